"""The manifest of a round: every array that crosses, how it is reduced, and which inputs it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbayes import trees
from fedbayes.algorithm import Algorithm, StructuredAlgorithm, client_of, declared, plan
from fedbayes.errors import UserError
from fedbayes.wire import provenance

PRIVATE = ("local", "data")


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
    >>> algorithm = fb.FedPer(fb.network("linear", clients), personal=("head/bias",), population=False)
    >>> [leaf.path for leaf in manifest(algorithm, clients.example)]
    ['shared/head/kernel', 'lr', 'shared/head/kernel', 'weight', 'loss']
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    arrays, whole = trees.arrays_of(data)
    if isinstance(algorithm, StructuredAlgorithm):
        algorithm = plan(algorithm, {"form": trees.take_apart(data)[0]})
    server = jax.eval_shape(algorithm.init_server, key)
    local = jax.eval_shape(lambda key, given: algorithm.init_local(key, whole(given)), key, arrays)
    down = jax.eval_shape(algorithm.broadcast, key, server)

    def client(key: Any, down: Any, local: Any, given: Any) -> Any:
        form, arrays = trees.take_apart(whole(given))
        return client_of(algorithm, form, key, down, local, arrays)[0]

    up = jax.eval_shape(client, key, down, local, arrays)
    kinds = declared(type(up))
    flows = provenance.trace(client, {"key": key, "down": down, "local": local, "data": arrays})
    rows = [Leaf("down", path, leaf.shape, str(leaf.dtype), "", (), ()) for path, leaf in trees.named(down).items()]
    for (path, leaf), flow in zip(trees.named(up).items(), flows, strict=True):
        kind = kinds[path.split("/")[0]].value
        rows.append(Leaf("up", path, leaf.shape, str(leaf.dtype), kind, tuple(flow.depends), tuple(flow.copies)))
    return rows


def adapt_reads_labels(algorithm: Algorithm[Any, Any, Any, Any], data: Any) -> bool:
    """Whether `adapt` looks at a client's labels; told from the program itself.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits")
    >>> model = fb.network("mlp", clients)
    >>> adapt_reads_labels(fb.FedAvg(model), clients.example), adapt_reads_labels(fb.FedVI.paper(model), clients.example)
    (True, False)
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    local = jax.eval_shape(algorithm.init_local, key, data)
    down = jax.eval_shape(lambda key: algorithm.broadcast(key, algorithm.init_server(key)), key)
    flows = provenance.trace(algorithm.adapt, {"key": key, "down": down, "local": local, "data": data})
    return any("data/y" in flow.depends for flow in flows)


def check(leaves: Sequence[Leaf]) -> None:
    """Refuse an algorithm that sends a leaf of `Local` or of the data as it is, whole or in parts."""
    for leaf in leaves:
        if private := [source for source in leaf.copies if source.split("/")[0] in PRIVATE]:
            problem = f"the upload {leaf.path!r} holds {', '.join(private)} as it is, which must not leave a client"
            raise UserError(f"{problem}; send a statistic of it, or declare it a part of the model")


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
