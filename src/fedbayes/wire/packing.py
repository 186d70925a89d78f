"""Bytes: pytrees as safetensors, and arrays in the pieces that travel."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from fedbayes import trees
from fedbayes.errors import UserError

PIECE = 2**20  # bytes of a message that travel at a time


def pack(tree: Any, metadata: dict[str, Any] | None = None) -> bytes:
    """A pytree as safetensors bytes, each array under its path; the same tree gives the same bytes.

    >>> unpack(pack({"a": np.ones(2, np.float32)}), {"a": np.zeros(2, np.float32)}, "example")
    {'a': array([1., 1.], dtype=float32)}
    """
    arrays = {path: np.asarray(leaf, order="C") for path, leaf in trees.named(tree).items()}
    # One entry: safetensors writes several in an order that differs from run to run.
    return safetensors.numpy.save(arrays, {"fedbayes": json.dumps(metadata)} if metadata is not None else None)


def unpack(content: bytes, template: Any, what: str, *, finite: bool = False) -> Any:
    """The pytree that `pack` wrote, checked against a template's names, shapes and dtypes (and finite values)."""
    try:
        arrays = safetensors.numpy.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as problem:
        raise UserError(f"{what} cannot be read ({problem}); it is damaged or not a fedbayes file") from None
    return assemble(arrays, template, what, finite=finite)


def assemble(arrays: Mapping[str, np.ndarray], template: Any, what: str, *, finite: bool = False) -> Any:
    """The pytree of arrays by path, checked against a template's names, shapes and dtypes (and finite values)."""
    expected = trees.named(template)
    if missing := sorted(set(expected) - set(arrays)):
        raise UserError(f"{what} lacks {', '.join(missing)}; it was written for another algorithm or network")
    if extra := sorted(set(arrays) - set(expected)):
        raise UserError(f"{what} holds {', '.join(extra)}, which this algorithm does not declare")
    for path, leaf in expected.items():
        array = arrays[path]
        if array.shape != tuple(leaf.shape) or array.dtype != leaf.dtype:
            found, wanted = (f"{one.dtype}{list(one.shape)}" for one in (array, leaf))
            why = "it was written for another network or data set"
            if array.shape == tuple(leaf.shape) and {array.dtype, leaf.dtype} == {np.dtype("float32"), np.dtype("float64")}:
                why = "sites and server compute in one precision; set JAX_ENABLE_X64 to the same everywhere"
            raise UserError(f"{what}: {path} is {found} where {wanted} is expected; {why}")
        if finite and np.issubdtype(array.dtype, np.inexact) and not np.isfinite(array).all():
            raise UserError(f"{what}: {path} holds numbers that are not finite")
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[path] for path in expected])


def cut(arrays: dict[str, Any]) -> tuple[str, Iterator[bytes]]:
    """Arrays for a message: what they are, and their bytes in pieces. They are taken out of `arrays`, so that a large message
    is in memory once.

    >>> told, pieces = cut({"a": np.ones(2, np.float32), "b": np.int32(3)})
    >>> told
    '[["a", "float32", [2]], ["b", "int32", []]]'
    >>> join(told, list(pieces))
    {'a': array([1., 1.], dtype=float32), 'b': array(3, dtype=int32)}
    """
    return json.dumps([[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]), _pieces(arrays)


def _pieces(arrays: dict[str, Any]) -> Iterator[bytes]:
    piece = bytearray()
    for name in list(arrays):
        rest = np.asarray(arrays.pop(name)).reshape(-1).view(np.uint8).data
        while len(rest):
            taken = rest[: PIECE - len(piece)]
            piece += taken
            rest = rest[len(taken) :]
            if len(piece) == PIECE:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


def join(told: str, pieces: list[bytes]) -> dict[str, np.ndarray]:
    """The inverse of `cut`; the pieces are taken out of their list. What does not fit together is a `ValueError`."""
    described = [(str(name), np.dtype(dtype), tuple(map(int, shape))) for name, dtype, shape in json.loads(told)]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in described]
    if any(dtype.hasobject or min(shape, default=0) < 0 for _, dtype, shape in described):
        raise ValueError("a message holds arrays of numbers alone")
    if sum(sizes) != sum(map(len, pieces)):
        raise ValueError(f"a message says that it has {sum(sizes)} bytes, but has {sum(map(len, pieces))}")
    arrays, rest = {}, memoryview(b"")
    pieces.reverse()
    for (name, dtype, shape), size in zip(described, sizes, strict=True):
        content = np.empty(size, np.uint8)
        filled = 0
        while filled < size:
            rest = rest or memoryview(pieces.pop())
            taken = rest[: size - filled]
            content[filled : filled + len(taken)] = taken
            filled, rest = filled + len(taken), rest[len(taken) :]
        arrays[name] = content.view(dtype).reshape(shape)
    return arrays


def metadata(content: bytes) -> dict[str, Any]:
    """The metadata that `pack` put into the bytes."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length]).get("__metadata__", {}).get("fedbayes", "{}"))
