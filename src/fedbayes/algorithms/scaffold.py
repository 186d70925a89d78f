"""SCAFFOLD: federated averaging with control variates against client drift (Karimireddy et al. 2020, Algorithm 1, option II).

    client:  y_i ← x, then K steps  y_i ← y_i − η (g_i(y_i) − c_i + c)
             c_i⁺ = c_i − c + (x − y_i) / (K η)
    server:  x ← x + η_g / |S| Σ_i (y_i − x),   c ← c + 1/N Σ_i (c_i⁺ − c_i)          over the cohort S of N clients

c_i estimates the gradient of client i, c that of all clients. Without them, several local steps pull y_i towards the optimum of
client i; with them every step is one for all clients, and with full participation the fixed point is the optimum of the mean
loss. Clients count the same, as in the paper. With one client c = c_i, and SCAFFOLD is FedAvg. c_i is not sent, but the change
that a client sends in its first round is its first c_i: only the sum over the cohort hides it. `adapt` fine-tunes a copy of x.

Reference:
    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: stochastic controlled averaging for federated learning. ICML 2020.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum, fact
from fedbayes.errors import UserError
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, fit, rows, tuning


class Server(NamedTuple):
    """The model x, the control variate c, the number of rounds behind them, and the state of the server's optimiser if any."""

    x: Params
    c: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """The client's control variate c_i, and a fine-tuned model after `adapt`."""

    c: Params
    tuned: Params | None


class Down(NamedTuple):
    """The model, the control variate and this round's step size η."""

    x: Params
    c: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """y_i − x, c_i⁺ − c_i, and the training loss."""

    step: Mean[Params]
    change: Sum[Params]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Scaffold(NetworkAlgorithm[Server, Local, Down, Up]):
    """Averaging whose local steps are corrected by control variates.

    >>> from fedbayes.models import Categorical, mlp
    >>> Scaffold(mlp((64,), Categorical(10))).planned(rounds=10, clients=20).N
    20
    """

    train: Training = Training(epochs=1, batch=50, lr=0.1)
    """A client's round, by plain SGD: c_i is the mean of its gradients."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`."""
    N: int | None = fact("clients")
    """How many clients may train; by default those of the run."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; its `lr` is η_g."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.optimiser != "sgd" or self.train.momentum or not self.train.lr:
            given = f"{self.train.optimiser} with momentum {self.train.momentum} and lr {self.train.lr}"
            raise UserError(f"train is {given}, but SCAFFOLD's clients take plain steps of sgd; give momentum 0 and lr above 0")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """x at random, c = 0."""
        x, start, optimiser = self.server_step.start(self.model.init(key))
        return Server(x, trees.zeros(x), start, optimiser)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """c_i = 0."""
        return Local(trees.zeros(self.model.init(key)), None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """x, c and the round's step size."""
        return Down(server.x, server.c, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Corrected steps from x, then the new c_i."""
        correction = jax.tree.map(jnp.subtract, down.c, local.c)

        def corrected(y: Params) -> Float[Array, ""]:
            linear = jax.tree.reduce(jnp.add, jax.tree.map(lambda c, y: jnp.sum(c * y), correction, y), jnp.float32(0))
            return linear - jax.lax.stop_gradient(linear)  # its gradient, but not its value

        y, loss = fit(self.model, down.x, self.train, key, data, down.lr, also=corrected)
        step = jax.tree.map(jnp.subtract, y, down.x)
        K = self.train.passes(data) * jnp.ceil(rows(data) / self.train.batch)
        change = jax.tree.map(lambda c, step: jnp.where(K > 0, -c - step / (jnp.maximum(K, 1) * down.lr), 0.0), down.c, step)
        return Up(step, change, loss), Local(jax.tree.map(jnp.add, local.c, change), local.tuned)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """A step along the mean of y_i − x; c takes the changes of the cohort as those of N clients."""
        if self.N is None:
            raise UserError(
                "SCAFFOLD's server needs the number of clients; give N, or call algorithm.planned(rounds, clients=…)"
            )
        mean = jax.tree.map(jnp.add, server.x, up.step)
        x, number, optimiser = self.server_step.next(server.x, server.round, server.optimiser, mean)
        return Server(x, jax.tree.map(lambda c, change: c + change / self.N, server.c, up.change), number, optimiser)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fine-tune a copy of x, without control variates."""
        return Local(local.c, fit(self.model, down.x, self.tune, key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's model, or x where it has none."""
        return self.model.apply(down.x if local.tuned is None else local.tuned, x)[None]
