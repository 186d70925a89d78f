"""FedRep: a shared representation under personal heads, learnt in turns (Collins et al. 2021, Algorithm 1).

    f_i(h, φ) = −1/n_i Σ log p(y | x, h, φ):  the representation φ is shared, the head h_i is the client's
    client:  h_i ← epochs of SGD on f_i(·, φ), from the head that it kept, φ as it was sent
             φ_i ← epochs of SGD on f_i(h_i, ·), from φ, the new head held fixed
    server:  φ ← Σ_i n_i φ_i / Σ_i n_i          (uniform=True: the plain mean)
    adapt:   epochs on the head alone, φ as it is

A round takes many epochs on the head, which is small and costs no message, and few on φ; FedPer moves both together. In the
paper's algorithm φ takes one gradient step and the server takes the plain mean; in its experiments φ takes epochs and clients
count by their rows. Only φ leaves a client. All heads start alike.

Reference:
    Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized federated learning. ICML 2021.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, NetworkAlgorithm, Params
from fedbayes.algorithms.fedper import Local, Server, Up
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss, rows


class Down(NamedTuple):
    """The shared representation and this round's step sizes, its own and the head's."""

    shared: Params
    lr: Float[Array, ""]
    head_lr: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class FedRep(NetworkAlgorithm[Server, Local, Down, Up]):
    """A client first fits its head to the representation, then the representation to its head.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedRep(mlp((64,), Categorical(10))).head.epochs
    10
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""
    head: Training = Training(epochs=10, batch=50, lr=0.1, momentum=0.9)
    """The first part of a client's round, on its head."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """The second part, on the representation."""
    tune: Training = Training(epochs=10, batch=50, lr=0.01, momentum=0.9)
    """Fitting the head in `adapt`."""
    uniform: bool = False
    """Whether every client counts the same, instead of by its rows."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """φ at random."""
        return Server(*self.server_step.start(trees.split(self.model.init(key), self.personal)[1]))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """The head at random."""
        return Local(trees.split(self.model.init(key), self.personal)[0])

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """φ and the round's step sizes."""
        return Down(server.shared, self.train.lr_of(server.round + 1), self.head.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Epochs on the head, then epochs on φ; the loss is that of the latter."""
        for_head, for_shared = jax.random.split(key)
        personal, _ = self._fit(local.personal, down.shared, self.head, down.head_lr, for_head, data)
        shared, loss = self._fit(down.shared, personal, self.train, down.lr, for_shared, data)
        return Up(shared, jnp.float32(1) if self.uniform else rows(data), loss), Local(personal)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean of the representations, or a step towards it."""
        return Server(*self.server_step.next(*server, up.shared))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fit the head to φ as it is."""
        return Local(self._fit(local.personal, down.shared, self.tune, self.tune.lr_of(1), key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: φ under the client's own head."""
        return self.model.apply(trees.merge(local.personal, down.shared), x)[None]

    def _fit(
        self, moving: Params, fixed: Params, training: Training, lr: Float[Array, ""], key: PRNGKeyArray, data: Data
    ) -> tuple[Params, Float[Array, ""]]:
        def f(moving: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, trees.merge(moving, fixed), batch)

        return descend(self.model, f, moving, training, lr, key, data)
