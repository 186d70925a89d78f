"""The jobs that every engine runs: their sizes, their data and the parameters that training starts from.

Only NumPy is needed here, so that each engine may live in an environment of its own.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """A dense layer, kernel (inputs, outputs), or a convolution, kernel (height, width, inputs, outputs)."""

    kernel: np.ndarray
    bias: np.ndarray


@dataclasses.dataclass(frozen=True)
class Job:
    """One federated task. A round is one shuffled local epoch of SGD at each client of the cohort, then their weighted mean."""

    name: str
    clients: int
    cohort: int
    rows: int
    batch: int
    shape: tuple[int, ...]
    classes: int
    lr: float
    hidden: tuple[int, ...]
    filters: tuple[int, ...] = ()
    """Filters of the 3 x 3 valid convolutions; 2 x 2 max-pooling follows the last of them."""
    rounds: int = 1
    """Rounds in one turn of an engine."""

    @property
    def steps(self) -> int:
        return self.rows // self.batch

    def network(self) -> str:
        """The network in words."""
        convolutions = [f"conv {filters}" for filters in self.filters]
        layers = [*convolutions, *(["max-pool 2"] if self.filters else []), *map(str, self.hidden), str(self.classes)]
        return "-".join(["x".join(map(str, self.shape)), *layers])


JOBS = {
    "A": Job("A", clients=100, cohort=10, rows=600, batch=50, shape=(784,), classes=10, lr=0.1, hidden=(256,), rounds=10),
    "B": Job(
        "B", clients=20, cohort=20, rows=200, batch=20, shape=(28, 28, 1), classes=62, lr=0.03, hidden=(128,), filters=(32, 64)
    ),
    "C": Job("C", clients=2000, cohort=200, rows=20, batch=10, shape=(64,), classes=10, lr=0.1, hidden=(32,), rounds=10),
}

CHECKS = ("ordered", "alike")


def checked(job: Job) -> Job:
    """The job with everybody in the cohort, so that the engines' ways of drawing a cohort do not matter."""
    return dataclasses.replace(job, clients=job.cohort)


def arrays(job: Job, seed: int = 0, *, check: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Features (clients, rows, *shape) and labels (clients, rows).

    Job A takes MNIST when the folder in FEDBAYES_DATA has it. Otherwise the rows are noisy copies of one prototype per class,
    which train as real data do: the times do not depend on it. For the check `alike`, all rows of a client are the same row, so
    that the order in which an engine shuffles them does not matter, and the number of its steps does.
    """
    count = job.clients * job.rows
    file = pathlib.Path(os.environ.get("FEDBAYES_DATA", "")) / "mnist_writers" / "mnist_writers.npz"
    if job.name == "A" and os.environ.get("FEDBAYES_DATA") and file.exists():
        with np.load(file) as archive:
            x = archive["x_train"][:count].reshape(-1, *job.shape).astype(np.float32) / np.float32(255)
            y = archive["y_train"][:count].astype(np.int32)
    else:
        random = np.random.default_rng(seed)
        prototypes = random.uniform(size=(job.classes, *job.shape)).astype(np.float32) ** 4
        y = random.integers(job.classes, size=count, dtype=np.int32)
        x = prototypes[y] + 0.1 * random.standard_normal((count, *job.shape), dtype=np.float32)
    x, y = x.reshape(job.clients, job.rows, *job.shape), y.reshape(job.clients, job.rows)
    if check == "alike":
        x, y = np.repeat(x[:, :1], job.rows, axis=1), np.repeat(y[:, :1], job.rows, axis=1)
    return np.ascontiguousarray(x), np.ascontiguousarray(y)


def source(job: Job) -> str:
    """Where the job's rows come from."""
    folder = os.environ.get("FEDBAYES_DATA")
    real = job.name == "A" and folder and (pathlib.Path(folder) / "mnist_writers" / "mnist_writers.npz").exists()
    return "MNIST" if real else "synthetic"


def parameters(job: Job, seed: int = 0) -> list[Layer]:
    """The layers that all engines start from, convolutions first; a flattened image is ordered height, width, channel."""
    random = np.random.default_rng(seed + 1)
    kernels: list[tuple[int, ...]] = []
    size = job.shape
    for filters in job.filters:
        kernels.append((3, 3, size[2], filters))
        size = (size[0] - 2, size[1] - 2, filters)
    if job.filters:
        size = (size[0] // 2, size[1] // 2, size[2])
    inputs = int(np.prod(size))
    for outputs in (*job.hidden, job.classes):
        kernels.append((inputs, outputs))
        inputs = outputs
    scale = [np.float32(1 / np.sqrt(np.prod(kernel[:-1]))) for kernel in kernels]
    return [
        Layer(deviation * random.standard_normal(kernel, dtype=np.float32), np.zeros(kernel[-1], np.float32))
        for kernel, deviation in zip(kernels, scale, strict=True)
    ]
