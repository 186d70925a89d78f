"""What is sent: the manifest of a round, where each uploaded leaf comes from, and the bytes themselves.

Nothing here knows an engine. The manifest is read off shapes alone, provenance off the program (its jaxpr), so both hold for
every run of the algorithm and not for one that was watched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy

from fedbayes import provenance, reduce, trees
from fedbayes.algorithm import Algorithm, Data
from fedbayes.data.clients import Clients
from fedbayes.errors import UserError

PRIVATE = ("local", "data")
PIECE = 2**20
"""Bytes of a message that travel at a time."""


class Leaf(NamedTuple):
    """One array of a message."""

    message: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    reduction: str
    depends: tuple[str, ...]
    copies: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Size on the wire."""
        return int(np.prod(self.shape, dtype=int)) * np.dtype(self.dtype).itemsize


def manifest(algorithm: Algorithm[Any, Any, Any, Any], data: Any) -> list[Leaf]:
    """Every array that crosses in one round, from the shapes of one client's rows or one silo's data; nothing is computed.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits")
    >>> [leaf.path for leaf in manifest(fb.FedPer(fb.network("linear", clients), personal=("head/bias",)), clients)]
    ['shared/head/kernel', 'lr', 'shared/head/kernel', 'weight', 'loss']
    """
    data = _one_client(data)
    key = jax.eval_shape(lambda: jax.random.key(0))
    arrays, whole = trees.arrays_of(data)
    one = () if isinstance(data, Data) else (arrays,)  # a structured model's data may tell the server of parameters
    server = jax.eval_shape(lambda key, *given: algorithm.init_server(key, *map(whole, given)), key, *one)
    local = jax.eval_shape(lambda key, given: algorithm.init_local(key, whole(given)), key, arrays)
    down = jax.eval_shape(algorithm.broadcast, key, server)

    def client(key: Any, down: Any, local: Any, given: Any) -> Any:
        return algorithm.client(key, down, local, whole(given))[0]

    up = jax.eval_shape(client, key, down, local, arrays)
    kinds = reduce.declared(type(up))
    flows = provenance.trace(client, {"key": key, "down": down, "local": local, "data": arrays})
    rows = [Leaf("down", path, leaf.shape, str(leaf.dtype), "", (), ()) for path, leaf in trees.named(down).items()]
    for (path, leaf), flow in zip(trees.named(up).items(), flows, strict=True):
        kind = kinds[path.split("/")[0]].value
        rows.append(Leaf("up", path, leaf.shape, str(leaf.dtype), kind, tuple(flow.depends), tuple(flow.copies)))
    return rows


def adapt_reads_labels(algorithm: Algorithm[Any, Any, Any, Any], data: Any) -> bool:
    """Whether a client needs labels to be adapted to; told from the program itself.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits")
    >>> model = fb.network("mlp", clients)
    >>> adapt_reads_labels(fb.FedAvg(model), clients), adapt_reads_labels(fb.FedVI(model), clients)
    (True, False)
    """
    data, key = _one_client(data), jax.eval_shape(lambda: jax.random.key(0))
    local = jax.eval_shape(algorithm.init_local, key, data)
    down = jax.eval_shape(lambda key: algorithm.broadcast(key, algorithm.init_server(key)), key)
    flows = provenance.trace(algorithm.adapt, {"key": key, "down": down, "local": local, "data": data})
    return any("data/y" in flow.depends for flow in flows)


def _one_client(data: Any) -> Any:
    if not isinstance(data, Clients):
        return data
    return jax.tree.map(lambda leaf: leaf[0], data.train([0], max(2, int(data.train_counts[0]))))


def check(leaves: Sequence[Leaf]) -> None:
    """Refuse an algorithm that sends a leaf of `Local` or of the data as it is, whole or in parts."""
    for leaf in leaves:
        private = [source for source in leaf.copies if source.split("/")[0] in PRIVATE]
        if private:
            raise UserError(
                f"the upload {leaf.path!r} holds {', '.join(private)} as it is, which must not leave a client; "
                "send a statistic of it, or declare it a part of the model"
            )


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
            raise UserError(
                f"{what}: {path} is {array.dtype}{list(array.shape)} where {leaf.dtype}{list(leaf.shape)} is expected; "
                "it was written for another network or data set"
            )
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


def sources(leaf: Leaf) -> list[str]:
    """What an uploaded leaf depends on, a tree at a time: `down/params` stands for every array below it."""
    return sorted({"/".join(name.split("/")[:2]) for name in leaf.depends})


def text(leaves: Sequence[Leaf]) -> str:
    """The manifest as tab-separated lines, for a file whose diff shows any change of a message."""
    lines = []
    for leaf in leaves:
        depends = ",".join(sources(leaf)) or "-"
        lines.append(f"{leaf.message}\t{leaf.path}\t{leaf.dtype}{list(leaf.shape)}\t{leaf.reduction or '-'}\t{depends}\n")
    return "".join(lines)
