"""Trackers: the rounds and evaluations of a run, for TensorBoard or MLflow, besides its own metrics.jsonl.

>>> import fedbayes as fb
>>> fb.trackers.tensorboard("logs")
Tracker('tensorboard:logs')

A run is found again by a digest of its config, so that one that is resumed goes on in the same place, and a step that is there
already, of the same run and therefore with the same numbers, is not logged twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import types
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedbayes.errors import UserError
from fedbayes.results.folder import flat
from fedbayes.results.loop import Callback

KINDS = ("tensorboard", "mlflow")


class Tracker(Callback):
    """A callback of `simulate` that logs each round, each evaluation, the config and the result.

    Args:
        kind: tensorboard or mlflow.
        where: A folder, or for MLflow the address of a tracking server.
        name: Of the run; by default its algorithm, data and seed.
    """

    def __init__(self, kind: str, where: str, name: str | None = None) -> None:
        self.kind, self.where, self.name = kind, where, name
        self.writer: TensorBoard | MLflow | None = None
        self.last: dict[str, int] = {}
        _module(kind)  # what is missing is said before the run

    def __repr__(self) -> str:
        return f"Tracker('{self.kind}:{self.where}')"

    def started(self, config: Mapping[str, Any]) -> None:
        """Before the first round, or the first after a checkpoint."""
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        data = config["data"].get("name", "silos")
        name = self.name or f"{config['algorithm']}-{data}-{config['seed']}".replace(" ", "-").lower()
        with self._reporting():
            self.writer = (TensorBoard if self.kind == "tensorboard" else MLflow)(self.where, f"{name}-{digest}")
            self.last = self.writer.steps()
            if not self.last:
                self.writer.text("config", config)

    def __call__(self, simulation: Any, done: Any) -> None:
        """After a round."""
        self._log(done.metrics, done.round)

    def evaluated(self, round: int, figures: Mapping[str, Any]) -> None:
        """After an evaluation: mode/group/figure, over rows."""
        values = {
            f"{mode}/{group}/{figure}": forms["rows"]
            for mode, groups in figures.items()
            for group, by_figure in groups.items()
            for figure, forms in by_figure.items()
        }
        self._log(values, round)

    def finished(self, result: Mapping[str, Any]) -> None:
        """After the last evaluation."""
        if self.writer is not None:
            with self._reporting():
                self.writer.text("result", result)
                self.writer.close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self.writer is None:
            raise UserError("a tracker follows a run that tells it when it starts; use it as a callback of simulate")
        new = {tag: float(value) for tag, value in values.items() if self.last.get(tag, -1) < step}
        if new:
            with self._reporting():
                self.writer.scalars(new, step)
            self.last |= dict.fromkeys(new, step)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """What a tracker's package raises, for a wrong address or a full disk, in one sentence."""
        try:
            yield
        except Exception as problem:
            said = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise UserError(f"cannot log to {self.kind}:{self.where} ({said}); the run can be resumed") from problem


class TensorBoard:
    """Event files in a folder of the run's own."""

    def __init__(self, where: str, name: str) -> None:
        self.folder = Path(where) / name
        self.there = _steps_in(self.folder)
        # Files are named by the second alone, and one of the same second would be written over.
        earlier = len(list(self.folder.glob("events.out.tfevents.*")))
        self.writer = _module("tensorboard").SummaryWriter(logdir=str(self.folder), filename_suffix=f".{earlier:04d}")

    def steps(self) -> dict[str, int]:
        """The last step of each tag in the event files."""
        return self.there

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers at a step, one event for each; they are on the disk afterwards."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()

    def text(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a config or a result as a block of JSON."""
        self.writer.add_text(name, "```json\n" + json.dumps(content, indent=2) + "\n```")
        self.writer.flush()

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


def _steps_in(folder: Path) -> dict[str, int]:
    """The last step of each scalar in a folder's event files: records of a length, its check, an event and its check."""
    event = import_module("tensorboardX.proto.event_pb2").Event
    found: dict[str, int] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, place = path.read_bytes(), 0
        while place + 12 <= len(content):
            length = int.from_bytes(content[place : place + 8], "little")
            if place + 16 + length > len(content):  # being written when its process was killed
                break
            one = event.FromString(content[place + 12 : place + 12 + length])
            for value in one.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found[value.tag] = max(found.get(value.tag, -1), one.step)
            place += 16 + length
    return found


class MLflow:
    """A run of the experiment `fedbayes`, at a server's address or in a folder."""

    def __init__(self, where: str, name: str) -> None:
        remote = "://" in where or where == "databricks"
        if not remote:  # MLflow asks for this since it would rather have a database; the small package has folders alone
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = _module("mlflow")
        address = where if remote else Path(where).absolute().as_uri()
        self.client = mlflow.MlflowClient(tracking_uri=address)
        self.experiment = self._experiment()
        found = self.client.search_runs([self.experiment], f"tags.`fedbayes.run` = '{name}'")
        if found:
            self.run: str = found[0].info.run_id
            self.client.set_terminated(self.run, status="RUNNING")
        else:
            self.run = self.client.create_run(self.experiment, run_name=name, tags={"fedbayes.run": name}).info.run_id

    def _experiment(self) -> str:
        if found := self.client.get_experiment_by_name("fedbayes"):
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment("fedbayes"))
        except Exception:
            if found := self.client.get_experiment_by_name("fedbayes"):  # another process made it meanwhile
                return str(found.experiment_id)
            raise

    def steps(self) -> dict[str, int]:
        """The last step of each of the run's metrics."""
        tags = self.client.get_run(self.run).data.metrics
        return {tag: max(each.step for each in self.client.get_metric_history(self.run, tag)) for tag in tags}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers at a step, with one call for all."""
        metric = import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        self.client.log_batch(self.run, metrics=[metric(tag, value, now, step) for tag, value in values.items()])

    def text(self, name: str, content: Mapping[str, Any]) -> None:
        """The config as parameters, and either as a file among the run's."""
        if name == "config":
            param = import_module("mlflow.entities").Param
            given = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(content).items()}
            params = [param(key, value) for key, value in given.items()]
            for start in range(0, len(params), 100):  # MLflow takes a hundred at once
                self.client.log_batch(self.run, params=params[start : start + 100])
        self.client.log_dict(self.run, dict(content), f"{name}.json")

    def close(self) -> None:
        """The run is finished."""
        self.client.set_terminated(self.run)


def _module(kind: str) -> types.ModuleType:
    if kind == "mlflow":
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it phones home otherwise
    try:
        return import_module({"tensorboard": "tensorboardX", "mlflow": "mlflow"}[kind])
    except ImportError:
        raise UserError(f"tracking with {kind} needs its package; pip install 'fedbayes[{kind}]'") from None


def tensorboard(folder: str | Path, name: str | None = None) -> Tracker:
    """Log to event files below a folder: `tensorboard --logdir FOLDER` shows them."""
    return Tracker("tensorboard", str(folder), name)


def mlflow(where: str | Path, name: str | None = None) -> Tracker:
    """Log to MLflow: the address of a tracking server, or a folder."""
    return Tracker("mlflow", str(where), name)


def tracker(spec: str, name: str | None = None) -> Tracker:
    """The tracker of `--track`.

    >>> tracker("wandb:logs")
    Traceback (most recent call last):
    fedbayes.errors.UserError: track is 'wandb:logs', but it is tensorboard:DIR or mlflow:URI
    """
    kind, _, where = spec.partition(":")
    if kind not in KINDS or not where:
        raise UserError(f"track is {spec!r}, but it is tensorboard:DIR or mlflow:URI")
    return Tracker(kind, where, name)
