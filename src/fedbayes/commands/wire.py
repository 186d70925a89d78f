"""`fedbayes wire`: what an algorithm sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from rich.table import Table
from tyro.conf import arg

from fedbayes import wire
from fedbayes.commands.display import show
from fedbayes.commands.options import DataOptions, RunOptions, choose


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes wire`."""

    data: Annotated[DataOptions, arg(name="")] = DataOptions()
    """The rows, for their shapes."""
    settings: Annotated[RunOptions, arg(name="")] = RunOptions()
    """The run."""
    plain: bool = False
    """Print tab-separated lines instead of a table."""


def main(arguments: Sequence[str]) -> None:
    """Print the manifest of a round."""
    does = "What {name} sends in a round: each array, its shape, its reduction and what it depends on."
    chosen = choose(Options, arguments, "wire", does)
    if chosen is None:
        return
    options = chosen.options
    leaves = wire.manifest(chosen.algorithm.planned(options.settings.rounds), chosen.data)
    wire.check(leaves)
    if options.plain:
        print(wire.text(leaves), end="")
        return
    for message, title in (("down", "to every client of the round"), ("up", "from each client")):
        sent = [leaf for leaf in leaves if leaf.message == message]
        total = sum(leaf.bytes for leaf in sent)
        table = Table(title=f"{title}: {len(sent)} arrays, {total:,} bytes", title_justify="left")
        for heading in ("array", "shape", "type", *(("reduced to", "depends on") if message == "up" else ())):
            table.add_column(heading, overflow="fold")
        for leaf in sent:
            cells = [leaf.path, str(list(leaf.shape)), leaf.dtype]
            table.add_row(*cells, *([leaf.reduction, ", ".join(wire.sources(leaf))] if message == "up" else []))
        show(table)
    show("Nothing of a client's local state or rows is sent as it is.")
