"""IVON: natural-gradient steps of a Gaussian over weights, each on its own, at one gradient a step (Shen et al. 2024).

    minimise over q = N(m, 1/s):   κ E_q[mean loss] + E_q[½ P w² − b w] + E_q[log q]          κ: rows over temperature
    each step:   w = m ± ε/√s,   ĝ± = ∇ mean loss of a minibatch at w          + in one step, − in the next, of one ε
                 ḡ ← the momentum of ĝ, without its bias;   m ← m − lr (κ ḡ + P m − b)/s, by `reach` at most
    each pair:   t = ½ κ (ĝ₊ − ĝ₋) ε √s + P                     its mean over ε and minibatches is κ E_q[∇²] + P (Price)
                 s ← s + (1 − β₂²)(t − s) + ½ (1 − β₂²)² (t − s)²/s          positive for any t

The published steps draw ε anew each time, and t = κ ĝ ε √s + P. In pairs, what is the same at +ε and −ε leaves t, so that far
from a mode, where ĝ is large for any ε, s does not run away; and of a quadratic loss ε leaves m, which would otherwise move at
random by lr standard deviations of q in each step. A last step without a partner leaves s.

b and P are natural parameters of a Gaussian prior; P may be negative in places, as a cavity's is. The fixed point of s is the
precision of the best mean-field Gaussian, that of a linear model with normal noise exactly.

Reference:
    Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan, Möllenhoff. Variational learning is effective
    for large deep networks. ICML 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import Data, Params, setting
from fedbayes.primitives import gaussian
from fedbayes.primitives.gaussian_network import noise_pool
from fedbayes.primitives.training import Training, local_steps


class Gaussian(NamedTuple):
    """Means and precisions of weights."""

    mean: Params
    precision: Params


class Factor(NamedTuple):
    """Natural parameters of a Gaussian factor exp(shift w − ½ precision w²) for each weight; precisions may be negative."""

    shift: Params
    precision: Params


@dataclasses.dataclass(frozen=True)
class Ivon:
    """How IVON steps."""

    momentum: float = setting(0.9, least=0, below=1)
    """β₁."""
    memory: float = setting(0.99, least=0, below=1)
    """β₂: about 1/(1 − β₂) steps are behind each precision."""


def natural(q: Gaussian) -> Factor:
    """(s m, s)."""
    return Factor(jax.tree.map(jnp.multiply, q.precision, q.mean), q.precision)


def usual(factor: Factor) -> Gaussian:
    """Means and precisions of a factor that is proper."""
    return Gaussian(jax.tree.map(jnp.divide, factor.shift, factor.precision), factor.precision)


def draw(
    key: PRNGKeyArray, q: Gaussian, pool: Float[Array, " m"] | None = None, sign: Float[Array, ""] | float = 1.0
) -> tuple[Params, Params]:
    """w = m + ε/√s, and ε, which is multiplied by `sign`."""
    noise = trees.normal_like(key, q.mean) if pool is None else gaussian.window(key, pool, q.mean)
    noise = jax.tree.map(lambda e: sign * e, noise)
    return jax.tree.map(lambda m, s, e: m + e * jax.lax.rsqrt(s), q.mean, q.precision, noise), noise


def fit(
    loss: Callable[[Params, Data], Float[Array, ""]],
    q: Gaussian,
    prior: Factor,
    weight: Float[Array, ""],
    steps: Ivon,
    training: Training,
    lr: Float[Array, ""],
    key: PRNGKeyArray,
    data: Data,
    reach: float,
    noisy: bool = True,
) -> tuple[Gaussian, Float[Array, ""]]:
    """q after the minibatches of a round, from `q`, and the mean loss; without noise the precisions stay as they are.

    `weight` is κ. `lr` times `reach` is the farthest that a weight moves in a step: where s begins far below the curvature, m
    stays near until s has grown, instead of diverging. Noise of a large network comes from a pool (`gaussian_network`).
    """
    pool = noise_pool(key, q.mean) if noisy else None
    beta, rate = steps.momentum, 1 - steps.memory**2

    def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
        (m, s), momentum, before, total, done, last = carry
        again = done % 2 == 1
        key = jax.lax.select(again, last, key)
        w, noise = draw(key, Gaussian(m, s), pool, jnp.where(again, -1.0, 1.0)) if noisy else (m, trees.zeros(m))
        value, g = jax.value_and_grad(loss)(w, batch)

        def precision(s: Array, g: Array, old: Array, e: Array, P: Array) -> Array:
            gap = jnp.where(again, weight / 2 * (g - old) * e * jnp.sqrt(s) + P - s, 0.0)
            return s + rate * gap + 0.5 * (rate * gap) ** 2 / s

        if noisy:
            s = jax.tree.map(precision, s, g, before, noise, prior.precision)
        momentum = jax.tree.map(lambda old, new: beta * old + (1 - beta) * new, momentum, g)
        unbiased = weight / (1 - beta ** (done + 1))

        def mean(m: Array, s: Array, g: Array, b: Array, P: Array) -> Array:
            far = (unbiased * g + P * m - b) / s
            return m - lr * (jnp.clip(far, -reach, reach) if noisy else far)

        m = jax.tree.map(mean, m, s, momentum, prior.shift, prior.precision)
        return Gaussian(m, s), momentum, g, total + value, done + 1, key

    zeros = trees.zeros(q.mean)
    start = (q, zeros, zeros, jnp.float32(0), jnp.float32(0), key)
    q, _, _, total, done, _ = local_steps(step, start, key, data, training.batch, training.passes(data))
    return q, total / jnp.maximum(done, 1)
