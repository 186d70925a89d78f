"""IFCA: iterative federated clustering (Ghosh et al. 2020, Algorithm 1 with model averaging); also known as ClusteredFL.

    client:  ĵ_i = argmin_j F_i(θ_j),  F_i(θ) = −1/n_i Σ log p(y | x, θ);   w_i ← θ_ĵ, then E epochs of SGD on F_i(w_i)
    server:  θ_j ← Σ_i s_ij n_i w_i / Σ_i s_ij n_i,   s_ij = 1 where j = ĵ_i, else 0          (with none, it stays)
             (uniform=True: the plain mean of a cluster, as the paper has it with clients of one size)
    adapt:   ĵ_i as above; with `fine_tune` then epochs of SGD from θ_ĵ, which are kept

A client's cluster is found anew in each round, so nothing stays on it while it trains. Uploads are sums: w_i − θ_ĵ in the place
of its cluster and zeros in the others, and a one in K numbers, so that the server learns how many rows came to each cluster and
not whose; that costs K d numbers, where the paper sends d and ĵ_i. A client that has not adapted predicts with all K models.

Reference:
    Ghosh, Chung, Yin, Ramchandran. An efficient framework for clustered federated learning. NeurIPS 2020.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum
from fedbayes.algorithms.ensemble import Down, Server, moved_means, random_starts
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.primitives.optimisers import ServerStep
from fedbayes.primitives.training import Training, descend, mean_loss, rows


class Local(NamedTuple):
    """After `adapt` the client's cluster ĵ, and with `fine_tune` its own model; nothing while training."""

    cluster: Int[Array, ""] | None
    params: Params | None


class Up(NamedTuple):
    """w_i − θ_ĵ in the place of the client's cluster, a one in that place, how many rows it has, and its training loss."""

    moved: Mean[Params]
    member: Mean[Float[Array, " K"]]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class IFCA(NetworkAlgorithm[Server, Local, Down, Up]):
    """K models, each of them averaged over the clients that it fits best.

    >>> from fedbayes.models import Categorical, mlp
    >>> IFCA(mlp((64,), Categorical(10)), K=4).fine_tune
    False
    """

    model: Model
    """The network and its likelihood; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    K: int = 2
    """Models, and clusters of clients."""
    noise: float | None = None
    """Models start as one network plus noise of this deviation; by default each at random."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    fine_tune: bool = False
    """Whether `adapt` also fine-tunes a copy of the chosen model."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning in `adapt`."""
    uniform: bool = False
    """Whether every client counts the same, instead of by its rows."""
    server_step: ServerStep = ServerStep()
    """The server's optimiser; by default it takes the mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.K < 1:
            raise UserError(f"K is {self.K}, but there is at least 1 model")
        if self.noise is not None and not self.noise > 0:
            raise UserError(f"noise is {self.noise}, but models that start alike stay alike; give more than 0, or None")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """K models that differ."""
        if self.noise is None:
            return Server(*self.server_step.start(random_starts(self.model, key, self.K)))
        alike = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.K, *leaf.shape)), self.model.init(key))
        apart = trees.normal_like(jax.random.fold_in(key, 1), alike)
        # The first stays as it is, so that one model is what other methods start from.
        theta = jax.tree.map(lambda leaf, e: leaf.at[1:].add(self.noise * e[1:]), alike, apart)
        return Server(*self.server_step.start(theta))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None, None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """All models and the round's step size."""
        return Down(server.theta, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from the model that fits the client's rows best."""
        cluster = self.best(down.theta, data)
        start = _model(down.theta, cluster)
        w, loss = descend(self.model, self._F, start, self.train, down.lr, key, data)
        member = (jnp.arange(self.K) == cluster).astype(jnp.float32)
        moved = jax.tree.map(lambda new, old: member.reshape((-1,) + (1,) * new.ndim) * (new - old)[None], w, start)
        return Up(moved, member, jnp.float32(1) if self.uniform else rows(data), loss), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean of each cluster that has somebody; `member` is Σ_i s_ij n_i over all rows of the round."""
        return Server(*self.server_step.next(*server, moved_means(server.theta, up.moved, up.member)))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Choose a model by the client's rows, and fine-tune a copy of it where asked to."""
        cluster = self.best(down.theta, data)
        if not self.fine_tune:
            return Local(cluster, None)
        start = _model(down.theta, cluster)
        return Local(cluster, descend(self.model, self._F, start, self.tune, self.tune.lr_of(1), key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's own or chosen model; where it has not chosen, a draw for each of the K."""
        if local.params is not None:
            return self.model.apply(local.params, x)[None]
        if local.cluster is not None:
            return self.model.apply(_model(down.theta, local.cluster), x)[None]
        return jax.vmap(lambda theta: self.model.apply(theta, x))(down.theta)

    def best(self, theta: Params, data: Data) -> Int[Array, ""]:
        """ĵ = argmin_j F(θ_j), model after model, so that memory is that of one."""
        return jnp.argmin(jax.lax.map(lambda one: mean_loss(self.model, one, data), theta))

    def _F(self, w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        return mean_loss(self.model, w, batch)


def _model(theta: Params, cluster: Int[Array, ""]) -> Params:
    return jax.tree.map(lambda leaf: leaf[cluster], theta)
