"""The compiled part of a round over clients: those of equal padding, in groups, as one call.

Rows come flat with a start and a count for each client, so a data set that is small lies on the device once and a call only
says where to look; of a large one, just the rows of the call's clients are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import AnyAlgorithm, Data
from fedbayes.engine import keys, reduce
from fedbayes.primitives.training import checked_steps

CACHE = 2**18
"""Bytes of parameters that a vmapped group may hold: what stays in a core's cache. See benchmarks/."""
jit_inline = functools.partial(jax.jit, inline=True)


class FlatRows(NamedTuple):
    """Rows of many clients, one after the other; client i has `counts[i]` of them from `starts[i]` on."""

    x: Shaped[Array | np.ndarray, "rows ..."]
    y: Shaped[Array | np.ndarray, " rows"]
    starts: Int[Array | np.ndarray, " slots"]
    counts: Int[Array | np.ndarray, " slots"]


class Padding(NamedTuple):
    """How clients are cut out of `FlatRows`: to which length, and whether every one of them fills it."""

    length: int
    full: bool


class CohortResult(NamedTuple):
    """What a call gives: the running sum, the stacked fields, the new states, and whose numbers are finite."""

    partial: reduce.Partial
    stacks: dict[str, Any]
    local: Any
    fine: Bool[Array, " slots"]


def client_data(rows: FlatRows, padding: Padding, start: Any, count: Any) -> Data:
    """One client's padded rows. Where everyone fills the length the mask is a constant, and `vmap` need not select by it."""
    x, y = (jax.lax.dynamic_slice_in_dim(jnp.asarray(leaf), start, padding.length) for leaf in (rows.x, rows.y))
    return Data(x, y, jnp.ones(padding.length, bool) if padding.full else jnp.arange(padding.length) < count)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_cohort(
    algorithm: AnyAlgorithm,
    width: int,
    padding: Padding,
    key: PRNGKeyArray,
    down: Any,
    ids: Int[Array | np.ndarray, " slots"],
    count: Any,
    local: Any,
    rows: FlatRows,
) -> CohortResult:
    """A round of the first `count` clients, `width` of them at a time, their uploads summed as they come."""

    @jit_inline  # traced once, although it is asked for its shapes and then for its program
    def one(id: Any, local: Any, start: Any, count: Any) -> tuple[Any, Any, Any]:
        data = client_data(rows, padding, start, count)
        up, new = algorithm.client(keys.fold(key, id), down, local, data)
        return up, new, trees.finite((up, new))

    slots = ids.shape[0]
    arguments = jax.tree.map(jnp.asarray, (ids, local, rows.starts, rows.counts))
    up, _, _ = jax.eval_shape(one, *jax.tree.map(lambda leaf: leaf[0], arguments))
    stacks = {name: stack_of(value, slots) for name, value in reduce.stacked(up).items()}
    start = CohortResult(reduce.empty(up), stacks, arguments[1], jnp.ones(slots, bool))

    def group(number: Any, done: CohortResult) -> CohortResult:
        place = number * width
        ups, new, fine = each(one, width)(*slice_of(arguments, place, width))
        present = (place + jnp.arange(width) < count).astype(jnp.float32)
        whole = put_back((done.stacks, done.local, done.fine), (reduce.stacked(ups), new, fine), place)
        return CohortResult(reduce.add(done.partial, ups, present), *whole)

    return jax.lax.fori_loop(0, (count + width - 1) // width, group, start)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_client(
    algorithm: AnyAlgorithm, padding: Padding, key: PRNGKeyArray, down: Any, local: Any, rows: FlatRows, place: Any
) -> tuple[checkify.Error, tuple[Any, Any]]:
    """The round of one client, with the first error that a check inside it found."""

    def run() -> Any:
        data = client_data(rows, padding, jnp.asarray(rows.starts)[place], jnp.asarray(rows.counts)[place])
        with checked_steps():
            up, new = algorithm.client(key, down, local, data)
        checkify.check(trees.finite((up, new)), "the upload or the client's state is not finite")
        return up, new

    return checkify.checkify(run)()


def group_width(size: int) -> int:
    """How many models of so many bytes a vmapped group has: many small ones fill a vector unit, large ones leave the cache.

    >>> group_width(100), group_width(2**16), group_width(2**20)
    (64, 4, 1)
    """
    return max(1, min(64, CACHE // max(1, size)))


def for_each(function: Callable[..., Any], width: int, count: Any, *arguments: Any) -> Any:
    """`function` of the first `count` entries of the arguments, stacked, group after group; what lies beyond is zeros."""
    arguments = jax.tree.map(jnp.asarray, arguments)
    function = jit_inline(function)
    slots = jax.tree.leaves(arguments)[0].shape[0]
    start = stack_of(jax.eval_shape(function, *jax.tree.map(lambda leaf: leaf[0], arguments)), slots)

    def group(number: Any, done: Any) -> Any:
        place = number * width
        return put_back(done, each(function, width)(*slice_of(arguments, place, width)), place)

    return jax.lax.fori_loop(0, (count + width - 1) // width, group, start)


def each(function: Callable[..., Any], width: int) -> Callable[..., Any]:
    """`vmap` over a group; a group of one is not mapped, so that its loops end when the client does."""
    if width > 1:
        return jax.vmap(function)

    def alone(*arguments: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], arguments)))

    return alone


def stack_of(shapes: Any, slots: int) -> Any:
    """Zeros for `slots` trees of these shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), shapes)


def slice_of(tree: Any, place: Any, width: int) -> Any:
    """`width` entries of each leaf's first axis, from a place that may be traced."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, place, width), tree)


def put_back(tree: Any, part: Any, place: Any) -> Any:
    """The inverse of `slice_of`."""
    return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, place, 0), tree, part)
