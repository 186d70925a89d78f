"""`fedbayes wire`: what an algorithm sends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import arg

from fedbayes import wire
from fedbayes.cli.arguments import choose, parse
from fedbayes.cli.display import show
from fedbayes.study.options import DataOptions, RunOptions


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
    """Print the manifest of a round, of a network's algorithm or of a model file's."""
    if arguments and arguments[0].endswith(".py"):
        _of_model_file(arguments)
        return
    does = "What {name} sends in a round: each array, its shape, its reduction and what it depends on."
    chosen = choose(Options, arguments, "wire", does)
    if chosen is not None:
        algorithm = chosen.algorithm.planned(chosen.options.settings.rounds, **chosen.data.facts)
        _show(wire.manifest(algorithm, chosen.data.example), chosen.options.plain, "client")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of `fedbayes wire FILE`."""

    silo: str | None = None
    """Whose round; by default the first silo's."""
    plain: bool = False
    """Print tab-separated lines instead of a table."""


def _of_model_file(arguments: Sequence[str]) -> None:
    from fedbayes.algorithms.evidence import Evidence
    from fedbayes.cli.fit import model_file
    from fedbayes.engine.silo_data import plan, read
    from fedbayes.engine.silos import SiloSimulation
    from fedbayes.primitives.dependence import inseparable
    from fedbayes.results.verdict import LARGEST

    file, rest = model_file(Path(arguments[0]), arguments[1:])
    description = f"What {file.name} sends in a round of {arguments[0]}."
    options = parse(FileOptions, rest, f"fedbayes wire {arguments[0]}", description, file.algorithm)
    silos = read(file.silos, options.algorithm, together=False)
    algorithm = plan(options.algorithm, silos, options.algorithm.rounds)
    simulation = SiloSimulation(algorithm, silos)
    data = simulation.data(options.silo or simulation.names[0])
    _show(wire.manifest(algorithm, data), options.plain, "silo")
    if not inseparable(algorithm.structured, data) and algorithm.structured.size() <= LARGEST:
        (show if not options.plain else print)("After the last round, evidence rounds for the verdict:")
        _show(wire.manifest(Evidence(algorithm), data), options.plain, "silo")


def _show(leaves: list[wire.Leaf], plain: bool, who: str) -> None:
    wire.check(leaves)
    if plain:
        print(wire.text(leaves), end="")
        return
    for message, title in (("down", f"to every {who} of the round"), ("up", f"from each {who}")):
        sent = [leaf for leaf in leaves if leaf.message == message]
        total = sum(leaf.bytes for leaf in sent)
        table = Table(title=f"{title}: {len(sent)} arrays, {total:,} bytes", title_justify="left")
        for heading in ("array", "shape", "type", *(("reduced to", "depends on") if message == "up" else ())):
            table.add_column(heading, overflow="fold")
        for leaf in sent:
            cells = [leaf.path, str(list(leaf.shape)), leaf.dtype]
            table.add_row(*cells, *([leaf.reduction, ", ".join(wire.sources(leaf))] if message == "up" else []))
        show(table)
    show(f"Nothing of a {who}'s local state or rows is sent as it is.")
