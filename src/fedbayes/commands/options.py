"""Options that commands share, and the algorithm's own fields as options."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import tyro
from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from fedbayes.algorithms import REGISTRY, find, names
from fedbayes.algorithms.fedbe import Unlabelled
from fedbayes.data import Clients, load
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Model, network


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Where the rows come from and how they are divided."""

    data: str = "digits"
    """A name (fedbayes list), an .npz, .csv or .parquet file, a folder of IDX or LEAF files, or hub:NAME."""
    partition: str | None = None
    """How rows become clients: iid, shards:5, dirichlet:0.3, labels:5, majority:0.9, pachinko; or the data's own."""
    clients: int | None = None
    """How many clients a partition makes."""
    client_column: str | None = None
    """Column that says whose a row is (CSV, Parquet)."""
    target: str | None = None
    """Column to predict (CSV, Parquet)."""
    test_column: str | None = None
    """Column that is true for test rows (CSV, Parquet)."""
    ignore: tuple[str, ...] = ()
    """Columns to leave out (CSV, Parquet)."""
    missing: Literal["refuse", "mean", "drop"] | None = None
    """What to do with missing values."""
    task: Literal["classification", "regression", "counts"] | None = None
    """What the target is; by default classes for text and whole numbers, regression for other numbers."""
    test: float | None = None
    """Share of each client's rows that is kept for testing."""
    hold_out: int = 0
    """How many clients never train and are evaluated as unseen."""
    standardise: bool = True
    """Let the network see each feature with mean 0 and deviation 1."""
    data_seed: int = 0
    """Of the partition, the split and the choice of unseen clients."""

    def load(self, seed: int | None = None) -> Clients:
        """The clients; `seed` instead of `data_seed` draws another partition."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        spec, own = options.pop("data"), options.pop("data_seed")
        if own < 0:
            raise UserError(f"data-seed is {own}, but a seed is not negative")
        return load(spec, **options, seed=own if seed is None else seed)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How long and with whom."""

    rounds: int = 100
    """Rounds of training; also the length of schedules."""
    cohort: int | float | None = None
    """Clients in a round: a number, or a share below 1; by default all."""
    dropout: float = 0.0
    """Share of a cohort that does not answer."""
    likelihood: Literal["categorical", "bernoulli", "normal", "poisson"] | None = None
    """What the network's outputs mean; by default it follows from the target."""
    loop: bool = False
    """Run clients one by one, slower, and name the client and the step if one fails."""

    @property
    def keywords(self) -> dict[str, Any]:
        """What `simulate` gets of them."""
        return {"cohort": self.cohort, "dropout": self.dropout, "clients": "loop" if self.loop else "vmap"}


def unbuilt(spec: str) -> Model:
    """A network that is known by name only, until the data says what goes in and out."""

    def none(*_: Any) -> Any:
        raise AssertionError(f"the network {spec} is built when the data is there")

    return Model(none, none, Categorical(2), spec, none, none)


def build(model: Model, data: Clients, likelihood: str | None) -> Model:
    """The network of a spec such as `mlp`, `mlp:256,128` or `cnn` for this data."""
    name, _, sizes = model.name.partition(":")
    options: dict[str, Any] = {}
    if sizes:
        if name != "mlp" or not all(size.isdigit() for size in sizes.split(",")):
            raise UserError(f"the network {model.name!r} cannot be read; sizes are for mlp, such as mlp:256 or mlp:256,128")
        options["hidden"] = tuple(int(size) for size in sizes.split(","))
    return network(name, data, likelihood=likelihood, **options)


registry = ConstructorRegistry()


@registry.primitive_rule
def _model_rule(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Model] | None:
    if type_info.type is not Model:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="NETWORK",
        instance_from_str=lambda words: unbuilt(words[0]),
        is_instance=lambda instance: isinstance(instance, Model),
        str_from_instance=lambda instance: [instance.name],
    )


@registry.primitive_rule
def _unlabelled_rule(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Unlabelled] | None:
    if type_info.type is not Unlabelled:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="DATA",
        instance_from_str=lambda words: Unlabelled(load(words[0]).x, words[0]),
        is_instance=lambda instance: isinstance(instance, Unlabelled),
        str_from_instance=lambda instance: [instance.name],
    )


def default(name: str, model: str = "mlp") -> Any:
    """The algorithm of that name with its own defaults and a small network."""
    return find(name, "clients")(model=unbuilt(model))


def parse(options: type[Any], arguments: Sequence[str], prog: str, description: str, algorithm: Any = None) -> Any:
    """Parse a dataclass of options; with an algorithm, its fields become options too, as the field `algorithm`."""
    if algorithm is not None:
        field = ("algorithm", Annotated[type(algorithm), arg(name="")], dataclasses.field(default=algorithm))
        options = dataclasses.make_dataclass("Options", [field], bases=(options,), frozen=True, kw_only=True)
        options.__doc__ = description
    # What cannot be written on a command line, such as a model's functions, is no option, and no choice between subcommands.
    hidden = (tyro.conf.SuppressFixed, tyro.conf.AvoidSubcommands)
    return tyro.cli(options, prog=prog, description=description, args=list(arguments), registry=registry, config=hidden)


class Chosen(NamedTuple):
    """What a command about one algorithm works with."""

    name: str
    options: Any
    data: Clients
    algorithm: Any


def choose(options: type[Any], arguments: Sequence[str], command: str, does: str) -> Chosen | None:
    """The algorithm that the arguments name, set as they say, with its network built for the data; None after help."""
    name = algorithm_name(arguments, command)
    if name is None:
        return None
    parsed = parse(options, arguments[1:], f"fedbayes {command} {name}", does.format(name=name), default(name))
    data = parsed.data.load()
    model = build(parsed.algorithm.model, data, parsed.settings.likelihood)
    return Chosen(name, parsed, data, dataclasses.replace(parsed.algorithm, model=model))


def algorithm_name(arguments: Sequence[str], command: str) -> str | None:
    """The algorithm at the start of the arguments; prints the choices where there is none."""
    if not arguments or arguments[0].startswith("-"):
        print(f"usage: fedbayes {command} ALGORITHM [options]\n\nalgorithms:")
        for name in names("clients"):
            print(f"  {name:<14} {REGISTRY[name][3]}")
        print(f"\nfedbayes {command} ALGORITHM --help lists an algorithm's own options.")
        if not arguments or arguments[0] in ("-h", "--help"):
            return None
        raise UserError(f"{command} needs an algorithm before the options, such as fedbayes {command} fedavg {arguments[0]} …")
    find(arguments[0], "clients")
    return arguments[0]


def override(algorithm: Any, settings: Sequence[str]) -> Any:
    """`algorithm` with `path=value` settings, such as train.lr=0.05."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        value = value_of(text)
        if not equals:
            raise UserError(f"the setting {setting!r} cannot be read; write path=value, such as train.lr=0.05")
        try:
            algorithm = _replace(algorithm, path.split("."), tuple(value) if isinstance(value, list) else value, setting)
        except TypeError:
            raise UserError(
                f"{setting!r}: {text!r} is not of the kind that {path} holds; see fedbayes run ALGORITHM --help"
            ) from None
    return algorithm


def value_of(text: str) -> Any:
    """A value as TOML has it, or as a word.

    >>> value_of("0.1"), value_of("[1, 2]"), value_of("head")
    (0.1, [1, 2], 'head')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _replace(config: Any, path: list[str], value: Any, setting: str) -> Any:
    fields = [field.name for field in dataclasses.fields(config)]
    if path[0] not in fields:
        raise UserError(f"{setting!r}: {type(config).__name__} has no {path[0]!r}; it has {', '.join(fields)}")
    inner = getattr(config, path[0])
    if len(path) > 1:
        value = _replace(inner, path[1:], value, setting)
    elif dataclasses.is_dataclass(inner) and not isinstance(inner, Model):
        names = ", ".join(field.name for field in dataclasses.fields(inner))
        raise UserError(f"{setting!r} must say which part of {path[0]}: one of {names}")
    elif isinstance(inner, Model):
        value = unbuilt(str(value))
    elif isinstance(inner, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif inner is None and isinstance(value, str):
        raise UserError(f"{setting!r}: expected a number")
    if inner is not None and not isinstance(inner, Model) and not isinstance(value, type(inner)):
        raise UserError(f"{setting!r}: expected a {type(inner).__name__}, such as {inner!r}")
    return dataclasses.replace(config, **{path[0]: value})


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


def arguments(options: Any, usual: Any, prefix: str = "--") -> list[str]:
    """A dataclass of options as the command line has them, where they are not the usual ones.

    >>> arguments(RunOptions(rounds=3, cohort=0.5, loop=True), RunOptions())
    ['--rounds', '3', '--cohort', '0.5', '--loop']
    >>> arguments(override(default("fedavg"), ["train.lr=0.3", "train.decay_at=[0.5]"]), default("fedavg"))
    ['--train.lr', '0.3', '--train.decay-at', '0.5']
    """
    found: list[str] = []
    for field in dataclasses.fields(options):
        value, before = getattr(options, field.name), getattr(usual, field.name)
        name = field.name.replace("_", "-")
        if isinstance(value, Model | Unlabelled):
            found += [] if value.name == getattr(before, "name", None) else [prefix + name, value.name]
        elif dataclasses.is_dataclass(value):
            found += arguments(value, before, f"{prefix}{name}.")
        elif value == before and type(value) is type(before):
            continue
        elif isinstance(value, bool):
            found.append(f"{prefix}{'' if value else 'no-'}{name}")
        else:
            found += [prefix + name, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return found


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    from fedbayes.runs import write

    try:
        write(path, json.dumps(content, indent=2).encode())
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}; choose another file") from None


@contextlib.contextmanager
def keeping(folder: Path, command: str, arguments: Sequence[str]) -> Iterator[None]:
    """Keep in a run's folder what was typed, however the run ends but for an error; one that is stopped says how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.json").is_file():
            write_json(folder / "command.json", {command: list(arguments)})
        raise KeyboardInterrupt(f"the run is in {folder}; the same command with --resume continues it") from None
    write_json(folder / "command.json", {command: list(arguments)})
