"""FedRecon: personal parameters are rebuilt in every round and never kept (Singhal et al. 2021, Algorithm 1).

    f(g, l; rows) = −1/n Σ log p(y | x, g, l):  g is shared, l the client's, from a start l⁰ that all have
    client:  its rows in two halves, support S and query Q, drawn anew in each round
             l_i ← R(S, g): epochs of SGD on f(g, ·; S) from l⁰, g held fixed
             Δ_i = g − g_i,  g_i ← epochs of SGD on f(·, l_i; Q) from g, l_i held fixed
    server:  v ← m v + Σ_i |Q_i| Δ_i / Σ_i |Q_i|,   g ← g − η_s v          (uniform=True: the plain mean)
             l⁰ ← the mean of the l_i          (population=False, as in the paper: l⁰ stays as it was drawn)
    adapt:   l ← R(all rows, g), g as it is

So g is trained for what clients will do with it, to fit an l to few rows, and a client that takes part once, or never did, is
worth as much as any. A client keeps nothing while it trains. With `shared` both halves are all of its rows. The query half is
the larger one where the rows are odd: a client of one row still trains g, under l⁰.

Reference:
    Singhal, Sidahmed, Garrett, Wu, Rush, Prakash. Federated reconstruction: partially local federated learning. NeurIPS 2021.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Params, Sum
from fedbayes.primitives import population
from fedbayes.primitives.optimisers import Optimiser, ServerStep
from fedbayes.primitives.population import Moments, Populated, Population
from fedbayes.primitives.training import Training, fit, halves, rows, tuning


class Server(NamedTuple):
    """g, the start l⁰, the momentum v, the number of rounds behind them, and how many l_i are behind a l⁰ that moves."""

    shared: Params
    start: Params
    momentum: Any
    round: Int[Array, ""]
    replies: Float[Array, ""] | None = None


class Local(NamedTuple):
    """The client's l after `adapt`; nothing while training."""

    personal: Params | None


class Down(NamedTuple):
    """g, l⁰, and this round's step sizes on each."""

    shared: Params
    start: Params
    lr: Float[Array, ""]
    personal_lr: Float[Array, ""]


class Up(NamedTuple):
    """Δ_i, how many rows are in the query half, the training loss on them, and l_i in a sum."""

    delta: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]
    population: Sum[Moments | None] = None


@dataclasses.dataclass(frozen=True)
class FedRecon(Populated[Server, Local, Down, Up]):
    """Half of a client's rows rebuild its own layers, the other half trains the shared ones under them.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedRecon(mlp((64,), Categorical(10))).personal
    ('head',)
    """

    published: ClassVar[Mapping[str, Any]] = {"population": False}

    personal: tuple[str, ...] = ("head",)
    """Paths of l, the layers that are the client's own."""
    shared: bool = False
    """Whether all of a client's rows are both support and query, instead of half of them each."""
    reconstruct: Training = Training(epochs=5, batch=50, lr=0.1, momentum=0.9)
    """R in a client's round."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's epochs on g."""
    server_lr: float = 1.0
    """η_s, the step size of the server."""
    server_momentum: float = 0.0
    """m, the momentum of the server."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.1, momentum=0.9)
    """R in `adapt`; in the paper it is the same."""
    uniform: bool = False
    """Whether every client counts the same, instead of by its query rows."""
    server_optimiser: Optimiser = "sgd"
    """Optimiser of the server, any of Optax's by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server_step()

    def server_step(self) -> ServerStep:
        """The server's step."""
        return ServerStep(self.server_optimiser, self.server_lr, self.server_momentum)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """g and l⁰ at random."""
        start, shared = trees.split(self.model.init(key), self.personal)
        replies = jnp.float32(0) if self.population else None
        return Server(shared, start, self.server_step().init(shared), jnp.int32(0), replies)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """g, l⁰ and the round's step sizes."""
        number = server.round + 1
        return Down(server.shared, server.start, self.train.lr_of(number), self.reconstruct.lr_of(number))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Rebuild l on the support half, then epochs on g over the query half."""
        for_halves, for_personal, for_shared = jax.random.split(key, 3)
        support, query = (data, data) if self.shared else halves(for_halves, data)
        personal, _ = fit(self.model, down.start, self.reconstruct, for_personal, support, down.personal_lr, fixed=down.shared)
        shared, loss = fit(self.model, down.shared, self.train, for_shared, query, down.lr, fixed=personal)
        delta = jax.tree.map(jnp.subtract, down.shared, shared)
        moments = population.sent(personal, down.start) if self.population else None
        return Up(delta, jnp.float32(1) if self.uniform else rows(query), loss, moments), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """A step of SGD with momentum against the mean Δ; l⁰ goes to the mean of the l_i, or stays."""
        shared, momentum = self.server_step().against(server.shared, server.momentum, up.delta)
        start, replies = server.start, server.replies
        if replies is not None and up.population is not None:
            start, _, replies = population.next(Population(start, None, replies), up.population, self.N)
        return Server(shared, start, momentum, server.round + 1, replies)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Rebuild l on all rows, whatever it was before."""
        return Local(fit(self.model, down.start, self.tune, key, data, fixed=down.shared)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: g under the client's l, or under l⁰ where it has none."""
        personal = down.start if local.personal is None else local.personal
        return self.model.apply(trees.merge(personal, down.shared), x)[None]
