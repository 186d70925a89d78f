"""What a fit asks of its silos, as programs that compile once for a model, a family and a form of data."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from fedbayes import trees
from fedbayes.algorithm import AnyStructured
from fedbayes.models.sites import Values
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian, variational


@functools.partial(jax.jit, static_argnums=0)
def global_values(structured: Structured, theta: Values, z: Float[Array, "s n"]) -> Values:
    """Z_G as the population has it, for each draw."""
    return jax.vmap(lambda one: structured.global_values(theta, one))(z)


@jax.jit
def global_draws(q: gaussian.Global, noise: Float[Array, "s n"]) -> Float[Array, "s n"]:
    """Z_G from standard normal noise, for each draw."""
    return jax.vmap(lambda one: gaussian.draw_global(q, one))(noise)


@functools.partial(jax.jit, static_argnums=0)
def log_populations(structured: Structured, theta: Values, z: Float[Array, "s n"]) -> Float[Array, " s"]:
    """log p_θ(Z_G) of each draw."""
    return jax.vmap(lambda one: structured.log_population(theta, one))(z)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def predict(
    family: Any, structured: Any, form: Any, draws: int, own: bool, key: Any, shared: Any, eta: Any, arrays: Any
) -> Values:
    """Posterior predictive draws of a silo, or of new rows."""
    silo = variational.Silo(family, structured, trees.put_together(form, arrays))
    return variational.predict(silo, key, shared, eta, count=draws, own=own)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def local_posterior(
    algorithm: AnyStructured, form: Any, count: int, key: Any, down: Any, local: Any, arrays: Any
) -> tuple[Values, Any]:
    """Draws of a silo's latents and of what it would observe, (chains, draws, …) for each site; and which diverged."""
    data, (for_draws, for_sites) = trees.put_together(form, arrays), jax.random.split(key)
    draws = algorithm.local_draws(for_draws, down, local, data, count)
    chains, each = draws.diverging.shape

    def one(arguments: Any) -> Values:
        key, z_G, z_L = arguments
        return algorithm.structured.predictive(key, down.shared.theta, z_G, z_L, data)

    flat = jax.tree.map(lambda leaf: leaf.reshape(chains * each, *leaf.shape[2:]), (draws.z_G, draws.z_L))
    values = jax.lax.map(one, (jax.random.split(for_sites, chains * each), *flat), batch_size=16)
    return jax.tree.map(lambda leaf: leaf.reshape(chains, each, *leaf.shape[1:]), values), draws.diverging


@functools.partial(jax.jit, static_argnums=(0, 1))
def adapt(algorithm: AnyStructured, form: Any, key: Any, down: Any, local: Any, arrays: Any) -> Any:
    """The state of a silo that may never have trained."""
    return algorithm.adapt(key, down, local, trees.put_together(form, arrays))
