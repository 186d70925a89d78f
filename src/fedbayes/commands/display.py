"""Tables and progress bars on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedbayes.evaluate import about_numbers


def show(*things: Any) -> None:
    """Print tables and text, as wide as the terminal is now."""
    Console().print(*things, highlight=False, soft_wrap=all(isinstance(thing, str) for thing in things))


PERCENT = {"accuracy", "ece", "mce"}
SHOWN = {False: ("accuracy", "log_score", "ece"), True: ("rmse", "log_score", "calibration_error")}
TITLES = {
    "accuracy": "accuracy %",
    "ece": "ECE %",
    "mce": "MCE %",
    "log_score": "log score",
    "rmse": "RMSE",
    "calibration_error": "calibration error",
}


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int], Callable[..., None]]]:
    """A bar with the time that is left; `add(label, rounds)` gives a callback that moves it on after each round."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:

        def add(label: str, rounds: int) -> Callable[..., None]:
            task = progress.add_task(label, total=rounds)

            def callback(simulation: Any, done: Any) -> None:
                progress.update(task, completed=simulation.round)

            return callback

        yield add


def result_table(results: Mapping[str, Sequence[dict[str, Any]]], title: str) -> Table:
    """One line for each method, stance and group of clients: figures pooled over rows, mean ± spread over the seeds."""
    numeric = about_numbers(next(iter(results.values()))[0]["metrics"])
    table = Table(
        title=title,
        title_justify="left",
        caption=caption(results, TITLES[SHOWN[numeric][0]]),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for heading in ("method", "stance", "clients"):
        table.add_column(heading)
    for name in SHOWN[numeric]:
        table.add_column(TITLES[name], justify="right", no_wrap=True)
    table.add_column("worst tenth", justify="right", no_wrap=True)
    first = SHOWN[numeric][0]
    if not lines(next(iter(results.values()))[0]):
        table.add_row("no test rows")
    for method, runs in results.items():
        for place, (stance, group) in enumerate(lines(runs[0])):
            figures = [run["metrics"][stance][group] for run in runs]
            cells = [cell(name, [figure[name]["rows"] for figure in figures]) for name in SHOWN[numeric]]
            cells.append(cell(first, [figure[first]["worst_tenth"] for figure in figures]))
            last = place == len(lines(runs[0])) - 1
            table.add_row("" if place else method, stance, group, *cells, end_section=last)
    return table


def lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The stances and groups that a result has figures for."""
    return [(stance, group) for stance, groups in result["metrics"].items() for group in groups]


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
    factor, digits = (100, 1) if name in PERCENT else (1, 3)
    mean = f"{factor * np.mean(values):.{digits}f}"
    return f"{mean} ± {factor * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean
