"""`fedbayes report`: the page of a run, or of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbayes import __version__, files
from fedbayes.errors import UserError
from fedbayes.report import blocks, compared, life, predictions, sections, structured
from fedbayes.report.records import Record, find, load


def report(paths: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Write one HTML file about runs, which opens without a network; by default in the run's folder, or, of several, here."""
    records = [load(folder) for folder in find([Path(path) for path in paths])]
    target = Path(out) if out is not None else records[0].folder / "report.html" if len(records) == 1 else Path("report.html")
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"out is {target}, but a page ends in .html; give a file such as report.html")
    text = single(records[0]) if len(records) == 1 else several(records)
    files.write(target, text.encode())
    return target


def single(record: Record) -> str:
    """The page of one run."""
    first, last = [sections.what_was_run(record)], [sections.sent(record), sections.time(record)]
    if record.structured:
        middle = [structured.posterior(record), structured.bound([record], [record.algorithm]), structured.silos(record)]
    else:
        parts = (sections.results, sections.learning, predictions.clients, predictions.calibration, predictions.uncertainty)
        middle = [part(record) for part in (*parts, life.life, sections.labels)]
    subtitle = f"{record.rounds} rounds, seed {record.config.get('seed')}, {record.state}"
    return blocks.page(f"{record.algorithm} on {record.data_name}", subtitle, [*first, *middle, *last], __version__)


def several(records: Sequence[Record]) -> str:
    """The page of a comparison: each data set on its own."""
    sets = compared.data_sets(records)
    parts = [compared.overview(records, len(sets))]
    for name, members, varied in sets:
        parts += compared.compared(name, members, varied, len(sets) > 1)
    names = ", ".join(dict.fromkeys(record.algorithm for record in records))
    on = ", ".join(dict.fromkeys(record.data_name for record in records))
    return blocks.page(f"{names} on {on}", f"{len(records)} runs compared", parts, __version__)
