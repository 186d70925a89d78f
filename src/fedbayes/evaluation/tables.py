"""Tables of results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedbayes.evaluation.score import SHOWN, about_numbers
from fedbayes.sheets import Cell, Sheet

PERCENT = {"accuracy", "ece", "mce"}
TITLES = {"accuracy": "accuracy %", "ece": "ECE %", "mce": "MCE %", "log_score": "log score", "rmse": "RMSE"}
TITLES["calibration_error"] = "calibration error"


def figures(
    results: Mapping[str, Sequence[dict[str, Any]]], title: str, winners: Collection[tuple[str, ...]] = (), note: str = ""
) -> Sheet:
    """One line for each method, mode and group of clients: figures pooled over rows, mean ± spread over the seeds.

    Args:
        results: The results of each method, seed after seed.
        title: Of the table.
        winners: Method, mode, group and figure that are set in bold.
        note: What else the caption says.
    """
    first_result = next(iter(results.values()))[0]
    shown = SHOWN[about_numbers(first_result["metrics"])]
    headings = ["method", "mode", "clients", *(TITLES[name] for name in shown), "worst tenth"]
    sections = []
    for method, runs in results.items():
        rows = []
        for place, (mode, group) in enumerate(lines(runs[0])):
            each = [run["metrics"][mode][group] for run in runs]
            cells = [Cell("" if place else method), Cell(mode), Cell(group)]
            for name in shown:
                text = cell(name, [figure[name]["rows"] for figure in each])
                cells.append(Cell(text, (method, mode, group, name) in winners))
            cells.append(Cell(cell(shown[0], [figure[shown[0]]["worst_tenth"] for figure in each])))
            rows.append(cells)
        sections.append(rows)
    if not lines(first_result):
        sections = [[[Cell("no test rows")]]]
    return Sheet(title, "; ".join(filter(None, (caption(results, TITLES[shown[0]]), note))), headings, sections)


def lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The modes and groups that a result has figures for."""
    return [(mode, group) for mode, groups in result["metrics"].items() for group in groups]


def caption(results: Mapping[str, Sequence[dict[str, Any]]], first: str) -> str:
    """What the figures are, in a sentence."""
    seeds = max(len(runs) for runs in results.values())
    spread = f"mean ± standard deviation over {seeds} seeds; " if seeds > 1 else ""
    return f"{spread}over all test rows; worst tenth: {first} over the tenth of clients where it is worst"


def cell(name: str, values: Sequence[float]) -> str:
    """A figure, or mean ± standard deviation of several.

    >>> cell("accuracy", [0.5, 0.7]), cell("log_score", [-0.25])
    ('60.0 ± 14.1', '-0.250')
    """
    factor, digits = scale_of(name)
    mean = f"{factor * np.mean(values):.{digits}f}"
    return f"{mean} ± {factor * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean


def scale_of(name: str) -> tuple[int, int]:
    """The factor and the digits that a metric is shown with."""
    return (100, 1) if name in PERCENT else (1, 3)
