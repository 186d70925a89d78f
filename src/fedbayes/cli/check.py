"""`fedbayes check`: which parts of a run's uncertainty are worth something."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from fedbayes import files
from fedbayes.cli.arguments import parse
from fedbayes.cli.display import plain_table, show
from fedbayes.cli.personalise import rows_of
from fedbayes.cli.run import opened, reloaded
from fedbayes.data import load
from fedbayes.results.check import MOST, check
from fedbayes.results.folder import LIFE
from fedbayes.sheets import Sheet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes check`."""

    run: Positional[Path]
    """Folder that `fedbayes run` left; the clients' rows are read again from where they were."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """The clients' rows, where the folder does not say where they are: a name or a path, as for `fedbayes run`."""
    modes: Annotated[tuple[str, ...] | None, arg(metavar="MODE")] = None
    """Of global, personal and adapted; by default those in which predictions differ."""
    most: int = MOST
    """Clients of a mode, at most; drawn at random where there are more."""
    elsewhere: Path | None = None
    """Rows of another kind, on which predictions should be less sure (.csv, .tsv, .parquet or .npz); by default the test rows
    with each feature permuted."""
    twin: bool = False
    """Also train the same method without noise in its steps, for as many rounds, to measure what that noise is worth."""
    json: Path | None = None
    """Also write the figures to this file."""


def main(arguments: Sequence[str]) -> None:
    """Print the worth of each part, and keep it for the run's page."""
    does = (
        "Take the uncertainty of a run apart: the log score of clients' test rows with each part of it less the log score "
        "without: averaging at prediction, the learnt scales, the person, the prior, noise while training. One sentence says "
        "whether the posterior is alive or inert. The run's page has a section of it."
    )
    options = parse(Options, arguments, "fedbayes check", does)
    fit = opened(options.run)
    elsewhere = None if options.elsewhere is None else rows_of(fit.shared, options.elsewhere, labels=False)[0]
    clients = None if options.data is None else load(options.data)
    given: dict[str, Any] = {"modes": options.modes, "most": options.most, "elsewhere": elsewhere, "twin": options.twin}
    found = check(reloaded(options.run) if clients is None else fit, clients, **given)
    for sheet in (found.sheet(), *found.more()):
        show(_table(sheet))
    show(str(found))
    with files.writing(options.run):
        files.write_json(options.run / LIFE, found.to_json())
    if options.json is not None:
        files.write(options.json, json.dumps(found.to_json(), indent=2).encode())
        show(f"figures: {options.json}")


def _table(sheet: Sheet) -> Any:
    rows = ([cell.text for cell in row] for section in sheet.sections for row in section)
    return plain_table(sheet.headings, rows, title=sheet.title, caption=sheet.caption)
