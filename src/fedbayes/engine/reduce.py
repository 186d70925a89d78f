"""Reduce uploads as their fields declare: a running sum in O(d) memory, and a stack where one is declared.

    Mean: sum_i weight_i x_i / sum_i weight_i      Sum: sum_i x_i      Stack: (x_1, …, x_n)

`weight_i` is the field `weight` of `Up` (a Sum) where there is one that is not None, and 1 otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes import trees
from fedbayes.algorithm import Reduce, declared

BLOCK = 2**16  # numbers that `add_here` adds at a time


class Partial(NamedTuple):
    """What has been summed so far. Adding two of them is leaf by leaf, so chunks, buckets and sites combine in any order."""

    sums: dict[str, Any]
    weight: Float[Array, ""]


def empty(up: Any) -> Partial:
    """The sum of no uploads; `up` is one upload or its shapes."""
    kinds = declared(type(up))
    for field in (field for field, kind in kinds.items() if kind is Reduce.MEAN):
        if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(getattr(up, field))):
            raise TypeError(f"{type(up).__qualname__}.{field} is declared Mean but holds whole numbers; make them floats")
    sums = {field: trees.zeros(getattr(up, field)) for field, kind in kinds.items() if kind is not Reduce.STACK}
    return Partial(sums, jnp.float32(0))


def add(partial: Partial, ups: Any, present: Float[Array, " clients"]) -> Partial:
    """`partial` plus the uploads stacked along the first axis of `ups`; those whose `present` is 0 are padding."""
    kinds = declared(type(ups))
    # jnp.where, not a product alone: padding may hold anything, and 0 · inf is not 0.
    weights = jnp.where(present > 0, weight_of(ups, present), 0.0)

    def weighted_sum(weights: Float[Array, " clients"], leaf: Any) -> Any:
        used = jnp.where(_along(present, leaf) > 0, leaf, jnp.zeros_like(leaf))
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.sum(used * _along(weights, leaf).astype(leaf.dtype), axis=0)
        return jnp.sum(used, axis=0, dtype=leaf.dtype)

    sums = {}
    for field in partial.sums:
        chosen = weights if kinds[field] is Reduce.MEAN else present
        total = jax.tree.map(lambda leaf, w=chosen: weighted_sum(w, leaf), getattr(ups, field))
        sums[field] = jax.tree.map(jnp.add, partial.sums[field], total)
    return Partial(sums, partial.weight + jnp.sum(weights))


def add_here(partial: Partial, up: Any) -> None:
    """`add` of one upload to sums in the host's memory, in place, block by block: a large one is never there a second time."""
    kinds, weight = declared(type(up)), np.float32(weight_of(up, 1.0))
    for field, sums in partial.sums.items():
        for total, leaf in zip(jax.tree.leaves(sums), jax.tree.leaves(getattr(up, field)), strict=True):
            times = weight.astype(total.dtype) if kinds[field] is Reduce.MEAN else total.dtype.type(1)
            for start in range(0, total.size, BLOCK):
                total.reshape(-1)[start : start + BLOCK] += times * np.reshape(leaf, -1)[start : start + BLOCK]
    partial.weight[...] += weight


def weight_of(up: Any, otherwise: Any) -> Any:
    """How much an upload counts in the Mean fields, or `otherwise` where it does not say."""
    found = getattr(up, "weight", None)
    return otherwise if found is None else found


def combine(one: Partial, other: Partial) -> Partial:
    """The sum of the uploads of both."""
    return jax.tree.map(jnp.add, one, other)


def stacked(ups: Any) -> dict[str, Any]:
    """The Stack fields of uploads, which travel beside the running sums."""
    return {field: getattr(ups, field) for field, kind in declared(type(ups)).items() if kind is Reduce.STACK}


def finish(up_type: type, partial: Partial, stacks: dict[str, Any]) -> Any:
    """`Up` with each field reduced as declared, for `Algorithm.server`."""
    fields = {}
    for field, kind in declared(up_type).items():
        if kind is Reduce.STACK:
            fields[field] = stacks[field]
        elif kind is Reduce.SUM:
            fields[field] = partial.sums[field]
        else:
            fields[field] = jax.tree.map(lambda leaf: leaf / partial.weight.astype(leaf.dtype), partial.sums[field])
    return up_type(**fields)


def _along(weights: Float[Array, " clients"], leaf: Any) -> Any:
    return weights.reshape((-1,) + (1,) * (leaf.ndim - 1))
