"""Draws of Z_G at the server from the prior itself times the silos' Gaussian factors, without asking anyone.

    p(Z_G) Π_j t_j(Z_G),        Π_j t_j = q / t_0

Where a hierarchy lies in the population (effects with a common scale, a horseshoe) the prior is a funnel, which the Gaussian
t_0 cannot represent, while silos' factors are often close to Gaussian. NUTS samples in coordinates that suit each latent:
those that silos say little about are taken on their standard scale (`models/frames.py`), the others as they are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedbayes.models import frames
from fedbayes.models.structured import Structured
from fedbayes.primitives import factored, gaussian, sampling, small
from fedbayes.primitives.gaussian import Global, Natural
from fedbayes.primitives.sampling import Chains, Draws, Health

CHAINS, FIRST, DRAWS = 4, 300, 2000
ACCEPT = 0.95
"""Higher than in silos: a funnel has a neck, and the prior is cheap."""


class Tilted(NamedTuple):
    """Draws on the real line, log Π_j t_j of each, and how the chains mixed."""

    z: Float[Array, "s n"]
    log_factors: Float[Array, " s"]
    health: Health


def draws(
    structured: Structured,
    count: int,
    key: PRNGKeyArray,
    q: Global,
    factors: Natural,
    near: Float[Array, "s n"] | None = None,
) -> Tilted:
    """`count` draws, from chains that are thinned.

    Args:
        structured: The model.
        count: How many draws, at most `CHAINS * DRAWS`.
        key: Of all that is random.
        q: q(Z_G).
        factors: Π_j t_j in q's coordinates.
        near: At least `FIRST` draws to start from, as those of chains that did not mix; by default of q.
    """
    return _thinned(structured, frames.depth(structured), count, key, q, factors, near)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _thinned(
    structured: Structured, depth: int, count: int, key: PRNGKeyArray, q: Global, factors: Natural, near: Any
) -> Tilted:
    found, health = sampled(structured, DRAWS, key, q, factors, near)
    kept = jnp.linspace(0, DRAWS - 1, -(-count // CHAINS)).astype(jnp.int32)
    z = found.u[:, kept].reshape(-1, q.mean.size)[:count]
    log_factors = jax.vmap(lambda one: gaussian.log_factor(factors, factored.standardised(q, one)))(z)
    return Tilted(z, log_factors, health)


def sampled(
    structured: Structured,
    most: int,
    key: PRNGKeyArray,
    q: Global,
    factors: Natural,
    near: Float[Array, "s n"] | None = None,
) -> tuple[Draws, Health]:
    """`most` draws in each of `CHAINS` chains, their `u` on the real line, and the state of the chains."""
    depth, n = frames.depth(structured), q.mean.size
    for_q, key = jax.random.split(key)
    if near is None:
        near = jax.vmap(lambda one: gaussian.draw_global(q, one))(jax.random.normal(for_q, (FIRST, n)))
    near = near[jnp.linspace(0, len(near) - 1, FIRST).astype(jnp.int32)]
    keys = jax.random.split(key, 2)
    root = gaussian.root(q)
    told = small.inverse_root(root)
    precision = jnp.diagonal(told.T @ factors.precision @ told)
    log_scale = frames.location_scale(structured, {}, q.mean)[1]
    free = precision * jnp.exp(2 * log_scale) < 1  # less is known from the silos than from the prior

    def log_tilted(x: Float[Array, " n"]) -> Float[Array, ""]:
        z, slope = _placed(structured, depth, free, x)
        value = structured.log_population({}, z) + slope + gaussian.log_factor(factors, factored.standardised(q, z))
        return jnp.where(jnp.isfinite(value), value, -jnp.inf)

    x = jax.vmap(lambda one: _standardised(structured, free, one))(near)

    def stage(carry: tuple[Array, Array, Array], number: Array) -> tuple[tuple[Array, Array, Array], Draws]:
        """Chains in coordinates with the mean and the root of what was drawn before."""
        mean, spread, chains = carry
        v = jax.vmap(lambda one: small.solve_lower(spread, one - mean))(chains)
        start = Chains(v, {}, jnp.full((), 0.1, float), {})
        density = lambda v, _: log_tilted(mean + spread @ v)  # noqa: E731
        room = jnp.array([min(FIRST, most), most])[number]
        found, end = sampling.nuts(density, keys[number], start, jnp.int32(0), room, most, accept=ACCEPT, patient=True)
        x = mean[None, None] + found.u @ spread.T
        weight = jnp.broadcast_to(sampling.draw_mask(found), x.shape[:2]).reshape(-1)
        return (*_moments(x.reshape(-1, n), weight.astype(x.dtype)), mean[None] + end.u @ spread.T), found._replace(u=x)

    begin = (*_moments(x, jnp.ones(FIRST)), x[:CHAINS])
    _, both = jax.lax.scan(stage, begin, jnp.arange(2))  # a loop, so that NUTS is compiled once
    found = jax.tree.map(lambda leaf: leaf[1], both)
    z = jax.vmap(jax.vmap(lambda one: _placed(structured, depth, free, one)[0]))(found.u)
    return found._replace(u=z), sampling.health(found)


def _moments(x: Float[Array, "s n"], weight: Float[Array, " s"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """The mean and a root of the covariance; of the variances alone where that has none."""
    weight = weight / jnp.sum(weight)
    mean = weight @ x
    x = x - mean[None]
    covariance = jnp.einsum("s,si,sj->ij", weight, x, x)
    variance = jnp.diagonal(covariance)
    root = small.cholesky(covariance + 1e-4 * jnp.diag(variance))
    return mean, jnp.where(jnp.isfinite(root).all(), root, jnp.diag(jnp.sqrt(variance)))


def _standardised(structured: Structured, free: Bool[Array, " n"], z: Float[Array, " n"]) -> Float[Array, " n"]:
    location, log_scale = frames.location_scale(structured, {}, z)
    return jnp.where(free, (z - location) * jnp.exp(-log_scale), z)


def _placed(
    structured: Structured, depth: int, free: Bool[Array, " n"], x: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, ""]]:
    """z for x, and log |dz/dx|."""
    z, log_scale = x, jnp.zeros(())
    for _ in range(depth):
        location, log_scale = frames.location_scale(structured, {}, z)
        z = jnp.where(free, location + jnp.exp(log_scale) * x, x)
    return z, jnp.sum(jnp.where(free, log_scale, 0.0))
