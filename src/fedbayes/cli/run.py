"""`fedbayes run`: train one algorithm and leave a run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from fedbayes import files
from fedbayes.cli.arguments import Chosen, choose, keeping
from fedbayes.cli.display import progress_bar, result_table, show
from fedbayes.engine.choose import described
from fedbayes.errors import UserError
from fedbayes.results.fit import Fit
from fedbayes.results.opened import open as open_run
from fedbayes.results.simulate import simulate
from fedbayes.results.trackers import tracker
from fedbayes.study.options import DataOptions, RunOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes run`."""

    data: Annotated[DataOptions, arg(name="")] = DataOptions()
    """The rows."""
    settings: Annotated[RunOptions, arg(name="")] = RunOptions()
    """The run."""
    seed: int = 0
    """Of everything that is random, besides the data."""
    out: Path | None = None
    """Folder of the run; by default runs/ALGORITHM-DATA-seed."""
    resume: bool = False
    """Go on where the folder's run stopped."""
    force: bool = False
    """Start over in a folder that holds a run."""
    evaluate_every: int = 0
    """Also evaluate all clients each so many rounds."""
    average_last: int = 0
    """Also give the mean of the figures after each of the last so many rounds."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KIND:WHERE")] = ()
    """Also log to tensorboard:DIR or mlflow:URI."""


def main(arguments: Sequence[str]) -> None:
    """Train, evaluate, print the table and where the run is."""
    chosen = choose(Options, arguments, "run", "Train {name} and leave a run folder. The options are the algorithm's fields.")
    if chosen is None:
        return
    name, options, data, _ = chosen
    folder = options.out or Path("runs") / f"{name}-{data.name}-{options.seed}"
    settings = options.settings
    trackers = tuple(tracker(spec) for spec in options.track)
    with progress_bar() as add, keeping(folder, "run", arguments):
        callbacks = (add(name, settings.rounds), *trackers)
        fit = _simulated(chosen, folder, resume=options.resume, force=options.force, callbacks=callbacks)
    show(result_table({name: [fit.result]}, f"{name} on {data.name}, {settings.rounds} rounds, seed {options.seed}"))
    for rows, settings_of in described(fit.result.get("choice", {})):
        show(f"adapt, {rows}: {settings_of}")
    show(f"run folder: {folder}")


def opened(folder: Path) -> Fit:
    """The run over clients in a folder, without anybody's rows."""
    fit = open_run(folder)
    if not isinstance(fit, Fit):
        raise UserError(f"{folder} is a run over silos; this is for runs of fedbayes run")
    return fit


def reloaded(folder: Path) -> Fit:
    """The run in a folder with its clients' rows, read again from where they were."""
    found = files.read_json(folder / "command.json").get("run") if (folder / "command.json").is_file() else None
    chosen = choose(Options, found, "run", "{name}") if found else None
    if chosen is None:
        raise UserError(f"{folder} does not say where its clients' rows are; give rows with --data")
    return _simulated(chosen, folder, resume=True)


def _simulated(chosen: Chosen, folder: Path, **more: Any) -> Fit:
    options, settings = chosen.options, chosen.options.settings
    given = {name: getattr(options, name) for name in ("seed", "evaluate_every", "average_last")}
    given |= {"config": {"network": options.algorithm.model.name}, **settings.keywords, **more}
    fit: Fit = simulate(chosen.algorithm, chosen.data, settings.rounds, folder=folder, **given)
    return fit
