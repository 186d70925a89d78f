"""`fedbayes report`: a page about runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fedbayes.cli.arguments import parse
from fedbayes.cli.display import show


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes report`."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")] = ()
    """Folders of runs, or folders that hold such folders, as compare --out leaves."""
    out: Path | None = None
    """The file; by default RUN/report.html, and report.html here for several runs."""


def main(arguments: Sequence[str]) -> None:
    """Write the page and print where it is."""
    does = (
        "Write one HTML page about a run, or a comparison of several: results, learning curves, clients, calibration, "
        "uncertainty, labels, what was sent, time; of a model over silos its posterior. It opens anywhere, without a network."
    )
    options = parse(Options, arguments, "fedbayes report", does)
    from fedbayes.errors import UserError
    from fedbayes.report.page import report

    if not options.runs:
        raise UserError("report needs the folder of a run, such as fedbayes report runs/fedavg-digits-0")
    show(f"page: {report(options.runs, options.out)}")
