"""What a notebook shows of an object: its repr and a small table, as HTML without a style of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedbayes.commands.tables import Cell, Sheet, figures, html

if TYPE_CHECKING:
    from fedbayes.data import Clients
    from fedbayes.silo_fit import SiloFit
    from fedbayes.stances import Evaluation


def scores(title: str, evaluation: Evaluation) -> str:
    """The main figures by stance and group of clients."""
    sheet = figures({"": [{"metrics": evaluation.summary()}]}, title)
    sections = [[row[1:] or row for row in rows] for rows in sheet.sections]  # there is one method, and the title names it
    return html(sheet._replace(headings=sheet.headings[1:], sections=sections), words=2)


def silos(fit: SiloFit) -> str:
    """The posterior of what all silos share, and how far it can be relied on."""
    from fedbayes.silo_text import HEADINGS, rows, verdict

    listed = rows(fit.result) or [["too many numbers to list"]]
    return _table(repr(fit), ["", *HEADINGS], listed, verdict(fit.result))


def clients(data: Clients) -> str:
    """Who has how many rows of which labels."""
    from fedbayes.data.describe import note, table

    headings, *lines = table(data)
    return _table(repr(data), headings, lines, note(data))


def facts(title: str, found: dict[str, Any]) -> str:
    """A line for each fact that is known."""
    return _table(title, [], [[name, str(value)] for name, value in found.items() if value is not None])


def _table(title: str, headings: list[str], lines: list[list[str]], caption: str = "") -> str:
    return html(Sheet(title, caption, headings, [[[Cell(text) for text in line] for line in lines]]), words=1)
