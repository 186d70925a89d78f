"""Kinds of algorithm whose server keeps K networks, K of each array."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes.algorithm import LocalT, Params, UpT, setting
from fedbayes.models import Bernoulli, Categorical, Likelihood, Model, Poisson
from fedbayes.primitives.averaging import Stepping


class Server(NamedTuple):
    """The networks (K of each array), the number of rounds behind them, and the state of the server's optimiser if any."""

    theta: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Down(NamedTuple):
    """The networks and this round's step size."""

    theta: Params
    lr: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Several(Stepping[Server, LocalT, Down, UpT]):
    """K networks that start apart: alike, they would stay alike."""

    K: int = setting(2, least=1)
    """Networks."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """K networks at random."""
        return Server(*self.server_step.start(random_starts(self.model, key, self.K)))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """All networks and the round's step size."""
        return Down(server.theta, self.train.lr_of(server.round + 1))

    def outputs(self, theta: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "K n k"]:
        """What each network gives."""
        return jax.vmap(lambda one: self.model.apply(one, x))(theta)


@dataclasses.dataclass(frozen=True)
class Grouped(Several[LocalT, UpT]):
    """A client trains one network, and sends its step in the place of that network, zeros in the others."""

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Any) -> Server:
        """The mean of each group that has somebody, or a step towards it; `up.member` is the group's share of the weight."""
        return Server(*self.server_step.next(*server, moved_means(server.theta, up.moved, up.member)))

    def sent(self, group: Int[Array, ""], new: Params, old: Params) -> tuple[Params, Float[Array, " K"]]:
        """new − old in the place of the group, and a one in that place."""
        member = (jnp.arange(self.K) == group).astype(jnp.float32)
        return jax.tree.map(lambda new, old: member.reshape((-1,) + (1,) * new.ndim) * (new - old)[None], new, old), member


def random_starts(model: Model, key: PRNGKeyArray, K: int) -> Params:
    """K networks at random, stacked; the first is `model.init(key)`, so that one network is what other methods start from."""
    keys = [key, *jax.random.split(jax.random.fold_in(key, 1), K - 1)] if K > 1 else [key]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(model.init(one) for one in keys))


def one_of(theta: Params, place: Int[Array, ""]) -> Params:
    """One of the networks."""
    return jax.tree.map(lambda leaf: leaf[place], theta)


def by_shares(shares: Float[Array, "*n K"], draws: int) -> Int[Array, s * n]:
    """The network of each draw: the one under the quantile (s + ½)/S, so that shares are right to 1/S, without chance.

    >>> by_shares(jnp.array([0.5, 0.25, 0.25]), 4).tolist()
    [0, 0, 1, 2]
    """
    edges = jnp.cumsum(shares, axis=-1)
    quantiles = ((jnp.arange(draws, dtype=edges.dtype) + 0.5) / draws).reshape((-1,) + (1,) * edges.ndim)
    return jnp.minimum(jnp.sum(quantiles > edges[None], axis=-1), edges.shape[-1] - 1)


def overlaps(shares: Float[Array, "n K"], draws: int) -> Float[Array, "s n K"]:
    """How much of each of S equal parts of [0, 1] is each network's, so that shares are exact on average.

    >>> overlaps(jnp.array([[0.625, 0.375]]), 4)[:, 0, 0].tolist()
    [1.0, 1.0, 0.5, 0.0]
    """
    upper = jnp.cumsum(shares, axis=-1).at[..., -1].set(1.0)
    lower = jnp.concatenate([jnp.zeros_like(upper[..., :1]), upper[..., :-1]], axis=-1)
    start = (jnp.arange(draws, dtype=shares.dtype) / draws).reshape(draws, 1, 1)
    inside = jnp.minimum(upper[None], start + 1 / draws) - jnp.maximum(lower[None], start)
    weight = jnp.maximum(inside, 0.0)
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def blended(likelihood: Likelihood, outputs: Float[Array, "K n k"], weights: Float[Array, "s n K"]) -> Float[Array, "s n k"]:
    """Outputs whose distribution is the mixture of the networks' by these weights; of numbers, its mean and variance.

    >>> from fedbayes.models import Bernoulli
    >>> a, half = jnp.array([[[-30.0]], [[30.0]]]), jnp.full((1, 1, 2), 0.5)
    >>> abs(blended(Bernoulli(), a, half).item()) < 1e-5  # p = (0 + 1)/2
    True
    """
    log_w, networks = jnp.log(weights)[..., None], jnp.swapaxes(outputs, 0, 1)[None]

    def mixed(logs: Float[Array, "1 n K k"]) -> Float[Array, "s n k"]:
        return jax.nn.logsumexp(log_w + logs, axis=2)

    if isinstance(likelihood, Categorical):
        return mixed(jax.nn.log_softmax(networks, axis=-1))
    if isinstance(likelihood, Bernoulli):
        return mixed(jax.nn.log_sigmoid(networks)) - mixed(jax.nn.log_sigmoid(-networks))
    if isinstance(likelihood, Poisson):
        return mixed(networks)
    mean = jnp.sum(weights[..., None] * networks[..., :1], axis=2)
    if networks.shape[-1] == 1:
        return mean
    away = jnp.exp(2 * networks[..., 1:]) + (networks[..., :1] - mean[:, :, None]) ** 2
    return jnp.concatenate([mean, jnp.log(jnp.sum(weights[..., None] * away, axis=2)) / 2], axis=-1)


def moved_means(theta: Params, moved: Params, member: Float[Array, " K"]) -> Params:
    """K networks, each moved by the mean over its members; one without members stays."""

    def mean(old: Array, moved: Array) -> Array:
        share = member.reshape((-1,) + (1,) * (old.ndim - 1))
        return old + jnp.where(share > 0, moved / jnp.where(share > 0, share, 1.0), 0.0)

    return jax.tree.map(mean, theta, moved)
