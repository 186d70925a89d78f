"""pFedBayes: personalised federated learning by variational inference (Zhang et al. 2022, Algorithm 1).

    q_i(θ) = N(μ_i, σ_i²) weight by weight stays with the client; w = N(μ, σ²) is shared, and is every client's prior
    client:  for each minibatch: `personal_steps` Adam steps on q_i:  −Σ log p(y | x, θ) + ζ/B · KL(q_i ‖ w_i),  θ ~ q_i,
             then one on its copy w_i of the shared one:  ζ/B · KL(q_i ‖ w_i);          B is the number of minibatches
    server:  w ← (1 − β) w + β Σ_i n_i w_i / Σ_i n_i, means and ρ alike, with σ = log(1 + e^ρ)
    adapt:   q_i alone is fitted to the client's rows, from itself or, where there is none, from w, with w as its prior

θ is drawn with noise of deviation 1, of which the public code has a thousandth. The public code divides ζ by the number of
local steps, 20; here B is the number of minibatches in an epoch, so that with ζ = 1 the sum over an epoch is the bound.
Noise of large networks is drawn as BPFed's is.

Reference:
    Zhang, Li, Li, Guo, Shao. Personalized federated learning via variational Bayesian inference. ICML 2022.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Sum, setting
from fedbayes.models.beliefs import Beliefs
from fedbayes.primitives import gaussian, gaussian_network
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.training import Training, rows, tuning


class Server(NamedTuple):
    """The shared Gaussian w, the number of rounds behind it, and the state of the server's optimiser if any."""

    w: MeanField
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """The client's own q, and whether it has one yet; until then w stands for it."""

    q: MeanField
    own: Bool[Array, ""]


class Down(NamedTuple):
    """The shared Gaussian and this round's step size."""

    w: MeanField
    lr: Float[Array, ""]


class Up(NamedTuple):
    """The client's copy of w after its round, how many rows it has, and its training loss."""

    w: Mean[MeanField]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class PFedBayes(Stepping[Server, Local, Down, Up]):
    """Each client has its own Gaussian network, whose prior is a Gaussian network that all share.

    >>> from fedbayes.models import Categorical, mlp
    >>> PFedBayes(mlp((64,), Categorical(10))).zeta
    10.0
    """

    zeta: float = setting(10.0, least=0, which="weighs a divergence")
    """ζ, weight of the KL divergence."""
    personal_steps: int = setting(5, least=1)
    """Steps on q for each minibatch."""
    beta: float = setting(1.0, above=0, most=1)
    """β, how far the server moves to the mean of the clients' copies."""
    rho: float = -3.0
    """ρ at the start."""
    spread: float | None = 0.1
    """Deviation of the means at the start; None starts them as the network does."""
    draws: int = setting(10, least=1)
    """Networks that a prediction averages."""
    local_reparametrisation: bool = False
    """Whether noise is drawn for what dense layers give, anew for each row, instead of for weights."""
    train: Training = Training(epochs=1, optimiser="adam", batch=50, lr=0.001)
    """A client's round."""
    tune: Training = tuning(epochs=5, optimiser="adam", batch=50, lr=0.001)
    """Fitting q in `adapt`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        gaussian_network.check(self.rho, self.zeta, self.train, self.tune)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """Means at random, all ρ alike."""
        return Server(*self.server_step.start(self._init(key)))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No q yet."""
        return Local(trees.zeros(self._init(key)), jnp.bool_(False))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """The shared Gaussian and the round's step size."""
        return Down(server.w, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Steps on q and on the copy of w, minibatch by minibatch."""
        q, w, loss = self._fit(self._own(down, local), down.w, self.train, down.lr, key, data, hold=False)
        return Up(w, rows(data), loss), Local(q, jnp.bool_(True))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The weighted mean, by β, or a step towards it."""
        mean = jax.tree.map(lambda old, new: old + self.beta * (new - old), server.w, up.w)
        return Server(*self.server_step.next(*server, mean))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Fit q to the rows, with w as it is."""
        q, _, _ = self._fit(self._own(down, local), down.w, self.tune, self.tune.lr_of(1), key, data, hold=True)
        return Local(q, jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of the client's q, or of w where it has none."""
        return gaussian_network.predict(self.model, key, self._own(down, local), x, self.draws)

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """The client's q and the shared w."""
        return Beliefs(gaussian.marginals(self._own(down, local)), gaussian.marginals(down.w))

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """Another q, another w."""
        down = down if beliefs.prior is None else down._replace(w=gaussian.mean_field(beliefs.prior))
        q = beliefs.posterior
        return down, local if q is None else Local(gaussian.mean_field(q), jnp.bool_(True))

    def _init(self, key: PRNGKeyArray) -> MeanField:
        return gaussian_network.init(self.model, key, self.rho, self.spread)

    def _own(self, down: Down, local: Local) -> MeanField:
        return trees.choose(local.own, local.q, down.w)

    def _fit(
        self, q: MeanField, w: MeanField, training: Training, lr: Float[Array, ""], key: PRNGKeyArray, data: Data, *, hold: bool
    ) -> tuple[MeanField, MeanField, Float[Array, ""]]:
        batch = min(training.batch, data.mask.shape[0])
        share = self.zeta / jnp.maximum(jnp.ceil(rows(data) / batch), 1)

        def divergence(q: MeanField, w: MeanField) -> Float[Array, ""]:
            return share * gaussian.kl(q, w)

        def fit(q: MeanField, key: PRNGKeyArray, pool: Any, batch: Data) -> Float[Array, ""]:
            return rows(batch) * gaussian_network.loss(self.model, key, q, batch, pool, local=self.local_reparametrisation)

        pull = divergence if self.zeta else None
        following = None if hold else divergence
        steps = self.personal_steps
        return gaussian_network.follow(self.model, fit, pull, following, q, w, training, lr, key, data, steps)
