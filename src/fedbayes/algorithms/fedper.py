"""FedPer: a shared base and personal last layers (Arivazhagan et al. 2019, Algorithms 1 and 2).

    w_i = (shared, personal_i)
    client:  E epochs of SGD on F_i(shared_i, personal_i), both parts together, from the broadcast base and its own head
    server:  shared ← Σ_i n_i shared_i / Σ_i n_i
    adapt:   a client that never trained fits a head of its own to the base as it is, from the mean of the others' heads

All heads start alike, as where the server draws the network once and sends it to everyone. A client's head enters a sum over
the clients of a round, whose mean is the head of a client that has none; with population=False, as in the paper, only the base
leaves a client, and a newcomer's head is random.

Reference:
    Arivazhagan, Aggarwal, Singh, Choudhary. Federated learning with personalization layers. 2019.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from fedbayes.primitives.layers import Down, Local, Server, Together, Up  # noqa: F401, older files name them here
from fedbayes.primitives.training import Training, tuning


@dataclasses.dataclass(frozen=True)
class FedPer(Together):
    """The last layers stay with the client, the rest is averaged.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedPer(mlp((64,), Categorical(10))).personal
    ('head',)
    """

    published: ClassVar[Mapping[str, Any]] = {"population": False}

    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.01, momentum=0.9)
    """Fitting the personal layers in `adapt`."""
