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
from fedbayes.algorithm import Data, Mean, Params, Sum, setting
from fedbayes.primitives.averaging import Weighted
from fedbayes.primitives.several import Down, Grouped, Server, one_of
from fedbayes.primitives.training import Training, fit, mean_loss


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
class IFCA(Grouped[Local, Up], Weighted[Server, Local, Down, Up]):
    """K models, each of them averaged over the clients that it fits best.

    >>> from fedbayes.models import Categorical, mlp
    >>> IFCA(mlp((64,), Categorical(10)), K=4).fine_tune
    False
    """

    K: int = setting(2, least=1)
    """Models, and clusters of clients."""
    noise: float | None = setting(None, above=0, which="tells models apart that start alike")
    """Models start as one network plus noise of this deviation; by default each at random."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    fine_tune: bool = False
    """Whether `adapt` also fine-tunes a copy of the chosen model."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning in `adapt`."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """K models that differ."""
        if self.noise is None:
            return super().init_server(key)
        alike = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.K, *leaf.shape)), self.model.init(key))
        apart = trees.normal_like(jax.random.fold_in(key, 1), alike)
        # The first stays as it is, so that one model is what other methods start from.
        theta = jax.tree.map(lambda leaf, e: leaf.at[1:].add(self.noise * e[1:]), alike, apart)
        return Server(*self.server_step.start(theta))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None, None)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from the model that fits the client's rows best."""
        cluster = self.best(down.theta, data)
        start = one_of(down.theta, cluster)
        w, loss = fit(self.model, start, self.train, key, data, down.lr)
        return Up(*self.sent(cluster, w, start), self.weight(data), loss), local

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Choose a model by the client's rows, and fine-tune a copy of it where asked to."""
        cluster = self.best(down.theta, data)
        if not self.fine_tune:
            return Local(cluster, None)
        return Local(cluster, fit(self.model, one_of(down.theta, cluster), self.tune, key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: the client's own or chosen model; where it has not chosen, a draw for each of the K."""
        if local.params is not None:
            return self.model.apply(local.params, x)[None]
        if local.cluster is not None:
            return self.model.apply(one_of(down.theta, local.cluster), x)[None]
        return self.outputs(down.theta, x)

    def best(self, theta: Params, data: Data) -> Int[Array, ""]:
        """ĵ = argmin_j F(θ_j), model after model, so that memory is that of one."""
        return jnp.argmin(jax.lax.map(lambda one: mean_loss(self.model, one, data), theta))
