"""Parts of FedHB's published form: columns that are dropped, Student's t, and the slope of a quadratic penalty."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.trees import Params


def drop_columns(key: PRNGKeyArray, m: Params, p: float) -> Params:
    """m̃: each column of a weight matrix, which is what leaves one input unit, and each bias is kept with probability p.

    What a normalisation multiplies a channel by, a leaf named scale, is a column of its own: without all of them at once
    nothing would be left of the network.
    """
    if p == 1:
        return m
    leaves, structure = jax.tree_util.tree_flatten_with_path(m)
    # (…, in, out) for dense layers and convolutions; (height, width, channels) where each channel has a filter of its own.
    masks = [leaf.shape if getattr(path[-1], "key", "") == "scale" else _column_mask(leaf.shape) for path, leaf in leaves]
    sizes = [math.prod(shape) for shape in masks]
    draws = jax.random.uniform(key, (sum(sizes),))  # one for all
    # In a loop, so that zeros and ones are made once and not again for every pixel that a scale or a filter multiplies.
    halves = jnp.pad(draws, (0, len(draws) % 2)).reshape(2, -1)
    kept = jax.lax.map(lambda half: (half < p).astype(jnp.float32), halves).reshape(-1)
    found, start = [], 0
    for (_, leaf), shape, size in zip(leaves, masks, sizes, strict=True):
        mask = kept[start : start + size].reshape(shape)
        found.append(leaf * jnp.broadcast_to(mask, leaf.shape))
        start += size
    return jax.tree.unflatten(structure, found)


def _column_mask(shape: tuple[int, ...]) -> tuple[int, ...]:
    axis = {0: None, 1: None, 3: 2}.get(len(shape), len(shape) - 2)
    return tuple(size if place == axis else 1 for place, size in enumerate(shape))


def student_t(key: PRNGKeyArray, degrees: float, shape: tuple[int, ...]) -> Array:
    """Student's t by Bailey's polar form (1994): exact, from two uniform numbers, where a gamma draw would be slow."""
    one, two = jax.random.split(key)
    radius = jax.random.uniform(one, shape, minval=1e-12)
    spread = jnp.sqrt(degrees * jnp.expm1(-2 / degrees * jnp.log(radius)))
    return spread * jnp.cos(2 * jnp.pi * jax.random.uniform(two, shape))


@jax.custom_jvp
def pull(weights: Params, m: Params, m0: Params) -> Float[Array, ""]:
    """The slopes of ½ Σ w (m − m0)², and 0 for its value, which nobody reads and which would be one more look at them."""
    return jnp.float32(0)


@pull.defjvp
def _slope_of_pull(primals: tuple[Params, Params, Params], tangents: tuple[Params, Params, Params]) -> tuple[Array, Array]:
    terms = jax.tree.map(lambda w, m, m0, dm: jnp.sum(w * (m - m0) * dm), *primals, tangents[1])
    return jnp.float32(0), jax.tree.reduce(jnp.add, terms, jnp.float32(0))
