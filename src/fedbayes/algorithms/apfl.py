"""APFL: each client mixes a model of its own with the global one (Deng et al. 2020, Algorithm 1).

    v̄_i = α_i v_i + (1 − α_i) w_i,   F_i(w) = −1/n_i Σ log p(y | x, w) over a minibatch
    client:  w_i ← w, then with each minibatch, all from the values before it,
             w_i ← w_i − η ∇F_i(w_i)
             v_i ← v_i − η ∇_v F_i(v̄_i)          = v_i − η α_i ∇F_i(v̄_i)
             α_i ← α_i − η ∇_α F_i(v̄_i)          = α_i − η ⟨v_i − w_i, ∇F_i(v̄_i)⟩, cut to [0, 1]
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean, as the paper has it)
    adapt:   v_i and α_i alone, w as it is

α_i moves once a round, with its first minibatch, as in the authors' code; every="batch" moves it with each. v_i and α_i never
leave their client and w does not know of them: the messages and w are FedAvg's. α = 0 is FedAvg, α = 1 each client's training
alone. A client that takes part for the first time starts v_i at w, so that α_i has no slope there; `adapt`, which is short and
may be its first, moves α_i with each minibatch. A client predicts with v̄ of its v_i and the w of now.

Reference:
    Deng, Kamani, Mahdavi. Adaptive personalized federated learning. 2020.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Params, setting
from fedbayes.primitives.averaging import Averaging, Down, Up
from fedbayes.primitives.optimisers import move
from fedbayes.primitives.training import Training, local_steps, mean_loss, tuning


class Local(NamedTuple):
    """The client's own model v, its share α in the mixture, and whether it has them yet; until then w stands for v."""

    v: Params
    alpha: Float[Array, ""]
    own: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class APFL(Averaging[Local]):
    """Federated averaging, and beside it a model of the client's own; it predicts with a mixture of both that it learns.

    >>> from fedbayes.models import Categorical, mlp
    >>> APFL(mlp((64,), Categorical(10)), alpha=0.25).adaptive
    True
    """

    alpha: float = setting(0.5, least=0, most=1, which="is a share")
    """α at the start: the share of the client's own model in its mixture."""
    adaptive: bool = True
    """Whether clients learn α; else it stays."""
    every: Literal["round", "batch"] = setting("round", "batch")
    """When α moves: with the first minibatch of a round, or with each."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round; α takes plain steps of the same size."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Training of the client's own model and of α in `adapt`."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No model of its own yet, and α at its start."""
        return Local(trees.zeros(self.model.init(key)), jnp.float32(self.alpha), jnp.bool_(False))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Steps on w, v and α, minibatch by minibatch."""
        w, local, loss = self._fit(down.params, self._own(down, local), self.train, down.lr, key, data, moving=True)
        return Up(w, self.weight(data), loss), local

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Steps on v and α, w as it is."""
        lr = self.tune.lr_of(1)
        return self._fit(down.params, self._own(down, local), self.tune, lr, key, data, moving=False)[1]

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: v̄, or w where the client has no v."""
        own = self._own(down, local)
        return self.model.apply(mixed(own.alpha, own.v, down.params), x)[None]

    def _own(self, down: Down, local: Local) -> Local:
        """The client's state, with w for v where it has none."""
        v = trees.choose(local.own, local.v, down.params)
        return Local(v, local.alpha, jnp.bool_(True))

    def _fit(
        self, w: Params, own: Local, training: Training, lr: Float[Array, ""], key: PRNGKeyArray, data: Data, *, moving: bool
    ) -> tuple[Params, Local, Float[Array, ""]]:
        """w where it is `moving`, v and α after local epochs; and the mean loss of w over the steps."""
        optimiser = training.build(lr, self.model)

        def F(w: Params, batch: Data) -> Float[Array, ""]:
            return mean_loss(self.model, w, batch)

        def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
            w, v, alpha, of_w, of_v, total, steps = carry
            slope = jax.grad(F)(mixed(alpha, v, w), batch)
            new_v, of_v = move(optimiser, v, jax.tree.map(lambda leaf: alpha * leaf, slope), of_v)
            new_alpha = alpha
            if self.adaptive:
                new_alpha = jnp.clip(alpha - lr * alpha_slope(v, w, slope), 0.0, 1.0)
                if moving and self.every == "round":
                    new_alpha = jnp.where(steps == 0, new_alpha, alpha)
            if moving:
                value, gradient = jax.value_and_grad(F)(w, batch)
                w, of_w = move(optimiser, w, gradient, of_w)
                total = total + value
            return w, new_v, new_alpha, of_w, of_v, total, steps + 1

        start = (w, own.v, own.alpha, optimiser.init(w), optimiser.init(own.v), jnp.float32(0), jnp.float32(0))
        w, v, alpha, _, _, total, steps = local_steps(step, start, key, data, training.batch, training.passes(data))
        return w, Local(v, alpha, own.own), total / jnp.maximum(steps, 1)


def mixed(alpha: Float[Array, ""], v: Params, w: Params) -> Params:
    """v̄ = α v + (1 − α) w."""
    # In this form v = w gives w to the last bit, and so does α = 0.
    return jax.tree.map(lambda v, w: w + alpha * (v - w), v, w)


def alpha_slope(v: Params, w: Params, slope: Params) -> Float[Array, ""]:
    """∂F(v̄)/∂α = ⟨v − w, ∇F(v̄)⟩."""
    terms = jax.tree.map(lambda v, w, slope: jnp.sum((v - w) * slope), v, w, slope)
    return jax.tree.reduce(jnp.add, terms, jnp.float32(0))
