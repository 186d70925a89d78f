"""Kinds of algorithm that average some layers of a network and leave the others to each client."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, DownT, Mean, Params, Sum
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.training import Training, fit, rows


class Server(NamedTuple):
    """The shared layers, the number of rounds behind them, and the state of the server's optimiser where it has one."""

    shared: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """The client's own layers."""

    personal: Params


class Down(NamedTuple):
    """The shared layers and this round's step size."""

    shared: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """The shared layers after the client's local epochs, how many rows it has, and its training loss."""

    shared: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class SharedLayers(Stepping[Server, Local, DownT, Up]):
    """The server averages the shared layers; the personal ones never leave their client. All of them start alike."""

    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""

    @property
    @abc.abstractmethod
    def tune(self) -> Training:
        """Fitting the personal layers in `adapt`."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The shared layers at random."""
        return Server(*self.server_step.start(trees.split(self.model.init(key), self.personal)[1]))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """The personal layers at random."""
        return Local(trees.split(self.model.init(key), self.personal)[0])

    def server(self, key: PRNGKeyArray, server: Server, down: DownT, up: Up) -> Server:
        """The weighted mean of the shared layers, or a step towards it."""
        return Server(*self.server_step.next(*server, up.shared))

    def adapt(self, key: PRNGKeyArray, down: Any, local: Local, data: Data) -> Local:
        """Fit the personal layers to the shared ones as they are."""
        return Local(fit(self.model, local.personal, self.tune, key, data, fixed=down.shared)[0])

    def predict(self, key: PRNGKeyArray, down: Any, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the shared layers with the client's own."""
        return self.model.apply(trees.merge(local.personal, down.shared), x)[None]


@dataclasses.dataclass(frozen=True)
class Together(SharedLayers[Down]):
    """Clients train shared and personal layers together."""

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """The shared layers and the round's step size."""
        return Down(server.shared, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on all layers together."""
        w, loss = fit(self.model, trees.merge(local.personal, down.shared), self.train, key, data, down.lr)
        personal, shared = trees.split(w, self.personal)
        return Up(shared, rows(data), loss), Local(personal)
