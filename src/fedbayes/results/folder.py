"""The folder of a run: config, metrics, checkpoint, clients' states, result.

    config.json              what was run; a resumed run must have the same
    metrics.jsonl            one line a round, and one for each evaluation
    checkpoint.safetensors   the server's state after a round, replaced atomically
    local/                   what clients keep (see states.py)
    scores.safetensors       each client's Score in each mode
    about.json               what a page tells of the clients and of what is sent, without the data
    timing.jsonl             seconds of each part of the run; not the same from run to run
    shared.safetensors       the shared model, with the algorithm and the layout of rows: all that a newcomer needs
    members.json             who the clients were
    life.json                the worth of each part of the uncertainty, where it was measured (see check.py)
    result.json              the figures; its presence says that the run is finished

A run that is killed at any moment and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import jax
import numpy as np

from fedbayes import __version__, files, wire
from fedbayes.algorithm import AnyAlgorithm, AnyNetwork
from fedbayes.data.clients import Clients
from fedbayes.data.describe import facts
from fedbayes.engine.choose import Choice
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import Evaluation, no_scores
from fedbayes.evaluation.score import Score, about_numbers
from fedbayes.files import SCHEMA as SCHEMA
from fedbayes.models import Model
from fedbayes.wire import provenance

log = logging.getLogger("fedbayes")
MOST = 500_000  # clients times classes up to which about.json says who has which labels: a megabyte or two
SHARED, MEMBERS, LIFE = "shared.safetensors", "members.json", "life.json"
AGAIN = "--force starts the run over"
FILES = (
    *("config.json", "metrics.jsonl", "checkpoint.safetensors", "scores.safetensors", "result.json"),
    *(
        SHARED,
        MEMBERS,
        "posterior.nc",
        "bound.png",
        "movement.png",
        "posterior.png",
        "about.json",
        "timing.jsonl",
        "command.json",
    ),
    "report.html",
    LIFE,
)


class Resumable(Protocol):
    """What a run's folder keeps of a simulation: the server's state, its round, and a store of what clients keep."""

    state: Any
    round: int

    @property
    def choice(self) -> Choice | None:
        """Settings of `adapt` that were chosen."""

    @property
    def local(self) -> Any:
        """Has `commit` and `restore`."""


class Run:
    """The folder of one run, held against other processes until `close`; a finished run is read without that."""

    def __init__(self, folder: Path, config: dict[str, Any], resume: bool = False, force: bool = False) -> None:
        self.folder, self.config = folder, json.loads(json.dumps(config))
        self.finished, self.extended, self.lines = False, 0, 0
        self.choice: Mapping[str, Any] | None = None  # as the checkpoint has it
        self._held: Callable[[], Any] | None = None
        if force or not resume or not (folder / "result.json").exists():
            self.hold()
        try:
            with files.writing(folder):
                self._begin(resume, force)
        except BaseException:
            self.close()
            raise

    def _begin(self, resume: bool, force: bool) -> None:
        if force:
            self._clear()
        if not (self.folder / "config.json").exists():
            self._clear()
            files.write_json(self.folder / "config.json", self.config)
            return
        if resume:
            self._same_config()
        self.finished = (self.folder / "result.json").exists() and not self.extended
        if not resume:
            state, hint = ("a finished run", "") if self.finished else ("an unfinished run", "--resume continues it, ")
            raise UserError(f"{self.folder} holds {state}; {hint}--force starts over, or choose another folder")

    def hold(self) -> None:
        """Keep other processes out; the second gets a sentence."""
        if self._held is None:
            self._held = weakref.finalize(self, os.close, files.lock(self.folder))

    def close(self) -> None:
        """Let others in."""
        if self._held is not None:
            self._held()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _clear(self) -> None:
        """Remove a run's files and nothing else; its config last, so that what is left is never taken for another run's."""
        shutil.rmtree(self.folder / "local", ignore_errors=True)
        for name in reversed(FILES):
            (self.folder / name).unlink(missing_ok=True)

    def _same_config(self) -> None:
        """Refuse a run with other settings; one that differs in a larger number of rounds alone is extended."""
        there = files.read_json(self.folder / "config.json")
        before, now = flat({**there, "schema": None}), flat({**self.config, "schema": None})
        different = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if different == ["rounds"] and now["rounds"] > before["rounds"] and not now.get("average_last"):
            self.hold()
            self.extended = before["rounds"]
        elif different:
            name, others = different[0], f" (and {len(different) - 1} more settings differ)" if len(different) > 1 else ""
            scheduled = len(different) > 1 and all(one.rpartition(".")[2] == "rounds" for one in different)
            why = "; it depends on the number of rounds, so this run cannot be extended" if scheduled else ""
            raise UserError(
                f"{self.folder} is a run with another {name}: {_short(before.get(name))} there, {_short(now.get(name))} "
                f"here{others}{why}; resume it with its own settings, or choose another folder"
            )

    def log(self, entry: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Append a line to metrics.jsonl, or to another such file."""
        self.lines += name == "metrics.jsonl"
        files.append_line(self.folder / name, entry)

    def time(self, part: str, round: int, seconds: float, **more: int) -> None:
        """Log how long a part of the run took, apart from the metrics, which are the same whenever the run is repeated."""
        self.log({"round": round, "part": part, "seconds": float(f"{seconds:.4g}"), **more}, "timing.jsonl")

    def tell(self, about: dict[str, Any]) -> None:
        """Write what a page of the run needs and cannot know without the data."""
        files.write_json(self.folder / "about.json", about, compact=True)

    def checkpoint(self, simulation: Resumable) -> None:
        """Write the server's state; the clients' states reach the disk before it."""
        started = time.perf_counter()
        metadata = {"round": simulation.round, "lines": self.lines, "local": simulation.local.commit(simulation.round)}
        metadata |= {} if simulation.choice is None else {"choice": simulation.choice.to_json()}
        files.save(self.folder / "checkpoint.safetensors", jax.device_get(simulation.state), metadata)
        self.time("checkpoints", simulation.round, time.perf_counter() - started)

    def restore(self, simulation: Resumable) -> list[dict[str, Any]]:
        """Put the simulation where the checkpoint is, if there is one; returns the history up to it.

        The history is not needed to go on, so damaged lines of it are a warning.
        """
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            simulation.local.restore(0, None)
            with files.writing(self.folder):
                (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            return []
        state, metadata = files.load(path, jax.device_get(simulation.state), "the checkpoint", AGAIN)
        simulation.state, simulation.round = jax.device_put(state), metadata["round"]
        simulation.local.restore(simulation.round, metadata["local"])
        self.choice = metadata.get("choice")
        if self.extended:  # only now, as a run whose checkpoint is damaged keeps its result
            with files.writing(self.folder):
                for name in ("result.json", "scores.safetensors", SHARED, "report.html", LIFE):
                    (self.folder / name).unlink(missing_ok=True)
            files.write_json(self.folder / "config.json", self.config)
        if self.finished:
            return read_history(self.folder, files.read_json(self.folder / "result.json"))
        history, damaged = files.read_lines(path := self.folder / "metrics.jsonl")
        last, every = simulation.round, self.config.get("evaluate_every") or 0
        again = {self.config["rounds"]}  # an evaluation at the end is made again
        if self.extended and not (every and self.extended % every == 0):
            again.add(self.extended)
        known = [(entry, entry.get("round", 0)) for entry in history]
        history = [entry for entry, round in known if round <= last and not ("evaluation" in entry and round in again)]
        files.write_lines(path, history)
        if damaged or len(history) < metadata["lines"]:
            log.warning("%s is damaged: %d of %d lines are left", path, len(history), metadata["lines"])
        self.lines = len(history)
        return history

    def finish(self, result: dict[str, Any], evaluation: Evaluation | None = None) -> None:
        """Write the figures; after this the run is finished."""
        if evaluation is not None:
            files.save(self.folder / "scores.safetensors", evaluation.scores)
        files.write_json(self.folder / "result.json", result, finite=True)
        self.finished = True

    def outcome(self, simulation: Simulation) -> tuple[dict[str, Any], Evaluation]:
        """The result and the scores of a finished run, from its files."""
        result = files.read_json(self.folder / "result.json", metrics=dict)
        return result, read_evaluation(self.folder, {**result, **self.config}, simulation.data.unseen)


def about(messages: Sequence[tuple[int, Sequence[wire.Leaf]]], data: Clients | None = None) -> dict[str, Any]:
    """What `Run.tell` writes: how many clients of a round exchange which arrays, and who has which labels."""
    sent = [
        {"clients": count, "leaves": [leaf._replace(depends=tuple(wire.sources(leaf)))._asdict() for leaf in leaves]}
        for count, leaves in messages
    ]
    return {"messages": sent, **({} if data is None else {"data": facts(data, MOST)._asdict()})}


def identity(algorithm: AnyAlgorithm, **settings: Any) -> dict[str, Any]:
    """The start of a run's config: the version, the algorithm with its options, and the settings given."""
    return {"fedbayes": __version__, "algorithm": algorithm.title, "options": describe(algorithm), **settings}


def describe(config: Any) -> Any:
    """An algorithm's hyper-parameters as JSON; a network is named by what it is."""
    if isinstance(config, Model):
        return {"name": config.name, "likelihood": repr(config.likelihood)}
    if dataclasses.is_dataclass(config):
        fields = [field.name for field in dataclasses.fields(config) if field.init and field.metadata.get("fact") != "form"]
        return {name: describe(getattr(config, name)) for name in fields}
    if isinstance(config, tuple | list):
        return [describe(entry) for entry in config]
    if callable(config):
        return getattr(config, "__qualname__", type(config).__name__)
    return config if isinstance(config, str | int | float | bool | None) else repr(config)


def fingerprint(algorithm: AnyNetwork, data: Clients) -> str:
    """A digest of the algorithm's network as a program, constants and all, so that a run is not resumed with another one.

    Activation, initialisation and scaling are in it, which shapes do not show.
    """
    model, key = algorithm.model, jax.eval_shape(lambda: jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, *data.shape), data.x.dtype)
    params = jax.eval_shape(model.init, key)
    return provenance.digest(jax.make_jaxpr(model.init)(key), jax.make_jaxpr(model.apply)(params, x))


def describe_data(data: Clients) -> dict[str, Any]:
    """What the clients are, with a fingerprint of who has which labels, so that a run is not resumed on other data."""
    digest, some = hashlib.sha256(), data.x[:: max(1, len(data.x) // 1000)]
    for array in (data.offsets, data.train_counts, data.unseen, data.shift, data.scale, data.y, some):
        digest.update(np.ascontiguousarray(array).tobytes())
    told = {"name": data.name, "clients": len(data), "unseen": int(data.unseen.sum()), "rows": len(data.x)}
    classes = len(data.classes) if data.classes is not None else None
    return told | {"shape": list(data.shape), "classes": classes, "fingerprint": digest.hexdigest()[:16]}


def read_history(folder: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lines of a finished run's metrics.jsonl; nothing needs them to go on, so damaged ones are a warning."""
    history, damaged = files.read_lines(path := folder / "metrics.jsonl")
    if damaged or not reaches_end(history, config):
        log.warning("%s is damaged: %d lines are left", path, len(history))
    return history


def reaches_end(history: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> bool:
    """Whether the last line is that of a run's end: of its last round or, over clients, of the evaluation after it."""
    last = history[-1] if history else {}
    return last.get("round") == config["rounds"] and ("modes" not in config or "evaluation" in last)


def read_scores(folder: Path, modes: Sequence[str], clients: int, schema: int = SCHEMA) -> dict[str, Score]:
    """Each client's score in each mode, in the order of the modes."""
    path, template = folder / "scores.safetensors", {mode: no_scores(clients) for mode in modes}
    found, _ = files.load(path, template, "the scores", AGAIN, finite=True, unchecked=schema == 1)
    return {mode: found[mode] for mode in modes}


def read_evaluation(folder: Path, result: Mapping[str, Any], unseen: np.ndarray) -> Evaluation:
    """The evaluation at the end of a finished run, from its scores."""
    scores = read_scores(folder, result["modes"], len(unseen), result.get("schema", 1))
    return Evaluation(result["rounds"], scores, unseen, about_numbers(result["metrics"]))


def flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name.

    >>> flat({"train": {"lr": 0.1}, "mu": None})
    {'train.lr': 0.1, 'mu': None}
    """
    found: dict[str, Any] = {}
    for name, value in content.items() if isinstance(content, Mapping) else ():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
