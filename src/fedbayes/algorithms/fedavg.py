"""FedAvg: federated averaging (McMahan et al. 2017, Algorithm 1), personalised by fine-tuning.

    client:  w_i ← w, then E epochs of SGD on its own mean loss F_i(w_i) = −1/n_i Σ log p(y | x, w_i)
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean)

Nothing stays on a client while it trains. `adapt` fine-tunes a copy of w that the client keeps (FedAvg+, Jiang et al. 2019).

References:
    McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-efficient learning of deep networks from decentralized
    data. AISTATS 2017. — Jiang, Konečný, Rush, Kannan. Improving federated learning personalization via model agnostic
    meta learning. 2019.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss, rows


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
class FedAvg(NetworkAlgorithm[Server, Local, Down, Up]):
    """Federated averaging, with fine-tuning as `adapt`.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedAvg(mlp((64,), Categorical(10))).train.batch
    50
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`."""
    uniform: bool = False
    """Whether every client counts the same, instead of by its rows."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """w at random."""
        return Server(*self.server_step.start(self.model.init(key)))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """w and the round's step size."""
        return Down(server.params, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w."""
        params, loss = self._fit(down.params, self.train, down.lr, key, data)
        return Up(params, jnp.float32(1) if self.uniform else rows(data), loss), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean, or a step towards it."""
        return Server(*self.server_step.next(*server, up.params))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fine-tune a copy of w."""
        return Local(self._fit(down.params, self.tune, self.tune.lr_of(1), key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's model, or w where it has none."""
        return self.model.apply(down.params if local.params is None else local.params, x)[None]

    def _fit(
        self, w: Params, training: Training, lr: Float[Array, ""], key: PRNGKeyArray, data: Data
    ) -> tuple[Params, Float[Array, ""]]:
        def F(w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, w, batch)

        return descend(self.model, F, w, training, lr, key, data)
