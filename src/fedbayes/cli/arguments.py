"""The command line's arguments: options that commands share, and an algorithm's own fields as options."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import tyro
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from fedbayes import files
from fedbayes.algorithms import REGISTRY, names
from fedbayes.data import Clients, load
from fedbayes.data.unlabelled import Unlabelled
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.primitives.optimisers import Optimiser
from fedbayes.primitives.training import Training
from fedbayes.study.options import build, default, unbuilt

registry = ConstructorRegistry()


def _in_a_word(kind: Any, metavar: str, read: Callable[[str], Any], written: Callable[[Any], str]) -> None:
    """Let options of a type of ours be written as one word."""

    @registry.primitive_rule
    def rule(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if type_info.type != kind:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: read(words[0]),
            is_instance=lambda instance: isinstance(instance, kind),
            str_from_instance=lambda instance: [written(instance)],
        )


_in_a_word(Model, "NETWORK", unbuilt, lambda model: model.name)
_in_a_word(Unlabelled, "DATA", lambda word: Unlabelled(load(word).x, word), lambda rows: rows.name)
_in_a_word(Optimiser, "OPTIMISER", str, str)


def parse(options: type[Any], arguments: Sequence[str], prog: str, description: str, algorithm: Any = None) -> Any:
    """Parse a dataclass of options; with an algorithm, its fields become options too, as the field `algorithm`."""
    if algorithm is not None:
        field = ("algorithm", Annotated[type(algorithm), arg(name="")], dataclasses.field(default=algorithm))
        options = dataclasses.make_dataclass("Options", [field], bases=(options,), frozen=True, kw_only=True)
        options.__doc__ = description
    # What cannot be written on a command line, such as a model's functions, is no option, and no choice between subcommands.
    how: Any = {"config": (tyro.conf.SuppressFixed, tyro.conf.AvoidSubcommands), "registry": registry}
    parsed, rest = tyro.cli(options, args=list(arguments), prog=prog, description=description, return_unknown_args=True, **how)
    if rest:
        raise UserError(f"{_unknown(rest[0], list(_options_of(parsed)))} {prog} --help lists all options")
    return parsed


GUESSES = {
    **dict.fromkeys(("learning-rate", "learningrate", "step-size", "eta"), "lr"),
    **dict.fromkeys(("batch-size", "batchsize", "bs"), "batch"),
    **dict.fromkeys(("local-epochs", "local-steps", "num-epochs"), "epochs"),
    **dict.fromkeys(("fraction", "clients-per-round"), "cohort"),
    "num-rounds": "rounds",
    "num-clients": "clients",
    "dataset": "data",
    "network": "model",
    "optimizer": "optimiser",
    "output": "out",
}
"""What options are called elsewhere, and here."""


def _unknown(given: str, options: Sequence[str]) -> str:
    """What to say of an option that there is not; the group in front of its name need not be right.

    >>> _unknown("--learning-rate=3", ["--rounds", "--tune.lr", "--train.lr"])
    'there is no option --learning-rate; did you mean --train.lr or --tune.lr?'
    """
    if not given.startswith("-"):
        return f"{given!r} was given, but no option takes it;"
    option = given.partition("=")[0].replace("_", "-")
    own = {one: one.lstrip("-").rpartition(".")[2] for one in options}
    name = option.lstrip("-").rpartition(".")[2].removeprefix("no-")
    name = GUESSES.get(name, name)
    wanted = {name} & set(own.values()) or difflib.get_close_matches(name, own.values(), n=1, cutoff=0.7)
    found = [one for one in options if own[one] in wanted] or difflib.get_close_matches(option, options, n=1)
    # Of the same name in several groups, the group that was given.
    found = [one for one in found if one.rpartition(".")[0] == option.rpartition(".")[0]] or found
    found = sorted(found, key=lambda one: not one.startswith("--train."))
    if "--set" in options and name in {field.name for field in dataclasses.fields(Training)}:
        found = [f"--set train.{name}=VALUE"]
    return f"there is no option {option};" + (f" did you mean {' or '.join(found)}?" if found else "")


def _options_of(parsed: Any, prefix: str = "--") -> Iterator[str]:
    """The options of a command; at the top, a group has no name."""
    for field in dataclasses.fields(parsed):
        value, name = getattr(parsed, field.name), field.name.replace("_", "-")
        if dataclasses.is_dataclass(value) and not isinstance(value, Model | Unlabelled):
            yield from _options_of(value, f"{prefix}{name}." if name not in ("data", "settings", "algorithm") else prefix)
        else:
            yield prefix + name


class Chosen(NamedTuple):
    """What a command about one algorithm works with."""

    name: str
    options: Any
    data: Clients
    algorithm: Any


def choose(options: type[Any], arguments: Sequence[str], command: str, does: str) -> Chosen | None:
    """The algorithm that the arguments name, set as they say, with its network built for the data; None after help.

    Without a name, the choices are printed.
    """
    if not arguments or arguments[0].startswith("-"):
        print(f"usage: fedbayes {command} ALGORITHM [options]\n\nalgorithms:")
        for name in names("clients"):
            print(f"  {name:<14} {REGISTRY[name].summary}")
        print(f"\nfedbayes {command} ALGORITHM --help lists an algorithm's own options.")
        if not arguments or arguments[0] in ("-h", "--help"):
            return None
        raise UserError(f"{command} needs an algorithm before the options, such as fedbayes {command} fedavg {arguments[0]} …")
    name = arguments[0]
    parsed = parse(options, arguments[1:], f"fedbayes {command} {name}", does.format(name=name), default(name))
    data = parsed.data.load()
    model = build(parsed.algorithm.model, data, parsed.settings.likelihood)
    return Chosen(name, parsed, data, dataclasses.replace(parsed.algorithm, model=model))


def python_file(path: Path, needed: Sequence[str], what: str) -> ModuleType:
    """A Python file of the user's as a module that has the names it needs."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; give {what}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; a model file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as problem:
        raise UserError(f"{path} cannot be loaded: {type(problem).__name__}: {problem}") from problem
    if missing := [name for name in needed if not hasattr(module, name)]:
        raise UserError(f"{path} has no {', '.join(missing)}; give {what}")
    return module


@contextlib.contextmanager
def keeping(folder: Path, command: str, arguments: Sequence[str]) -> Iterator[None]:
    """Keep in a run's folder what was typed, however the run ends but for an error; one that is stopped says how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.json").is_file():
            files.write_json(folder / "command.json", {command: list(arguments)})
        raise KeyboardInterrupt(f"the run is in {folder}; the same command with --resume continues it") from None
    files.write_json(folder / "command.json", {command: list(arguments)})
