"""`fedbayes fit`: a NumPyro model file over its silos."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from tyro.conf import UseAppendAction, arg

from fedbayes.algorithms import find, names
from fedbayes.algorithms.default import MOST
from fedbayes.cli.arguments import keeping, parse, python_file
from fedbayes.cli.display import plain_table, progress_bar, show
from fedbayes.errors import UserError
from fedbayes.models.structured import Structured
from fedbayes.results.simulate import simulate, suited
from fedbayes.results.structured_text import HEADINGS, rows, verdict
from fedbayes.results.trackers import tracker

NEEDED = ("population", "silo", "silos")
USAGE = """usage: fedbayes fit FILE [--algorithm NAME] [options]

Fit a NumPyro model over silos whose data stays apart. FILE is a Python file that has
  population()              samples what all silos share
  silo(population, data)    samples a silo's own latents and observes its data
  silos()                   gives a dict of names and their data; a dict of that name will do too
and may have
  algorithm                 the method, such as fedbayes.PVI(population, silo); without it, the one that suits the model
  rounds                    how many rounds it needs

algorithms: {algorithms} (default ep; sfvi for models with more than {most} global latents or with parameters)
fedbayes fit FILE --help lists the options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes fit`."""

    cohort: int | float | None = None
    """Silos in a round: a number, or a share below 1; by default all."""
    in_turn: bool = False
    """One silo a round, each in its turn."""
    seed: int = 0
    """Of everything that is random."""
    out: Path | None = None
    """Folder of the run; by default runs/NAME-ALGORITHM-SEED."""
    resume: bool = False
    """Go on with a run that was stopped."""
    force: bool = False
    """Start over in a folder that holds a run."""
    loop: bool = False
    """Run silos one by one, slower, and name the silo whose numbers fail."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KIND:WHERE")] = ()
    """Also log to tensorboard:DIR or mlflow:URI."""


def main(arguments: Sequence[str]) -> None:
    """Fit, print the posterior and where the run is."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format(algorithms=", ".join(names("silos")), most=MOST))
        return
    path = Path(arguments[0])
    if str(path).startswith("-"):
        raise UserError(f"fit needs a model file before the options, such as fedbayes fit model.py {path} …")
    file, rest = model_file(path, arguments[1:])
    options = parse(Options, rest, f"fedbayes fit {path}", f"Fit {path.name} over its silos.", file.algorithm)
    rounds, label, data = options.algorithm.rounds, file.name, file.silos
    folder = options.out or Path("runs") / f"{path.stem}-{label}-{options.seed}"
    trackers = tuple(tracker(spec) for spec in options.track)
    given = {name: getattr(options, name) for name in ("cohort", "in_turn", "seed", "loop", "resume", "force")}
    with progress_bar() as add, keeping(folder, "fit", arguments):
        given |= {"callbacks": (add(label, rounds), *trackers), "config": {"file": path.name}}
        fit = simulate(options.algorithm, data, rounds, folder=folder, **given)
    silos = "1 silo" if len(data) == 1 else f"{len(data)} silos"
    if file.why:
        show(file.why)
    ran = fit.result["rounds"]
    ended = f"converged after {ran} rounds" if ran < rounds else f"{ran} rounds"
    show(f"{path.stem}: {label} over {silos}, {ended}, seed {options.seed}")
    show(plain_table(["", *HEADINGS], rows(fit.result) or [["too many numbers to list: see posterior.nc"]]))
    show(verdict(fit.result))
    picture = "bound.png" if len(fit.bound) else "movement.png"
    show(f"run folder: {folder} (posterior.nc is for ArviZ; posterior.png and {picture} are pictures)")


class ModelFile(NamedTuple):
    """What a model file and the command line choose: the algorithm with its rounds, its name, and the silos."""

    algorithm: Any
    name: str
    silos: Mapping[str, Any]
    why: str = ""
    """Why it is not the usual default, if so."""


def model_file(path: Path, arguments: Sequence[str]) -> tuple[ModelFile, list[str]]:
    """A model file with the algorithm that --algorithm names, or its own; and the arguments that are left."""
    module = load(path)
    name, rest = _algorithm_name(list(arguments))
    Structured(module.population, module.silo).global_latents()  # what is wrong with the population is said first
    silos = {} if "-h" in rest or "--help" in rest else _silos(module, path)  # help needs no data
    chosen, why = _chosen(module, name, silos)
    label = next(known for known in names("silos") if find(known) is type(chosen))
    return ModelFile(chosen, label, silos, why), rest


def load(path: Path) -> ModuleType:
    """A model file as a module."""
    return python_file(path, NEEDED, "a Python file with population(), silo(population, data) and silos()")


def _algorithm_name(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The value of --algorithm, and the other arguments."""
    for place, word in enumerate(arguments):
        if word == "--algorithm" and place + 1 < len(arguments):
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
        if word.startswith("--algorithm="):
            return word.partition("=")[2], arguments[:place] + arguments[place + 1 :]
    return None, arguments


def _chosen(module: ModuleType, name: str | None, silos: Mapping[str, Any]) -> tuple[Any, str]:
    """The algorithm that was named, the file's own, or the default, with its rounds; and why, if it is unusual.

    Another algorithm than the file's takes over the file's family, where both have one.
    """
    own: Any = getattr(module, "algorithm", None)
    if own is not None and type(own) not in map(find, names("silos")):
        expected = "it must be one with its model, such as fedbayes.PVI(population, silo)"
        raise UserError(f"algorithm in {module.__name__}.py is {own!r}, but {expected}")
    if own is not None and (name is None or isinstance(own, find(name, "silos"))):
        rounds = own.rounds or getattr(module, "rounds", None) or own.default_rounds
        return dataclasses.replace(own, rounds=rounds), ""
    why = ""
    if name is None:
        algorithm, why = suited(module.population, module.silo, silos)
    else:
        algorithm = find(name, "silos")(module.population, module.silo)
        if own is not None and _has_family(own) and _has_family(algorithm):
            algorithm = dataclasses.replace(algorithm, family=own.family)
    rounds = (getattr(module, "rounds", None) if own is None else None) or algorithm.default_rounds
    return dataclasses.replace(algorithm, rounds=rounds), why


def _has_family(algorithm: Any) -> bool:
    """Whether a family can be chosen for it."""
    return any(field.name == "family" and field.init for field in dataclasses.fields(algorithm))


def _silos(module: ModuleType, path: Path) -> Mapping[str, Any]:
    try:
        given = module.silos() if callable(module.silos) else module.silos
    except UserError:
        raise
    except Exception as problem:
        raise UserError(f"silos() in {path} fails: {type(problem).__name__}: {problem}") from problem
    if not isinstance(given, Mapping):
        raise UserError(f"silos in {path} gives {type(given).__name__}, but it must give a dict of names and their data")
    return given
