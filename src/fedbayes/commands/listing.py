"""`fedbayes list`: what has a name."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fedbayes.algorithms import REGISTRY
from fedbayes.commands.display import show
from fedbayes.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Print the algorithms, networks and data sets."""
    if list(arguments) in (["-h"], ["--help"]):
        print("usage: fedbayes list\n\nThe algorithms, networks and data sets that have names.")
        return
    if arguments:
        raise UserError(f"list takes no options, but {arguments[0]!r} was given")
    from fedbayes.data import NAMES
    from fedbayes.models.networks import NETWORKS

    table = Table("algorithm", "what it does", title="algorithms", title_justify="left")
    for name, (_, _, text) in REGISTRY.items():
        table.add_row(name, text)
    show(table)
    show(f"networks: {', '.join(NETWORKS)}")
    show(f"data sets: {', '.join(NAMES)}; or a file, a folder, hub:NAME (see docs/your-data.md)")
