"""FedEM: clients are mixtures of K shared components (Marfoq et al. 2021, Algorithm 1).

    p_i(y | x) = Σ_k π_ik p(y | x, θ_k)          the components are everybody's, the shares π_i each client's own
    client:  q_k(row) ∝ π_ik p(y | x, θ_k),   π_ik ← mean over its rows of q_k                               (E, M)
             θ_k ← E epochs of SGD on −1/n_i Σ q_k(row) log p(y | x, θ_k), for all k                        (M)
    server:  θ_k ← Σ_i n_i θ_ik / Σ_i n_i          (uniform=True: the plain mean)
    adapt:   EM on π_i alone, the components as they are; with `fine_tune` then one round's M-step by `tune`, which is kept

π_i never leaves its client. `predict` gives draws of the components in the proportions π_i.

Reference:
    Marfoq, Neglia, Bellet, Kameni, Vidal. Federated multi-task learning under a mixture of distributions. NeurIPS 2021.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Mean, Params, Sum, setting
from fedbayes.primitives.averaging import Weighted
from fedbayes.primitives.several import Down, Server, Several, by_shares
from fedbayes.primitives.training import Training, descend, masked_mean

LEAST = 1e-12
"""A share counts as at least this, so that a component that explained nothing for a while can come back."""


class Local(NamedTuple):
    """The client's shares; and its own components after `adapt` with `fine_tune`."""

    pi: Float[Array, " K"]
    theta: Params | None


class Up(NamedTuple):
    """The components after the client's local epochs, how many rows it has, and its training loss."""

    theta: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class FedEM(Several[Local, Up], Weighted[Server, Local, Down, Up]):
    """Shared components; each client has its own shares of them.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedEM(mlp((64,), Categorical(10))).K
    3
    """

    K: int = setting(3, least=1)
    """Components."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    em_steps: int = setting(20, least=1)
    """Steps of EM on the shares in `adapt`."""
    fine_tune: bool = False
    """Whether `adapt` also fine-tunes a copy of the components."""
    tune: Training = Training(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning in `adapt`."""
    draws: int = setting(30, least=1)
    """Draws of a prediction, divided among the components by the client's shares."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Equal shares."""
        return Local(jnp.full(self.K, 1 / self.K, jnp.float32), None)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """One E-step, then the M-step."""
        q = responsibilities(local.pi, self.log_likelihoods(down.theta, data))
        pi = _shares(q, data, local.pi)
        theta, loss = self._fit(down.theta, q, self.train, down.lr, key, data)
        return Up(theta, self.weight(data), loss), Local(pi, None)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean of each component, or a step towards it."""
        return Server(*self.server_step.next(*server, up.theta))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """EM on the shares, from equal ones: this problem is concave, so only a start without zeros matters."""
        log_p = self.log_likelihoods(down.theta, data)
        equal = jnp.full_like(local.pi, 1 / self.K)
        pi = jax.lax.fori_loop(0, self.em_steps, lambda _, pi: _shares(responsibilities(pi, log_p), data, pi), equal)
        if not self.fine_tune:
            return Local(pi, None)
        return Local(pi, self._fit(down.theta, responsibilities(pi, log_p), self.tune, self.tune.lr_of(1), key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of the components in the client's shares."""
        outputs = self.outputs(down.theta if local.theta is None else local.theta, x)
        return outputs if self.K == 1 else outputs[by_shares(local.pi, self.draws)]

    def log_likelihoods(self, theta: Params, data: Data) -> Float[Array, "K n"]:
        """log p(y | x, θ_k) of each row, component after component, so that memory is that of one."""
        return jax.lax.map(lambda one: self.model.likelihood.log_prob(self.model.apply(one, data.x), data.y), theta)

    def _fit(
        self, theta: Params, q: Float[Array, "K n"], training: Training, lr: Float[Array, ""], key: PRNGKeyArray, data: Data
    ) -> tuple[Params, Float[Array, ""]]:
        def F(theta: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            x, q_batch = data.x[batch.x], q[:, batch.x]
            log_p = self.model.likelihood.log_prob(self.outputs(theta, x), batch.y)
            return masked_mean(-jnp.sum(q_batch * log_p, axis=0), batch.mask)

        # Minibatches of places instead of rows: q is known for each place.
        return descend(self.model, F, theta, training, lr, key, data._replace(x=jnp.arange(data.mask.shape[0])))


def responsibilities(pi: Float[Array, " K"], log_p: Float[Array, "K n"]) -> Float[Array, "K n"]:
    """q_k(row) ∝ π_k p(y | x, θ_k), the E-step."""
    return jax.nn.softmax(jnp.log(jnp.maximum(pi, LEAST))[:, None] + log_p, axis=0)


def _shares(q: Float[Array, "K n"], data: Data, before: Float[Array, " K"]) -> Float[Array, " K"]:
    """The mean of q over the rows that exist, the M-step of π; without rows, the shares from before."""
    means = jax.vmap(lambda one: masked_mean(one, data.mask))(q)
    return jnp.where(jnp.any(data.mask), means, before)
