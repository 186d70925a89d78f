"""Ditto: personal models that stay near the global one (Li et al. 2021, Algorithm 1).

    client:  w_i ← w, then E epochs of SGD on F_i(w_i) = −1/n_i Σ log p(y | x, w_i)
             v_i ← epochs of SGD on h_i(v_i; w) = F_i(v_i) + λ/2 ‖v_i − w‖², from where v_i stands
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean, as the paper has it)
    adapt:   v_i alone, w as it is

v_i never leaves its client and w does not know of it: the messages and w are FedAvg's. With λ = 0, v_i is the client's training
alone; as λ grows, v_i goes to w. A client that takes part for the first time starts v_i at w. Both models see the same
minibatches.

Reference:
    Li, Hu, Beirami, Smith. Ditto: fair and robust federated learning through personalization. ICML 2021.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, NetworkAlgorithm, Params
from fedbayes.algorithms.fedavg import Down, Server, Up
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss, rows


class Local(NamedTuple):
    """The client's own model v, and whether it has one yet; until then w stands for it."""

    v: Params
    own: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Ditto(NetworkAlgorithm[Server, Local, Down, Up]):
    """Federated averaging, and beside it a model of the client's own that a pull of strength λ holds near.

    >>> from fedbayes.models import Categorical, mlp
    >>> Ditto(mlp((64,), Categorical(10))).lam
    1.0
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    lam: float = 1.0
    """λ, strength of the pull of the client's own model towards w."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    personal_epochs: int = 1
    """Epochs of a round on the client's own model, otherwise trained as w is."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Training of the client's own model in `adapt`, with the same pull."""
    uniform: bool = False
    """Whether every client counts the same, instead of by its rows."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lam >= 0:
            raise UserError(f"lam is {self.lam}, but it weighs a squared distance: give 0 or more")
        if self.personal_epochs < 0:
            raise UserError(f"personal_epochs is {self.personal_epochs}, but it counts epochs: give 0 or more")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """w at random."""
        return Server(*self.server_step.start(self.model.init(key)))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No model of its own yet."""
        return Local(trees.zeros(self.model.init(key)), jnp.bool_(False))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """w and the round's step size."""
        return Down(server.params, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w for the server, and from v for the client."""

        def F(w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, w, batch)

        w, loss = descend(self.model, F, down.params, self.train, down.lr, key, data)
        personal = dataclasses.replace(self.train, epochs=self.personal_epochs)
        v = self._personal(down, local, personal, down.lr, key, data)
        return Up(w, jnp.float32(1) if self.uniform else rows(data), loss), Local(v, jnp.bool_(True))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean, or a step towards it."""
        return Server(*self.server_step.next(*server, up.params))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Epochs on the client's own model, from v or, where it has none, from w."""
        return Local(self._personal(down, local, self.tune, self.tune.lr_of(1), key, data), jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: v, or w where the client has none."""
        return self.model.apply(_own(down, local), x)[None]

    def _personal(
        self, down: Down, local: Local, training: Training, lr: Float[Array, ""], key: PRNGKeyArray, data: Data
    ) -> Params:
        """v after epochs on h."""

        def h(v: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, v, batch) + self.lam / 2 * trees.squared_distance(v, down.params)

        return descend(self.model, h, _own(down, local), training, lr, key, data)[0]


def _own(down: Down, local: Local) -> Params:
    return trees.choose(local.own, local.v, down.params)
