"""The engines that are compared. Each module is a worker: a process that runs rounds when it is told to.

The driver writes one JSON object a line to the worker's standard input and reads one a line from its standard output. What an
engine itself prints goes to standard error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jobs
import numpy as np


class Engine(Protocol):
    """A job set up in one engine."""

    def run(self, rounds: int) -> list[float]:
        """Run the rounds and wait for each; seconds of each."""

    def parameters(self) -> list[jobs.Layer]:
        """The global model, in the form of `jobs.parameters`."""


class NotSupported(Exception):
    """The engine cannot do this job or this check."""


def timed(step: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each call of a function that blocks until its round is done."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def serve(build: Callable[..., Engine], packages: Sequence[str]) -> None:
    """Answer the driver until it closes the pipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=sorted(jobs.JOBS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--check", choices=jobs.CHECKS)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**content: object) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    job = jobs.checked(jobs.JOBS[options.job]) if options.check else jobs.JOBS[options.job]
    data = jobs.arrays(job, options.seed, check=options.check)
    try:
        engine = build(
            job,
            *data,
            jobs.parameters(job, options.seed),
            options.seed,
            threads=options.threads,
            shuffle=options.check != "ordered",
        )
    except (ImportError, NotSupported) as reason:
        reply(skipped=f"{type(reason).__name__}: {reason}" if isinstance(reason, ImportError) else str(reason))
        return
    reply(
        ready=True,
        python=".".join(map(str, sys.version_info[:3])),
        versions={package: importlib.metadata.version(package) for package in packages},
        note=getattr(engine, "note", ""),
    )
    for line in sys.stdin:
        request = json.loads(line)
        if "run" in request:
            reply(seconds=engine.run(request["run"]))
        elif "save" in request:
            layers = engine.parameters()
            content = {f"{field}{i}": value for i, layer in enumerate(layers) for field, value in layer._asdict().items()}
            np.savez(pathlib.Path(request["save"]), **content)
            reply(saved=True, finite=all(bool(np.isfinite(value).all()) for value in content.values()))
