"""The posterior of a last layer under a prior whose width is uncertain: a mixture of Gaussians of several widths.

    p(z) = Σ_k π_k N(z; μ, σ_k² V)          k = 1 … K
    p(z | rows) ≈ Σ_k w_k N(ẑ_k, T H_k⁻¹),  log w_k = log π_k + Σ_f log p(rows of fold f | ẑ_k from the other folds) + const

A client's own rows weigh the widths: one whose rows look like everybody's stays near μ, one whose rows do not moves far. The
weights are pseudo-Bayesian (Geisser and Eddy 1979): rows that are held out in turn take the place of the marginal likelihood,
which for a prior of a thousand weights would weigh the prior's volume more than predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedbayes.algorithm import Data
from fedbayes.primitives import laplace
from fedbayes.primitives.training import shuffle
from fedbayes.trees import Params

FOLDS = 5

HeadOf = Callable[[Float[Array, " settings"], Bool[Array, " n"]], laplace.Head]
"""A component's head, whose prior and outputs follow from its settings, on the rows of a mask."""


class Mixed(NamedTuple):
    """Modes of all components, stacked, and log w."""

    modes: Params
    log_weight: Float[Array, " k"]


def folds(key: PRNGKeyArray, data: Data) -> Int[Array, " n"]:
    """The fold of each row: random, of equal size up to one; rows that do not exist are in none, -1.

    >>> data = Data(jnp.zeros((8, 1)), jnp.zeros(8), jnp.arange(8) < 6)
    >>> sorted(folds(jax.random.key(0), data).tolist())
    [-1, -1, 0, 0, 1, 2, 3, 4]
    """
    return jnp.where(data.mask, jnp.argsort(shuffle(key, data)) % FOLDS, -1)


def fitted(
    key: PRNGKeyArray, head_of: HeadOf, settings: Float[Array, "k settings"], log_prior: Float[Array, " k"], data: Data
) -> Mixed:
    """The mode and the weight of each component; a component's search starts at the mode of the one before."""
    number = jnp.arange(FOLDS if len(settings) > 1 else 0)[:, None]  # a single component has all of the weight
    held_out = folds(key, data)[None] == number
    masks = jnp.concatenate([data.mask[None], data.mask[None] & ~held_out])

    def component(start: Params, one: Float[Array, " settings"]) -> tuple[Params, tuple[Params, Float[Array, ""]]]:
        def fit(start: Params, mask: Bool[Array, " n"]) -> tuple[Params, Float[Array, " n"]]:
            head = head_of(one, mask)
            z = laplace.mode(head, start)
            return z, head.likelihood.log_prob(head.outputs(z), head.y)

        z, logs = jax.vmap(fit)(start, masks)
        return z, (jax.tree.map(lambda leaf: leaf[0], z), jnp.sum(jnp.where(held_out, logs[1:], 0.0)))

    mean = head_of(settings[0], data.mask).mean
    start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (len(masks), *leaf.shape)), mean)
    _, (modes, scores) = jax.lax.scan(component, start, settings)
    return Mixed(modes, jax.nn.log_softmax(log_prior + scores))


def draws(
    key: PRNGKeyArray,
    head_of: HeadOf,
    settings: Float[Array, "k settings"],
    mixed: Mixed,
    mask: Bool[Array, " n"],
    count: int,
    temperature: float | Float[Array, ""] = 1.0,
) -> tuple[Params, Int[Array, " s"]]:
    """So many draws, and the component of each: by systematic resampling, so that its share is its weight up to one draw."""
    for_place, for_draws = jax.random.split(key)
    places = (jax.random.uniform(for_place, dtype=jnp.float32) + jnp.arange(count, dtype=jnp.float32)) / count
    chosen = jnp.searchsorted(jnp.cumsum(jnp.exp(mixed.log_weight)), places.astype(mixed.log_weight.dtype)).clip(
        max=len(settings) - 1
    )

    def one(key: PRNGKeyArray, place: Int[Array, ""]) -> Params:
        z = jax.tree.map(lambda leaf: leaf[place], mixed.modes)
        found = laplace.draws(key, head_of(settings[place], mask), z, 1, temperature)
        return jax.tree.map(lambda leaf: leaf[0], found)

    return jax.vmap(one)(jax.random.split(for_draws, count), chosen), chosen
