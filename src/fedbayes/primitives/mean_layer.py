"""A part of a last layer that is a client's own, with a posterior from the mean of a network's answers to the client's rows.

Of d features the first are global, the others local; the constructor of posteriors g is a network (Vedadi et al. 2023):

    r(β) = N(0, σ0²);   q(β | support) = N(μ, diag σ²)
    μ = c_μ mean(g),   σ = 1e-5 + σ0 exp(c_σ mean(g)),   b_β = mean(g)              (26–29)
                       g = g(h_global(x)), its mean over the support's rows
    outputs            W_g h_global + b_g + β h_local + b_β

The paper's (24) sums where the mean is meant, its (29) has b_β in the wrong place; of its numberings footnote 6 holds here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedbayes.algorithm import Data, Params
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.models.beliefs import Marginals
from fedbayes.primitives import gaussian
from fedbayes.primitives.training import first_half, masked_mean


class Posterior(NamedTuple):
    """q(β): means and standard deviations, and the bias that comes with it."""

    mean: Float[Array, "l k"]
    sigma: Float[Array, "l k"]
    bias: Float[Array, " k"]


@dataclasses.dataclass(frozen=True)
class MeanLayer:
    """The last layer's own part; `network` is a network whose last layer has W_g and b_g alone."""

    model: Model
    constructor: Model
    """From global features to μ, σ and b_β."""
    shared: int
    """Features that are global."""
    local: int
    outputs: int
    bias: bool
    sigma0: float
    mean_scale: float
    """c_μ."""
    sigma_scale: float
    """c_σ."""

    def posterior(self, own: Params, h: Float[Array, "n d"], support: Bool[Array, " n"]) -> Posterior:
        """q(β | support), equations 26 to 29, by the constructor's parameters; without a row it is r(β)."""
        g = self.constructor.apply(own, h[:, : self.shared])
        mean = jnp.sum(jnp.where(support[:, None], g, 0.0), axis=0) / jnp.maximum(jnp.sum(support), 1).astype(g.dtype)
        m, s = jnp.split(mean[: 2 * self.local * self.outputs].reshape(2, self.local, self.outputs), 2)
        bias = mean[2 * self.local * self.outputs :] if self.bias else jnp.zeros(self.outputs)
        return Posterior(self.mean_scale * m[0], 1e-5 + self.sigma0 * jnp.exp(self.sigma_scale * s[0]), bias)

    @property
    def prior(self) -> Marginals:
        """r(β)."""
        shape = self.local, self.outputs
        return Marginals(jnp.zeros(shape), jnp.full(shape, self.sigma0))

    def divergence(self, q: Posterior) -> Float[Array, ""]:
        """KL(q(β) ‖ r(β))."""
        return gaussian.kl_diagonal(q.mean, q.sigma, jnp.zeros_like(q.mean), jnp.full_like(q.sigma, self.sigma0))

    def episode(
        self, network: Params, own: Params, key: PRNGKeyArray, batch: Data, shared: bool
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """−log p(y | β), the mean over a query, and KL(q ‖ r), q from a support; halves of a batch, or all of it each."""
        h = self.model.features(network, batch.x)  # type: ignore[misc]
        support, query = (batch, batch) if shared else first_half(batch)
        q = self.posterior(own, h, support.mask)
        outputs = self.read(network, *self.drawn(key, q), h)
        return masked_mean(-self.model.likelihood.log_prob(outputs, batch.y), query.mask), self.divergence(q)

    def drawn(self, key: PRNGKeyArray, q: Posterior | None) -> tuple[Float[Array, "l k"], Float[Array, " k"]]:
        """β and b_β; zeros without a posterior."""
        if q is None:
            return jnp.zeros((self.local, self.outputs)), jnp.zeros(self.outputs)
        return q.mean + q.sigma * jax.random.normal(key, q.mean.shape), q.bias

    def with_head(self, network: Params, beta: Float[Array, "l k"], bias: Float[Array, " k"]) -> Params:
        """The network with a last layer of its own, whose kernel is W_g above β."""
        head = network["head"]
        whole = {"kernel": jnp.concatenate([head["kernel"], beta]), "bias": head["bias"] + bias}
        return {**network, "head": whole}

    def read(self, network: Params, beta: Any, bias: Any, h: Float[Array, "n d"]) -> Float[Array, "n m"]:
        """The likelihood's parameters of rows with these features."""
        return self.model.readout(self.with_head(network, beta, bias), h)  # type: ignore[misc]

    def check_linear(self, network: Params) -> None:
        """Refuse a network whose outputs are not linear in β."""
        key, nought = jax.random.key(0), jnp.zeros(self.outputs)
        h = jax.random.normal(key, (3, self.shared + self.local))
        beta = jax.random.normal(jax.random.fold_in(key, 1), (self.local, self.outputs))
        without, whole = (self.read(network, one, nought, h) for one in (jnp.zeros_like(beta), beta))
        if not bool(jnp.allclose(whole, without + h[:, self.shared :] @ beta, rtol=1e-3, atol=1e-3)):
            raise UserError(f"a certificate draws outputs that are linear in the last layer, but those of {self.model} are not")

    def gibbs(
        self, network: Params, own: Params, key: PRNGKeyArray, rows: Data, draws: int
    ) -> tuple[Float[Array, "m n k"], Float[Array, ""]]:
        """Outputs with a fresh draw of β for each row, and KL(q ‖ r), q from all rows."""
        h = self.model.features(network, rows.x)  # type: ignore[misc]
        q = self.posterior(own, h, rows.mask)
        base, local = self.read(network, jnp.zeros_like(q.mean), q.bias, h), h[:, self.shared :]
        noise = jax.random.normal(key, (draws, *base.shape))
        outputs = (base + local @ q.mean)[None] + jnp.sqrt(local**2 @ q.sigma**2)[None] * noise
        return outputs, self.divergence(q)
