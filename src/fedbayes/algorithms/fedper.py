"""FedPer: a shared base and personal last layers (Arivazhagan et al. 2019, Algorithms 1 and 2).

    w_i = (shared, personal_i)
    client:  E epochs of SGD on F_i(shared_i, personal_i), both parts together, from the broadcast base and its own head
    server:  shared ← Σ_i n_i shared_i / Σ_i n_i
    adapt:   a client that never trained fits a head of its own to the base as it is

Only the base leaves a client. All heads start alike, as where the server draws the network once and sends it to everyone.

Reference:
    Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers. 2019.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss, rows


class Server(NamedTuple):
    """The shared base, the number of rounds behind it, and the state of the server's optimiser where it has one."""

    shared: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """The client's own layers."""

    personal: Params


class Down(NamedTuple):
    """The shared base and this round's step size."""

    shared: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """The base after the client's local epochs, how many rows it has, and its training loss."""

    shared: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class FedPer(NetworkAlgorithm[Server, Local, Down, Up]):
    """The last layers stay with the client, the rest is averaged.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedPer(mlp((64,), Categorical(10))).personal
    ('head',)
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = Training(epochs=5, batch=50, lr=0.01, momentum=0.9)
    """Fitting the personal layers in `adapt`."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The base at random."""
        return Server(*self.server_step.start(trees.split(self.model.init(key), self.personal)[1]))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """The personal layers at random."""
        return Local(trees.split(self.model.init(key), self.personal)[0])

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """The base and the round's step size."""
        return Down(server.shared, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on base and head together."""

        def F(w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, w, batch)

        start = trees.merge(local.personal, down.shared)
        w, loss = descend(self.model, F, start, self.train, down.lr, key, data)
        personal, shared = trees.split(w, self.personal)
        return Up(shared, rows(data), loss), Local(personal)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean of the bases, or a step towards it."""
        return Server(*self.server_step.next(*server, up.shared))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fit the personal layers to the base as it is."""

        def F(personal: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, trees.merge(personal, down.shared), batch)

        return Local(descend(self.model, F, local.personal, self.tune, self.tune.lr_of(1), key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the shared base under the client's own layers."""
        return self.model.apply(trees.merge(local.personal, down.shared), x)[None]
