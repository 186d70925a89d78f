"""Silos in one process: an algorithm over data that differs from silo to silo in size, shape and latents.

There are few silos and many iterations, so each silo is compiled with its own shapes and whole stretches of iterations are
one compiled loop. Keys and reductions are those of the simulator: an iteration is a round in which every silo takes part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedbayes import gaussian, keys, reduce
from fedbayes.algorithms.sfvi import SFVI, Local, Server, Up
from fedbayes.errors import UserError

STRETCH = 1000
"""Iterations in one compiled call."""


@dataclasses.dataclass(frozen=True)
class SiloFit:
    """What was learnt: the server's state, each silo's own state, and the bound in each iteration."""

    algorithm: SFVI
    server: Server
    local: dict[str, Local]
    bound: Float[np.ndarray, " rounds"]

    def draws(self, count: int = 1000, seed: int = 0) -> dict[str, Array]:
        """Draws from q(Z_G), as the population's sites have it: (count, …) for each."""
        q, structured = self.server.shared.eta, self.algorithm.structured
        noise = jax.random.normal(jax.random.key(seed), (count, q.mean.size))
        return jax.vmap(lambda noise: structured.global_values(gaussian.draw_global(q, noise)))(noise)


def fit_silos(
    algorithm: SFVI,
    silos: Mapping[str, Any],
    rounds: int,
    *,
    seed: int = 0,
    callback: Callable[[int, float], None] | None = None,
) -> SiloFit:
    """Run `rounds` iterations over all silos, each a name and its data.

    >>> import numpyro, numpyro.distributions as dist
    >>> def population():
    ...     return numpyro.sample("mean", dist.Normal(0.0, 10.0))
    >>> def silo(mean, data):
    ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])
    >>> fit = fit_silos(SFVI(population, silo, lr=0.05), {"a": {"y": jnp.ones(8)}, "b": {"y": jnp.zeros(8)}}, 500)
    >>> bool(abs(fit.server.shared.eta.mean[0] - 0.5) < 0.05)
    True
    """
    if not silos:
        raise UserError("there is no silo; give at least one, as a name and its data")
    algorithm = algorithm.planned(rounds)
    data = tuple(jax.tree.map(jnp.asarray, content) for content in silos.values())
    server_key, local_key = keys.of_start(seed)
    server = algorithm.init_server(server_key, data[0])
    local = tuple(_named(name, algorithm.init_local, local_key, content) for name, content in zip(silos, data, strict=True))
    bounds: list[np.ndarray] = []
    for start in range(0, rounds, STRETCH):
        count = min(STRETCH, rounds - start)
        server, local, bound = _stretch(algorithm, count, jax.random.key(seed), jnp.int32(start), server, local, data)
        bounds.append(np.asarray(bound))
        if not np.isfinite(bounds[-1]).all():
            bad = start + int((~np.isfinite(bounds[-1])).argmax()) + 1
            raise UserError(f"the bound is not finite in iteration {bad}; try a smaller lr, or a smaller start")
        if callback is not None:
            callback(start + count, float(bounds[-1][-1]))
    return SiloFit(algorithm, server, dict(zip(silos, local, strict=True)), np.concatenate(bounds))


def _named(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except UserError as problem:
        raise UserError(f"silo {name!r}: {problem}") from None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stretch(
    algorithm: SFVI, count: int, seed: Any, start: Any, server: Server, local: tuple[Local, ...], data: tuple[Any, ...]
) -> tuple[Server, tuple[Local, ...], Float[Array, " rounds"]]:
    def iteration(carry: Any, number: Any) -> tuple[Any, Float[Array, ""]]:
        server, local = carry
        key = jax.random.fold_in(seed, number)
        down = algorithm.broadcast(keys.fold(key, np.uint32(keys.BROADCAST)), server)
        partial, new = None, []
        for place, (own, content) in enumerate(zip(local, data, strict=True)):
            up, state = algorithm.client(keys.fold(key, np.uint32(place)), down, own, content)
            partial = reduce.add(
                reduce.empty(up) if partial is None else partial, jax.tree.map(lambda leaf: leaf[None], up), jnp.ones(1)
            )
            new.append(state)
        assert partial is not None
        summed = reduce.finish(Up, partial, {})
        server = algorithm.server(keys.fold(key, np.uint32(keys.SERVER)), server, down, summed)
        return (server, tuple(new)), summed.bound + algorithm.own_bound(down)

    (server, local), bounds = jax.lax.scan(iteration, (server, local), start + 1 + jnp.arange(count))
    return server, local, bounds
