"""Noise of the proposals for a silo's latents: quantiles of a logistic in one dimension, antithetic t draws in several."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

DEGREES = 8
"""Degrees of freedom of the proposals in several dimensions, an even number."""
LOGISTIC = 0.65
"""The scale of the logistic density that is used in one dimension."""
WITHIN = 8
"""Draws of a plate's elements for each draw of the silo's latents outside plates."""


def draw(key: PRNGKeyArray, sizes: dict[str, Any], inner: int) -> dict[str, Any]:
    """Noise of the proposals (halves, draws, blocks, d); of plates' latents for each draw of the silo's own."""
    found = {}
    for place, (name, (blocks, d)) in enumerate(sizes.items()):
        shape = (2, inner // 2, 2, WITHIN // 2, blocks, d) if name and "" in sizes else (2, inner // 2, blocks, d)
        one = jax.random.fold_in(key, place)
        found[name] = _lattice(one, shape) if d == 1 else _antithetic(one, shape)
    return found


def _lattice(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """Logistic noise for one dimension: equidistant quantiles, shifted at random, for the near draws and for the far ones.

    Weights vanish at both ends, so that their mean is the trapezoid rule for a periodic function: a dozen are a quadrature.
    """
    first = near(shape[-3])
    parts = []
    for count, one in zip((first, shape[-3] - first), jax.random.split(key), strict=True):
        shift = jax.random.uniform(one, (*shape[:-3], 1, *shape[-2:]))
        steps = jnp.arange(count).reshape(*(1 for _ in shape[:-3]), count, 1, 1) / count
        u = jnp.clip((steps + shift) % 1.0, 1e-6, 1 - 1e-6)
        parts.append(LOGISTIC * (jnp.log(u) - jnp.log1p(-u)))
    return jnp.concatenate(parts, axis=-3)


def _antithetic(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """t noise in pairs of opposite sign."""
    half = (*shape[:-3], shape[-3] // 2, *shape[-2:])
    for_normal, for_scale = jax.random.split(key)
    # χ² with an even number of degrees is a sum of exponentials, which compiles in a fraction of a gamma's time.
    chi_square = 2 * jnp.sum(jax.random.exponential(for_scale, (*half[:-1], DEGREES // 2)), axis=-1, keepdims=True)
    one = jax.random.normal(for_normal, half) * jnp.sqrt(DEGREES / chi_square)
    return jnp.stack([one, -one], axis=-3).reshape(shape)


def near(draws: int) -> int:
    """How many draws of a half are as wide as the curvature says; the others are wider."""
    return 2 * (3 * draws // 8)


def log_density(square: Array, d: int) -> Array:
    """log density of the noise at points of that squared length: logistic in one dimension, t with `DEGREES` in several."""
    if d == 1:
        size = jnp.sqrt(jnp.maximum(square, 1e-30)) / LOGISTIC
        return -size - math.log(LOGISTIC) - 2 * jnp.log1p(jnp.exp(-size))
    constant = math.lgamma((DEGREES + d) / 2) - math.lgamma(DEGREES / 2) - d * math.log(DEGREES * math.pi) / 2
    return constant - (DEGREES + d) / 2 * jnp.log1p(square / DEGREES)
