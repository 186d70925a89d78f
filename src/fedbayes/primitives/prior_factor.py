"""The server's part of EP and PVI: q after a round's changes, and t_0, the Gaussian factor that stands for the prior.

With w = p(Z_G) / t_0(Z_G) and q = N(0, I) in its own coordinates, t_0 ← t_0 · (the Gaussian with the moments of q w) / q:

    draws        of q w = p(Z_G) Π_j t_j(Z_G) by NUTS at the server, where global latents scale other global latents (a funnel)
    weights      mean E_w ∇ log w,  covariance I + E_w (∇² log w + ∇ log w ∇ log wᵀ) − mean meanᵀ,  E_w under q with weights w
    expansion    of log p to second order, averaged over q: PVI's, without moments
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.models import frames
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian, matching, small, tilted
from fedbayes.primitives.factored import multiplied, over, power, proper_part, rewritten, standard, standardised, times
from fedbayes.primitives.gaussian import Global, Natural

DRAWS = 512
"""Draws for averages over q, in pairs ± u."""
CHAIN = 1000
"""Draws a chain of q w."""
UNMIXED = 1.2
"""An r-hat of these chains above which t_0 stays for this round."""


def start(structured: Structured, key: PRNGKeyArray) -> tuple[Global, Natural]:
    """q at the prior's moments, and t_0 = q in its coordinates."""
    z = jax.vmap(structured.prior_draw)(jax.random.split(key, 20 * DRAWS))
    low, high = jnp.quantile(z, 0.005, axis=0), jnp.quantile(z, 0.995, axis=0)  # a Cauchy has no moments
    z = jnp.clip(z, low[None], high[None])
    q = gaussian.from_moments(jnp.mean(z, axis=0), jnp.atleast_2d(jnp.cov(z, rowvar=False)))
    t_0 = standard(q.mean.size)
    if frames.depth(structured) > 1:
        return q, t_0
    for number in range(3):  # for a Gaussian prior, one makes it exact
        at = jax.random.fold_in(key, number)
        q, t_0 = _updated(q, t_0, _by_weights(structured, at, q, t_0))
    return q, t_0


def after(
    structured: Structured, key: PRNGKeyArray, q: Global, t_0: Natural, change: Natural, *, matched: bool
) -> tuple[Global, Natural, Float[Array, ""]]:
    """q and t_0 after as much of a round's change as leaves q proper and an update of t_0; and what part was taken.

    `matched` matches moments (EP); otherwise the prior is expanded (PVI).
    """
    part = proper_part(standard(q.mean.size), change)
    new = multiplied(q, power(change, part))
    t_0 = rewritten(t_0, q, new)
    if not matched:
        found = _by_expansion(structured, key, new, t_0)
    elif frames.depth(structured) > 1:
        found = _by_draws(structured, key, new, t_0)
    else:
        found = _by_weights(structured, key, new, t_0)
    return *_updated(new, t_0, found), part


def _updated(q: Global, t_0: Natural, change: Natural) -> tuple[Global, Natural]:
    """q and t_0, both times as much of the change as leaves q proper, in the new q's coordinates."""
    change = jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf).all(), leaf, 0.0), change)
    change = power(change, proper_part(standard(q.mean.size), change))
    new = multiplied(q, change)
    return new, rewritten(times(t_0, change), q, new)


def _by_draws(structured: Structured, key: PRNGKeyArray, q: Global, t_0: Natural) -> Natural:
    factors = over(standard(q.mean.size), t_0)
    found, health = tilted.sampled(structured, CHAIN, key, q, factors)

    def log_tilted(u: Float[Array, " n"]) -> Float[Array, ""]:
        return structured.log_population({}, gaussian.draw_global(q, u)) + gaussian.log_factor(factors, u)

    u = jax.vmap(jax.vmap(lambda z: standardised(q, z)))(found.u)
    in_q = found._replace(u=u, gradient=jax.vmap(jax.vmap(jax.grad(log_tilted)))(u))
    change = over(matching.gaussian_of(in_q).natural, standard(q.mean.size))
    return power(change, jnp.where(health.rhat < UNMIXED, 1.0, 0.0))


def _by_weights(structured: Structured, key: PRNGKeyArray, q: Global, t_0: Natural) -> Natural:
    log_w = lambda u: _log_prior(structured, q, u) - gaussian.log_factor(t_0, u)  # noqa: E731
    u = _pairs(key, q)
    g, H = jax.vmap(jax.grad(log_w))(u), jax.vmap(jax.hessian(log_w))(u)
    weights, n = jax.nn.softmax(jax.vmap(log_w)(u)), q.mean.size
    mean = weights @ g
    covariance = jnp.eye(n) + jnp.einsum("s,sij->ij", weights, H + g[:, :, None] * g[:, None, :]) - jnp.outer(mean, mean)
    precision = small.inverse((covariance + covariance.T) / 2)
    return over(Natural(precision @ mean, precision), standard(n))


def _by_expansion(structured: Structured, key: PRNGKeyArray, q: Global, t_0: Natural) -> Natural:
    log_w = lambda u: _log_prior(structured, q, u) - gaussian.log_factor(t_0, u)  # noqa: E731
    u = _pairs(key, q)
    g, H = jax.vmap(jax.grad(log_w))(u), jax.vmap(jax.hessian(log_w))(u)
    return Natural(jnp.mean(g, axis=0), -jnp.mean(H, axis=0))


def _log_prior(structured: Structured, q: Global, u: Float[Array, " n"]) -> Float[Array, ""]:
    return structured.log_population({}, gaussian.draw_global(q, u))


def _pairs(key: PRNGKeyArray, q: Global) -> Float[Array, "s n"]:
    half = jax.random.normal(key, (DRAWS // 2, q.mean.size))
    return jnp.concatenate([half, -half])
