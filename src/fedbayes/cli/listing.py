"""`fedbayes list`: what has a name."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fedbayes.algorithms import REGISTRY, names
from fedbayes.cli.display import show
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

    kinds = {"clients": "a network over clients (run, compare)", "silos": "a NumPyro model over silos (fit)"}
    for over, title in kinds.items():
        table = Table("algorithm", "what it does", title=title, title_justify="left")
        for name in names(over):
            table.add_row(name, REGISTRY[name].summary)
        show(table)
    show(f"networks: {', '.join(NETWORKS)}")
    show(f"data sets: {', '.join(NAMES)}; or a file, a folder, hub:NAME (see docs/your-data.md)")
