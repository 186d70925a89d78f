"""FedRep: a shared representation under personal heads, learnt in turns (Collins et al. 2021, Algorithm 1).

    f_i(h, φ) = −1/n_i Σ log p(y | x, h, φ):  the representation φ is shared, the head h_i is the client's
    client:  h_i ← epochs of SGD on f_i(·, φ), from the head that it kept, φ as it was sent
             φ_i ← epochs of SGD on f_i(h_i, ·), from φ, the new head held fixed
    server:  φ ← Σ_i n_i φ_i / Σ_i n_i          (uniform=True: the plain mean)
    adapt:   epochs on the head alone, φ as it is

A round takes many epochs on the head, which is small and costs no message, and few on φ; FedPer moves both together. In the
paper's algorithm φ takes one gradient step and the server takes the plain mean; in its experiments φ takes epochs and clients
count by their rows. All heads start alike. Besides φ, a client's head enters a sum over the clients of a round, whose mean is
the head of a client that has none; with population=False only φ leaves a client, and a newcomer's head is random.

Reference:
    Collins, Hassani, Mokhtari, Shakkottai. Exploiting shared representations for personalized federated learning. ICML 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.algorithm import Data, Params
from fedbayes.primitives.averaging import Weighted
from fedbayes.primitives.layers import Local, Server, SharedLayers, Up, begin, kept
from fedbayes.primitives.population import Population
from fedbayes.primitives.training import Training, fit, tuning


class Down(NamedTuple):
    """The shared representation, this round's step sizes, its own and the head's, and the population of heads."""

    shared: Params
    lr: Float[Array, ""]
    head_lr: Float[Array, ""]
    population: Population | None = None


@dataclasses.dataclass(frozen=True)
class FedRep(SharedLayers[Down], Weighted[Server, Local, Down, Up]):
    """A client first fits its head to the representation, then the representation to its head.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedRep(mlp((64,), Categorical(10))).head.epochs
    10
    """

    published: ClassVar[Mapping[str, Any]] = {"population": False}

    head: Training = Training(epochs=10, batch=50, lr=0.1, momentum=0.9)
    """The first part of a client's round, on its head."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """The second part, on the representation."""
    tune: Training = tuning(epochs=10, batch=50, lr=0.01, momentum=0.9)
    """Fitting the head in `adapt`."""

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """φ, the round's step sizes and the population."""
        number = server.round + 1
        return Down(server.shared, self.train.lr_of(number), self.head.lr_of(number), server.population)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Epochs on the head, then epochs on φ; the loss is that of the latter."""
        for_head, for_shared = jax.random.split(key)
        personal, _ = fit(self.model, begin(down, local), self.head, for_head, data, down.head_lr, fixed=down.shared)
        shared, loss = fit(self.model, down.shared, self.train, for_shared, data, down.lr, fixed=personal)
        moments, local = kept(down, personal)
        return Up(shared, self.weight(data), loss, moments), local
