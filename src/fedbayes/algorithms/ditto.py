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
from fedbayes.algorithm import Data, Params, setting
from fedbayes.primitives.averaging import Averaging, Down, Up
from fedbayes.primitives.training import Training, fit, pull, tuning


class Local(NamedTuple):
    """The client's own model v, and whether it has one yet; until then w stands for it."""

    v: Params
    own: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Ditto(Averaging[Local]):
    """Federated averaging, and beside it a model of the client's own that a pull of strength λ holds near.

    >>> from fedbayes.models import Categorical, mlp
    >>> Ditto(mlp((64,), Categorical(10))).lam
    1.0
    """

    lam: float = setting(1.0, least=0, which="weighs a squared distance")
    """λ, strength of the pull of the client's own model towards w."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    personal_epochs: int = setting(1, least=0, which="counts epochs")
    """Epochs of a round on the client's own model, otherwise trained as w is."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Training of the client's own model in `adapt`, with the same pull."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No model of its own yet."""
        return Local(trees.zeros(self.model.init(key)), jnp.bool_(False))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w for the server, and from v for the client."""
        w, loss = fit(self.model, down.params, self.train, key, data, down.lr)
        personal = dataclasses.replace(self.train, epochs=self.personal_epochs)
        v, _ = fit(self.model, _own(down, local), personal, key, data, down.lr, also=pull(self.lam, down.params))
        return Up(w, self.weight(data), loss), Local(v, jnp.bool_(True))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Epochs on the client's own model, from v or, where it has none, from w."""
        v, _ = fit(self.model, _own(down, local), self.tune, key, data, also=pull(self.lam, down.params))
        return Local(v, jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: v, or w where the client has none."""
        return self.model.apply(_own(down, local), x)[None]


def _own(down: Down, local: Local) -> Params:
    return trees.choose(local.own, local.v, down.params)
