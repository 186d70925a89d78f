"""Made-up clients, as many as wanted, written block by block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedbayes.data import store
from fedbayes.data.clients import Clients
from fedbayes.data.rows import mapped

CLIENTS_PER_BLOCK = 1000

LARGE = 16 * 2**20
"""Rows of more bytes than this go to a temporary file; less than for real data, as these are for measuring memory."""


def synthetic(
    clients: int = 100,
    rows: int = 10,
    features: int = 20,
    classes: int | None = 10,
    seed: int = 0,
    folder: Path | str | None = None,
    test: float = 0.2,
) -> Clients:
    """Clients that differ: x ~ N(a_i, I), and y from a linear model with weights W + B_i.

    a_i ~ N(0, I/4) shifts a client's features, B_i ~ N(0, 1/4) its weights (scaled by the number of features). With `classes`,
    y is a draw from softmax(2 x(W + B_i)); with None, y = x(W + B_i) + N(0, 0.1²). A `folder` keeps the clients there; without
    one, they are in memory or, if large, in a temporary file.

    >>> synthetic(clients=3, rows=5, features=2, classes=4)
    Clients(synthetic: 3 clients, 15 rows of (2,), 4 classes)
    >>> synthetic(clients=3, rows=5, features=2, classes=None).y.dtype
    dtype('float32')
    """
    total, names = clients * rows, None if classes is None else tuple(map(str, range(classes)))
    forms = (((total, features), np.dtype(np.float32)), ((total,), np.dtype(np.float32 if classes is None else np.int32)))
    small = _small(clients, rows, features, test)

    def drawn(place: int) -> Iterator[np.ndarray]:
        """The blocks of x or of y; the rows are drawn twice, so that memory is that of a block."""
        return (block[place] for block in _blocks(clients, rows, features, classes, seed))

    if folder is not None:
        parts: dict[str, store.Part] = {name: (*forms[place], drawn(place)) for place, name in enumerate("xy")}
        parts |= {name: (array.shape, array.dtype, [array]) for name, array in small.items()}
        store.write(Path(folder), parts, "synthetic", names, None)
        return Clients.load(folder)
    if total * features * 4 > LARGE:
        x, y = (mapped(functools.partial(drawn, place), *forms[place]) for place in (0, 1))
    else:
        x, y = (np.concatenate(arrays) for arrays in zip(*_blocks(clients, rows, features, classes, seed), strict=True))
    return Clients(x=x, y=y, classes=names, name="synthetic", **small)  # type: ignore[arg-type]


def _blocks(clients: int, rows: int, features: int, classes: int | None, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    k = classes or 1
    shared = np.random.default_rng([seed, 0]).standard_normal((features, k), np.float32) / np.sqrt(np.float32(features))
    for block, start in enumerate(range(0, clients, CLIENTS_PER_BLOCK)):
        rng = np.random.default_rng([seed, 1, block])
        n = min(CLIENTS_PER_BLOCK, clients - start)
        shift = rng.standard_normal((n, 1, features), np.float32) / 2
        own = rng.standard_normal((n, features, k), np.float32) / np.float32(2 * np.sqrt(features))
        x = rng.standard_normal((n, rows, features), np.float32) + shift
        signal = x @ (shared + own)
        if classes is None:
            y = signal[..., 0] + np.float32(0.1) * rng.standard_normal((n, rows), np.float32)
        else:  # the largest of logits with Gumbel noise is a draw from the softmax
            y = (2 * signal + rng.gumbel(size=signal.shape)).argmax(-1).astype(np.int32)
        yield x.reshape(n * rows, features), y.reshape(n * rows)


def _small(clients: int, rows: int, features: int, test: float) -> dict[str, np.ndarray]:
    held = min(max(round(rows * test), 1 if test > 0 else 0), rows - 1)
    return {
        "offsets": np.arange(clients + 1, dtype=np.int64) * rows,
        "train_counts": np.full(clients, rows - held, np.int64),
        "names": np.arange(clients).astype(str),
        "unseen": np.zeros(clients, bool),
        "shift": np.zeros(1, np.float32),
        "scale": np.ones(1, np.float32),
    }
