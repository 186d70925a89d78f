"""An ensemble of K networks, each of them averaged over a group of clients (Kim and Hospedales 2023, section F.2).

    u_i ~ U(0, 1) once for each client, which is then of group j(i) = ⌊K u_i⌋
    client:  w_i ← θ_j(i), then E epochs of SGD on F_i(w_i)
    server:  θ_j ← mean over the participants of group j of w_i          (with none, it stays)

The groups have nothing to do with the data: this is the baseline that a mixture must beat. In the paper they are of equal size,
here only in expectation, as no client knows how many others there are. A client draws its group when it first takes part and
keeps it. Uploads are sums: w_i − θ_j in the place of its group and zeros in the others, and a one in K numbers, so that the
server learns how many came from each group and not who; that costs K d numbers, and no less would keep the group from it.

With use="preset" a client predicts with and fine-tunes the network of its group, with "ensemble" all K, each on its own. Before
a client has a group all K predict.

Reference:
    Kim, Hospedales. A hierarchical Bayesian approach to federated learning. 2023.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss

NONE = -1.0
"""u of a client that has not drawn it."""


class Server(NamedTuple):
    """The networks (K of each array), the number of rounds behind them, and the state of the server's optimiser if any."""

    theta: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """u, which gives the client's group; and fine-tuned networks, one or K of each array, after `adapt`."""

    u: Float[Array, ""]
    theta: Params | None


class Down(NamedTuple):
    """The networks and this round's step size."""

    theta: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """w_i − θ_j in the place of the client's group, a one in that place, and its training loss."""

    moved: Mean[Params]
    member: Mean[Float[Array, " K"]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Ensemble(NetworkAlgorithm[Server, Local, Down, Up]):
    """K networks, each of them trained by a random group of the clients.

    >>> from fedbayes.models import Categorical, mlp
    >>> Ensemble(mlp((64,), Categorical(10)), K=5).use
    'preset'
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    K: int = 2
    """Networks, and groups of clients."""
    use: Literal["preset", "ensemble"] = "preset"
    """What a client predicts with and fine-tunes: its group's network or all of them."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9)
    """A client's round."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning in `adapt`."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.K < 1:
            raise UserError(f"K is {self.K}, but an ensemble has at least 1 network")
        if self.use not in ("preset", "ensemble"):
            raise UserError(
                f"use is {self.use!r}, but a client uses its preset network or the ensemble; give one of these words"
            )

    def init_server(self, key: PRNGKeyArray) -> Server:
        """K networks at random."""
        return Server(*self.server_step.start(random_starts(self.model, key, self.K)))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No group yet: this start is the same for all clients."""
        return Local(jnp.float32(NONE), None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """All networks and the round's step size."""
        return Down(server.theta, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from the network of the client's group."""
        u = _drawn(key, local.u)
        member = (jnp.arange(self.K) == self._group(u)).astype(jnp.float32)
        start = jax.tree.map(lambda leaf: leaf[self._group(u)], down.theta)
        w, loss = descend(self.model, self._F, start, self.train, down.lr, key, data)
        moved = jax.tree.map(lambda new, old: member.reshape((-1,) + (1,) * new.ndim) * (new - old)[None], w, start)
        return Up(moved, member, loss), Local(u, None)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The mean of each group that has somebody, or a step towards it."""
        return Server(*self.server_step.next(*server, moved_means(server.theta, up.moved, up.member)))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fine-tune a copy of the client's network or of all."""
        u = _drawn(key, local.u)
        theta = down.theta if self.use == "ensemble" else jax.tree.map(lambda leaf: leaf[self._group(u)][None], down.theta)

        def tuned(start: Params) -> Params:
            return descend(self.model, self._F, start, self.tune, self.tune.lr_of(1), key, data)[0]

        return Local(u, jax.vmap(tuned)(theta))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """A draw for each network; with use="preset" they are all that of the client's group where it has one."""
        if local.theta is not None:
            return jax.vmap(lambda theta: self.model.apply(theta, x))(local.theta)
        chosen = jnp.arange(self.K)
        if self.use == "preset":
            chosen = jnp.where(local.u == NONE, chosen, self._group(local.u))
        return jax.vmap(lambda theta: self.model.apply(theta, x))(down.theta)[chosen]

    def _F(self, w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        return mean_loss(self.model, w, batch)

    def _group(self, u: Float[Array, ""]) -> Int[Array, ""]:
        return jnp.clip((self.K * u).astype(jnp.int32), 0, self.K - 1)


def random_starts(model: Model, key: PRNGKeyArray, K: int) -> Params:
    """K networks at random, stacked; the first is `model.init(key)`, so that one network is what other methods start from."""
    keys = [key, *jax.random.split(jax.random.fold_in(key, 1), K - 1)] if K > 1 else [key]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(model.init(one) for one in keys))


def _drawn(key: PRNGKeyArray, u: Float[Array, ""]) -> Float[Array, ""]:
    # Folded, so that the draw has nothing to do with the shuffles, which the key gives too.
    return jnp.where(u == NONE, jax.random.uniform(jax.random.fold_in(key, 0xFFFFFFFE)), u)


def moved_means(theta: Params, moved: Params, member: Float[Array, " K"]) -> Params:
    """K networks, each moved by the mean over its members; one without members stays."""

    def mean(old: Array, moved: Array) -> Array:
        share = member.reshape((-1,) + (1,) * (old.ndim - 1))
        return old + jnp.where(share > 0, moved / jnp.where(share > 0, share, 1.0), 0.0)

    return jax.tree.map(mean, theta, moved)
