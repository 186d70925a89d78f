"""`fedbayes data describe`: who has what."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fedbayes.cli.arguments import parse
from fedbayes.cli.display import show
from fedbayes.errors import UserError
from fedbayes.study.options import DataOptions

USAGE = "usage: fedbayes data describe DATA [options]\n\nfedbayes data describe --help lists the options."


@dataclasses.dataclass(frozen=True)
class Options:
    """Print clients, rows and labels of a data set, and draw how labels are spread over clients."""

    data: Annotated[DataOptions, arg(name="")] = DataOptions()
    """The rows."""
    plot: Path | None = None
    """Draw the label distribution into this .svg, .png or .pdf."""


def main(arguments: Sequence[str]) -> None:
    """Print a description; draw it where asked."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    if arguments[0] != "describe":
        raise UserError(f"data has no command {arguments[0]!r}; the one it has is describe")
    rest = list(arguments[1:])
    if rest and not rest[0].startswith("-"):
        rest = ["--data", *rest]
    options: Options = parse(Options, rest, "fedbayes data describe", Options.__doc__ or "")
    from fedbayes.data.describe import describe

    clients = options.data.load()
    show(describe(clients))
    if options.plot is not None:
        from fedbayes.report.labels import label_distribution

        show(f"picture: {label_distribution(clients, options.plot)}")
