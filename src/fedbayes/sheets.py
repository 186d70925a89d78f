"""Tables before they have a form, and their forms: terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape as escaped_html
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WORDS = 3  # columns that hold words: method, mode, clients
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


def listing(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "") -> str:
    """Lines of text as a table for a notebook."""
    return html(Sheet(title, caption, list(headings), [[[Cell(text) for text in line] for line in lines]]), words=1)


def rich(sheet: Sheet, width: int | None = None) -> Table:
    """For the terminal; where it is too narrow, spreads and intervals go below their numbers, and long names are folded."""
    table, console = _rich(sheet, " "), Console(width=width)
    widest = table.__rich_measure__(console, console.options.update(width=10_000)).maximum
    return table if widest <= console.width else _rich(sheet, "\n")


def _rich(sheet: Sheet, gap: str) -> Table:
    table = Table(title=Text(sheet.title), caption=Text(sheet.caption), title_justify="left", caption_justify="left")
    table.box, table.pad_edge, table.collapse_padding = box.SIMPLE_HEAD, False, True

    def broken(place: int, text: str) -> str:
        return text if place < WORDS else re.sub("(?<!±) ", gap, text)

    for place, heading in enumerate(sheet.headings):
        text = broken(place, heading.replace("worst tenth", "worst\ntenth"))  # so that words have room at 80 columns
        # Of the words only the method's name may be long.
        table.add_column(Text(text), justify="left" if place < WORDS else "right", no_wrap=place > 0, overflow="fold")
    for rows in sheet.sections:
        for place, row in enumerate(rows):
            texts = [Text(broken(at, one.text), style="bold" if one.bold else "") for at, one in enumerate(row)]
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
    caption = rf"\caption{{{escape(sheet.title)}. {escape(sheet.caption[:1].upper() + sheet.caption[1:])}.}}"
    columns = rf"\begin{{tabular}}{{{'l' * WORDS}{'r' * (width - WORDS)}}}"
    head = [
        r"\begin{table}",
        r"\centering",
        caption,
        columns,
        r"\toprule",
        line(list(map(escape, sheet.headings))),
        r"\midrule",
    ]
    return "\n".join([*head, "\n\\midrule\n".join(sections), r"\bottomrule", r"\end{tabular}", r"\end{table}"])


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


def escape(text: str) -> str:
    r"""Text as LaTeX sets it.

    >>> escape("fedavg_2: 50 % ± 1"), escape("-0.25")
    ('fedavg\\_2: 50 \\% $\\pm$ 1', '$-$0.25')
    """
    signed = re.sub(r"(?<![\w-])-(?=\d)", "−", text)
    return "".join(SPECIAL.get(character, character) for character in signed)
