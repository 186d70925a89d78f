"""pFedMe: personal models at the Moreau envelope of the clients' losses (Dinh, Tran and Nguyen 2020, Algorithm 1).

    F_i(w) = min_θ f_i(θ) + λ/2 ‖θ − w‖²,   ∇F_i(w) = λ (w − θ̂_i(w))
    client:  for each minibatch:   θ ← `K` steps on f_i(θ; minibatch) + λ/2 ‖θ − w_i‖², from where θ stands
                                   w_i ← w_i − η λ (w_i − θ)
    server:  w ← (1 − β) w + β 1/S Σ_i w_i
    adapt:   θ alone, w as it is

θ is the client's own model and stays with it; a client that has none starts it at w. The authors' code starts it at w in each
round.

Reference:
    Dinh, Tran, Nguyen. Personalized federated learning with Moreau envelopes. NeurIPS 2020.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Params, setting
from fedbayes.errors import UserError
from fedbayes.primitives.averaging import Averaging, Down, Server, Up
from fedbayes.primitives.training import Training, local_steps, mean_loss


class Local(NamedTuple):
    """The client's own model θ, and whether it has one yet; until then w stands for it."""

    theta: Params
    own: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class PFedMe(Averaging[Local]):
    """Personal models, each held near a shared one that moves towards them.

    >>> from fedbayes.models import Categorical, mlp
    >>> PFedMe(mlp((64,), Categorical(10))).lam
    15.0
    """

    lam: float = setting(15.0, least=0, which="weighs a squared distance")
    """λ, strength of the pull of θ towards w."""
    K: int = setting(5, least=1)
    """K, steps on θ for each minibatch."""
    personal_lr: float = 0.01
    """Size of a step on θ."""
    beta: float = setting(1.0, above=0)
    """β, how far the server moves to the mean."""
    train: Training = Training(epochs=1, batch=50, lr=0.005)
    """A client's round; `lr` is η."""
    tune_epochs: int = 5
    """Epochs on θ in `adapt`."""
    _: dataclasses.KW_ONLY
    uniform: bool = True
    """Whether every client counts the same, instead of by its rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.optimiser != "sgd" or self.train.momentum or self.train.decays or self.train.clip:
            raise UserError(
                "pFedMe's step on w is η λ (w − θ), so its `train` has no momentum, weight_decay, clip or other optimiser"
            )

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No model of its own yet."""
        return Local(trees.zeros(self.model.init(key)), jnp.bool_(False))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Steps on θ, and w after them, minibatch by minibatch."""
        theta, w, loss = self._fit(down, local, down.lr, key, data, self.train.passes(data))
        return Up(w, self.weight(data), loss), Local(theta, jnp.bool_(True))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """Towards the mean, by β."""
        mean = jax.tree.map(lambda w, new: w + self.beta * (new - w), server.params, up.params)
        return super().server(key, server, down, up._replace(params=mean))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Epochs on θ, held near w."""
        return Local(self._fit(down, local, jnp.float32(0), key, data, self.tune_epochs)[0], jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: θ, or w where the client has none."""
        return self.model.apply(trees.choose(local.own, local.theta, down.params), x)[None]

    def _fit(
        self, down: Down, local: Local, eta: Float[Array, ""], key: PRNGKeyArray, data: Data, epochs: Any
    ) -> tuple[Params, Params, Float[Array, ""]]:
        def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
            theta, w, total, steps = carry

            def inner(_: Any, theta: Params) -> Params:
                gradient = jax.grad(lambda theta: mean_loss(self.model, theta, batch))(theta)
                pulled = jax.tree.map(lambda slope, theta, w: slope + self.lam * (theta - w), gradient, theta, w)
                return jax.tree.map(lambda theta, slope: theta - self.personal_lr * slope, theta, pulled)

            theta = jax.lax.fori_loop(0, self.K, inner, theta)
            loss = mean_loss(self.model, theta, batch)
            w = jax.tree.map(lambda w, theta: w - eta * self.lam * (w - theta), w, theta)
            return theta, w, total + loss, steps + 1

        start = (trees.choose(local.own, local.theta, down.params), down.params, jnp.float32(0), jnp.float32(0))
        theta, w, total, steps = local_steps(step, start, key, data, self.train.batch, epochs)
        return theta, w, total / jnp.maximum(steps, 1)
