"""Kinds of algorithm that average some layers of a network and leave the others to each client."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, DownT, Mean, Params, Sum
from fedbayes.primitives import population
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.population import Moments, Populated, Population
from fedbayes.primitives.training import Training, fit, rows


class Server(NamedTuple):
    """The shared layers, the number of rounds behind them, the server's optimiser's state if any, and the population's m."""

    shared: Params
    round: Int[Array, ""]
    optimiser: Any = None
    population: Population | None = None


class Local(NamedTuple):
    """The client's own layers, and whether it has them yet; until then the population's mean stands for them."""

    personal: Params
    own: Bool[Array, ""] | None = None


class Down(NamedTuple):
    """The shared layers, this round's step size, and the population of the personal layers."""

    shared: Params
    lr: Float[Array, ""]
    population: Population | None = None


class Up(NamedTuple):
    """The shared layers after the client's local epochs, its rows, its training loss, and its personal layers in a sum."""

    shared: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]
    population: Sum[Moments | None] = None


@dataclasses.dataclass(frozen=True)
class SharedLayers(Stepping[Server, Local, DownT, Up], Populated[Server, Local, DownT, Up]):
    """The server averages the shared layers; the personal ones stay with their client, and all of them start alike.

    With `population` the server also learns the mean of the personal layers, from sums: a client that has none starts there.
    """

    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""

    @property
    @abc.abstractmethod
    def tune(self) -> Training:
        """Fitting the personal layers in `adapt`."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The shared layers at random, and the population at the personal ones drawn with them."""
        personal, shared = trees.split(self.model.init(key), self.personal)
        return Server(*self.server_step.start(shared), population.start(personal) if self.population else None)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No personal layers yet; without a population, random ones."""
        personal, _ = trees.split(self.model.init(key), self.personal)
        return Local(trees.zeros(personal) if self.population else personal, jnp.bool_(False))

    def server(self, key: PRNGKeyArray, server: Server, down: DownT, up: Up) -> Server:
        """The weighted mean of the shared layers, or a step towards it; and the population after the round."""
        shared, number, optimiser = self.server_step.next(server.shared, server.round, server.optimiser, up.shared)
        if server.population is None or up.population is None:
            return Server(shared, number, optimiser)
        return Server(shared, number, optimiser, population.next(server.population, up.population, self.N))

    def adapt(self, key: PRNGKeyArray, down: Any, local: Local, data: Data) -> Local:
        """Fit the personal layers to the shared ones as they are."""
        return Local(fit(self.model, begin(down, local), self.tune, key, data, fixed=down.shared)[0], jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Any, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the shared layers with the client's own, or with the population's mean where it has none."""
        return self.model.apply(trees.merge(begin(down, local), down.shared), x)[None]


def begin(down: Any, local: Local) -> Params:
    """The personal layers that a client has, or starts from."""
    if down.population is None or local.own is None:
        return local.personal
    return population.begin(local.own, local.personal, down.population.mean)


def kept(down: Any, personal: Params) -> tuple[Moments | None, Local]:
    """A client's part of the population's sums and its state, after a round."""
    moments = None if down.population is None else population.sent(personal, down.population.mean)
    return moments, Local(personal, jnp.bool_(True))


@dataclasses.dataclass(frozen=True)
class Together(SharedLayers[Down]):
    """Clients train shared and personal layers together."""

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """The shared layers, the round's step size and the population."""
        return Down(server.shared, self.train.lr_of(server.round + 1), server.population)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on all layers together."""
        w, loss = fit(self.model, trees.merge(begin(down, local), down.shared), self.train, key, data, down.lr)
        personal, shared = trees.split(w, self.personal)
        moments, local = kept(down, personal)
        return Up(shared, rows(data), loss, moments), local
