"""The one run loop: rounds of any engine, with callbacks, a history, checkpoints and Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedbayes.algorithm import AnyAlgorithm
from fedbayes.engine.round import Diverged, Round
from fedbayes.errors import UserError
from fedbayes.results.folder import Resumable, Run


class Engine(Resumable, Protocol):
    """Whatever runs rounds: a simulation over clients or silos, or the coordinator of a deployment."""

    @property
    def algorithm(self) -> AnyAlgorithm:
        """What it runs."""

    def advance(self, rounds: int) -> Iterator[Round]:
        """Run some rounds."""


class Callback:
    """Told of a run as it goes; each method may be left out. A plain function of the engine and the `Round` will do too."""

    def started(self, config: Mapping[str, Any]) -> None:
        """Before the first round, or the first after a checkpoint."""

    def __call__(self, engine: Any, done: Round) -> None:
        """After a round, or a stretch of rounds where they are short."""

    def evaluated(self, round: int, metrics: Mapping[str, Any]) -> None:
        """After an evaluation."""

    def finished(self, result: Mapping[str, Any]) -> None:
        """After the last round and what follows it."""


class _Function(Callback):
    def __init__(self, function: Callable[[Any, Round], None]) -> None:
        self.function = function

    def __call__(self, engine: Any, done: Round) -> None:
        self.function(engine, done)


def listening(callbacks: Sequence[Any], config: Mapping[str, Any] | None) -> list[Callback]:
    """Callbacks as given by a user, each as a `Callback`; told of the run that starts, where there is its config."""
    for one in callbacks:
        if not callable(one):
            raise UserError(f"a callback is {one!r}, but it is a function of the simulation and the round, or a tracker")
    found = [one if isinstance(one, Callback) else _Function(one) for one in callbacks]
    for one in found:
        if config is not None:
            one.started(config)
    return found


def recorder(history: list[dict[str, Any]], run: Run | None, callbacks: Sequence[Callback]) -> Callable[[dict[str, Any]], None]:
    """A function that adds a line to a run's history and to its folder, and tells callbacks of an evaluation."""

    def record(entry: dict[str, Any]) -> None:
        history.append(entry)
        if run is not None:
            run.log(entry)
        for one in callbacks if "evaluation" in entry else ():
            one.evaluated(entry["round"], entry["evaluation"])

    return record


def run_rounds(
    engine: Engine,
    rounds: int,
    record: Callable[[dict[str, Any]], None],
    run: Run | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    window: int = 1,
    due: Callable[[int], bool] = lambda round: True,
    after: Callable[[int], None] = lambda round: None,
) -> None:
    """Run an engine up to round `rounds`, or until its algorithm stops by itself.

    Args:
        engine: What runs.
        rounds: The last round.
        record: Takes a line of the history for each window: the round and the mean of each metric.
        run: The folder that times and checkpoints go to.
        callbacks: Told of each round or stretch.
        window: Rounds in a line of the history.
        due: Whether to write a checkpoint after a round; after the last one and after Ctrl-C there always is one.
        after: Called after each window, before its checkpoint.
    """
    with stop_after_round() as stopped:
        while engine.round < rounds and not over(engine):
            parts: list[Round] = []
            try:
                for done in engine.advance(min(window - engine.round % window, rounds - engine.round)):
                    parts.append(done)
                    for callback in callbacks:
                        callback(engine, done)
            except Diverged as problem:
                if run is None:
                    raise
                run.checkpoint(engine)
                raise Diverged(f"{problem} (the state after round {engine.round} is kept in {run.folder})") from None
            metrics = {name: float(np.concatenate([part.trace[name] for part in parts]).mean()) for name in parts[-1].trace}
            record({"round": engine.round, **metrics})
            if run is not None:
                run.time("training", engine.round, sum(part.seconds for part in parts), clients=len(parts[-1].clients))
            after(engine.round)
            last = engine.round == rounds or over(engine)
            if run is not None and (last or stopped() or due(engine.round)):
                run.checkpoint(engine)
            if stopped() and not last:
                raise KeyboardInterrupt


def over(engine: Engine) -> bool:
    """Whether the algorithm needs no more rounds."""
    return engine.algorithm.stops and bool(engine.algorithm.stopped(engine.state))


@contextlib.contextmanager
def stop_after_round() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end the round that runs instead of breaking it; a second Ctrl-C breaks it."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
