"""`fedbayes compare`: several algorithms, several seeds, one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from fedbayes.algorithms import find, names
from fedbayes.commands.display import progress_bar, result_table, show
from fedbayes.commands.options import DataOptions, RunOptions, build, default, override, parse, unbuilt, write_json
from fedbayes.errors import UserError
from fedbayes.fit import simulate
from fedbayes.runs import SCHEMA

USUAL = ("fedavg", "fedprox", "fedbabu", "fedper")
"""What is compared where nothing is named."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Train several algorithms on the same clients over several seeds; print one table with mean ± spread."""

    algorithms: Positional[tuple[str, ...]] = ()
    """Names of algorithms (fedbayes list); by default fedavg, fedprox, fedbabu and fedper."""
    seeds: int = 3
    """How many seeds: 0, 1, …"""
    json: Path | None = None
    """Also write every figure to this file."""
    out: Path | None = None
    """Keep each run in a folder below this one; a second call with the same options then goes on where it stopped."""
    force: bool = False
    """Start over in folders that hold a run."""
    model: str = "mlp"
    """Network: linear, mlp, mlp:256,128 (sizes of its hidden layers), cnn or mobilenet."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="PATH=VALUE")] = ()
    """A field of the algorithms, such as --set train.lr=0.05; or of one: --set fedprox.mu=0.1."""
    vary_data: bool = False
    """Draw the partition anew for each seed, instead of once."""
    data: Annotated[DataOptions, arg(name="")] = DataOptions()
    """The rows."""
    settings: Annotated[RunOptions, arg(name="")] = RunOptions()
    """The runs."""


def main(arguments: Sequence[str]) -> None:
    """Run them all, print the table."""
    options: Options = parse(Options, arguments, "fedbayes compare", Options.__doc__ or "")
    results = compare(options)
    data = next(iter(results.values()))[0]["data"]
    rounds = options.settings.rounds
    show(result_table(results, f"{data['name']}: {data['clients']} clients, {data['unseen']} unseen, {rounds} rounds"))
    if options.json is not None:
        content = {"schema": SCHEMA, "command": ["fedbayes", "compare", *arguments], "results": results}
        write_json(options.json, content)


def compare(options: Options) -> dict[str, list[dict[str, Any]]]:
    """The results of each algorithm, seed after seed."""
    chosen = options.algorithms or USUAL
    for name in chosen:
        find(name, "clients")
    if options.seeds < 1:
        raise UserError(f"seeds is {options.seeds}, but a comparison needs at least one")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"cannot write {options.json}: there is no folder {options.json.parent}; make it or choose another")
    data, settings = options.data.load(), options.settings
    model = build(unbuilt(options.model), data, settings.likelihood)
    results: dict[str, list[dict[str, Any]]] = {}
    with progress_bar() as add:
        for name in chosen:
            algorithm = dataclasses.replace(override(default(name), _settings_of(name, options.set)), model=model)
            for seed in range(options.seeds):
                if options.vary_data:
                    data = options.data.load(seed)
                    model = build(unbuilt(options.model), data, settings.likelihood)
                    algorithm = dataclasses.replace(algorithm, model=model)
                fit = simulate(
                    algorithm,
                    data,
                    settings.rounds,
                    cohort=settings.cohort,
                    seed=seed,
                    dropout=settings.dropout,
                    clients="loop" if settings.loop else "vmap",
                    folder=options.out / f"{name}-{seed}" if options.out is not None else None,
                    resume=not options.force,
                    force=options.force,
                    callbacks=(add(f"{name}, seed {seed}", settings.rounds),),
                    config={"network": options.model},
                )
                results.setdefault(name, []).append(fit.result)
    return results


def _settings_of(name: str, settings: Sequence[str]) -> list[str]:
    """The settings for one algorithm: those that name it, without its name, and those that name none."""
    own = []
    for setting in settings:
        first, _, rest = setting.partition(".")
        if first not in names("clients"):
            own.append(setting)
        elif first == name:
            own.append(rest)
    return own
