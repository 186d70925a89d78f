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
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Mean, Params, setting
from fedbayes.primitives.several import Down, Grouped, one_of
from fedbayes.primitives.training import Training, fit, tuning

NONE = -1.0
"""u of a client that has not drawn it."""


class Local(NamedTuple):
    """u, which gives the client's group; and fine-tuned networks, one or K of each array, after `adapt`."""

    u: Float[Array, ""]
    theta: Params | None


class Up(NamedTuple):
    """w_i − θ_j in the place of the client's group, a one in that place, and its training loss."""

    moved: Mean[Params]
    member: Mean[Float[Array, " K"]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Ensemble(Grouped[Local, Up]):
    """K networks, each of them trained by a random group of the clients.

    >>> from fedbayes.models import Categorical, mlp
    >>> Ensemble(mlp((64,), Categorical(10)), K=5).use
    'preset'
    """

    K: int = setting(2, least=1)
    """Networks, and groups of clients."""
    use: Literal["preset", "ensemble"] = setting("preset", "ensemble")
    """What a client predicts with and fine-tunes: its group's network or all of them."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning in `adapt`."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No group yet: this start is the same for all clients."""
        return Local(jnp.float32(NONE), None)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from the network of the client's group."""
        u = _drawn(key, local.u)
        start = one_of(down.theta, self._group(u))
        w, loss = fit(self.model, start, self.train, key, data, down.lr)
        return Up(*self.sent(self._group(u), w, start), loss), Local(u, None)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fine-tune a copy of the client's network or of all."""
        u = _drawn(key, local.u)
        theta = down.theta if self.use == "ensemble" else jax.tree.map(lambda leaf: leaf[self._group(u)][None], down.theta)
        return Local(u, jax.vmap(lambda start: fit(self.model, start, self.tune, key, data)[0])(theta))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """A draw for each network; with use="preset" they are all that of the client's group where it has one."""
        if local.theta is not None:
            return self.outputs(local.theta, x)
        chosen = jnp.arange(self.K)
        if self.use == "preset":
            chosen = jnp.where(local.u == NONE, chosen, self._group(local.u))
        return self.outputs(down.theta, x)[chosen]

    def _group(self, u: Float[Array, ""]) -> Int[Array, ""]:
        return jnp.clip((self.K * u).astype(jnp.int32), 0, self.K - 1)


def _drawn(key: PRNGKeyArray, u: Float[Array, ""]) -> Float[Array, ""]:
    # Folded, so that the draw has nothing to do with the shuffles, which the key gives too.
    return jnp.where(u == NONE, jax.random.uniform(jax.random.fold_in(key, 0xFFFFFFFE)), u)
