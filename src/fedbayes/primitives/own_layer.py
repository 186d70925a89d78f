"""A part of a last layer that is a client's own, with a learnt prior, and its posterior from rows with or without labels.

outputs = W h + b + βᵀ[h P, 1],    β ~ N(0, σ0² diag s²);    P, s, the posterior constructor and log c are parameters
q(β | rows): `primitives.experts`, in units u = σ0 s [h P, 1]
a row with a label:    its likelihood;                         a row without:    (n, log(e^(ν − QUIET) + 1)), (n, ν) = g(h)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Params
from fedbayes.models import Model, Normal
from fedbayes.models.beliefs import Marginals
from fedbayes.primitives import experts
from fedbayes.primitives.experts import Effects
from fedbayes.primitives.training import in_blocks, labelled, masked_mean, unlabelled

WIDTHS = (1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""σ0 among which the federation chooses; the first, with which training learns s, is kept where none is ahead of it."""
START, RATE = 0.5, 4.0
"""s at the start; and by how much faster log s moves than other parameters."""
QUIET = 2.0
"""The constructor's precisions start at log(1 + e^−QUIET) for a row, in units of the prior's."""
HIDDEN = 0.25
"""The share of episodes whose support has no labels."""
DRAWS = 8
"""Draws of the outputs in log E_q ℓ while training, where it has no closed form."""


class Own(NamedTuple):
    """q(β): the mean and a root of the covariance, the last row of both for the bias; and log c where noise is learnt."""

    mean: Float[Array, "*s r k"]
    root: Float[Array, "*s r r"]
    noise: Float[Array, "*s"] | None

    @property
    def marginals(self) -> Marginals:
        """Outputs share deviations. Of a q for each draw of θ those of the mixture, where its variance is a mean over outputs.

        >>> two = Own(jnp.array([[[0.0]], [[2.0]]]), jnp.ones((2, 1, 1)), None).marginals  # variance 1 within, 1 between
        >>> float(two.mean[0, 0]), round(float(two.deviation[0, 0]), 4)
        (1.0, 1.4142)
        """
        mean, variance = self.mean, jnp.sum(self.root**2, axis=-1, keepdims=True)
        if mean.ndim == 3:
            variance = jnp.mean(variance, axis=0) + jnp.mean(jnp.var(mean, axis=0), axis=-1, keepdims=True)
            mean = jnp.mean(mean, axis=0)
        return Marginals(mean, jnp.sqrt(variance))

    def moved(self, to: Marginals) -> Own:
        """The same correlations with other marginals."""
        old = self.marginals
        ratio = jnp.where(old.deviation > 0, to.deviation / jnp.where(old.deviation > 0, old.deviation, 1.0), 0.0)
        before, after, ratio = (jnp.expand_dims(one, range(self.mean.ndim - 2)) for one in (old.mean, to.mean, ratio))
        return self._replace(mean=after + ratio * (self.mean - before), root=ratio * self.root)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The last layer's own part; its parameters are `own`, those of the network `network`."""

    model: Model
    constructor: Model
    """From features to natural parameters."""
    local: int
    """Columns of P."""
    outputs: int
    bias: bool
    sigma0: Any
    """σ0; may be traced."""

    def start(self, key: PRNGKeyArray, constructor: Params) -> Params:
        """Random orthogonal directions of features, as long as all features are; n = 0; log c = 0 where noise is learnt."""
        d = self.width
        basis = jnp.linalg.qr(jax.random.normal(key, (d, self.local)))[0] * math.sqrt(d / self.local)
        constructor = {**constructor, "head": jax.tree.map(jnp.zeros_like, constructor["head"])}
        noise = {"noise": jnp.zeros(())} if self.model.likelihood == Normal(scale=None) else {}
        return {"network": constructor, "basis": basis, "scale": jnp.full(self.local + 1, math.log(START) / RATE), **noise}

    @property
    def width(self) -> int:
        """How many features the network has."""
        return int(jax.eval_shape(self.model.init, jax.random.key(0))["head"]["kernel"].shape[0])

    def features(self, own: Params, h: Float[Array, "n d"]) -> Float[Array, "n r"]:
        """[h P, 1]."""
        return jnp.concatenate([h @ own["basis"], jnp.full((len(h), 1), float(self.bias))], axis=1)

    def deviations(self, own: Params) -> Float[Array, " r"]:
        """σ0 s."""
        return jnp.exp(RATE * own["scale"]) * self.sigma0

    def prior(self, own: Params) -> Marginals:
        """r(β); outputs share deviations."""
        return Marginals(jnp.zeros((self.local + 1, self.outputs)), self.deviations(own)[:, None])

    def with_prior(self, own: Params, deviation: Float[Array, "r 1"]) -> Params:
        """Parameters with the scales of another r(β), where σ0 is not 0."""
        sigma0 = jnp.asarray(self.sigma0, jnp.float32)
        able = (deviation[:, 0] > 0) & (sigma0 > 0)
        scale = jnp.log(jnp.where(able, deviation[:, 0] / jnp.where(sigma0 > 0, sigma0, 1.0), 1.0)) / RATE
        return {**own, "scale": jnp.where(able, scale, own["scale"])}

    def units(self, own: Params, h: Float[Array, "n d"]) -> Float[Array, "n r"]:
        """u."""
        return self.features(own, h) * self.deviations(own)[None]

    def shifted(self, network: Params, h: Float[Array, "n d"], noise: Any, delta: Float[Array, "n k"]) -> Float[Array, "n m"]:
        """The likelihood's parameters of rows whose last layer gives δ more, with c times the noise of a number."""
        head = network["head"]

        def one(h: Float[Array, " d"], delta: Float[Array, " k"]) -> Float[Array, " m"]:
            return self.model.readout({**network, "head": {**head, "bias": head["bias"] + delta}}, h[None])[0]  # type: ignore[misc]

        outputs = jax.vmap(one)(h, delta)
        return outputs if noise is None else outputs.at[:, 1].add(noise)

    def effects(
        self, network: Params, own: Params, h: Float[Array, "n d"], data: Data, steps: Any, unroll: bool = False
    ) -> Effects:
        """q in units of the prior, from rows, of which some may have labels."""
        known, size = data.mask & labelled(data.y), self.local + 1
        y = jnp.where(known, data.y, jnp.zeros_like(data.y))
        labels = experts.Labels(functools.partial(self.shifted, network, h, own.get("noise")), self.model.likelihood, y, known)
        said = self.constructor.apply(own["network"], h)
        each = said[:, :-size], jax.nn.softplus(said[:, -size:] - QUIET)
        natural, precision = (jnp.sum(jnp.where((data.mask & ~known)[:, None], one, 0.0), axis=0) for one in each)
        given = experts.Experts(natural.reshape(size, self.outputs), precision)
        return experts.product(self.units(own, h), given, labels, steps, unroll=unroll)

    def posterior(self, network: Params, own: Params, data: Data, steps: Any, temperature: Any) -> tuple[Own, Float[Array, ""]]:
        """q(β) from a client's rows, and KL(q(β) ‖ r(β))."""
        h = in_blocks(self.model.features, network, _there(data))  # type: ignore[arg-type]
        q = self.effects(network, own, h, data, steps).tempered(temperature)
        scale, noise = self.deviations(own), own.get("noise")
        noise = None if noise is None else jnp.where(scale[0] > 0, noise, 0.0)  # σ0 = 0 is the global model
        return Own(scale[:, None] * q.mean, scale[:, None] * q.root, noise), q.divergence()

    def gibbs(
        self, network: Params, own: Params, key: PRNGKeyArray, q: Own, x: Shaped[Array, "n ..."], draws: int
    ) -> Float[Array, "m n k"]:
        """The likelihood's parameters with a fresh draw of β for each row."""
        h = self.model.features(network, x)  # type: ignore[misc]
        u = self.features(own, h)
        mean, deviation = u @ q.mean, jnp.linalg.norm(u @ q.root, axis=1)[:, None]
        noise = jax.random.normal(key, (draws, *mean.shape))
        return jax.vmap(lambda e: self.shifted(network, h, q.noise, mean + deviation * e))(noise)

    def episode(
        self, network: Params, own: Params, key: PRNGKeyArray, batch: Data
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """−log E_q p(y | β), the mean over a query, and KL(q ‖ r), q from a support of random length."""
        for_noise, for_size, for_labels = jax.random.split(key, 3)
        h, n = self.model.features(network, _there(batch)), jnp.sum(batch.mask)  # type: ignore[misc]
        size = jnp.floor(jax.random.uniform(for_size) * (n // 2 + 1).astype(jnp.float32)).astype(n.dtype)
        support = jnp.arange(len(h)) < size
        y = jnp.where(jax.random.uniform(for_labels) < HIDDEN, unlabelled(batch.y), batch.y)
        q = self.effects(network, own, h, Data(batch.x, y, batch.mask & support), 1, unroll=True)
        nll = self._surprise(network, own, h, q, for_noise, batch.y)
        return masked_mean(nll, batch.mask & ~support), q.divergence()

    def _surprise(self, network: Params, own: Params, h: Any, q: Effects, key: PRNGKeyArray, y: Any) -> Float[Array, " n"]:
        """−log E_q p(y | β) of each row; by draws, for a normal likelihood exactly."""
        mean, variance = q.of(self.units(own, h))
        outputs = functools.partial(self.shifted, network, h, own.get("noise"))
        likelihood = self.model.likelihood
        if isinstance(likelihood, Normal):
            at = outputs(mean)
            slope = outputs(mean + 1)[:, 0] - at[:, 0]  # of the outputs' units
            noise = jnp.exp(at[:, 1]) if likelihood.scale is None else jnp.full(len(at), likelihood.scale)
            whole = jnp.stack([at[:, 0], jnp.log(jnp.sqrt(noise**2 + slope**2 * variance))], axis=1)
            return -Normal(scale=None).log_prob(whole, y)
        noise = jax.random.normal(key, (DRAWS, *mean.shape))
        deviation = jnp.sqrt(variance + 1e-12)[:, None]  # the root has no slope at 0
        each = jax.vmap(lambda e: likelihood.log_prob(outputs(mean + deviation * e), y))(noise)
        return math.log(DRAWS) - jax.nn.logsumexp(each, axis=0)


def _there(data: Data) -> Shaped[Array, "n ..."]:
    """The rows, with 0 for those that do not exist: a large number there would leave slopes that are not finite."""
    return jnp.where(data.mask.reshape(-1, *(1,) * (data.x.ndim - 1)), data.x, jnp.zeros_like(data.x))
