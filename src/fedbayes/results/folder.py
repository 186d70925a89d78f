"""The folder of a run: config, metrics, checkpoint, clients' states, result.

    config.json              what was run; a resumed run must have the same
    metrics.jsonl            one line a round, and one for each evaluation
    checkpoint.safetensors   the server's state after a round, replaced atomically
    local/                   what clients keep (see states.py)
    scores.safetensors       each client's Score in each mode
    about.json               what a page tells of the clients and of what is sent, without the data
    timing.jsonl             seconds of each part of the run; not the same from run to run
    shared.safetensors       the shared model, with the algorithm and the layout of rows: all that a newcomer needs
    clients.json             who the clients were
    result.json              the figures; its presence says that the run is finished

A run that is killed at any moment and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import jax
import numpy as np

from fedbayes import wire
from fedbayes.algorithm import AnyNetwork
from fedbayes.data.clients import Clients
from fedbayes.data.describe import facts
from fedbayes.engine.clients import Simulation
from fedbayes.engine.local_state import sync_folder
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import Evaluation, no_scores
from fedbayes.evaluation.score import Score, about_numbers
from fedbayes.models import Model
from fedbayes.wire import provenance

SCHEMA = 2
"""Of result.json; it grows when a field changes its meaning."""
MOST = 500_000
"""Clients times classes up to which about.json says who has which labels: a megabyte or two."""
SHARED, MEMBERS = "shared.safetensors", "clients.json"
FILES = (
    *("config.json", "metrics.jsonl", "checkpoint.safetensors", "scores.safetensors", "result.json"),
    *(
        SHARED,
        MEMBERS,
        "posterior.nc",
        "bound.png",
        "posterior.png",
        "about.json",
        "timing.jsonl",
        "command.json",
        "report.html",
    ),
)


class Resumable(Protocol):
    """What a run's folder keeps of a simulation: the server's state, its round, and a store of what clients keep."""

    state: Any
    round: int

    @property
    def local(self) -> Any:
        """Has `commit` and `restore`."""


class Run:
    """The folder of one run."""

    def __init__(self, folder: Path, config: dict[str, Any], resume: bool = False, force: bool = False) -> None:
        self.folder, self.config = folder, json.loads(json.dumps(config))
        self.finished, self.extended = False, 0
        with writing(folder):
            if force:
                self._clear()
            existing = (folder / "config.json").exists()
            if existing and not resume:
                done = (folder / "result.json").exists()
                state = "a finished run" if done else "an unfinished run"
                hint = "--force starts over" if done else "--resume continues it, --force starts over"
                raise UserError(f"{folder} holds {state}; {hint}, or choose another folder")
            if existing:
                self._same_config()
                self.finished = (folder / "result.json").exists()
            else:
                self._clear()
                folder.mkdir(parents=True, exist_ok=True)
                write(folder / "config.json", json.dumps(self.config, indent=2).encode())

    def _clear(self) -> None:
        """Remove a run's files and nothing else; its config last, so that what is left is never taken for another run's."""
        shutil.rmtree(self.folder / "local", ignore_errors=True)
        for name in reversed(FILES):
            (self.folder / name).unlink(missing_ok=True)

    def _same_config(self) -> None:
        """Refuse a run with other settings; one that differs in a larger number of rounds alone is extended."""
        there = read_json(self.folder / "config.json")
        before, now = flat(there), flat(self.config)
        different = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if different == ["rounds"] and now["rounds"] > before["rounds"] and not now.get("average_last"):
            self.extended = before["rounds"]
            for name in ("result.json", "scores.safetensors", SHARED, "report.html"):
                (self.folder / name).unlink(missing_ok=True)
            write(self.folder / "config.json", json.dumps(self.config, indent=2).encode())
        elif different:
            name, others = different[0], f" (and {len(different) - 1} more settings differ)" if len(different) > 1 else ""
            why = "; it depends on the number of rounds, so this run cannot be extended" if "rounds" in different else ""
            raise UserError(
                f"{self.folder} is a run with another {name}: {_short(before.get(name))} there, {_short(now.get(name))} "
                f"here{others}{why}; resume it with its own settings, or choose another folder"
            )

    def log(self, entry: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Append a line to metrics.jsonl, or to another such file."""
        with writing(self.folder), open(self.folder / name, "a") as file:
            file.write(json.dumps(entry) + "\n")

    def time(self, part: str, round: int, seconds: float, **more: int) -> None:
        """Log how long a part of the run took, apart from the metrics, which are the same whenever the run is repeated."""
        self.log({"round": round, "part": part, "seconds": float(f"{seconds:.4g}"), **more}, "timing.jsonl")

    def tell(self, about: dict[str, Any]) -> None:
        """Write what a page of the run needs and cannot know without the data."""
        with writing(self.folder):
            write(self.folder / "about.json", json.dumps(about, separators=(",", ":")).encode())

    def checkpoint(self, simulation: Resumable) -> None:
        """Write the server's state; the clients' states reach the disk before it."""
        started = time.perf_counter()
        with writing(self.folder):
            kept = simulation.local.commit(simulation.round)
            state = jax.device_get(simulation.state)
            metadata = {"round": simulation.round, "sha256": _digest(state), "local": kept}
            write(self.folder / "checkpoint.safetensors", wire.pack(state, metadata))
        self.time("checkpoints", simulation.round, time.perf_counter() - started)

    def restore(self, simulation: Resumable) -> list[dict[str, Any]]:
        """Put the simulation where the checkpoint is, if there is one; returns the history up to it."""
        path = self.folder / "checkpoint.safetensors"
        if not path.exists():
            simulation.local.restore(0, None)
            with writing(self.folder):
                (self.folder / "metrics.jsonl").unlink(missing_ok=True)
            return []
        content = path.read_bytes()
        what = f"the checkpoint {path}"
        state = wire.unpack(content, jax.device_get(simulation.state), what)
        metadata = wire.metadata(content)
        if metadata.get("sha256") != _digest(state):
            raise UserError(f"{what} does not match its checksum: it is damaged; --force starts the run over")
        simulation.state, simulation.round = jax.device_put(state), metadata["round"]
        simulation.local.restore(simulation.round, metadata["local"])
        history = read_history(self.folder)
        if not self.finished:
            last, end = simulation.round, self.config["rounds"]  # the evaluation at the end is made again
            every = self.config.get("evaluate_every") or 0
            if self.extended and not (every and self.extended % every == 0):
                history = [entry for entry in history if not ("evaluation" in entry and entry["round"] == self.extended)]
            history = [entry for entry in history if entry["round"] <= last and not ("evaluation" in entry and last == end)]
            with writing(self.folder):
                write(self.folder / "metrics.jsonl", "".join(json.dumps(entry) + "\n" for entry in history).encode())
        return history

    def finish(self, result: dict[str, Any], evaluation: Evaluation | None = None) -> None:
        """Write the figures; after this the run is finished."""
        with writing(self.folder):
            if evaluation is not None:
                write(self.folder / "scores.safetensors", wire.pack(evaluation.scores))
            write(self.folder / "result.json", json.dumps(result, indent=2, allow_nan=False).encode())
        self.finished = True

    def outcome(self, simulation: Simulation) -> tuple[dict[str, Any], Evaluation]:
        """The result and the scores of a finished run, from its files."""
        result = read_json(self.folder / "result.json")
        scores = read_scores(self.folder, self.config["modes"], len(simulation.data))
        numeric = about_numbers(result["metrics"])
        return result, Evaluation(simulation.round, scores, simulation.data.unseen, numeric)


def about(messages: Sequence[tuple[int, Sequence[wire.Leaf]]], data: Clients | None = None) -> dict[str, Any]:
    """What `Run.tell` writes: how many clients of a round exchange which arrays, and who has which labels."""
    sent = [
        {"clients": count, "leaves": [leaf._replace(depends=tuple(wire.sources(leaf)))._asdict() for leaf in leaves]}
        for count, leaves in messages
    ]
    return {"messages": sent, **({} if data is None else {"data": facts(data, MOST)._asdict()})}


def describe(config: Any) -> Any:
    """An algorithm's hyper-parameters as JSON; a network is named by what it is."""
    if isinstance(config, Model):
        return {"name": config.name, "likelihood": repr(config.likelihood)}
    if dataclasses.is_dataclass(config):
        fields = [field.name for field in dataclasses.fields(config) if field.metadata.get("fact") != "form"]
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
    model = algorithm.model
    x = jax.ShapeDtypeStruct((2, *data.shape), data.x.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(model.init, key)
    return provenance.digest(jax.make_jaxpr(model.init)(key), jax.make_jaxpr(model.apply)(params, x))


def describe_data(data: Clients) -> dict[str, Any]:
    """What the clients are, with a fingerprint of who has which labels, so that a run is not resumed on other data."""
    digest = hashlib.sha256()
    for array in (
        data.offsets,
        data.train_counts,
        data.unseen,
        data.shift,
        data.scale,
        data.y,
        data.x[:: max(1, len(data.x) // 1000)],
    ):
        digest.update(np.ascontiguousarray(array).tobytes())
    return {
        "name": data.name,
        "clients": len(data),
        "unseen": int(data.unseen.sum()),
        "rows": len(data.x),
        "shape": list(data.shape),
        "classes": len(data.classes) if data.classes is not None else None,
        "fingerprint": digest.hexdigest()[:16],
    }


def write(path: Path, content: bytes) -> None:
    """Replace a file atomically: whoever reads it finds the old content or the new, also after a crash."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    try:
        write(path, json.dumps(content, indent=2).encode())
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}; choose another file") from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves no trace when it does not."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    history = []
    with contextlib.suppress(FileNotFoundError), open(folder / "metrics.jsonl") as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # a line that was being written when the run was killed
                history.append(json.loads(line))
    return history


def read_scores(folder: Path, modes: Sequence[str], clients: int) -> dict[str, Score]:
    """Each client's score in each mode, in the order of the modes."""
    path = folder / "scores.safetensors"
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise UserError(f"{path} cannot be read ({problem.strerror}); --force starts the run over") from None
    found = wire.unpack(content, {mode: no_scores(clients) for mode in modes}, f"the scores {path}", finite=True)
    return {mode: found[mode] for mode in modes}


def flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name.

    >>> flat({"train": {"lr": 0.1}, "mu": None})
    {'train.lr': 0.1, 'mu': None}
    """
    found: dict[str, Any] = {}
    for name, value in content.items() if isinstance(content, Mapping) else ():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def upgraded(content: Any) -> Any:
    """A table of schema 1 as schema 2 has it: evaluation modes were stances.

    >>> upgraded({"schema": 1, "stances": ["global"]})
    {'schema': 2, 'modes': ['global']}
    """
    if not isinstance(content, dict) or not content.keys() & {"stance", "stances"}:
        return content
    renamed = {{"stance": "mode", "stances": "modes"}.get(name, name): value for name, value in content.items()}
    return renamed | ({"schema": SCHEMA} if "schema" in content else {})


def read_json(path: Path) -> dict[str, Any]:
    """The content of one of a run's JSON files, as the present schema has it."""
    try:
        return upgraded(json.loads(path.read_text()))
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read ({problem}); it is damaged or not a file of a run") from None


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """An error of the disk, such as one that is full, becomes a sentence."""
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"cannot write to {folder}: {problem.strerror}; what was written before is intact, "
            "so make room or choose another folder"
        ) from None


def _digest(state: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


@contextlib.contextmanager
def locked(folder: Path, who: str = "", wait: float = 0.0) -> Iterator[int]:
    """Nobody else in a folder meanwhile; gives the open file that holds it, which a child may inherit to hold it too.

    `wait` is how many seconds another one has to be gone.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    whose = f"{who}: " if who else ""
                    raise UserError(
                        f"{whose}another process is working in {folder}; wait for it, or choose another folder"
                    ) from None
                time.sleep(0.05)
        yield file
    finally:
        os.close(file)
