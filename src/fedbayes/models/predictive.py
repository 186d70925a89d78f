"""Predictions from posterior draws of a likelihood's parameters.

S draws make a mixture, p(y) = 1/S Σ_s p(y | draw_s). Its entropy is the total uncertainty, the mean entropy of its components
the aleatoric part, the difference (the mutual information) the epistemic part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbayes.models.likelihoods import Bernoulli, Categorical, Likelihood, Normal, Poisson
from fedbayes.trees import other_peoples_code


def probabilities(likelihood: Likelihood, draws: Float[Array, "s n k"]) -> Float[Array, "s n c"]:
    """What each draw says of each label."""
    logits = draws if isinstance(likelihood, Categorical) else jnp.concatenate([jnp.zeros_like(draws), draws], axis=-1)
    return jax.nn.softmax(logits)


def moments(likelihood: Likelihood, draws: Float[Array, "s n k"]) -> tuple[Float[Array, " n"], ...]:
    """Mean of the mixture, its variance, and the part of that which is the draws' disagreement on the mean."""
    with other_peoples_code():
        component = likelihood.distribution(draws)
        means, variances = component.mean, component.variance
    epistemic = jnp.var(means, axis=0)
    return jnp.mean(means, axis=0), jnp.mean(variances, axis=0) + epistemic, epistemic


def predictive(likelihood: Likelihood, draws: Float[Array, "s n k"]) -> Float[Array, "n c"]:
    """The prediction of S draws: probabilities of the labels, or mean and standard deviation of a number.

    >>> predictive(Normal(1.0), jnp.array([[[2.0]], [[4.0]]])).tolist()  # sqrt(1 + variance of the means)
    [[3.0, 1.4142135381698608]]
    """
    if is_numeric(likelihood):
        mean, variance, _ = moments(likelihood, draws)
        return jnp.stack([mean, jnp.sqrt(variance)], axis=-1)
    return jnp.mean(probabilities(likelihood, draws), axis=0)


class Uncertainty(NamedTuple):
    """Of each row: all of it, the part that more data would leave, and the part that it would take away.

    Entropies in nats for labels, variances for a number.
    """

    total: Float[Array, " n"]
    aleatoric: Float[Array, " n"]
    epistemic: Float[Array, " n"]


def uncertainty(likelihood: Likelihood, draws: Float[Array, "s n k"]) -> Uncertainty:
    """How sure S draws are of each row, and why not.

    >>> from fedbayes.models import Bernoulli
    >>> agree, differ = jnp.array([[[0.0]], [[0.0]]]), jnp.array([[[-20.0]], [[20.0]]])
    >>> [round(float(part[0]), 3) for part in uncertainty(Bernoulli(), agree)]  # a fair coin
    [0.693, 0.693, 0.0]
    >>> [round(float(part[0]), 3) for part in uncertainty(Bernoulli(), differ)]  # sure, but not of which
    [0.693, 0.0, 0.693]
    """
    if is_numeric(likelihood):
        _, total, epistemic = moments(likelihood, draws)
        return Uncertainty(total, total - epistemic, epistemic)
    each = probabilities(likelihood, draws)
    total = _entropy(jnp.mean(each, axis=0))
    epistemic = jnp.maximum(total - jnp.mean(_entropy(each), axis=0), 0.0)
    return Uncertainty(total, total - epistemic, epistemic)


def quantile(likelihood: Likelihood, draws: Float[Array, "s n k"], level: float) -> Float[Array, " n"]:
    """The number below which the mixture of S draws has this share of its mass; of counts, the least that reaches it.

    >>> round(quantile(Normal(1.0), jnp.array([[[2.0]], [[2.0]]]), 0.95).item(), 3)  # 2 + 1.645
    3.645
    >>> quantile(Poisson(), jnp.zeros((1, 1, 1)), 0.95).tolist()  # P(y ≤ 2) = .92, P(y ≤ 3) = .98
    [3.0]
    """
    counts = isinstance(likelihood, Poisson)
    with other_peoples_code():
        component = likelihood.distribution(draws)
        centre, reach = component.mean, 10 * jnp.sqrt(component.variance) + counts
    ends = jnp.min(centre - reach, axis=0), jnp.max(centre + reach, axis=0)  # less than 1 % lies beyond, by Chebyshev

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        y = jnp.floor(middle) if counts else middle
        there = jnp.maximum(y, 0.0) if counts else y
        share = jnp.mean(distribution_function(likelihood, draws, there[None], 0.0), axis=0)
        less = (share < level) | ((y < 0) & counts)
        return jnp.where(less, middle, low), jnp.where(less, high, middle)

    _, high = jax.lax.fori_loop(0, 48, halve, ends)
    return jnp.floor(high) if counts else high


def _entropy(probabilities: Float[Array, "... k"]) -> Float[Array, ...]:
    return -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities), axis=-1)


def distribution_function(likelihood: Likelihood, draws: Array, y: Array, step: float = 0.5) -> Array:
    """P(Y ≤ y) under each draw; of counts, less `step` of the mass at y."""
    if isinstance(likelihood, Normal):
        scale = jnp.full_like(draws[..., 0], likelihood.scale) if likelihood.scale is not None else jnp.exp(draws[..., 1])
        return jax.scipy.stats.norm.cdf((y - draws[..., 0]) / scale)
    if isinstance(likelihood, Poisson):
        rate = jnp.exp(draws[..., 0])
        y = jnp.broadcast_to(y, rate.shape)
        mass = jnp.exp(jax.scipy.special.xlogy(y, rate) - rate - jax.scipy.special.gammaln(y + 1))
        return jax.scipy.special.gammaincc(y + 1, rate) - step * mass  # halfway up the step: a count has no density
    raise NotImplementedError(f"{type(likelihood).__name__} has no distribution function here")


def is_numeric(likelihood: Likelihood) -> bool:
    """Whether the target is a number rather than a label."""
    return not isinstance(likelihood, Categorical | Bernoulli)
