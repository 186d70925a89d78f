"""BayesADMM: ADMM between Gaussian posteriors of one network (Möllenhoff, Swaroop, Doshi-Velez and Khan 2026), by IVON.

    q(w) = N(m, 1/s) weight by weight, natural parameters λ = (s m, s);   p(w) = N(0, 1/s_0), λ_0
    site of client k: a Gaussian factor with natural parameters λ_k, which stays with it; at the start λ_k = 0
    client:  q_k = argmin_q  1/τ Σ_i E_q[−log p(y_i | x_i, w)] + E_q[log site_k] + ρ KL(q ‖ q̄)             (IVON)
             λ_k ← λ_k + γ ρ (λ(q_k) − λ(q̄))
    server:  λ̄ ← (1 − α) mean_k λ(q_k) + α (λ_0 + Σ_k λ_k)

With ρ = 1 it is partitioned variational inference with damping γ, and for a linear model with normal noise its fixed point is
the best mean-field posterior of all rows, whatever ρ and γ are. Where weights do not depend on each other there, one round with
γ = 1 and enough steps reaches it. τ < 1 counts rows more than once, as networks like it. As published, α = 1/(1 + ρ K); with
many clients q̄ is then all but the mean of their posteriors, and moves little in a round, so the default is 1.

sites=False keeps λ_k = 0 and takes α = 0: FedIvon (Pal et al. 2024), whose server multiplies posteriors. isotropic=True leaves
all precisions at s_0 and draws no noise: λ_k/s_0 are the dual variables of ADMM, and it is FedLap (Swaroop et al. 2025); both
together are FedProx with μ = ρ s_0 τ/n_k.

Generalised cross-entropy (1 − p^δ)/δ in the place of −log p bounds what a row with a wrong label can do (`robust`, δ; Zhang and
Sabuncu 2018), as in FedGVI (Mildner et al. 2025).

Reference:
    Möllenhoff, Swaroop, Doshi-Velez, Khan. Federated ADMM from Bayesian duality. ICLR 2026.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum, fact, setting
from fedbayes.errors import UserError
from fedbayes.models import Categorical
from fedbayes.models.beliefs import Beliefs, Marginals
from fedbayes.primitives import ivon
from fedbayes.primitives.ivon import Factor, Gaussian, Ivon
from fedbayes.primitives.training import Training, fit, masked_mean, rows, tuning


class Server(NamedTuple):
    """λ̄, Σ_k λ_k over all clients, where clients begin their steps, and the rounds behind them."""

    q: Factor
    sites: Factor
    start: Gaussian
    round: Int[Array, ""]


class Local(NamedTuple):
    """The client's site; and a fine-tuned mean after `adapt`."""

    site: Factor
    tuned: Params | None = None


class Down(NamedTuple):
    """λ̄, where to begin, and the round's step size."""

    q: Factor
    start: Gaussian
    lr: Float[Array, ""]


class Up(NamedTuple):
    """λ(q_k), the change of λ_k, a 1 that counts clients, and the training loss."""

    q: Mean[Factor]
    change: Sum[Factor]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class BayesADMM(NetworkAlgorithm[Server, Local, Down, Up]):
    """A Gaussian posterior of one network, as a product of what each client's rows say of it.

    >>> from fedbayes.models import Categorical, mlp
    >>> BayesADMM(mlp((64,), Categorical(10))).planned(rounds=10, clients=20, rows=1000).N
    20
    """

    sites: bool = True
    """Whether clients keep a site; without one it is FedIvon."""
    isotropic: bool = False
    """Whether all precisions stay s_0 and weights have no noise: FedLap."""
    temperature: float = setting(0.1, above=0)
    """τ."""
    rho: float | None = setting(None, above=0)
    """ρ, weight of a client's divergence from q̄. None: max(.1, 4/K). With 1 a client moves q̄ by its share of all rows, which
    many clients make small; with less than about 4/K clients of different kinds can drive precisions apart."""
    gamma: float = setting(0.3, above=0, most=1)
    """γ, how far a site moves in a round."""
    alpha: float | None = setting(1.0, least=0, most=1)
    """α, the weight of the sites in q̄; the rest is the mean of the clients' posteriors. None: 1/(1 + ρ K), as published."""
    prior: float = setting(1.0, above=0)
    """Deviation of w under p, s_0^−½."""
    curvature: float = setting(0.05, above=0)
    """h_0: where steps begin, precisions are s_0 + h_0 n/(τ ρ), n the mean number of rows of a client. Large steps, as with a
    large `lr` of `train`, come with a small h_0."""
    robust: float = setting(0.0, least=0, most=1)
    """δ of the generalised cross-entropy of labels; 0 is the log-likelihood."""
    draws: int = setting(20, least=1)
    """Networks that a prediction averages."""
    steps: Ivon = Ivon()
    """How IVON steps."""
    train: Training = Training(epochs=1, batch=50, lr=0.1)
    """A client's round; `lr` multiplies natural-gradient steps."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the mean in `adapt`."""
    N: int | None = fact("clients")
    """K, how many clients may train; by default those of the run."""
    D: int | None = fact("rows")
    """Rows of all these; by default those of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.robust and not isinstance(self.model.likelihood, Categorical):
            raise UserError(f"robust is {self.robust}, but the target is a number; it is for labels, leave it 0")
        if self.train.optimiser != "sgd" or self.train.momentum or self.train.weight_decay:
            raise UserError("train is for IVON, whose momentum is in steps; leave its optimiser, momentum and weight_decay")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """q̄ = p; steps begin at the network's random weights."""
        prior, more = self._prior(), 0.0 if self.isotropic else self._begin
        start = Gaussian(self.model.init(key), jax.tree.map(lambda s: s + more, prior.precision))
        return Server(prior, jax.tree.map(jnp.zeros_like, prior), start, jnp.int32(0))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """λ_k = 0."""
        return Local(jax.tree.map(jnp.zeros_like, self._prior()))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """λ̄, the start and the step size."""
        return Down(server.q, server.start, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """q_k by IVON from where q̄ is, and λ_k."""
        prior = jax.tree.map(lambda q, site: q - site / self._rho, down.q, local.site)
        weight = rows(data) / (self.temperature * self._rho)
        how = (self.steps, self.train, down.lr)
        q, loss = ivon.fit(self._loss, down.start, prior, weight, *how, key, data, self.prior, noisy=not self.isotropic)
        found = ivon.natural(q)
        if not self.sites:
            return Up(found, jax.tree.map(jnp.zeros_like, found), jnp.float32(1), loss), local
        change = jax.tree.map(lambda new, old: self.gamma * self._rho * (new - old), found, down.q)
        return Up(found, change, jnp.float32(1), loss), Local(jax.tree.map(jnp.add, local.site, change))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """q̄ between the mean of the clients' posteriors and the product of the prior and all sites."""
        sites, alpha = jax.tree.map(jnp.add, server.sites, up.change), self._alpha
        product = jax.tree.map(jnp.add, self._prior(), sites)
        q = jax.tree.map(lambda mean, product: (1 - alpha) * mean + alpha * product, up.q, product)
        proper = jax.tree.map(lambda s, old: jnp.maximum(s, LEAST * old), q.precision, server.q.precision)
        q = Factor(q.shift, proper)
        return Server(q, sites, ivon.usual(q), server.round + 1)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fine-tune the mean; deviations stay."""
        return local._replace(tuned=fit(self.model, down.start.mean, self.tune, key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of q̄, or around the client's own mean; where there is no noise, one draw."""
        q = down.start if local.tuned is None else down.start._replace(mean=local.tuned)
        if self.isotropic:
            return self.model.apply(q.mean, x)[None]
        return jax.lax.map(lambda key: self.model.apply(ivon.draw(key, q)[0], x), jax.random.split(key, self.draws))

    @property
    def deterministic(self) -> BayesADMM:
        """Precisions stay at the prior's, and there is no noise."""
        return dataclasses.replace(self, isotropic=True)

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """q̄, around the client's own mean where it has one, and p."""
        if self.isotropic:
            return Beliefs()
        mean = down.start.mean if local.tuned is None else local.tuned
        return Beliefs(
            Marginals(mean, _deviations(down.start.precision)),
            Marginals(trees.zeros(mean), _deviations(self._prior().precision)),
        )

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """Another q̄; p is fixed."""
        if beliefs.posterior is None:
            return down, local
        precision = jax.tree.map(lambda sd: 1 / jnp.maximum(sd, 1e-12) ** 2, beliefs.posterior.deviation)
        down = down._replace(start=Gaussian(beliefs.posterior.mean, precision))
        return down, local if local.tuned is None else local._replace(tuned=beliefs.posterior.mean)

    @property
    def _alpha(self) -> float:
        if not self.sites:
            return 0.0
        return 1 / (1 + self._rho * self._known[0]) if self.alpha is None else self.alpha

    @property
    def _rho(self) -> float:
        return max(0.1, 4 / self._known[0]) if self.rho is None else self.rho

    @property
    def _begin(self) -> float:
        clients, rows = self._known
        return self.curvature * rows / (clients * self.temperature * self._rho)

    @property
    def _known(self) -> tuple[int, int]:
        if self.N is None or self.D is None:
            raise UserError(
                "N or D is not set; give the clients and their rows, or call algorithm.planned(rounds, clients=…, rows=…)"
            )
        return self.N, self.D

    def _prior(self) -> Factor:
        """λ_0."""
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        return Factor(trees.zeros(shapes), jax.tree.map(lambda leaf: jnp.full(leaf.shape, self.prior**-2, leaf.dtype), shapes))

    def _loss(self, w: Params, batch: Data) -> Float[Array, ""]:
        log_p = self.model.likelihood.log_prob(self.model.apply(w, batch.x), batch.y)
        return masked_mean(-log_p if not self.robust else (1 - jnp.exp(self.robust * log_p)) / self.robust, batch.mask)


LEAST = 0.1
"""Of a precision of q̄ before, what is left of it at least after a round: sites may be negative, q̄ not."""


def _deviations(precision: Params) -> Params:
    return jax.tree.map(jax.lax.rsqrt, precision)
