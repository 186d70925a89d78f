"""LG-FedAvg: local representations under a shared last layer (Liang et al. 2020, Algorithm 1).

    w_i = (local_i, shared):  what comes first in the network is the client's, what comes last is averaged
    client:  E epochs of SGD on F_i(local_i, shared_i), both parts together, from its own layers and the broadcast ones
    server:  shared ← Σ_i n_i shared_i / Σ_i n_i
    adapt:   a client that never trained fits layers of its own under the shared ones as they are, from the mean of the others'

It is FedPer with the split turned round, `population` included. In the paper's experiments the layers start from a model that
FedAvg has trained for some rounds; here all start alike, at random.

Reference:
    Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think locally, act globally: federated learning with
    local and global representations. 2020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from fedbayes.primitives.layers import Together
from fedbayes.primitives.training import Training, tuning


@dataclasses.dataclass(frozen=True)
class LGFedAvg(Together):
    """Each client has its own representation; the last layer is averaged.

    >>> from fedbayes.models import Categorical, mlp
    >>> LGFedAvg(mlp((64,), Categorical(10))).personal
    ('body',)
    """

    published: ClassVar[Mapping[str, Any]] = {"population": False}

    personal: tuple[str, ...] = ("body",)
    """Paths of the layers that stay with the client."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.01, momentum=0.9)
    """Fitting the personal layers in `adapt`."""
