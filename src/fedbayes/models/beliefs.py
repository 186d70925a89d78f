"""The distributions over parameters that a method holds, in one form for all methods.

A method says where its posterior and its prior are (`NetworkAlgorithm.beliefs`) and takes others in their place
(`with_beliefs`), so that an evaluation can measure what a prediction owes to them. See evaluation/life.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedbayes.trees import Params


class Marginals(NamedTuple):
    """Mean and standard deviation of each parameter."""

    mean: Params
    deviation: Params


class Beliefs(NamedTuple):
    """The posterior that `predict` draws from and the prior under which `adapt` fits; None where there is no such thing."""

    posterior: Marginals | None = None
    prior: Marginals | None = None


def of_draws(draws: Params) -> Marginals:
    """The marginals of draws, which are the first axis.

    >>> float(of_draws(jnp.array([1.0, 2.0, 3.0])).deviation)
    1.0
    """

    def deviation(leaf: Array) -> Array:
        apart = jnp.any(leaf != leaf[:1], axis=0)  # the mean of equal numbers is not equal to them, to the last digit
        return jnp.where(apart, jnp.std(leaf, axis=0, ddof=min(1, len(leaf) - 1)), 0.0)

    return Marginals(jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), draws), jax.tree.map(deviation, draws))


def redrawn(draws: Params, marginals: Marginals) -> Params:
    """The same draws, moved and scaled to these marginals; their correlations stay.

    >>> redrawn(jnp.array([1.0, 2.0, 3.0]), Marginals(jnp.float32(0.0), jnp.float32(5.0))).tolist()
    [-5.0, 0.0, 5.0]
    """

    def one(draws: Array, mean: Array, deviation: Array, old: Array, scale: Array) -> Array:
        standard = jnp.where(scale > 0, (draws - old[None]) / jnp.where(scale > 0, scale, 1.0)[None], 0.0)
        return mean[None] + deviation[None] * standard

    return jax.tree.map(one, draws, *marginals, *of_draws(draws))
