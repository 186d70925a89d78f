"""The population of clients' own layers: the mean of what clients keep and, where a prior needs it, the variance.

    z_i ~ N(m, v), weight by weight; a client keeps z_i, or a Gaussian N(μ_i, σ_i²) with z_i = μ_i
    client:  sends z_i − m, σ_i² + (z_i − m)² and 1, of which the server receives the sums over the S clients of the round
    server:  n ← min(n + S, N)
             δ = 1/n Σ_i (z_i − m),   m ← m + δ,   v ← (1 − S/n) v + 1/n Σ_i (σ_i² + (z_i − m)²) − δ²
    a client without layers of its own starts at m, under the prior N(m, v)

If all N clients take part, m is the mean of their layers and v the variance of the mixture of their Gaussians. In smaller
cohorts m is the mean of all replies until there are N of them, then an exponential average over about the last N: each client
counts once, and what was drawn at random counts only until the first reply. Moments are taken about the m that was broadcast,
which loses no digits to cancellation. They are sums; of a cohort of one the server learns that client's layers.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedbayes import trees
from fedbayes.algorithm import DownT, LocalT, NetworkAlgorithm, Params, ServerT, UpT, fact


class Population(NamedTuple):
    """m, v where there is a prior, and n, the replies behind them."""

    mean: Params
    variance: Params | None
    replies: Float[Array, ""]


class Moments(NamedTuple):
    """Of one client z − m, σ² + (z − m)² where there is a prior, and 1; of a round their sums."""

    first: Params
    second: Params | None
    clients: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Populated(NetworkAlgorithm[ServerT, LocalT, DownT, UpT]):
    """Clients keep layers of their own; the population's mean of them is the start of a client that has none."""

    _: dataclasses.KW_ONLY
    population: bool = True
    """Whether clients send their own layers into a sum, whose mean is where newcomers start; else they start at random."""
    N: int | None = fact("clients", needed_by="population")
    """N, the clients that may take part; by default those of the run."""

    @property
    def has_global(self) -> bool:
        """Only with a population: without one, a client that has no layers of its own has random ones."""
        return self.population


def start(mean: Params, variance: Params | None = None) -> Population:
    """The population before the first reply: where the network starts."""
    return Population(mean, variance, jnp.float32(0))


def sent(kept: Params, mean: Params, variance: Params | None = None) -> Moments:
    """A client's part of the sums, from the layers that it keeps, the m that was broadcast and, where it has them, its σ².

    >>> sent({"w": jnp.float32(3.0)}, {"w": jnp.float32(1.0)}, {"w": jnp.float32(0.25)}).second["w"].item()
    4.25
    """
    first = jax.tree.map(jnp.subtract, kept, mean)
    second = None if variance is None else jax.tree.map(lambda offset, square: square + offset**2, first, variance)
    return Moments(first, second, jnp.float32(1))


def next(population: Population, sums: Moments, N: int | None) -> Population:
    """The population after a round; without N, as if all had taken part.

    >>> sums = Moments(jnp.float32(6.0), jnp.float32(20.0), jnp.float32(2))  # of 2 and 4, about 0
    >>> [float(part) for part in next(start(jnp.float32(0), jnp.float32(0)), sums, 2)]
    [3.0, 1.0, 2.0]
    """
    n = sums.clients if N is None else jnp.minimum(population.replies + sums.clients, jnp.float32(N))
    n = jnp.maximum(n, 1.0)
    delta = jax.tree.map(lambda first: first / n, sums.first)

    def spread(old: Array, second: Array, delta: Array) -> Array:
        return jnp.maximum((1 - sums.clients / n) * old + second / n - delta**2, 0.0)

    variance = None if sums.second is None else jax.tree.map(spread, population.variance, sums.second, delta)
    return Population(jax.tree.map(jnp.add, population.mean, delta), variance, n)


def begin(own: Bool[Array, ""], kept: Params, population: Params | None) -> Params:
    """A client's own layers, or the population's where it has none; without a population, those that it was given."""
    return kept if population is None else trees.choose(own, kept, population)
