"""The population's latents on their standard scale: where they are drawn with a location and a scale that others have.

    x_i = (z_i − location_i(z)) / scale_i(z),        location and scale from the latents before z_i

A hierarchy in Z_G, such as effects with a common scale, is a funnel in z and often none in x. The map is triangular, so that it
is a bijection whatever the model is, with log |dx/dz| = −Σ log scale_i.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from fedbayes.models.sites import Values, on_real_line, run
from fedbayes.models.structured import Structured
from fedbayes.trees import other_peoples_code

DEEPEST = 8
"""Levels of a hierarchy in the population that are followed."""


def location_scale(
    structured: Structured, theta: Values, z: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """The location and the log of the scale of each global latent on the real line; 0 where its distribution has none."""
    latents = structured.global_latents()
    sites = run(structured.population, (), real=on_real_line(latents, {"": z[None]}), theta=theta)[1]
    locations, scales = [], []
    with other_peoples_code():
        for latent in latents:
            location, scale = _of(sites[latent.name]["fn"], jnp.shape(sites[latent.name]["value"]), latent.width)
            locations.append(location)
            scales.append(scale)
    return jnp.concatenate(locations), jnp.concatenate(scales)


def _of(fn: object, shape: tuple[int, ...], width: int) -> tuple[Array, Array]:
    support = fn.support  # type: ignore[attr-defined]
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    nothing = jnp.zeros(width)
    location, scale, rate = (getattr(fn, name, None) for name in ("loc", "scale", "rate"))
    if scale is None and (root := getattr(fn, "scale_tril", None)) is not None:
        scale = jnp.sqrt(jnp.sum(root**2, axis=-1))
    try:
        if support is constraints.positive and location is None and (scale is not None or rate is not None):
            size = jnp.log(scale) if scale is not None else -jnp.log(rate)  # type: ignore[arg-type]
            return jnp.broadcast_to(size, shape).reshape(width), nothing
        if location is not None and scale is not None:
            parts = (jnp.broadcast_to(part, shape).reshape(width) for part in (location, jnp.log(scale)))
            return next(parts), next(parts)
    except (TypeError, ValueError):  # of another shape than its value, as a simplex has
        pass
    return nothing, nothing


@functools.cache
def depth(structured: Structured) -> int:
    """Levels of the hierarchy in the population: after so many steps, `placed` has found z."""
    with jax.ensure_compile_time_eval():
        x = jnp.sin(1.0 + jnp.arange(structured.size(), dtype=jnp.zeros(0).dtype))  # no round numbers
        z = x + 1.0  # not x, at which a latent with scale 1 would be found without a step
        for level in range(DEEPEST):
            location, log_scale = location_scale(structured, {}, z)
            before, z = z, location + jnp.exp(log_scale) * x
            if bool(jnp.all(z == before)):
                return level
    return DEEPEST


@functools.partial(jax.jit, static_argnums=0)
def standardised(
    structured: Structured, theta: Values, z: Float[Array, "s n"]
) -> tuple[Float[Array, "s n"], Float[Array, " s"]]:
    """x for each z, and log |dx/dz|."""
    location, log_scale = jax.vmap(lambda one: location_scale(structured, theta, one))(z)
    return (z - location) * jnp.exp(-log_scale), -jnp.sum(log_scale, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def placed(structured: Structured, theta: Values, x: Float[Array, "s n"]) -> Float[Array, "s n"]:
    """z for each x: level after level, as each needs those before it."""

    def level(_: int, z: Array) -> Array:
        location, log_scale = jax.vmap(lambda one: location_scale(structured, theta, one))(z)
        return location + jnp.exp(log_scale) * x

    return jax.lax.fori_loop(0, DEEPEST, level, x)
