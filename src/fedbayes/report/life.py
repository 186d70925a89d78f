"""The part of a run's page that says which of its uncertainty is alive, from what `fedbayes check` left."""

from __future__ import annotations

from fedbayes import files
from fedbayes.errors import UserError
from fedbayes.evaluation.life import Check
from fedbayes.report.blocks import Prose, Section, Table
from fedbayes.report.records import Record
from fedbayes.results.folder import LIFE
from fedbayes.sheets import Sheet

TITLE = "Is the uncertainty alive?"


def life(record: Record) -> Section:
    """The verdicts, and the worth of each part."""
    path = record.folder / LIFE
    if not path.exists():
        said = "Not checked: fedbayes check RUN measures what averaging, the learnt scales and the person are worth."
        return Section(TITLE, [Prose(said)])
    try:
        found = Check.from_json(files.read_json(path))
        tables = [_table(sheet) for sheet in (found.sheet(), *found.more())]
        verdicts = [Prose(f"{one.verdict[0].upper()}{one.verdict[1:]}.", warning=one.word == "harmful") for one in found.lives]
    except (UserError, KeyError, ValueError, TypeError, AttributeError, IndexError):
        return Section(TITLE, [Prose(f"{path} cannot be read; fedbayes check writes it anew.")])
    return Section(TITLE, [*verdicts, *tables])


def _table(sheet: Sheet) -> Table:
    rows = [[cell.text for cell in row] for section in sheet.sections for row in section]
    return Table(sheet.headings, rows, f"{sheet.title}; {sheet.caption}", 1)
