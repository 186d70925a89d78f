"""FedProx: federated averaging with a proximal term (Li et al. 2020, Algorithm 2).

    client:  minimise F_i(w_i) + μ/2 ‖w_i − w‖²,  F_i(w_i) = −1/n_i Σ log p(y | x, w_i)
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean, as the paper has it with clients drawn by n_i)

What a client minimises is its negative log posterior, over n_i, under the prior N(w, 1/(μ n_i)): the simplest hierarchical
model here. `adapt` minimises the same. The messages are FedAvg's; μ = 0 is FedAvg.

Reference:
    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated optimization in heterogeneous networks. MLSys 2020.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import PRNGKeyArray

from fedbayes.algorithm import Data
from fedbayes.primitives.averaging import Averaging, Down, FineTuning, Local, Server, Up
from fedbayes.primitives.training import Training, fit, pull, tuning


@dataclasses.dataclass(frozen=True)
class FedProx(Averaging[Local], FineTuning[Server, Down, Up]):
    """Federated averaging with a pull of strength μ towards the broadcast model.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedProx(mlp((64,), Categorical(10)), mu=0.1).mu
    0.1
    """

    mu: float = 0.01
    """Strength μ of the proximal term."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`, with the same pull."""

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w on the pulled objective."""
        params, loss = fit(self.model, down.params, self.train, key, data, down.lr, also=pull(self.mu, down.params))
        return Up(params, self.weight(data), loss), local

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """The client's own mode of the pulled objective."""
        return Local(fit(self.model, down.params, self.tune, key, data, also=pull(self.mu, down.params))[0])
