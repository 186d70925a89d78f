"""What is done to rows before they are clients: checks, the split, and files for what memory should not hold."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fedbayes.errors import UserError, nearest

LARGE = 256 * 2**20  # rows of more bytes than this are kept in a mapped file instead of in memory

BLOCK = 8 * 2**20  # bytes that are read or written at a time where the rows may be many


def blocks(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of x a few megabytes at a time, each with the number of its first row."""
    step = max(1, BLOCK // max(1, x[:1].nbytes))
    for start in range(0, len(x), step):
        yield start, x[start : start + step]
        release(x)


def check_finite(x: np.ndarray, features: Sequence[str] | None, name: str, allow_missing: bool = False) -> None:
    """Refuse text, NaN and infinity, and say where they are."""
    if x.dtype.kind not in "biuf":
        raise UserError(f"{name}: x has type {x.dtype}, expected numbers")
    if x.dtype.kind != "f":
        return
    for start, block in blocks(x):
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is refused as such
            block = block.astype(np.float32)
        bad = np.isinf(block) if allow_missing else ~np.isfinite(block)
        if bad.any():
            row, *place = (int(i) for i in np.argwhere(bad)[0])
            where = f"column {features[place[0]]!r}" if features else f"feature {', '.join(map(str, place))}"
            what, remedy = "an infinite value", "correct it"
            if np.isnan(block[row][tuple(place)]):
                what, remedy = "a missing value (NaN)", "remove or replace it, or choose missing=mean or missing=drop"
            raise UserError(f"{name}: {what} in row {start + row}, {where}; {remedy}")


def split(client: np.ndarray, counts: np.ndarray, test: float, seed: int) -> np.ndarray:
    """For each row whether it is for testing: a random share of each client's rows, at least one on either side.

    >>> split(np.array([0, 0, 0, 0, 1, 1, 2]), np.array([4, 2, 1]), test=0.1, seed=0).sum()
    np.int64(2)
    """
    if not 0 <= test < 1:
        raise UserError(f"test={test} is not a share of rows; expected at least 0 and less than 1")
    wanted = np.clip(np.rint(counts * test), 1 if test > 0 else 0, np.maximum(counts - 1, 0)).astype(np.int64)
    order = np.lexsort((np.random.default_rng([seed, 0]).random(len(client)), client))
    order = order[(client < 0).sum() :]  # rows that are left out come first
    position = np.arange(len(order)) - (np.cumsum(counts) - counts)[client[order]]
    is_test = np.zeros(len(client), bool)
    is_test[order] = position < wanted[client[order]]
    return is_test


def identify(client: np.ndarray, names: Sequence[str] | np.ndarray | None, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions 0..N-1 and the names of the clients."""
    if names is not None:
        if client.dtype.kind not in "iu" or client.max() >= len(names) or client.min() < -1:
            raise UserError(f"{name}: client must be whole numbers below {len(names)}, the number of client names")
        return client.astype(np.int64), np.asarray(names, dtype=str)
    if client.dtype.kind == "f":
        if not np.isfinite(client).all():
            raise UserError(f"{name}: the client of row {int((~np.isfinite(client)).argmax())} is missing; give every row one")
        if (client == np.rint(client)).all():
            client = client.astype(np.int64)
    if client.dtype.kind == "O":
        client = client.astype(str)
    values, positions = np.unique(client, return_inverse=True)
    return positions.astype(np.int64), values.astype(str)


def targets(y: np.ndarray, classes: list[str] | None, name: str) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """int32 labels and the names of the classes, or float32 targets and None."""
    if y.dtype.kind == "f":
        if classes is not None:
            raise UserError(f"{name}: y is a float but has class names; expected whole numbers from 0 to {len(classes) - 1}")
        if not np.isfinite(y).all():
            row = int((~np.isfinite(y)).argmax())
            raise UserError(f"{name}: y of row {row} is not a finite number; drop or correct that row")
        return y.astype(np.float32), None
    if y.dtype.kind not in "biu":
        raise UserError(f"{name}: y has type {y.dtype}, expected whole numbers for classes or floats for a numeric target")
    found = np.unique(y).astype(np.int64)
    k = len(found) if classes is None else len(classes)
    if found[0] < 0 or found[-1] >= k:
        shown = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
        advice = "renumber them, name the classes, or choose task=regression or task=counts"
        raise UserError(f"{name}: the labels are {shown}; expected whole numbers from 0 to {k - 1} for {k} classes: {advice}")
    return y.astype(np.int32), tuple(classes or map(str, range(k)))


def take(x: np.ndarray, order: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """x[order] as dtype, in memory or, if large, in a mapped file."""
    shape = (len(order), *x.shape[1:])
    if dtype.itemsize * int(np.prod(shape)) <= LARGE:
        return np.ascontiguousarray(x[order], dtype)
    step = max(1, BLOCK // max(1, x[:1].nbytes))
    return mapped(lambda: (x[order[i : i + step]] for i in range(0, len(order), step)), shape, dtype)


def mapped(parts: Callable[[], Iterator[np.ndarray]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array in a temporary file, written part by part; the file has no name and goes with the array."""
    try:
        with tempfile.TemporaryFile() as file:
            for part in parts():
                # Written, not assigned through the map: a full disk is then an error instead of a signal.
                file.write(np.ascontiguousarray(part, dtype).data)
            file.flush()
            return np.memmap(file, dtype, "r", shape=shape)
    except OSError as error:
        size, why = int(np.prod(shape)) * dtype.itemsize >> 20, error.strerror
        advice = "free some space or set TMPDIR to another folder"
        raise UserError(f"cannot keep {size} MB in {tempfile.gettempdir()} ({why}): {advice}") from error


def release(x: np.ndarray) -> None:
    """Give the pages of a mapped file back, so that memory does not grow with the clients that were visited."""
    # Not for copy-on-write maps, whose changes would be lost.
    if isinstance(x, np.memmap) and x.mode in ("r", "r+") and hasattr(mmap, "MADV_DONTNEED"):
        x._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def place_of(name: Any, names: Sequence[str] | np.ndarray, data: str) -> int:
    """The place of a client of some data by its name."""
    places = np.flatnonzero(np.asarray(names) == name)
    if not len(places):
        hint = "" if isinstance(name, str) else f"; a name is text, such as {str(names[0])!r}"
        raise UserError(f"{data} has no client {name!r}; {nearest(str(name), names)}{hint}")
    return int(places[0])
