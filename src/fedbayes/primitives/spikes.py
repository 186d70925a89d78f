"""Parts of FedHB's published form: columns that are dropped, Student's t, and the slope of a quadratic penalty."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import Data
from fedbayes.models import Model
from fedbayes.primitives.training import Training, descend, mean_loss
from fedbayes.trees import Params


class Prior(NamedTuple):
    """What q(φ) has besides m0 and V0, and `pull` with E[Σ⁻¹] = pull / V0."""

    nu0: float
    n0: float
    l0: float
    pull: float
    degrees: float
    """ν of the Student-t, n0 − d + 1."""


def equation_18(
    m0: Params, delta: Params, square: Params, N: int, p: float, lambda0: float, epsilon: float
) -> tuple[Params, Params]:
    """The next m0, and Nε² + λ0 m0² + Σ ρ_i, from the means of the steps and of their squares."""

    def mean(old: Array, delta: Array) -> Array:
        return p * N / (N + lambda0) * (old + delta)

    def scatter(old: Array, new: Array, delta: Array, square: Array) -> Array:
        moved = new - old
        apart = jnp.maximum(square - 2 * moved * delta + moved**2, 0.0)  # the mean of (m_i − m0)²
        return N * epsilon**2 + lambda0 * new**2 + N * (p * apart + (1 - p) * new**2)

    new = jax.tree.map(mean, m0, delta)
    return new, jax.tree.map(scatter, m0, new, delta, square)


def population(key: PRNGKeyArray, m0: Params, V: Params, share: Any, degrees: Any, one: bool = False) -> Params:
    """A draw of a new client's weights (19): Student's t around m0 with squared scales share V, or normal without degrees.

    Weights have variances of their own a posteriori, or with `one` share a single one.
    """
    if degrees is None:  # no variance to be unsure of
        noise = trees.normal_like(key, m0)
    elif one:
        heavy = jnp.sqrt(degrees / jax.random.chisquare(jax.random.fold_in(key, 1), degrees))
        noise = jax.tree.map(lambda e: heavy * e, trees.normal_like(key, m0))
    else:
        noise = student_t_like(key, m0, degrees)
    return jax.tree.map(lambda m, v, e: m + jnp.sqrt(share * v) * e, m0, V, noise)


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


def student_t_like(key: PRNGKeyArray, like: Params, degrees: Any) -> Params:
    """Student's t for each weight; degrees of freedom for all, for each array, or for each weight."""
    leaves, structure = jax.tree.flatten(like)
    of = [degrees] * len(leaves) if isinstance(degrees, int | float) else jax.tree.leaves(degrees)
    keys = jax.random.split(key, len(leaves))
    drawn = [student_t(one, nu, leaf.shape) for one, nu, leaf in zip(keys, of, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def divergence(V0: Params, m0: Params, delta: Params, n0: float, p: float, epsilon: float) -> Float[Array, ""]:
    """E[KL(q_i ‖ p(θ_i | φ))] of a spike, up to a constant."""

    def term(V: Array, m0: Array, delta: Array) -> Array:
        rho = p * delta**2 + (1 - p) * m0**2
        return jnp.sum(jnp.log(V) + n0 / V * (rho + epsilon**2)) / 2

    return jax.tree.reduce(jnp.add, jax.tree.map(term, V0, m0, delta))


def divergence_of_phi(V0: Params, m0: Params, Sigma0: Params, n0: float, nu0: float, lambda0: float) -> Float[Array, ""]:
    """KL(q(φ) ‖ p(φ)), equation 37, up to a constant."""

    def term(V: Array, m0: Array, Sigma0: Array) -> Array:
        return jnp.sum(n0 * (Sigma0 + lambda0 * m0**2) / V + nu0 * (jnp.log(V) - jnp.log(Sigma0))) / 2

    return jax.tree.reduce(jnp.add, jax.tree.map(term, V0, m0, Sigma0))


def descend_under(
    model: Model,
    start: Params,
    m0: Params,
    fixed: Params,
    strength: Params,
    p: float,
    most: Float[Array, ""] | float,
    training: Training,
    lr: Float[Array, ""],
    key: PRNGKeyArray,
    data: Data,
) -> tuple[Params, Float[Array, ""]]:
    """Minimise the mean loss + ½ Σ strength (m − m0)²; the part of the pull above `most` is a proximal step after each step."""
    length = lr / (1 - training.momentum)  # what a step of SGD comes to once its momentum has built up

    def F(m: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        gentle = jax.tree.map(lambda s: jnp.minimum(s, most), strength)
        return mean_loss(model, trees.merge(drop_columns(key, m, p), fixed), batch) + pull(gentle, m, m0)

    def pulled(m: Params) -> Params:
        def one(s: Array, m: Array, m0: Array) -> Array:
            rest = length * (s - jnp.minimum(s, most))
            return (m + rest * m0) / (1 + rest)

        return jax.tree.map(one, strength, m, m0)

    return descend(model, F, start, training, lr, key, data, pulled if training.optimiser == "sgd" else None)
