"""BPFed: a Gaussian network whose layers are shared or personal (Chen, Liu, Cao and Zhang 2023, sections III and IV).

    ζ = (μ_ζ, σ_ζ): the shared layers θ ~ N(μ_ζ, σ_ζ²);     η_i = (μ_η, σ_η): a client's own layers φ_i ~ N(μ_η, σ_η²)
    prior π_i of round t:   of the shared part ζ^t as it was broadcast; of the personal part the population's N(m, v), or with
             prior="last", as in the paper, what the client kept of its last round, η_i^{t−1}
    client:  from q = π_i, for each minibatch, a step of q = N(μ_η, σ_η²) N(μ_ζ, σ_ζ²), both parts together, on
             Q_i = −n/b 1/M Σ_j Σ_m log p(D_i^j | φ_m, θ_m) + KL(q ‖ π_i),   φ_m, θ_m ~ q            (8–10)
             with `reinforce`, then one of a copy of π_i on the divergence alone, KL(q ‖ copy)        (11)
             under the population's prior the personal part of q begins at m with the deviations of the start, not with v
             it keeps η_i and sends ζ_i, of q or, with `reinforce`, of that copy
    server:  ζ^{t+1} = 1/S Σ_i ζ_i,  means and deviations alike
             m = mean of μ_i,  v = mean of (σ_i² + μ_i²) − m²,  over the round's clients, or with prior="last" over all
    adapt:   (10) on the client's rows from the same prior, in one round or more: both parts, or the personal part alone under ζ
    a client without an η of its own predicts as q begins, with prior="last" with N(m, v)

Under the population's prior, rows that come back are counted once, and m is trained as a shared last layer is. Under the last
posterior they are counted again in each round, deviations fall, and clients with few labels each train a last layer whose
mean over clients predicts badly. Draws of width v would be noise: v has what clients disagree about, weight by weight, and a
round that begins with it unlearns its last layer. m and v are learnt from sums (`primitives.population`); with
population=False, as in the paper, no number of η leaves a client, its prior is "last", and a new client's η is random.

`BPFed.paper` has the published settings: prior="last", kl = 1, (11), Adam, and `adapt` of the personal part alone. The mean of
means and deviations is the Wasserstein barycentre of the clients' Gaussians; the other averages are options. In networks of
20,000 weights and more the noise of a round's steps comes from a pool that is drawn once for it, in windows at random places
and with random signs (`gaussian.draw`).

With ρ = −200 no deviation is left, and with kl = 0, prior="last" and whole=False the rest is FedPer; with `alternate`, FedRep;
with the split turned round, LG-FedAvg; each with the same `uniform` and `population`, as kl = 0 leaves no prior to use v. The
paper does not say which parameters (11) moves and which of two copies it returns. If it moved q, an Adam step on (11) would
undo the one on (10); if the prior in (10) moved as pFedBayes' does, nothing would hold q. Here the copy moves, the prior in
(10) does not, and the copy is returned.

Steps on the divergence are explicit. By SGD they are stable while lr kl/(σ² n) < 2 (1 + momentum), σ the prior's deviation:
with the σ = .007 of ρ = −5 and lr = .1 a kl of 1 diverges for clients of fewer than 580 rows. With a larger kl, give a larger
rho or Adam.

Reference:
    Chen, Liu, Cao, Zhang. Bayesian personalized federated learning with shared and personalized uncertainty
    representations. 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Params, Sum, setting
from fedbayes.errors import UserError
from fedbayes.models.beliefs import Beliefs
from fedbayes.primitives import gaussian, gaussian_network, population
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.population import Moments, Populated, Population
from fedbayes.primitives.training import Training, rows, tuning


class Server(NamedTuple):
    """ζ, with σ = log(1 + e^ρ), the rounds behind it, the state of the server's optimiser if any, and the population of η."""

    zeta: MeanField
    round: Int[Array, ""]
    optimiser: Any = None
    population: Population | None = None


class Local(NamedTuple):
    """η, the client's own layers, and whether it has them yet; until then the population stands for them. After `adapt` with
    `whole` also a ζ of the client's own."""

    eta: MeanField
    own: Bool[Array, ""] | None = None
    zeta: MeanField | None = None


class Down(NamedTuple):
    """ζ, this round's step sizes, of both parts and, with `alternate`, of the personal one, and the population of η."""

    zeta: MeanField
    lr: Float[Array, ""]
    personal_lr: Float[Array, ""] | None
    population: Population | None = None


class Pair(NamedTuple):
    """Two numbers for each shared weight, whose means over clients make the next ζ: μ and σ, μ and ρ, or μ/σ² and 1/σ²."""

    first: Params
    second: Params


class Up(NamedTuple):
    """The shared part after the client's round, how much the client counts, its training loss, and η's moments in a sum."""

    zeta: Mean[Pair]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]
    population: Sum[Moments | None] = None


@dataclasses.dataclass(frozen=True)
class BPFed(Stepping[Server, Local, Down, Up], Populated[Server, Local, Down, Up]):
    """Every weight is Gaussian; some layers are learnt together, the last ones are each client's own.

    >>> from fedbayes.models import Categorical, mlp
    >>> BPFed(mlp((64,), Categorical(10))).personal
    ('head',)
    """

    published: ClassVar[Mapping[str, Any]] = {
        "population": False,
        "prior": "last",
        "kl": 1.0,
        "reinforce": True,
        "rho": -3.0,
        "head": Training(epochs=10, optimiser="adam", batch=50, lr=0.001),
        "train": Training(epochs=10, optimiser="adam", batch=50, lr=0.001),
        "tune": Training(epochs=20, optimiser="adam", batch=50, lr=0.001),
        "whole": False,
    }

    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""
    kl: float = setting(0.001, least=0, which="weighs a divergence")
    """Weight of the KL divergence in (10) and (11). 1 is Bayes' rule, under which the narrow deviations of the start, as a
    prior, let clients with few rows hardly move."""
    reinforce: bool = False
    """With True, a copy of the prior follows q by (11), and is sent and kept instead of q."""
    prior: Literal["population", "last"] = setting("population", "last")
    """Prior of a client's η in each round: the population's N(m, v), and the round starts at m; or its own last posterior,
    where the round starts too."""
    alternate: bool = False
    """With True, a round moves the personal layers first, by `head`, then the shared ones, by `train`; else all together."""
    average: Literal["wasserstein", "plain", "precision"] = setting("wasserstein", "plain", "precision")
    """What the server averages: deviations; ρ, as pFedBayes does; or precisions, which also weigh the means."""
    uniform: bool = True
    """With True, every client counts the same; else by its rows."""
    rho: float = -5.0
    """ρ at the start."""
    spread: float | None = None
    """Deviation of the means at the start; None starts them as the network does."""
    M: int = setting(1, least=1)
    """M, draws of the weights in each step."""
    local_reparametrisation: bool = False
    """With True, noise is drawn for the outputs of dense layers, anew for each row; else for weights."""
    draws: int = setting(20, least=1)
    """Networks that a prediction averages."""
    head: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """First part of a client's round, on the personal layers; only with `alternate`."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fitting in `adapt`."""
    whole: bool = True
    """With True, `adapt` fits the shared layers too, with ζ as their prior; with False the personal ones alone."""
    tune_rounds: int = setting(1, least=1)
    """Rounds of `tune` in `adapt`, each with the last one's posterior as its prior, as while training. One is Bayes' rule under
    the prior of the start; with few rows, more of them get away from a start that says nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior == "population" and not self.population:
            given = 'prior is "population", but with population=False no population is learnt'
            raise UserError(f'{given}; give prior="last", or leave population=True')
        gaussian_network.check(self.rho, self.kl, self.head, self.train, self.tune)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The shared layers at random, and the population at the personal ones drawn with them."""
        eta, zeta = self._init(key)
        return Server(
            *self.server_step.start(zeta), population.start(eta.mean, self._variance(eta)) if self.population else None
        )

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No personal layers yet; without a population, random ones."""
        eta, _ = self._init(key)
        return Local(trees.zeros(eta) if self.population else eta, jnp.bool_(False))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """ζ, the round's step sizes and the population."""
        first = self.head.lr_of(server.round + 1) if self.alternate else None
        return Down(server.zeta, self.train.lr_of(server.round + 1), first, server.population)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Steps on (10) and (11) from the prior, on both parts or on one after the other."""
        prior, start, zeta = self._prior(down, local), self._start(down, local), down.zeta
        if not self.alternate:
            q, loss = self._fit(_merge(start, zeta), None, _merge(prior, zeta), self.train, down.lr, key, data, self.reinforce)
            eta, zeta = _split(q, self.personal)
        else:
            for_eta, for_zeta = jax.random.split(key)
            eta, _ = self._fit(start, zeta, prior, self.head, down.personal_lr, for_eta, data, self.reinforce)
            zeta, loss = self._fit(zeta, eta, down.zeta, self.train, down.lr, for_zeta, data, self.reinforce)
        moments = None if down.population is None else population.sent(eta.mean, down.population.mean, self._variance(eta))
        up = Up(self._sent(zeta), jnp.float32(1) if self.uniform else rows(data), loss, moments)
        return up, Local(eta, jnp.bool_(True))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The mean over clients, or a step towards it; and the population after the round."""
        zeta, number, optimiser = self.server_step.next(server.zeta, server.round, server.optimiser, self._received(up.zeta))
        if server.population is None or up.population is None:
            return Server(zeta, number, optimiser)
        # Where rounds start at the population, its mean is trained as ζ is: by the clients of the round alone.
        behind = None if self.prior == "population" else self.N
        return Server(zeta, number, optimiser, population.next(server.population, up.population, behind))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fit both parts, or the personal one alone, from their prior; q is kept."""
        prior, start, zeta = self._prior(down, local), self._start(down, local), None if self.whole else down.zeta
        prior, q = (_merge(one, down.zeta) if self.whole else one for one in (prior, start))

        def fitted(q: MeanField, prior: MeanField, key: PRNGKeyArray) -> MeanField:
            return self._fit(q, zeta, prior, self.tune, self.tune.lr_of(1), key, data, False)[0]

        if self.tune_rounds == 1:
            q = fitted(q, prior, key)
        else:
            q = fitted(q, prior, jax.random.fold_in(key, 0))
            q = jax.lax.fori_loop(1, self.tune_rounds, lambda t, q: fitted(q, q, jax.random.fold_in(key, t)), q)
        eta, zeta = _split(q, self.personal) if self.whole else (q, None)
        return Local(eta, jnp.bool_(True), zeta)

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of both parts; of the population's personal part where the client has none."""
        zeta = down.zeta if local.zeta is None else local.zeta
        return gaussian_network.predict(self.model, key, _merge(self._begin(down, local), zeta), x, self.draws)

    @property
    def deterministic(self) -> BPFed:
        """Without deviations and divergence."""
        return dataclasses.replace(self, rho=-200.0, kl=0.0, reinforce=False)

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """Both parts; the prior of η is the population's, where there is one."""
        q = _merge(self._begin(down, local), down.zeta if local.zeta is None else local.zeta)
        prior = None if down.population is None else gaussian.marginals(_merge(self._prior(down, local), down.zeta))
        return Beliefs(gaussian.marginals(q), prior)

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """A posterior becomes the client's own; a prior goes into ζ and the population."""
        if beliefs.prior is not None and down.population is not None:
            eta, zeta = _split(gaussian.mean_field(beliefs.prior), self.personal)
            down = down._replace(zeta=zeta, population=down.population._replace(mean=eta.mean, variance=self._variance(eta)))
        if beliefs.posterior is not None:
            eta, zeta = _split(gaussian.mean_field(beliefs.posterior), self.personal)
            local = Local(eta, jnp.bool_(True), zeta)
        return down, local

    def _init(self, key: PRNGKeyArray) -> tuple[MeanField, MeanField]:
        return _split(gaussian_network.init(self.model, key, self.rho, self.spread), self.personal)

    def _variance(self, eta: MeanField) -> Params | None:
        """σ², where there is a prior to make of it."""
        return jax.tree.map(lambda rho: gaussian.deviation(rho) ** 2, eta.rho) if self.kl else None

    def _prior(self, down: Down, local: Local) -> MeanField:
        """The prior of η: the population's N(m, v), or what the client kept, where it has kept anything."""
        kept = self.prior == "last"
        return self._or_population(down, local, kept, None if down.population is None else down.population.variance)

    def _start(self, down: Down, local: Local) -> MeanField:
        """q of η where a round starts: the prior, or with the population's m, around which draws of width v would be noise."""
        return self._prior(down, local) if self.prior == "last" else self._or_population(down, local, False, None)

    def _begin(self, down: Down, local: Local) -> MeanField:
        """η that a client predicts with: its own, else that of a start."""
        if self.prior == "last":
            return self._prior(down, local)
        return self._or_population(down, local, True, None)

    def _or_population(self, down: Down, local: Local, kept: bool, variance: Params | None) -> MeanField:
        """η where it is `kept` and the client has one, else N(m, v) of the population; without v, deviations of the start."""
        if down.population is None or (kept and local.own is None):
            return local.eta
        mean = down.population.mean
        if variance is None:
            rho = jax.tree.map(lambda leaf: jnp.full_like(leaf, self.rho), mean)
        else:
            rho = jax.tree.map(lambda v: gaussian.rho_of(jnp.sqrt(v)), variance)
        others = MeanField(mean, rho)
        return population.begin(local.own, local.eta, others) if kept and local.own is not None else others

    def _fit(
        self,
        moving: MeanField,
        fixed: MeanField | None,
        prior: MeanField,
        training: Training,
        lr: Any,
        key: PRNGKeyArray,
        data: Data,
        reinforce: bool,
    ) -> tuple[MeanField, Float[Array, ""]]:
        """Epochs on (10) and, with `reinforce`, (11), divided by n; the fixed part has no divergence that could change."""
        n, held = jnp.maximum(rows(data), 1), gaussian.prior(prior)

        def whole(moving: MeanField) -> MeanField:
            return moving if fixed is None else _merge(moving, fixed)

        def divergence(moving: MeanField, other: Any) -> Float[Array, ""]:
            return self.kl / n * gaussian.kl(moving, other)

        def fit(moving: MeanField, key: PRNGKeyArray, pool: Any, batch: Data) -> Float[Array, ""]:
            return gaussian_network.loss(
                self.model, key, whole(moving), batch, pool, self.M, local=self.local_reparametrisation
            )

        reinforce = reinforce and self.kl > 0
        terms = ((lambda q, _: divergence(q, held)) if self.kl else None, divergence if reinforce else None)
        q, copy, loss = gaussian_network.follow(
            self.model, fit, *terms, moving, prior, training, lr, key, data, drawn=whole(moving)
        )
        return copy if reinforce else q, loss

    def _sent(self, zeta: MeanField) -> Pair:
        if self.average == "plain":
            return Pair(zeta.mean, zeta.rho)
        sigma = jax.tree.map(gaussian.deviation, zeta.rho)
        if self.average == "wasserstein":
            return Pair(zeta.mean, sigma)
        precision = jax.tree.map(lambda s: 1 / s**2, sigma)
        return Pair(jax.tree.map(jnp.multiply, precision, zeta.mean), precision)

    def _received(self, pair: Pair) -> MeanField:
        if self.average == "plain":
            return MeanField(pair.first, pair.second)
        if self.average == "wasserstein":
            return MeanField(pair.first, jax.tree.map(gaussian.rho_of, pair.second))
        mean = jax.tree.map(jnp.divide, pair.first, pair.second)
        return MeanField(mean, jax.tree.map(lambda precision: gaussian.rho_of(1 / jnp.sqrt(precision)), pair.second))


def _split(q: MeanField, personal: tuple[str, ...]) -> tuple[MeanField, MeanField]:
    (mean, shared_mean), (rho, shared_rho) = (trees.split(part, personal) for part in q)
    return MeanField(mean, rho), MeanField(shared_mean, shared_rho)


def _merge(one: MeanField, other: MeanField) -> MeanField:
    return MeanField(*(trees.merge(a, b) for a, b in zip(one, other, strict=True)))
