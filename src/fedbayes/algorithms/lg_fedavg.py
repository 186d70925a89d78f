"""LG-FedAvg: local representations under a shared last layer (Liang et al. 2020, Algorithm 1).

    w_i = (local_i, shared):  what comes first in the network is the client's, what comes last is averaged
    client:  E epochs of SGD on F_i(local_i, shared_i), both parts together, from its own layers and the broadcast ones
    server:  shared ← Σ_i n_i shared_i / Σ_i n_i
    adapt:   a client that never trained fits layers of its own under the shared ones as they are

It is FedPer with the split turned round, and runs as such. In the paper's experiments the layers start from a model that FedAvg
has trained for some rounds; here all start alike, at random.

Reference:
    Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think locally, act globally: federated learning with
    local and global representations. 2020.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, NetworkAlgorithm
from fedbayes.algorithms.fedper import Down, FedPer, Local, Server, Up
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training


@dataclasses.dataclass(frozen=True)
class LGFedAvg(NetworkAlgorithm[Server, Local, Down, Up]):
    """Each client has its own representation; the last layer is averaged.

    >>> from fedbayes.models import Categorical, mlp
    >>> LGFedAvg(mlp((64,), Categorical(10))).personal
    ('body',)
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    personal: tuple[str, ...] = ("body",)
    """Paths of the layers that stay with the client."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = Training(epochs=5, batch=50, lr=0.01, momentum=0.9)
    """Fitting the personal layers in `adapt`."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The shared layers at random."""
        return self._turned.init_server(key)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """The client's own layers at random."""
        return self._turned.init_local(key, data)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """The shared layers and the round's step size."""
        return self._turned.broadcast(key, server)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on all layers together."""
        return self._turned.client(key, down, local, data)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean of the shared layers."""
        return self._turned.server(key, server, down, up)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fit the client's own layers under the shared ones as they are."""
        return self._turned.adapt(key, down, local, data)

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the shared layers on the client's own."""
        return self._turned.predict(key, down, local, x)

    @property
    def _turned(self) -> FedPer:
        return FedPer(self.model, self.personal, self.train, self.tune, self.server_step)
