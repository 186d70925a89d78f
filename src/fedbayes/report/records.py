"""What a page knows of a run: the files of its folder, as far as they are there and whole.

A file that is missing or damaged costs its part of the page, and a sentence there says so.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes import files, wire
from fedbayes.data.describe import Facts
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import Evaluation
from fedbayes.evaluation.score import Score, about_numbers
from fedbayes.results.folder import reaches_end, read_scores

GROUPS = ("participating", "unseen")
SUMMARY = ("mean", "sd", "5%", "95%")
FORMS = ("rows", "clients", "spread", "worst_tenth")
Figures = dict[str, dict[str, dict[str, dict[str, float]]]]  # mode → group → figure → form → number, as a result has them


@dataclasses.dataclass
class Record:
    """One run."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] | None = None
    scalars: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """One for each round."""
    evaluations: list[tuple[int, Figures]] = dataclasses.field(default_factory=list)
    scores: dict[str, Score] | None = None
    data: Facts | None = None
    messages: list[tuple[int, list[wire.Leaf]]] = dataclasses.field(default_factory=list)
    """How many clients of a round exchange which arrays."""
    timing: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    command: str | None = None
    notes: list[str] = dataclasses.field(default_factory=list)
    """What is wrong with the run's files."""

    @property
    def structured(self) -> bool:
        """Whether it is a NumPyro model over silos."""
        return "silos" in self.about_data or "posterior" in (self.result or {})

    @property
    def about_data(self) -> dict[str, Any]:
        """What the config says of the data."""
        found = self.config.get("data")
        return found if isinstance(found, dict) else {}

    @property
    def data_name(self) -> str:
        """The data set, or the model file that has it."""
        return str(self.about_data.get("name") or Path(str(self.config.get("file", "silos"))).stem)

    @property
    def algorithm(self) -> str:
        """The algorithm's name."""
        return str(self.config["algorithm"])

    @property
    def rounds(self) -> int:
        """Rounds that were meant."""
        return int(self.config["rounds"])

    @property
    def round(self) -> int:
        """The last round that is known of."""
        return int(max([entry["round"] for entry in self.scalars] + [round for round, _ in self.evaluations], default=0))

    @property
    def figures(self) -> Figures:
        """The figures of the result, or of an unfinished run's last evaluation."""
        if self.result is not None and (found := figures_of(self.result.get("metrics"))):
            return found
        return self.evaluations[-1][1] if self.evaluations else {}

    @property
    def numeric(self) -> bool:
        """Whether the target is a number."""
        return about_numbers(self.figures)

    @property
    def evaluation(self) -> Evaluation | None:
        """The clients' scores at the end, where they are known and it is known which clients were held out."""
        if not self.scores or self.data is None:
            return None
        return Evaluation(self.rounds, self.scores, np.array(self.data.unseen, bool), self.numeric)

    @property
    def state(self) -> str:
        """Whether it is finished."""
        return "finished" if self.result is not None else f"unfinished: round {self.round} of {self.rounds}"

    def name(self, client: int) -> str:
        """What a client is called."""
        return self.data.names[client] if self.data is not None else f"client {client}"

    def groups(self) -> dict[str, np.ndarray]:
        """The clients that take part and those that were held out, as masks over clients; together where it is not known."""
        count = len(next(iter(self.scores.values())).rows) if self.scores else 0
        if self.data is not None:
            unseen = np.array(self.data.unseen, bool)
            return {name: mask for name, mask in (("participating", ~unseen), ("unseen", unseen)) if mask.any()}
        return {"participating" if not self.about_data.get("unseen") else "all": np.ones(count, bool)}


def find(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs: those given, and those below a given folder that is none itself."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}; give the folder of a run, or one that holds such folders")
        below = [path] if _config(path) else sorted({file.parent for file in path.rglob("config.json") if _config(file.parent)})
        if not below:
            advice = "give the folder that fedbayes run, compare or fit named at its end"
            raise UserError(f"{path} holds no run: no config.json of one is in it or below it; {advice}")
        found |= {folder.resolve(): folder for folder in below if folder.resolve() not in found}
    return list(found.values())


def load(folder: Path) -> Record:
    """All that can be read of a run."""
    record = Record(folder, _config(folder) or {})
    _read_result(record)
    _read_metrics(record)
    _read_scores(record)
    _read_about(record)
    record.timing = [entry for entry in _lines(record, "timing.jsonl") if _is_number(entry.get("seconds")) and "part" in entry]
    record.command = _command(record)
    return record


def _config(folder: Path) -> dict[str, Any] | None:
    """What was run; a deployed server says it in result.json alone."""
    for name in ("config.json", "result.json"):
        if (folder / name).is_file():
            found = files.read_json(folder / name)
            fine = isinstance(found.get("algorithm"), str) and isinstance(found.get("rounds"), int)
            return found if fine else None
    return None


def _read_result(record: Record) -> None:
    path = record.folder / "result.json"
    if not path.exists():
        record.notes.append(
            f"This run is unfinished: round {{round}} of {record.rounds}. The page shows what is there; the command of the run "
            "with --resume continues it."
        )
        return
    try:
        found = files.read_json(path)
        if not ("metrics" in found or _has_posterior(found) or "sites" in found):
            raise UserError(f"{path} holds no result; it is damaged")
        record.result = found
    except UserError as problem:
        record.notes.append(f"{problem}.")


def _has_posterior(result: dict[str, Any]) -> bool:
    """Whether a result is that of a fit over silos, whole."""
    sites = result.get("posterior")
    return (
        isinstance(sites, dict)
        and all(isinstance(one, dict) and all(_is_number(one.get(key)) for key in SUMMARY) for one in sites.values())
        and isinstance(result.get("theta"), dict)
        and all(map(_is_number, result["theta"].values()))
        and (result.get("bound") is None or _is_number(result["bound"]))
        and isinstance(result.get("verdict", {}), dict)
        and all(result.get(name) is None or _is_number(result[name]) for name in ("khat", "ess"))
    )


def _read_metrics(record: Record) -> None:
    path, entries = record.folder / "metrics.jsonl", _lines(record, "metrics.jsonl")
    if record.result is not None and path.exists() and not reaches_end(entries, record.result):
        record.notes.append(f"{path} does not reach the run's end; some of its lines are lost.")
    for entry in entries:
        if not isinstance(entry.get("round"), int):
            continue
        if "evaluation" in entry:
            if figures := figures_of(entry["evaluation"]):
                record.evaluations.append((entry["round"], figures))
        else:
            record.scalars.append({name: value for name, value in entry.items() if _is_number(value)})
    record.notes = [note.replace("{round}", str(record.round)) for note in record.notes]


def _lines(record: Record, name: str) -> list[dict[str, Any]]:
    """The lines of a .jsonl file that can be read."""
    path = record.folder / name
    found, bad = files.read_lines(path)
    if bad:
        record.notes.append(f"{bad} of {bad + len(found)} lines of {path} cannot be read; the page leaves them out.")
    return found


def _read_scores(record: Record) -> None:
    path, modes = record.folder / "scores.safetensors", record.config.get("modes", [])
    if not path.exists() or record.result is None:
        return
    try:
        record.scores = read_scores(record.folder, modes, int(record.about_data["clients"]), record.result.get("schema", 1))
    except (UserError, KeyError, ValueError, TypeError) as problem:
        record.notes.append(f"The page has no figures of single clients: {problem}.")


def _read_about(record: Record) -> None:
    path = record.folder / "about.json"
    if not path.exists():
        return
    try:
        found = files.read_json(path)
        for message in found["messages"]:
            leaves = [wire.Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in message["leaves"]]
            sum(leaf.bytes for leaf in leaves)  # shapes and types that are none are found here
            same = next((place for place, (_, other) in enumerate(record.messages) if other == leaves), None)
            if same is None:
                record.messages.append((int(message["clients"]), leaves))
            else:  # silos whose sizes differ may yet send the same
                record.messages[same] = (record.messages[same][0] + int(message["clients"]), leaves)
        if "data" in found:
            record.data = _facts(found["data"], record)
    except (UserError, KeyError, ValueError, TypeError, AttributeError) as problem:
        said = str(problem) if isinstance(problem, UserError) else f"{path} cannot be read; it is damaged"
        record.notes.append(f"The page does not say who has which labels, nor what was sent: {said}.")
        record.messages, record.data = [], None


def _facts(given: dict[str, Any], record: Record) -> Facts:
    facts = Facts(**given)
    count = int(record.about_data["clients"])
    shapes: dict[str, tuple[int, ...]] = {"unseen": (count,), "train": (count,), "test": (count,), "names": (count,)}
    shapes |= {} if facts.labels is None else {"labels": (count, len(facts.classes or []))}
    shapes |= {} if facts.quantiles is None else {"quantiles": (count, 5)}
    for name, shape in shapes.items():
        if np.shape(getattr(facts, name)) != shape:
            raise ValueError(name)
    return facts._replace(names=[str(name) for name in facts.names])


def _command(record: Record) -> str | None:
    """What to type to run it again, into a folder of its own."""
    path = record.folder / "command.json"
    try:
        found = files.read_json(path) if path.exists() else {}
    except UserError as problem:
        record.notes.append(f"{problem}.")
        return None
    for command in ("run", "fit"):
        words = found.get(command)
        if isinstance(words, list) and words:
            return shlex.join(["fedbayes", command, *again([str(word) for word in words], record.folder.name)])
    return None


def again(words: Sequence[str], folder: str) -> list[str]:
    """The arguments of a run without what is only for its folder, and with another folder.

    >>> again(["fedavg", "--out", "a", "--rounds", "3", "--force"], "a")
    ['fedavg', '--rounds', '3', '--out', 'a-again']
    """
    kept, skip = [], False
    for word in words:
        if not skip and word not in ("--resume", "--force", "--out") and not word.startswith("--out="):
            kept.append(word)
        skip = word == "--out"
    return [*kept, "--out", f"{folder}-again"]


def figures_of(given: Any) -> Figures:
    """Figures without what is not a finite number: a file may be damaged, and a figure of no rows is none."""
    found: Figures = {}
    for mode, groups in _items(given):
        for group, figures in _items(groups):
            whole = {
                name: forms
                for name, forms in _items(figures)
                if isinstance(forms, dict) and all(_is_number(forms.get(form)) for form in FORMS)
            }
            if whole:
                found.setdefault(mode, {})[group] = whole
    return found


def _items(given: Any) -> list[tuple[str, Any]]:
    return list(given.items()) if isinstance(given, dict) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
