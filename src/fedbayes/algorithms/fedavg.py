"""FedAvg: federated averaging (McMahan et al. 2017, Algorithm 1), personalised by fine-tuning.

    client:  w_i ← w, then E epochs of SGD on its own mean loss F_i(w_i) = −1/n_i Σ log p(y | x, w_i)
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean)

Nothing stays on a client while it trains. `adapt` fine-tunes a copy of w that the client keeps (FedAvg+, Jiang et al. 2019).

References:
    McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-efficient learning of deep networks from decentralized
    data. AISTATS 2017. — Jiang, Konečný, Rush, Kannan. Improving federated learning personalization via model agnostic
    meta learning. 2019.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import PRNGKeyArray

from fedbayes.algorithm import Data
from fedbayes.primitives.averaging import Averaging, Down, FineTuning, Local, Server, Up
from fedbayes.primitives.training import Training, fit, tuning


@dataclasses.dataclass(frozen=True)
class FedAvg(Averaging[Local], FineTuning[Server, Down, Up]):
    """Federated averaging, with fine-tuning as `adapt`.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedAvg(mlp((64,), Categorical(10))).train.batch
    50
    """

    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`."""

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w."""
        params, loss = fit(self.model, down.params, self.train, key, data, down.lr)
        return Up(params, self.weight(data), loss), local
