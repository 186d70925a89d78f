"""A study: methods × data × seeds, from a TOML file or from the options of `fedbayes compare`, as a list of runs.

The file's keys are the fields of `RunOptions` and of `Study`; docs/compare.md has one.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedbayes.engine.round import checked_seed
from fedbayes.errors import UserError, nearest
from fedbayes.evaluation.assess import MODES
from fedbayes.evaluation.differences import LOWER_IS_BETTER
from fedbayes.evaluation.score import HIGHER_IS_BETTER
from fedbayes.files import upgraded
from fedbayes.study.options import DataOptions, RunOptions, default, override

Grid = dict[str, list[Any]]
FIGURES = sorted(HIGHER_IS_BETTER | LOWER_IS_BETTER)  # what a search may choose by
NAME = re.compile(r"[\w.+-]+")


class Method(NamedTuple):
    """An algorithm with settings of its own."""

    algorithm: str
    settings: tuple[str, ...]
    """Each as path=value."""
    grid: Grid | None = None
    """Instead of the search's."""


@dataclasses.dataclass(frozen=True)
class Search:
    """Settings that are chosen on validation rows, which are cut from the clients' training rows."""

    grid: Grid = dataclasses.field(default_factory=dict)
    """Values to try, by path; every combination is one try."""
    figure: str = "log_score"
    """What is compared, over the validation rows of participating clients."""
    mode: str = "best"
    """Of which mode; `best` is the one where the try does best."""
    share: float = 0.2
    """Of each client's training rows that is for validation."""
    seed: int = 1000
    """Of the tries, and of the choice of validation rows."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What is run."""

    data: dict[str, DataOptions]
    methods: dict[str, Method]
    seeds: tuple[int, ...] = (0, 1, 2)
    run: RunOptions = RunOptions()
    model: str = "mlp"
    baseline: str = ""
    vary_data: bool = False
    search: Search | None = None

    def __post_init__(self) -> None:
        for kind, names in (("methods", self.methods), ("data", self.data)):
            if not names:
                raise UserError(f"a comparison needs at least one table under {kind}, such as [{kind}.{EXAMPLES[kind]}]")
            for name in names:
                if not NAME.fullmatch(name) or name.startswith("."):
                    raise UserError(f"{kind} has {name!r}, but it names a folder: letters, digits, and . _ + - inside")
        if not self.seeds or len(set(map(checked_seed, self.seeds))) < len(self.seeds):
            raise UserError(f"seeds is {list(self.seeds)}, but a comparison needs at least one, none twice")
        if self.run.rounds < 1:
            raise UserError(f"rounds is {self.run.rounds}, but a run has at least one")
        if self.baseline and self.baseline not in self.methods:
            raise UserError(_unknown("baseline", self.baseline, self.methods))
        for method in self.methods.values():
            override(default(method.algorithm, self.model), method.settings)
        if self.search is not None:
            self._check_search(self.search)

    def _check_search(self, search: Search) -> None:
        if search.mode not in (*MODES, "best"):
            raise UserError(_unknown("search.mode", search.mode, (*MODES, "best")))
        if search.figure not in FIGURES:
            raise UserError(_unknown("search.figure", search.figure, FIGURES))
        if not 0 < search.share < 1:
            raise UserError(f"search.share is {search.share}, but it is a share of the training rows, between 0 and 1")
        if checked_seed(search.seed) in self.seeds:
            raise UserError(f"search.seed is {search.seed}, but it must be none of the seeds of the comparison")
        sizes = {}
        for name, method in self.methods.items():
            tries = self.tries(method)
            sizes[name] = len(tries)
            for settings in tries:  # whether each method has these fields is said before anything runs
                try:
                    override(default(method.algorithm, self.model), (*method.settings, *settings))
                except UserError as problem:
                    advice = f"give {name} a grid of its own, [methods.{name}.grid], with as many tries as the others'"
                    raise UserError(f"the search cannot try {' '.join(settings)} for {name}: {problem}; {advice}") from None
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise UserError(f"the grids give different numbers of tries ({listed}), but every method gets the same number")
        if not next(iter(sizes.values())):
            raise UserError("the search has nothing to try; give it a table [search.grid], such as train.lr = [0.01, 0.1]")

    def tries(self, method: Method) -> list[tuple[str, ...]]:
        """The settings of each try."""
        grid = method.grid if method.grid is not None else self.search.grid if self.search is not None else {}
        columns = [[setting(path, value) for value in values] for path, values in grid.items()]
        return list(itertools.product(*columns)) if columns else []

    def place(self, data: str, name: str) -> str:
        """Where a run's folder is below the study's."""
        return name if len(self.data) == 1 else f"{data}/{name}"

    def jobs(self, chosen: Mapping[tuple[str, str], tuple[str, ...]] | None = None) -> list[Job]:
        """The runs, those of one method together; with the settings that a search chose for data and method."""
        chosen = dict.fromkeys(itertools.product(self.data, self.methods), ()) if chosen is None else chosen
        return [
            self._job(f"{name}-{seed}", data, name, seed, chosen[data, name])
            for data, name in itertools.product(self.data, self.methods)
            if (data, name) in chosen
            for seed in self.seeds
        ]

    def search_jobs(self) -> list[Job]:
        """The tries of the search."""
        if self.search is None:
            return []
        return [
            self._job(f"search/{name}-{number}", data, name, self.search.seed, settings, self.search.share)
            for data, name in itertools.product(self.data, self.methods)
            for number, settings in enumerate(self.tries(self.methods[name]))
        ]

    def _job(self, place: str, data: str, name: str, seed: int, settings: Sequence[str], share: float | None = None) -> Job:
        method, options = self.methods[name], self.data[data]
        if self.vary_data and share is None:
            options = dataclasses.replace(options, data_seed=seed)
        given = (method.algorithm, (*method.settings, *settings), self.model, options, self.run, share)
        return Job(self.place(data, place), data, name, seed, *given)


EXAMPLES = {"methods": "fedavg", "data": "digits"}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a study; it goes to another process as JSON.

    >>> job = Job("a-0", "digits", "a", 0, "fedavg", ("train.lr=0.1",), "mlp", DataOptions(ignore=("x",)), RunOptions())
    >>> msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
    True
    """

    place: str
    """Its folder, below the study's."""
    data_name: str
    method: str
    seed: int
    algorithm: str
    settings: tuple[str, ...]
    model: str
    data: DataOptions
    run: RunOptions
    validation: float | None = None
    """The share of training rows that tests instead of the test rows, in a try of a search."""


def setting(path: str, value: Any) -> str:
    """A field and its value as `--set` takes them.

    >>> setting("train.decay_at", [0.5, 0.75]), setting("train.lr", 1e-5), setting("part", "head")
    ('train.decay_at=[0.5, 0.75]', 'train.lr=1e-05', 'part="head"')
    """
    return f"{path}={json.dumps(value)}"


def read(path: Path) -> Study:
    """The study of a TOML file."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise UserError(f"{path} cannot be read as TOML: {problem}") from None
    try:
        return parse(content)
    except UserError as problem:
        raise UserError(f"{path}: {problem}") from None


def parse(content: Mapping[str, Any]) -> Study:
    """The study that TOML's tables describe.

    >>> study = parse({"rounds": 5, "seeds": 2, "data": {"digits": {}}, "methods": {"fedavg": {"train": {"lr": 0.1}}}})
    >>> [job.place for job in study.jobs()], study.methods["fedavg"].settings
    (['fedavg-0', 'fedavg-1'], ('train.lr=0.1',))
    >>> parse({"round": 5})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedbayes.errors.UserError: there is no key 'round'; did you mean rounds or dropout? there is baseline, choose, cohort, ...
    """
    file: _File = _fields(_File, "", content)
    common = _settings("set", file.set)
    methods = {name: _method(name, table, common) for name, table in file.methods.items()}
    if file.data and not all(isinstance(table, Mapping) for table in file.data.values()):
        only: DataOptions = _fields(DataOptions, "data", file.data)
        data = {folder_name(only.data): only}
    else:
        data = {name: _fields(DataOptions, f"data.{name}", {"data": name, **table}) for name, table in file.data.items()}
    search = None
    if file.search is not None:
        grid = _grid("search.grid", file.search.get("grid", {}))
        search = _fields(Search, "search", {**upgraded(file.search), "grid": grid})
    seeds = first_seeds(file.seeds) if isinstance(file.seeds, int) else file.seeds
    run = RunOptions(**{field.name: getattr(file, field.name) for field in dataclasses.fields(RunOptions)})
    return Study(data, methods, seeds, run, file.model, file.baseline, file.vary_data, search)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _File(RunOptions):
    """The keys of a study's file."""

    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    seeds: int | tuple[int, ...] = 3
    model: str = Study.model
    baseline: str = Study.baseline
    vary_data: bool = Study.vary_data
    set: dict[str, Any] = dataclasses.field(default_factory=dict)
    search: dict[str, Any] | None = None


def first_seeds(count: int) -> tuple[int, ...]:
    """0, 1, …: as many as asked for.

    >>> first_seeds(20260101)
    Traceback (most recent call last):
    fedbayes.errors.UserError: seeds is 20260101, but it is how many: 1 to 9999; a study's file may list them
    """
    if not 1 <= count < 10_000:
        raise UserError(f"seeds is {count}, but it is how many: 1 to 9999; a study's file may list them")
    return tuple(range(count))


def folder_name(spec: str) -> str:
    """A name for a data set that is given by a path or in another form.

    >>> folder_name("digits"), folder_name("data/patients.csv"), folder_name("hub:a/b")
    ('digits', 'patients', 'b')
    """
    return re.sub(r"[^\w.+-]+", "-", Path(spec).stem).strip("-.") or "data"


def _method(name: str, table: Mapping[str, Any], common: Sequence[str]) -> Method:
    rest = dict(table)
    algorithm, grid = rest.pop("algorithm", name), rest.pop("grid", None)
    if not isinstance(algorithm, str):
        raise UserError(f"methods.{name}.algorithm is {algorithm!r}, but it is the name of an algorithm (fedbayes list)")
    settings = (*common, *_settings(f"methods.{name}", rest))
    return Method(algorithm, settings, None if grid is None else _grid(f"methods.{name}.grid", grid))


def _fields(cls: type[Any], where: str, values: Mapping[str, Any]) -> Any:
    """A dataclass of options from a table; refuses an unknown key and a value of another type."""
    kinds, prefix = typing.get_type_hints(cls), f"{where}." if where else ""
    for name in values:
        if name not in kinds:
            raise UserError(f"there is no key {prefix + name!r}; {nearest(name, sorted(kinds))}")
    for name, value in values.items():
        try:
            msgspec.convert(value, kinds[name])
        except msgspec.ValidationError:
            raise UserError(f"{prefix}{name} is {value!r}, but it is {_words(kinds[name])}") from None
    return msgspec.convert(values, cls)


def _words(kind: Any) -> str:
    """What a key holds; msgspec names types, and of a choice not even the values."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_words(one) for one in inner if one is not types.NoneType))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (tuple, dict):
        return f"a list, each {_words(inner[0])}" if origin is tuple else f"a table{'' if inner[1] is Any else ' of tables'}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[kind]


def _settings(where: str, table: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Nested tables as path=value."""
    found: list[str] = []
    for name, value in table.items():
        if isinstance(value, Mapping):
            found += _settings(where, value, f"{prefix}{name}.")
        elif not isinstance(value, str | int | float | bool | list):
            raise UserError(f"{where}.{prefix}{name} is {value!r}, which no field holds")
        else:
            found.append(setting(prefix + name, value))
    return tuple(found)


def _grid(where: str, table: Any, prefix: str = "") -> Grid:
    if not isinstance(table, Mapping):
        raise UserError(f"{where} is {table!r}, but it is a table of lists, such as train.lr = [0.01, 0.1]")
    found: Grid = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= _grid(where, value, f"{prefix}{name}.")
        elif isinstance(value, list) and value:
            found[prefix + name] = value
        else:
            raise UserError(f"{where}.{prefix}{name} is {value!r}, but it is a list of values to try")
    return found


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    return f"{what} is {name!r}, which there is not; {nearest(name, known)}"
