"""Kinds of algorithm whose server takes a mean over clients, or steps towards it.

A kind is abstract and holds what its algorithms have in common: the server's state, the messages, and the step that the server
takes. An algorithm derives from a kind, is final, and holds what is its own.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, DownT, LocalT, Mean, NetworkAlgorithm, Params, ServerT, Sum, UpT
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, fit, rows


class Server(NamedTuple):
    """The model, the number of rounds behind it, and the state of the server's optimiser where it has one."""

    params: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """A fine-tuned model after `adapt`; nothing while training."""

    params: Params | None


class Down(NamedTuple):
    """The model and this round's step size."""

    params: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """The client's model after its local epochs, how many rows it has, and its training loss."""

    params: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Stepping(NetworkAlgorithm[ServerT, LocalT, DownT, UpT]):
    """The server's optimiser steps towards a mean over clients, each of which trains by `train`."""

    _: dataclasses.KW_ONLY
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    @property
    @abc.abstractmethod
    def train(self) -> Training:
        """A client's round."""


@dataclasses.dataclass(frozen=True)
class Weighted(Stepping[ServerT, LocalT, DownT, UpT]):
    """A client counts by its rows, or all count the same."""

    _: dataclasses.KW_ONLY
    uniform: bool = False
    """Whether every client counts the same, instead of by its rows."""

    def weight(self, data: Data) -> Float[Array, ""]:
        """How much a client counts."""
        return jnp.float32(1) if self.uniform else rows(data)


@dataclasses.dataclass(frozen=True)
class Averaging(Weighted[Server, LocalT, Down, Up]):
    """The server averages one network, as FedAvg does."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """w at random."""
        return Server(*self.server_step.start(self.model.init(key)))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """w and the round's step size."""
        return Down(server.params, self.train.lr_of(server.round + 1))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean, or a step towards it."""
        return Server(*self.server_step.next(*server, up.params))


@dataclasses.dataclass(frozen=True)
class FineTuning(NetworkAlgorithm[ServerT, Local, DownT, UpT]):
    """A client keeps nothing while it trains; `adapt` fine-tunes a copy of `down.params`, which it then predicts with."""

    @property
    @abc.abstractmethod
    def tune(self) -> Training:
        """Fine-tuning of the whole model in `adapt`."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None)

    def adapt(self, key: PRNGKeyArray, down: Any, local: Local, data: Data) -> Local:
        """Fine-tune a copy of w."""
        return Local(fit(self.model, down.params, self.tune, key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Any, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's model, or w where it has none."""
        return self.model.apply(down.params if local.params is None else local.params, x)[None]
