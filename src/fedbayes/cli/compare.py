"""`fedbayes compare`: methods × data × seeds, one table for each data set, and differences with intervals."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from fedbayes import files
from fedbayes.algorithms import names
from fedbayes.cli.arguments import parse
from fedbayes.cli.display import progress_bar, show
from fedbayes.engine.choose import described_over
from fedbayes.errors import UserError
from fedbayes.evaluation.differences import difference_sheet
from fedbayes.evaluation.score import about_numbers
from fedbayes.evaluation.tables import figures
from fedbayes.results.folder import SCHEMA
from fedbayes.results.trackers import tracker
from fedbayes.sheets import Cell, Sheet, latex, markdown, rich
from fedbayes.study.crew import alone
from fedbayes.study.options import DataOptions, RunOptions, value_of
from fedbayes.study.run import Outcome, run_study
from fedbayes.study.study import Job, Method, Search, Study, first_seeds, folder_name, read

USUAL = ("fedavg", "fedprox", "fedbabu", "fedper")  # what is compared where nothing is named


@dataclasses.dataclass(frozen=True)
class Options:
    """Train several algorithms on the same clients over several seeds; print their figures and their differences."""

    algorithms: Positional[tuple[str, ...]] = ()
    """Names of algorithms (fedbayes list), by default fedavg, fedprox, fedbabu and fedper; or a study's TOML file."""
    seeds: int = 3
    """How many seeds: 0, 1, …"""
    baseline: str | None = None
    """The method that others are compared with; by default the first."""
    units: Literal["seeds", "clients", "both"] = "both"
    """What the intervals shown are for: other seeds, other clients, or both; --json has all three."""
    json: Path | None = None
    """Also write every figure to this file."""
    markdown: Path | None = None
    """Also write the tables as Markdown."""
    latex: Path | None = None
    """Also write the tables as LaTeX."""
    out: Path | None = None
    """Keep each run in a folder below this one; a second call with the same options then goes on where it stopped."""
    force: bool = False
    """Start over in folders that hold a run."""
    processes: int | None = None
    """How many runs at once, each in a process of its own; by default as many as there are cores."""
    track: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="KIND:WHERE")] = ()
    """Also log each run to tensorboard:DIR or mlflow:URI."""
    model: str = "mlp"
    """Network: linear, mlp, mlp:256,128 (sizes of its hidden layers), cnn or mobilenet."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="PATH=VALUE")] = ()
    """A field of the algorithms, such as --set train.lr=0.05; or of one: --set fedprox.mu=0.1."""
    search: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="PATH=VALUE,VALUE")] = ()
    """Choose a field on validation rows, for each method, such as --search train.lr=0.01,0.03,0.1."""
    vary_data: bool = False
    """Draw the partition anew for each seed, instead of once."""
    data: Annotated[DataOptions, arg(name="")] = DataOptions()
    """The rows."""
    settings: Annotated[RunOptions, arg(name="")] = RunOptions()
    """The runs."""


IN_STUDY = ("seeds", "model", "set", "search", "vary_data", "data", "settings")
"""What a study's file says, and the command line then does not."""


def main(arguments: Sequence[str]) -> None:
    """Run them all, print the tables."""
    options: Options = parse(Options, arguments, "fedbayes compare", Options.__doc__ or "")
    outcome = compare(options)
    for choice in chosen(outcome):
        show(choice)
    sheets = [one for data, found in outcome.results.items() if found for one in tables(outcome, data, options.units)]
    for sheet in sheets:
        show(rich(sheet))
    if options.json is not None:
        files.write_json(options.json, content(outcome, ["fedbayes", "compare", *arguments]))
    for path, form in ((options.markdown, markdown), (options.latex, latex)):
        if path is not None:
            files.write(path, ("\n\n".join(map(form, sheets)) + "\n").encode())
    if options.out is not None:
        show(f"run folders: {options.out}")
    if outcome.failures:
        listed = "; ".join(f"{place}: {why}" for place, why in outcome.failures.items())
        missing = sum(len(outcome.missing(data)) for data in outcome.study.data)
        raise UserError(f"{missing} of {len(outcome.study.jobs())} runs failed and are not in the tables: {listed}")


def compare(options: Options) -> Outcome:
    """Do the study that the options name or describe."""
    study = study_of(options)
    for path in (options.json, options.markdown, options.latex):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}; make it or choose another")
    if options.processes is not None and options.processes < 1:
        raise UserError(f"processes is {options.processes}, but at least one does the runs")
    for spec in options.track:
        tracker(spec)
    with contextlib.ExitStack() as stack:
        if options.out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedbayes-")))
        else:
            stack.enter_context(alone(out := options.out))
        try:
            outcome = run_study(study, out, options.processes, bars, force=options.force, track=options.track)
        except KeyboardInterrupt:
            kept = f"the runs are in {options.out}; the same command goes on with them"
            raise KeyboardInterrupt(kept if options.out is not None else "with --out DIR it could be resumed") from None
    if not any(outcome.results.values()):
        sentences = list(dict.fromkeys(outcome.failures.values()))
        raise UserError(sentences[0] + (f" (all {len(outcome.failures)} runs failed)" if len(outcome.failures) > 1 else ""))
    return outcome


def study_of(options: Options) -> Study:
    """The study of a TOML file, or the one that the options describe."""
    first = Path(options.algorithms[0]) if options.algorithms else None
    if first is not None and first.suffix == ".toml":
        if not first.is_file():
            raise UserError(f"there is no file {first}; give a study's TOML file, or names of algorithms")
        usual = Options()
        given = [name for name in IN_STUDY if getattr(options, name) != getattr(usual, name)]
        if len(options.algorithms) > 1 or given:
            what = " ".join(options.algorithms[1:]) or f"an option of {given[0]}"
            raise UserError(f"{first} says what is run, but {what} was given besides; write it into the file")
        study = read(first)
        return study if options.baseline is None else dataclasses.replace(study, baseline=options.baseline)
    methods = {name: Method(name, tuple(_settings_of(name, options.set))) for name in options.algorithms or USUAL}
    search = Search(dict(map(_searched, options.search))) if options.search else None
    data, seeds, baseline = {folder_name(options.data.data): options.data}, first_seeds(options.seeds), options.baseline or ""
    return Study(data, methods, seeds, options.settings, options.model, baseline, options.vary_data, search)


@contextlib.contextmanager
def bars(jobs: Sequence[Job]) -> Iterator[Any]:
    """A bar for each run that is under way, and one for all."""
    with progress_bar(sum(job.run.rounds for job in jobs)) as add:
        known: dict[str, Any] = {}

        def progress(job: Job, round: int) -> None:
            if job.place not in known:
                known[job.place] = add(job.place, job.run.rounds)
            known[job.place](round)

        yield progress


RULE = "bold: the best in its mode and clients, where the 95 % interval of its difference from each other method excludes zero"


def tables(outcome: Outcome, data: str, units: str) -> list[Sheet]:
    """The figures on one data set, and the differences from the baseline."""
    runs = {name: list(seeds.values()) for name, seeds in outcome.results[data].items()}
    first = next(iter(runs.values()))[0]
    about = first["data"]
    label = about["name"] if len(outcome.study.data) == 1 else f"{data} ({about['name']})"
    title = f"{label}: {about['clients']} clients, {about['unseen']} unseen, {first['rounds']} rounds"
    missing = outcome.missing(data)
    notes = [RULE] * (len(runs) > 1) + [f"missing: {', '.join(missing)}"] * bool(missing)
    found = [figures(runs, title, outcome.winners(data, units), "; ".join(notes))]
    if base := outcome.differences(data):
        sheet = difference_sheet(base, units, about_numbers(first["metrics"]))
        found.append(sheet._replace(title=f"{label}: {sheet.title}"))
    return found + choices(label, outcome.results[data])


def choices(label: str, results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[Sheet]:
    """The settings of `adapt` that each method's federation chose; nothing where no run chose any."""
    sections = []
    for name, seeds in results.items():
        told = {seed: result["choice"] for seed, result in seeds.items() if result.get("choice")}
        if told:
            sections.append([[Cell(name), *map(Cell, words)] for words in described_over(told)])
    headings = ["method", "to adapt with", "settings", "gain"]
    caption = "gain: nats a row over the first candidate, of the clients that chose; mean ± standard deviation over seeds"
    return [Sheet(f"{label}: settings of adapt that the federation chose", caption, headings, sections)] if sections else []


def chosen(outcome: Outcome) -> Iterator[str]:
    """What a search chose, a line for each method and data."""
    search = outcome.study.search
    for (data, name), choice in outcome.search.items():
        place = outcome.study.place(data, name)
        if choice.settings is None or search is None:
            yield f"{place}: no try of the search ended well"
            continue
        best = next(one for one in choice.tries if one.settings == choice.settings)
        failed = sum(one.failure is not None for one in choice.tries)
        tries = f"{len(choice.tries)} tries" + (f", {failed} failed" if failed else "")
        figure = f"{search.figure} {best.score:.3f}, {best.mode}, on validation rows"
        yield f"{place}: {' '.join(choice.settings)} of {tries} ({figure})"


def content(outcome: Outcome, command: Sequence[str]) -> dict[str, Any]:
    """Everything, for --json."""
    study = outcome.study
    return {
        "schema": SCHEMA,
        "command": list(command),
        "study": dataclasses.asdict(study),
        "results": {
            study.place(data, name): list(seeds.values())
            for data, methods in outcome.results.items()
            for name, seeds in methods.items()
        },
        "differences": [
            {"data": data, **one._asdict(), "intervals": {unit: found and list(found) for unit, found in one.intervals.items()}}
            for data in outcome.results
            for one in outcome.differences(data)
        ],
        "search": {
            study.place(data, name): {"chosen": choice.settings, "tries": [one._asdict() for one in choice.tries]}
            for (data, name), choice in outcome.search.items()
        },
        "failures": outcome.failures,
    }


def _searched(text: str) -> tuple[str, list[Any]]:
    path, equals, values = text.partition("=")
    if not equals or not values:
        raise UserError(f"the search {text!r} cannot be read; write path=value,value, such as train.lr=0.01,0.1")
    return path, [value_of(value) for value in values.split(",")]


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
