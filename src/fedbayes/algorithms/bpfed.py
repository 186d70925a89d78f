"""BPFed: a Gaussian network whose layers are shared or personal (Chen, Liu, Cao and Zhang 2023, sections III and IV).

    ζ = (μ_ζ, σ_ζ): the shared layers θ ~ N(μ_ζ, σ_ζ²);     η_i = (μ_η, σ_η): a client's own layers φ_i ~ N(μ_η, σ_η²)
    prior π_i of round t:   the shared part as it was broadcast, ζ^t, and the personal part of its last round, η_i^{t−1}
    client:  for each minibatch, a step of q = N(μ_η, σ_η²) N(μ_ζ, σ_ζ²), both parts together, on
             Q_i = −n/b 1/M Σ_j Σ_m log p(D_i^j | φ_m, θ_m) + KL(q ‖ π_i),   φ_m, θ_m ~ q            (8–10)
             then one of a copy of π_i on the divergence alone, KL(q ‖ copy), so that it follows q    (11)
             what it keeps of η_i and sends of ζ_i is that copy
    server:  ζ^{t+1} = 1/S Σ_i ζ_i,  means and deviations alike
    adapt:   the personal part alone is fitted to the client's rows, under ζ, in one round or more

A client's round starts at its prior, so π_i is q as it was. Without (11), `reinforce=False`, q itself is kept and sent; that is
Bayes' rule for rows that are new in each round. Rows that come back are counted again, and deviations fall from round to
round; `kl` above 1 holds against it. The mean of means and deviations is the Wasserstein barycentre of the clients' Gaussians;
the other averages are options. In networks of 20,000 weights and more the noise of a round's steps comes from a pool that is
drawn once for it, in windows at random places and with random signs (`gaussian.draw`).

With ρ = −200 no deviation is left, and with kl = 0 the rest is FedPer; with `alternate`, FedRep; with the split turned round,
LG-FedAvg; each with the same `uniform`. The paper does not say which parameters (11) moves and which of two copies it returns.
If it moved q, an Adam step on (11) would undo the one on (10); if the prior in (10) moved as pFedBayes' does, nothing would
hold q. Here the copy moves, the prior in (10) does not, and the copy is returned.

Reference:
    Chen, Liu, Cao, Zhang. Bayesian personalized federated learning with shared and personalized uncertainty
    representations. 2023.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Params, Sum, setting
from fedbayes.primitives import gaussian, gaussian_network
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.training import Training, rows, tuning


class Server(NamedTuple):
    """ζ, with σ = log(1 + e^ρ), the number of rounds behind it, and the state of the server's optimiser if any."""

    zeta: MeanField
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """η, the client's own layers."""

    eta: MeanField


class Down(NamedTuple):
    """ζ and this round's step sizes, of both parts and, with `alternate`, of the personal one."""

    zeta: MeanField
    lr: Float[Array, ""]
    personal_lr: Float[Array, ""] | None


class Pair(NamedTuple):
    """Two numbers for each shared weight, whose means over clients make the next ζ: μ and σ, μ and ρ, or μ/σ² and 1/σ²."""

    first: Params
    second: Params


class Up(NamedTuple):
    """The shared part after the client's round, how much the client counts, and its training loss."""

    zeta: Mean[Pair]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class BPFed(Stepping[Server, Local, Down, Up]):
    """Every weight is Gaussian; some layers are learnt together, the last ones are each client's own.

    >>> from fedbayes.models import Categorical, mlp
    >>> BPFed(mlp((64,), Categorical(10))).personal
    ('head',)
    """

    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""
    kl: float = setting(1.0, least=0, which="weighs a divergence")
    """Weight of the KL divergence in (10) and (11)."""
    reinforce: bool = True
    """Whether a copy of the prior follows q by (11) and is what leaves and stays, instead of q."""
    alternate: bool = False
    """Whether a round moves the personal layers first, by `head`, then the shared ones, by `train`, instead of all together."""
    average: Literal["wasserstein", "plain", "precision"] = setting("wasserstein", "plain", "precision")
    """What the server averages: deviations; ρ, as pFedBayes does; or precisions, which also weigh the means."""
    uniform: bool = True
    """Whether every client counts the same, instead of by its rows."""
    rho: float = -3.0
    """ρ at the start."""
    spread: float | None = None
    """Deviation of the means at the start; None starts them as the network does."""
    M: int = setting(1, least=1)
    """M, draws of the weights in each step."""
    local_reparametrisation: bool = False
    """Whether noise is drawn for what dense layers give, anew for each row, instead of for weights."""
    draws: int = setting(20, least=1)
    """Networks that a prediction averages."""
    head: Training = Training(epochs=10, optimiser="adam", batch=50, lr=0.001)
    """First part of a client's round, on the personal layers; only with `alternate`."""
    train: Training = Training(epochs=10, optimiser="adam", batch=50, lr=0.001)
    """A client's round."""
    tune: Training = tuning(epochs=20, optimiser="adam", batch=50, lr=0.001)
    """Fitting the personal layers in `adapt`."""
    tune_rounds: int = setting(1, least=1)
    """Rounds of `tune` in `adapt`, each with the last one's posterior as its prior, as while training. One is Bayes' rule under
    the prior of the start; with few rows, more of them get away from a start that says nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gaussian_network.check(self.rho, self.kl, self.head, self.train, self.tune)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The shared layers at random."""
        return Server(*self.server_step.start(self._init(key)[1]))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """The personal layers at random."""
        return Local(self._init(key)[0])

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """ζ and the round's step sizes."""
        first = self.head.lr_of(server.round + 1) if self.alternate else None
        return Down(server.zeta, self.train.lr_of(server.round + 1), first)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Steps on (10) and (11) from the prior, on both parts or on one after the other."""
        eta, zeta = local.eta, down.zeta
        if not self.alternate:
            q, loss = self._fit(_merge(eta, zeta), None, _merge(eta, zeta), self.train, down.lr, key, data)
            eta, zeta = _split(q, self.personal)
        else:
            for_eta, for_zeta = jax.random.split(key)
            eta, _ = self._fit(eta, zeta, local.eta, self.head, down.personal_lr, for_eta, data)
            zeta, loss = self._fit(zeta, eta, down.zeta, self.train, down.lr, for_zeta, data)
        return Up(self._sent(zeta), jnp.float32(1) if self.uniform else rows(data), loss), Local(eta)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The mean over clients, or a step towards it."""
        return Server(*self.server_step.next(*server, self._received(up.zeta)))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fit the personal layers, with what the client has of them as their prior; q itself is kept."""
        alone = dataclasses.replace(self, reinforce=False)

        def fitted(eta: MeanField, key: PRNGKeyArray) -> MeanField:
            return alone._fit(eta, down.zeta, eta, self.tune, self.tune.lr_of(1), key, data)[0]

        if self.tune_rounds == 1:
            return Local(fitted(local.eta, key))
        return Local(jax.lax.fori_loop(0, self.tune_rounds, lambda t, eta: fitted(eta, jax.random.fold_in(key, t)), local.eta))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of both parts."""
        return gaussian_network.predict(self.model, key, _merge(local.eta, down.zeta), x, self.draws)

    def _init(self, key: PRNGKeyArray) -> tuple[MeanField, MeanField]:
        return _split(gaussian_network.init(self.model, key, self.rho, self.spread), self.personal)

    def _fit(
        self,
        moving: MeanField,
        fixed: MeanField | None,
        prior: MeanField,
        training: Training,
        lr: Any,
        key: PRNGKeyArray,
        data: Data,
    ) -> tuple[MeanField, Float[Array, ""]]:
        """Epochs on (10), divided by n; the part that is fixed has no divergence that could change."""
        n, held = jnp.maximum(rows(data), 1), gaussian.prior(prior)

        def whole(moving: MeanField) -> MeanField:
            return moving if fixed is None else _merge(moving, fixed)

        def divergence(moving: MeanField, other: Any) -> Float[Array, ""]:
            return self.kl / n * gaussian.kl(moving, other)

        def fit(moving: MeanField, key: PRNGKeyArray, pool: Any, batch: Data) -> Float[Array, ""]:
            return gaussian_network.loss(
                self.model, key, whole(moving), batch, pool, self.M, local=self.local_reparametrisation
            )

        reinforce = self.kl > 0 and self.reinforce
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
