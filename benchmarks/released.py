"""FedRep as the code that BPFed's authors released has it, whose figures its tables give under that name.

On each minibatch there is one step of the whole network and then four of the head alone, with Adam, whose averages a client
keeps from round to round. FedRep itself fits the head for epochs, then the body, and starts both optimisers anew.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

import fedbayes as fb
from fedbayes import trees
from fedbayes.algorithm import Algorithm, Data, Params
from fedbayes.algorithms.fedper import Down, Server, Up
from fedbayes.models import Model
from fedbayes.primitives.optimisers import move
from fedbayes.primitives.training import local_steps, mean_loss, rows

HEAD = ("head",)


class Local(NamedTuple):
    """The client's head, and the states of both optimisers."""

    personal: Params
    of_all: Any
    of_head: Any


@dataclasses.dataclass(frozen=True)
class ReleasedFedRep(Algorithm[Server, Local, Down, Up]):
    model: Model
    train: fb.Training
    steps: int = 4
    """Steps of the head after each of the whole network."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        return Server(trees.split(self.model.init(key), HEAD)[1], jnp.int32(0))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        w, optimiser = self.model.init(key), self.train.build(self.train.lr_of(1), self.model)
        personal, _ = trees.split(w, HEAD)
        return Local(personal, optimiser.init(w), optimiser.init(personal))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        return Down(server.shared, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        optimiser = self.train.build(down.lr, self.model)

        def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
            w, of_all, of_head, total, count = carry
            value, gradient = jax.value_and_grad(lambda w: mean_loss(self.model, w, batch))(w)
            w, of_all = move(optimiser, w, gradient, of_all)
            head, body = trees.split(w, HEAD)

            def again(_: Any, carry: Any) -> Any:
                head, of_head = carry
                gradient = jax.grad(lambda head: mean_loss(self.model, trees.merge(head, body), batch))(head)
                return move(optimiser, head, gradient, of_head)

            head, of_head = jax.lax.fori_loop(0, self.steps, again, (head, of_head))
            return trees.merge(head, body), of_all, of_head, total + value, count + 1

        start = (trees.merge(local.personal, down.shared), local.of_all, local.of_head, jnp.float32(0), jnp.float32(0))
        w, of_all, of_head, total, count = local_steps(step, start, key, data, self.train.batch, self.train.epochs)
        head, body = trees.split(w, HEAD)
        return Up(body, rows(data), total / jnp.maximum(count, 1)), Local(head, of_all, of_head)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        return Server(up.shared, server.round + 1)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        return local

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        return self.model.apply(trees.merge(local.personal, down.shared), x)[None]
