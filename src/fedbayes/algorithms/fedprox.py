"""FedProx: federated averaging with a proximal term (Li et al. 2020, Algorithm 2).

    client:  minimise F_i(w_i) + μ/2 ‖w_i − w‖²,  F_i(w_i) = −1/n_i Σ log p(y | x, w_i)
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean, as the paper has it with clients drawn by n_i)

What a client minimises is its negative log posterior, over n_i, under the prior N(w, 1/(μ n_i)): the simplest hierarchical
model here. `adapt` minimises the same. The messages are FedAvg's; μ = 0 is FedAvg.

Reference:
    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated optimization in heterogeneous networks. MLSys 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, NetworkAlgorithm, Params
from fedbayes.algorithms.fedavg import Down, Local, Server, Up
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss, rows


@dataclasses.dataclass(frozen=True)
class FedProx(NetworkAlgorithm[Server, Local, Down, Up]):
    """Federated averaging with a pull of strength μ towards the broadcast model.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedProx(mlp((64,), Categorical(10)), mu=0.1).mu
    0.1
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    mu: float = 0.01
    """Strength μ of the proximal term."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`, with the same pull."""
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
        """Local epochs from w on the pulled objective."""
        params, loss = descend(self.model, self._objective(down.params), down.params, self.train, down.lr, key, data)
        return Up(params, jnp.float32(1) if self.uniform else rows(data), loss), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean, or a step towards it."""
        return Server(*self.server_step.next(*server, up.params))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """The client's own mode of the pulled objective."""
        lr = self.tune.lr_of(1)
        return Local(descend(self.model, self._objective(down.params), down.params, self.tune, lr, key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's model, or w where it has none."""
        return self.model.apply(down.params if local.params is None else local.params, x)[None]

    def _objective(self, w: Params) -> Callable[[Params, PRNGKeyArray, Data], Float[Array, ""]]:
        def objective(w_i: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, w_i, batch) + self.mu / 2 * trees.squared_distance(w_i, w)

        return objective
