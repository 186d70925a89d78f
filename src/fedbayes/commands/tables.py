"""Tables of results and of differences, and the forms that they are written in: terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape as escaped_html
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedbayes.comparison import Difference
from fedbayes.evaluate import SHOWN, about_numbers

PERCENT = {"accuracy", "ece", "mce"}
TITLES = {
    "accuracy": "accuracy %",
    "ece": "ECE %",
    "mce": "MCE %",
    "log_score": "log score",
    "rmse": "RMSE",
    "calibration_error": "calibration error",
}
NARROW = 100
"""Columns of a terminal below which an interval stands under its difference."""
WORDS = 3
"""Columns that hold words: method, stance, clients."""


class Cell(NamedTuple):
    """What stands in a place of a table."""

    text: str
    bold: bool = False


class Sheet(NamedTuple):
    """A table before it has a form: sections of rows, the first columns words and the others numbers."""

    title: str
    caption: str
    headings: list[str]
    sections: list[list[list[Cell]]]
    wraps: bool = False
    """Whether numbers give way in a narrow terminal, instead of words."""


def figures(
    results: Mapping[str, Sequence[dict[str, Any]]], title: str, winners: Collection[tuple[str, ...]] = (), note: str = ""
) -> Sheet:
    """One line for each method, stance and group of clients: figures pooled over rows, mean ± spread over the seeds.

    Args:
        results: The results of each method, seed after seed.
        title: Of the table.
        winners: Method, stance, group and figure that are set in bold.
        note: What else the caption says.
    """
    first_result = next(iter(results.values()))[0]
    shown = SHOWN[about_numbers(first_result["metrics"])]
    headings = ["method", "stance", "clients", *(TITLES[name] for name in shown), "worst tenth"]
    sections = []
    for method, runs in results.items():
        rows = []
        for place, (stance, group) in enumerate(lines(runs[0])):
            each = [run["metrics"][stance][group] for run in runs]
            cells = [Cell("" if place else method), Cell(stance), Cell(group)]
            for name in shown:
                text = cell(name, [figure[name]["rows"] for figure in each])
                cells.append(Cell(text, (method, stance, group, name) in winners))
            cells.append(Cell(cell(shown[0], [figure[shown[0]]["worst_tenth"] for figure in each])))
            rows.append(cells)
        sections.append(rows)
    if not lines(first_result):
        sections = [[[Cell("no test rows")]]]
    return Sheet(title, "; ".join(filter(None, (caption(results, TITLES[shown[0]]), note))), headings, sections)


SAID = {
    "seeds": "95 % interval for other seeds on the same clients",
    "clients": "95 % interval for other clients with these trained models",
    "both": "95 % interval for other seeds and other clients",
}


def difference_sheet(found: Sequence[Difference], unit: str, numeric: bool) -> Sheet:
    """One line for each method, stance and group: figures over rows less the baseline's, with an interval of the unit."""
    shown = SHOWN[numeric]
    each = {(one.method, one.stance, one.group, one.figure): one for one in found if one.form == "rows"}
    sections: list[list[list[Cell]]] = []
    for method in dict.fromkeys(one.method for one in found):
        rows: list[list[Cell]] = []
        for stance, group in dict.fromkeys((one.stance, one.group) for one in found if one.method == method):
            cells = [Cell("" if rows else method), Cell(stance), Cell(group)]
            for name in shown:
                one = each[method, stance, group, name]
                interval = one.interval(unit)
                cells.append(Cell(difference_cell(one, unit), interval is not None and interval.excludes_zero))
            rows.append(cells)
        sections.append(rows)
    used = _used(found, unit)
    said = f"{SAID[used]}; bold where it excludes zero" if used else f"there are too few {unit} for an interval"
    headings = ["method", "stance", "clients", *(TITLES[name] for name in shown)]
    baseline = next(iter(found)).baseline
    return Sheet(f"difference from {baseline}", f"over all test rows; {said}", headings, sections, wraps=True)


def _used(found: Sequence[Difference], unit: str) -> str | None:
    """The unit whose intervals are shown."""
    order = (unit,) if unit != "both" else ("both", "seeds", "clients")
    return next((name for name in order if any(one.intervals[name] is not None for one in found)), None)


def difference_cell(one: Difference, unit: str) -> str:
    """A difference with its interval, with signs.

    >>> from fedbayes.comparison import Interval
    >>> both = {"seeds": None, "clients": None, "both": Interval(-0.01, 0.03)}
    >>> difference_cell(Difference("b", "a", "global", "unseen", "accuracy", "rows", 0.01, both), "both")
    '+1.0 [-1.0, +3.0]'
    """
    factor, digits = _scale(one.figure)
    text, interval = f"{factor * one.estimate:+.{digits}f}", one.interval(unit)
    return text if interval is None else f"{text} [{factor * interval.low:+.{digits}f}, {factor * interval.high:+.{digits}f}]"


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
    factor, digits = _scale(name)
    mean = f"{factor * np.mean(values):.{digits}f}"
    return f"{mean} ± {factor * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean


def _scale(name: str) -> tuple[int, int]:
    return (100, 1) if name in PERCENT else (1, 3)


def rich(sheet: Sheet) -> Table:
    """For the terminal."""
    table = Table(
        title=Text(sheet.title),
        title_justify="left",
        caption=Text(sheet.caption),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for place, heading in enumerate(sheet.headings):
        words = place < WORDS
        short = heading.replace("worst tenth", "worst\ntenth")  # so that words have room at 80 columns
        table.add_column(short, justify="left" if words else "right", no_wrap=words == sheet.wraps)
    narrow = sheet.wraps and Console().width < NARROW
    for rows in sheet.sections:
        for place, row in enumerate(rows):
            style = ["bold" if one.bold else "" for one in row]
            words_of = [one.text.replace(" [", "\n[") if narrow else one.text for one in row]
            texts = [Text(text, style=each) for text, each in zip(words_of, style, strict=True)]
            table.add_row(*texts, end_section=place == len(rows) - 1)
    return table


def markdown(sheet: Sheet) -> str:
    """For a page."""

    def escaped(text: str) -> str:
        return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    texts = [
        line([f"**{escaped(one.text)}**" if one.bold else escaped(one.text) for one in row])
        for rows in sheet.sections
        for row in rows
    ]
    rule = line(["---"] * WORDS + ["---:"] * (len(sheet.headings) - WORDS))
    return "\n".join(
        [f"**{escaped(sheet.title)}**", "", line(list(map(escaped, sheet.headings))), rule, *texts, "", escaped(sheet.caption)]
    )


def latex(sheet: Sheet) -> str:
    """For a paper, with the package booktabs."""

    width = len(sheet.headings)

    def line(cells: Sequence[str]) -> str:
        return " & ".join([*cells, *[""] * (width - len(cells))]) + r" \\"

    sections = [
        "\n".join(line([rf"\textbf{{{escape(one.text)}}}" if one.bold else escape(one.text) for one in row]) for row in rows)
        for rows in sheet.sections
    ]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape(sheet.title)}. {escape(sheet.caption[:1].upper() + sheet.caption[1:])}.}}",
            rf"\begin{{tabular}}{{{'l' * WORDS}{'r' * (width - WORDS)}}}",
            r"\toprule",
            line(list(map(escape, sheet.headings))),
            r"\midrule",
            "\n\\midrule\n".join(sections),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def html(sheet: Sheet, words: int = WORDS) -> str:
    """For a notebook: the first `words` columns are words, the others numbers.

    >>> html(Sheet("a < b", "", ["who", "n"], [[[Cell("you"), Cell("1", True)]]]), words=1).splitlines()[1]
    '<caption style="text-align: left">a &lt; b</caption>'
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ("left" if place < words else "right" for place in range(len(cells)))
        return "".join(f'<{tag} style="text-align: {side}">{cell}</{tag}>' for side, cell in zip(sides, cells, strict=True))

    def written(one: Cell) -> str:
        return f"<b>{escaped_html(one.text)}</b>" if one.bold else escaped_html(one.text)

    heading = f"<thead><tr>{line('th', list(map(escaped_html, sheet.headings)))}</tr></thead>" if sheet.headings else ""
    rows = [f"<tr>{line('td', [written(one) for one in row])}</tr>" for rows in sheet.sections for row in rows]
    caption = f'<caption style="text-align: left">{escaped_html(sheet.title)}</caption>'
    below = f"<small>{escaped_html(sheet.caption)}</small>" if sheet.caption else ""
    return "\n".join(filter(None, ["<table>", caption, heading, "<tbody>", *rows, "</tbody>", "</table>", below]))


SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "[": "{[}",  # after \\ a bracket would be a length
}


def escape(text: str) -> str:
    r"""Text as LaTeX sets it.

    >>> escape("fedavg_2: 50 % ± 1"), escape("-0.25")
    ('fedavg\\_2: 50 \\% $\\pm$ 1', '$-$0.25')
    """
    signed = re.sub(r"(?<![\w-])-(?=\d)", "−", text)
    return "".join(SPECIAL.get(character, character) for character in signed)
