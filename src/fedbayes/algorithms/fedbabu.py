"""FedBABU: body aggregation and body update (Oh et al. 2022, Algorithm 1).

    w = (body, head); the head stays at its random start through all of training
    client:  body_i ← body, then E epochs of SGD on F_i(body_i, head)
    server:  body ← mean over the participants of body_i          (each counts the same)
    adapt:   fine-tune body and head on the client's rows

`part` chooses what `adapt` fine-tunes: "full" (the paper's main setting), "body" or "head", which the paper compares.

Reference:
    Oh, Kim, Yun. FedBABU: Toward enhanced representation for federated image classification. ICLR 2022.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Params, setting
from fedbayes.primitives.averaging import Local, Stepping
from fedbayes.primitives.training import Training, fit, tuning


class Server(NamedTuple):
    """The body, the head as it was drawn, the number of rounds behind them, and the state of the server's optimiser if any."""

    body: Params
    head: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Down(NamedTuple):
    """The body, the fixed head, and this round's step size."""

    body: Params
    head: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """The client's body after its local epochs and its training loss."""

    body: Mean[Params]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class FedBABU(Stepping[Server, Local, Down, Up]):
    """The body is learnt together under a head that nobody trains; personalisation fine-tunes both.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedBABU(mlp((64,), Categorical(10))).train.decay_at
    (0.5, 0.75)
    """

    head: tuple[str, ...] = ("head",)
    """Paths of the part that is not trained."""
    head_scale: float = 1.0
    """The head at its start, kernel and bias, is multiplied by this."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning in `adapt`."""
    part: Literal["full", "body", "head"] = setting("full", "body", "head")
    """What `adapt` fine-tunes."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """Body and head at random."""
        head, body = trees.frozen(self.model.init(key), self.head, self.head_scale)
        body, start, optimiser = self.server_step.start(body)
        return Server(body, head, start, optimiser)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """Body, head and the round's step size."""
        return Down(server.body, server.head, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on the body alone."""
        body, loss = fit(self.model, down.body, self.train, key, data, down.lr, fixed=down.head)
        return Up(body, loss), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The mean body, or a step towards it."""
        body, number, optimiser = self.server_step.next(server.body, server.round, server.optimiser, up.body)
        return Server(body, server.head, number, optimiser)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fine-tune the whole model, or the part of it that `part` says."""
        full = trees.merge(down.body, down.head)
        moving, fixed = {
            "full": (full, jax.tree.map(lambda _: None, full)),
            "body": (down.body, down.head),
            "head": (down.head, down.body),
        }[self.part]
        return Local(trees.merge(fit(self.model, moving, self.tune, key, data, fixed=fixed)[0], fixed))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's model, or the shared one where it has none."""
        return self.model.apply(trees.merge(down.body, down.head) if local.params is None else local.params, x)[None]
