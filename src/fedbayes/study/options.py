"""Settings of runs and of algorithms as text: what a command line, a study file and a run folder have in common."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from typing import Any, Literal

from fedbayes.algorithms import find
from fedbayes.data import Clients, load
from fedbayes.data.unlabelled import Unlabelled
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
    hold_out: int | tuple[str, ...] = 0
    """How many clients never train and are evaluated as unseen; or which, by name (two or more if a name is a number)."""
    standardise: bool = True
    """Let the network see each feature with mean 0 and deviation 1."""
    data_seed: int = 0
    """Of the partition, the split and the choice of unseen clients."""

    def load(self, seed: int | None = None) -> Clients:
        """The clients; `seed` instead of `data_seed` draws another partition."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        spec, own = options.pop("data"), options.pop("data_seed")
        if not 0 <= own < 2**63:
            raise UserError(f"data-seed is {own}, but a seed is not negative and below 2^63")
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
    choose: bool = True
    """Let the federation choose settings of adapt that are not given, in runs of ten rounds and eight participants or more."""
    modes: tuple[str, ...] = ()
    """Evaluation modes, such as global adapted:5 adapted, the latter after adapt on five rows or all; by default all."""
    loop: bool = False
    """Run clients one by one, slower, and name the client and the step if one fails."""

    @property
    def keywords(self) -> dict[str, Any]:
        """What `simulate` gets of them."""
        backend = "loop" if self.loop else "vmap"
        given = {"cohort": self.cohort, "dropout": self.dropout, "choose": self.choose, "clients": backend}
        return {**given, "modes": self.modes or None}


def unbuilt(spec: str) -> Model:
    """A network that is known by name only, until the data says what goes in and out."""

    def none(*_: Any) -> Any:
        raise AssertionError(f"the network {spec} is built when the data is there")

    return Model(none, none, Categorical(2), spec, none, none)


def build(model: Model, data: Clients, likelihood: str | None) -> Model:
    """The network of a spec such as `mlp`, `mlp:256,128` or `cnn` for this data."""
    name, _, sizes = model.name.partition(":")
    if not sizes:
        return network(name, data, likelihood=likelihood)
    if name != "mlp" or not all(size.isdigit() for size in sizes.split(",")):
        raise UserError(f"the network {model.name!r} cannot be read; sizes are for mlp, such as mlp:256 or mlp:256,128")
    return network(name, data, likelihood=likelihood, hidden=tuple(map(int, sizes.split(","))))


def default(name: str, model: str = "mlp") -> Any:
    """The algorithm of that name with its own defaults and a small network."""
    return find(name, "clients")(model=unbuilt(model))


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
            advice = "see fedbayes run ALGORITHM --help"
            raise UserError(f"{setting!r}: {text!r} is not of the kind that {path} holds; {advice}") from None
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
    elif isinstance(inner, Model):
        value = unbuilt(str(value))
    elif dataclasses.is_dataclass(inner):
        names = ", ".join(field.name for field in dataclasses.fields(inner))
        raise UserError(f"{setting!r} must say which part of {path[0]}: one of {names}")
    elif isinstance(inner, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    elif inner is None and isinstance(value, str):
        raise UserError(f"{setting!r}: expected a number")
    if inner is not None and not isinstance(inner, Model) and not isinstance(value, type(inner)):
        raise UserError(f"{setting!r}: expected a {type(inner).__name__}, such as {inner!r}")
    return dataclasses.replace(config, **{path[0]: value})


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
