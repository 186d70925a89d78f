"""Per-FedAvg: a start from which one step personalises (Fallah, Mokhtari and Ozdaglar 2020, Algorithm 1).

    F_i(w) = f_i(w − α ∇f_i(w)):   the loss of a client after one step of its own
    client:  for each minibatch, split into D and D':   w_i ← w_i − β (I − α ∇²f_i(w_i; D)) ∇f_i(w_i − α ∇f_i(w_i; D); D')
    server:  w ← 1/S Σ_i w_i
    adapt:   `adapt_steps` steps of size α from w, on all rows of the client at once

The step is the gradient of f_i(w − α ∇f_i(w; D); D'), which JAX takes through the inner step, second derivatives and all. The
paper estimates its Hessian on a third batch D''; here D serves. With `first_order` the Hessian is left out, as in the paper's
Per-FedAvg (FO). With α = 0 it is FedAvg on the second halves.

Reference:
    Fallah, Mokhtari, Ozdaglar. Personalized federated learning: a meta-learning approach. NeurIPS 2020.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Params, setting
from fedbayes.algorithms.pfedme import Local
from fedbayes.primitives.averaging import Averaging, Down, Up
from fedbayes.primitives.training import Training, descend, first_half, mean_loss


@dataclasses.dataclass(frozen=True)
class PerFedAvg(Averaging[Local]):
    """Averaging of models that are meant to be good after one step on a client's own rows.

    >>> from fedbayes.models import Categorical, mlp
    >>> PerFedAvg(mlp((64,), Categorical(10))).alpha
    0.01
    """

    alpha: float = setting(0.01, least=0, which="is a step size")
    """α, size of a personal step."""
    first_order: bool = False
    """Whether the Hessian is left out."""
    adapt_steps: int = setting(1, least=1)
    """Personal steps in `adapt` and at the end of a client's round."""
    train: Training = Training(epochs=1, batch=50, lr=0.1)
    """A client's round; `lr` is β."""
    _: dataclasses.KW_ONLY
    uniform: bool = True
    """Whether every client counts the same, instead of by its rows."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No model of its own yet."""
        return Local(trees.zeros(self.model.init(key)), jnp.bool_(False))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Steps on F_i, then the client's own steps from where they led."""

        def F(w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            D, other = first_half(batch)
            return mean_loss(self.model, self._step(w, D), other)

        w, loss = descend(self.model, F, down.params, self.train, down.lr, key, data)
        return Up(w, self.weight(data), loss), Local(self._own(w, data), jnp.bool_(True))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Personal steps from w."""
        return Local(self._own(down.params, data), jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's model, or w where it has none."""
        return self.model.apply(trees.choose(local.own, local.theta, down.params), x)[None]

    def _step(self, w: Params, data: Data) -> Params:
        """w − α ∇f(w; data)."""
        gradient = jax.grad(lambda w: mean_loss(self.model, w, data))(w)
        if self.first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return jax.tree.map(lambda w, slope: w - self.alpha * slope, w, gradient)

    def _own(self, w: Params, data: Data) -> Params:
        return jax.lax.fori_loop(0, self.adapt_steps, lambda _, theta: self._step(theta, data), w)
