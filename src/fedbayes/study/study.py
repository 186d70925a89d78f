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

from fedbayes.errors import UserError, nearest
from fedbayes.evaluation.assess import MODES
from fedbayes.evaluation.differences import LOWER_IS_BETTER
from fedbayes.evaluation.score import HIGHER_IS_BETTER
from fedbayes.study.options import DataOptions, RunOptions, default, override

Grid = dict[str, list[Any]]
FIGURES = sorted(HIGHER_IS_BETTER | LOWER_IS_BETTER)
"""What a search may choose by."""
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
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds is {list(self.seeds)}, but a comparison needs at least one, none negative, none twice")
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
        if search.seed in self.seeds or search.seed < 0:
            raise UserError(f"search.seed is {search.seed}, but it must be none of the seeds of the comparison")
        sizes = {}
        for name, method in self.methods.items():
            tries = self.tries(method)
            sizes[name] = len(tries)
            for settings in tries:  # whether each method has these fields is said before anything runs
                try:
                    override(default(method.algorithm, self.model), (*method.settings, *settings))
                except UserError as problem:
                    raise UserError(
                        f"the search cannot try {' '.join(settings)} for {name}: {problem}; give {name} a grid of "
                        f"its own, [methods.{name}.grid], with as many tries as the others'"
                    ) from None
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise UserError(f"the grids give different numbers of tries ({listed}), but every method gets the same number")
        if not next(iter(sizes.values())):
            raise UserError("the search has nothing to try; give it a table [search.grid], such as train.lr = [0.01, 0.1]")

    def tries(self, method: Method) -> list[tuple[str, ...]]:
        """The settings of each try."""
        grid = method.grid if method.grid is not None else self.search.grid if self.search is not None else {}
        if not grid:
            return []
        columns = [[setting(path, value) for value in values] for path, values in grid.items()]
        return list(itertools.product(*columns))

    def place(self, data: str, name: str) -> str:
        """Where a run's folder is below the study's."""
        return name if len(self.data) == 1 else f"{data}/{name}"

    def jobs(self, chosen: Mapping[tuple[str, str], tuple[str, ...]] | None = None) -> list[Job]:
        """The runs, those of one method together; with the settings that a search chose for data and method."""
        return [
            Job(
                self.place(data, f"{name}-{seed}"),
                data,
                name,
                seed,
                method.algorithm,
                (*method.settings, *((chosen or {}).get((data, name), ()))),
                self.model,
                dataclasses.replace(options, data_seed=seed) if self.vary_data else options,
                self.run,
            )
            for data, options in self.data.items()
            for name, method in self.methods.items()
            if chosen is None or (data, name) in chosen
            for seed in self.seeds
        ]

    def search_jobs(self) -> list[Job]:
        """The tries of the search."""
        if self.search is None:
            return []
        return [
            Job(
                self.place(data, f"search/{name}-{number}"),
                data,
                name,
                self.search.seed,
                method.algorithm,
                (*method.settings, *settings),
                self.model,
                options,
                self.run,
                self.search.share,
            )
            for data, options in self.data.items()
            for name, method in self.methods.items()
            for number, settings in enumerate(self.tries(method))
        ]


EXAMPLES = {"methods": "fedavg", "data": "digits"}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a study."""

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

    def to_json(self) -> str:
        """One line, for another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """What `to_json` wrote.

        >>> job = Job("a-0", "digits", "a", 0, "fedavg", ("train.lr=0.1",), "mlp", DataOptions(ignore=("x",)), RunOptions())
        >>> Job.from_json(job.to_json()) == job
        True
        """
        fields = json.loads(line)
        fields["data"]["ignore"] = tuple(fields["data"]["ignore"])
        fields["settings"] = tuple(fields["settings"])
        return cls(**{**fields, "data": DataOptions(**fields["data"]), "run": RunOptions(**fields["run"])})


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
    fedbayes.errors.UserError: there is no key 'round'; did you mean rounds or dropout? there is baseline, cohort, data, ...
    """
    own = {"seeds", "model", "baseline", "vary_data", "data", "methods", "set", "search"}
    runs = {field.name for field in dataclasses.fields(RunOptions)}
    _known("", content, sorted(own | runs))
    common = _settings("set", _table(content, "set"))
    methods = {name: _method(name, table, common) for name, table in _tables(content, "methods").items()}
    given = _table(content, "data")
    single = bool(given) and not all(isinstance(table, Mapping) for table in given.values())
    if single:
        options_of_data = _data("data", given, None)
        data = {folder_name(options_of_data.data): options_of_data}
    else:
        data = {name: _data(f"data.{name}", table, name) for name, table in _tables(content, "data").items()}
    seeds = content.get("seeds", 3)
    if isinstance(seeds, bool) or not (isinstance(seeds, int) or _is_list_of(seeds, int)):
        raise UserError(f"seeds is {seeds!r}, but it is how many, or a list of seeds")
    options: dict[str, Any] = {}
    for name, kind in (("model", str), ("baseline", str), ("vary_data", bool)):
        if name in content:
            if not isinstance(content[name], kind):
                raise UserError(f"{name} is {content[name]!r}, but it is a {kind.__name__}")
            options[name] = content[name]
    if "search" in content:
        table = dict(_table(content, "search"))
        grid = _grid("search.grid", table.pop("grid", {}))
        options["search"] = _fields(Search, "search", {**table, "grid": grid})
    settings = {name: value for name, value in content.items() if name in runs}
    seeds = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    return Study(data, methods, seeds, _fields(RunOptions, "", settings), **options)


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


def _data(where: str, table: Mapping[str, Any], name: str | None) -> DataOptions:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return _fields(DataOptions, where, {**({} if name is None else {"data": name}), **fields})


def _fields(cls: type[Any], where: str, values: Mapping[str, Any]) -> Any:
    """A dataclass of options from a table, refused where a key is unknown or a value is not of its kind."""
    kinds = typing.get_type_hints(cls)
    _known(where, values, list(kinds))
    for name, value in values.items():
        if not _fits(value, kinds[name]):
            label = f"{where}.{name}" if where else name
            raise UserError(f"{label} is {value!r}, but it is {_words(kinds[name])}")
    return cls(**values)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(_fits(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(one, typing.get_args(kind)[0]) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(kind) or kind)


def _words(kind: Any) -> str:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(_words(one) for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    known = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return known.get(kind, "a list" if typing.get_origin(kind) is tuple else "a table")


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


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, Mapping):
        raise UserError(f"{name} is {table!r}, but it is a table: write [{name}]")
    return table


def _tables(content: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    for key, value in _table(content, name).items():
        if not isinstance(value, Mapping):
            raise UserError(f"{name}.{key} is {value!r}, but it is a table: write [{name}.{key}]")
    return _table(content, name)


def _known(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            label = f"{where}.{name}" if where else name
            raise UserError(f"there is no key {label!r}; {nearest(name, known)}")


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    return f"{what} is {name!r}, which there is not; {nearest(name, known)}"


def _is_list_of(value: Any, kind: type[Any]) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)
