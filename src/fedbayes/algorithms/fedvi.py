"""FedVI: posteriors of personal parameters, amortised, from rows without labels (Vedadi et al. 2023, sections 3, 5, D).

    θ ~ t(θ);   for each client k:  β_k ~ r(β) = N(0, σ0² I),   y_ik ~ ℓ(Y | f(θ, β_k, x_ik))              (1, 25)
    h = h(x; θ'):      an embedding of d features, the first of them global, the others local
    q(β | support) = N(μ, diag σ²):   μ = c_μ mean(g),   σ = 1e-5 + σ0 exp(c_σ mean(g)),   b_β = mean(g)              (26–29)
                       g = g(h_global(x); θ''), the posterior constructor, its mean over the support's rows
    outputs            W_g h_global + b_g + β h_local + b_β
    client:  minimise  1/|query| Σ_query −log ℓ(y | θ, β) + τ/|B| KL(q(β | support) ‖ r(β)),   β ~ q           (8, 24)
    server:  SGD with momentum on Σ_k n_k (θ − θ_k) / Σ_k n_k
    adapt:   q(β | all rows of the client): no label is looked at, nothing is trained

Each minibatch B is split into support and query, its first and second half; with `shared`, both are all of it. Clients keep
nothing. Without `adapt` a client has β = 0: the global classifier alone.

With γ > 0 the shared parameters have a posterior too, q(θ) = N(θ, diag s²): each local step draws θ, and the server adds the
gradient of γ/|D| KL(q(θ) ‖ N(0, σ_θ² I)) that (8) has, once for each step; the paper leaves this for later.

The paper's (24) sums where the mean is meant, its (29) has b_β in the wrong place, and its features are numbered once from each
end; here footnote 6 holds. |B| is the number of rows that a minibatch has, also where that is below the paper's 256. c_μ and
c_σ are 1/10 and 1/100, which has each coordinate of q near r at the start.

Reference:
    Vedadi, Dillon, Mansfield, Singhal, Afkanpour, Morningstar. Federated variational inference: towards improved
    personalization and generalization. 2023.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum, fact, setting
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Model, mlp
from fedbayes.models.beliefs import Beliefs, Marginals
from fedbayes.primitives import gaussian
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.optimisers import Optimiser, ServerStep
from fedbayes.primitives.training import Training, descend, first_half, masked_mean, rows


class Sizes(NamedTuple):
    """Features that all clients share, features of their own, and outputs."""

    shared: int
    local: int
    outputs: int


class Theta(NamedTuple):
    """θ: the embedding and the global classifier, as the network has them, and the constructor of posteriors."""

    network: Params
    constructor: Params


class Posterior(NamedTuple):
    """q(β): means and standard deviations, and the bias that comes with it."""

    mean: Float[Array, "l k"]
    sigma: Float[Array, "l k"]
    bias: Float[Array, " k"]


class Server(NamedTuple):
    """θ, or with γ > 0 its posterior; the momentum of the server's steps; the number of rounds behind them."""

    theta: Theta | MeanField
    momentum: Any
    round: Int[Array, ""]


class Local(NamedTuple):
    """q(β) after `adapt`; nothing while training."""

    q: Posterior | None


class Down(NamedTuple):
    """θ, or its posterior, and this round's step size."""

    theta: Theta | MeanField
    lr: Float[Array, ""]


class Up(NamedTuple):
    """How far θ moved, θ − θ_k, how many rows the client has, its training loss, and with γ > 0 how many steps it took."""

    delta: Mean[Theta | MeanField]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]
    steps: Mean[Float[Array, ""] | None]


@dataclasses.dataclass(frozen=True)
class FedVI(NetworkAlgorithm[Server, Local, Down, Up]):
    """A shared network tells from a client's rows, without their labels, what the client's own last layer should be.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedVI(mlp((64,), Categorical(10), hidden=(128,))).sizes
    Sizes(shared=102, local=26, outputs=10)
    """

    model: Model
    """The network and its likelihood; on the command line linear (features are columns), mlp, mlp:256,128, cnn or mobilenet."""
    local: float = setting(0.2, above=0, below=1, which="is a share of the features")
    """Share of the embedding's features, the last of them, that are local."""
    constructor: tuple[int, ...] = (256, 256)
    """Hidden layers of the posterior constructor."""
    tau: float = setting(1e-3, least=0, which="weighs a divergence")
    """τ, the weight of KL(q(β) ‖ r(β)); 1 is Bayes' rule for the rows of a batch."""
    sigma0: float | None = setting(None, above=0, which="is a standard deviation")
    """σ0, the deviation of r(β); by default √(2/(local features + outputs))."""
    mean_scale: float = 0.1
    """c_μ."""
    sigma_scale: float = 0.01
    """c_σ."""
    bias: bool = True
    """Whether the constructor gives a bias b_β too, which no prior holds."""
    shared: bool = False
    """Whether support and query are the whole minibatch each, instead of a half each."""
    gamma: float = setting(0.0, least=0, which="weighs a divergence")
    """γ, the weight of KL(q(θ) ‖ t(θ)); with 0, θ is a point."""
    sigma_theta: float = setting(1.0, above=0, which="is a standard deviation")
    """σ_θ, the deviation of t(θ); only with γ > 0."""
    rho: float = -5.0
    """Where deviations of q(θ) start, log(1 + e^ρ); only with γ > 0."""
    draws: int = setting(10, least=1)
    """Draws of β that a prediction averages."""
    train: Training = Training(epochs=1, batch=256, lr=0.02)
    """A client's round."""
    server_lr: float = 3.0
    """Step size of the server; 3 is for rounds of one step, with several about 1 is enough."""
    server_momentum: float = 0.9
    """Momentum of the server."""
    D: int | None = fact("rows")
    """|D|, the rows of all clients, which γ > 0 asks for; by default those of the run."""
    server_optimiser: Optimiser = "sgd"
    """Optimiser of the server, any of Optax's by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.features is None or self.model.readout is None:
            raise UserError(
                f"FedVI looks at a network's features, but {self.model} does not say what they are; give from_functions "
                "features and readout, or from_flax a models.Network of body and head"
            )
        self.server_step()
        if self.gamma > 0 and (self.train.optimiser != "sgd" or self.train.momentum):
            raise UserError("with gamma > 0 the server adds what each plain step of a client lacks; train with sgd, momentum 0")

    def server_step(self) -> ServerStep:
        """The server's step."""
        return ServerStep(self.server_optimiser, self.server_lr, self.server_momentum)

    @property
    def sizes(self) -> Sizes:
        """How many features are global and local, and how many outputs the last layer has."""
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        kernel = shapes.get("head", {}).get("kernel") if isinstance(shapes.get("head"), dict) else None
        if kernel is None or kernel.ndim != 2 or set(shapes["head"]) != {"kernel", "bias"}:
            raise UserError(f"FedVI makes the last layer personal, but {self.model} has none at head/kernel and head/bias")
        features, outputs = kernel.shape
        local = min(max(1, round(self.local * features)), features - 1)
        if features < 2:
            raise UserError(f"{self.model} has {features} feature, but FedVI needs at least a global and a local one")
        return Sizes(features - local, local, outputs)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """θ at random."""
        network = self.model.init(key)
        head = {**network["head"], "kernel": network["head"]["kernel"][: self.sizes.shared]}
        theta: Any = Theta({**network, "head": head}, self._constructor().init(jax.random.fold_in(key, 1)))
        if self.gamma > 0:
            theta = MeanField(theta, jax.tree.map(lambda leaf: jnp.full_like(leaf, self.rho), theta))
        return Server(theta, self.server_step().init(theta), jnp.int32(0))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """θ and the round's step size."""
        return Down(server.theta, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local steps on (24)."""
        theta, loss = descend(self.model, self._loss, down.theta, self.train, down.lr, key, data)
        count = rows(data)
        steps = self.train.passes(data) * jnp.ceil(count / self.train.batch) if self.gamma > 0 else None
        return Up(jax.tree.map(jnp.subtract, down.theta, theta), count, loss, steps), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """A step of SGD with momentum, with γ > 0 on the global term of (8) too."""
        delta = up.delta
        if isinstance(server.theta, MeanField) and up.steps is not None:
            # A client moved by lr times the sum of its steps' gradients; each of them lacks this one.
            slope, length = jax.grad(self._global_term)(server.theta), down.lr * up.steps
            delta = jax.tree.map(lambda delta, slope: delta + length * slope, delta, slope)
        theta, momentum = self.server_step().against(server.theta, server.momentum, delta)
        return Server(theta, momentum, server.round + 1)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """q(β) from the client's rows, whatever their labels are."""
        theta = self._mean(down.theta)
        return Local(self.posterior(theta, self.model.features(theta.network, data.x), data.mask))  # type: ignore[misc]

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of β, and with γ > 0 of θ; the global classifier alone where there is no q(β)."""

        def one(key: PRNGKeyArray) -> Float[Array, "n k"]:
            for_theta, for_beta = jax.random.split(key)
            theta = gaussian.draw(for_theta, down.theta) if isinstance(down.theta, MeanField) else down.theta
            network = self.with_head(theta, *self._drawn(for_beta, local.q))
            return self.model.apply(network, x)

        if local.q is None and not isinstance(down.theta, MeanField):
            return one(key)[None]
        return jax.vmap(one)(jax.random.split(key, self.draws))  # what does not depend on the draw is computed once

    @property
    def deterministic(self) -> FedVI:
        """β without noise and without a prior, θ as a point."""
        return dataclasses.replace(self, sigma0=1e-6, tau=0.0, gamma=0.0)

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """β after `adapt`, and θ with γ > 0."""
        found: dict[str, tuple[Any, Any, float]] = {}
        if local.q is not None:
            found["beta"] = (local.q.mean, local.q.sigma, self.prior_scale)
        if isinstance(down.theta, MeanField):
            found["theta"] = (*gaussian.marginals(down.theta), self.sigma_theta)
        if not found:
            return Beliefs()
        posterior = Marginals(*({name: one[place] for name, one in found.items()} for place in (0, 1)))
        scale = {name: jax.tree.map(lambda leaf, s=s: jnp.full_like(leaf, s), mean) for name, (mean, _, s) in found.items()}
        return Beliefs(posterior, Marginals(trees.zeros(posterior.mean), scale))

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """Another q(β) with the bias as it is, another q(θ); the priors are fixed."""
        if beliefs.posterior is None:
            return down, local
        mean, deviation = beliefs.posterior
        if "theta" in mean:
            down = down._replace(theta=gaussian.mean_field(Marginals(mean["theta"], deviation["theta"])))
        return down, local if local.q is None else Local(local.q._replace(mean=mean["beta"], sigma=deviation["beta"]))

    def posterior(self, theta: Theta, h: Float[Array, "n d"], support: Bool[Array, " n"]) -> Posterior:
        """q(β | support), equations 26 to 29; without a row it is r(β)."""
        size = self.sizes
        g = self._constructor().apply(theta.constructor, h[:, : size.shared])
        mean = jnp.sum(jnp.where(support[:, None], g, 0.0), axis=0) / jnp.maximum(jnp.sum(support), 1).astype(g.dtype)
        m, s = jnp.split(mean[: 2 * size.local * size.outputs].reshape(2, size.local, size.outputs), 2)
        bias = mean[2 * size.local * size.outputs :] if self.bias else jnp.zeros(size.outputs)
        return Posterior(self.mean_scale * m[0], 1e-5 + self.prior_scale * jnp.exp(self.sigma_scale * s[0]), bias)

    def divergence(self, q: Posterior) -> Float[Array, ""]:
        """KL(q(β) ‖ r(β))."""
        return gaussian.kl_diagonal(q.mean, q.sigma, jnp.zeros_like(q.mean), jnp.full_like(q.sigma, self.prior_scale))

    @property
    def prior_scale(self) -> float:
        """σ0."""
        return self.sigma0 if self.sigma0 is not None else math.sqrt(2 / (self.sizes.local + self.sizes.outputs))

    def _loss(self, lam: Any, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        for_theta, for_beta = jax.random.split(key)
        theta = gaussian.draw(for_theta, lam) if isinstance(lam, MeanField) else lam
        h = self.model.features(theta.network, batch.x)  # type: ignore[misc]
        support, query = (batch, batch) if self.shared else first_half(batch)
        q = self.posterior(theta, h, support.mask)
        outputs = self.model.readout(self.with_head(theta, *self._drawn(for_beta, q)), h)  # type: ignore[misc]
        nll = masked_mean(-self.model.likelihood.log_prob(outputs, batch.y), query.mask)
        return nll + self.tau / jnp.maximum(rows(batch), 1) * self.divergence(q)

    def _drawn(self, key: PRNGKeyArray, q: Posterior | None) -> tuple[Float[Array, "l k"], Float[Array, " k"]]:
        if q is None:
            return jnp.zeros((self.sizes.local, self.sizes.outputs)), jnp.zeros(self.sizes.outputs)
        return q.mean + q.sigma * jax.random.normal(key, q.mean.shape), q.bias

    def check_gibbs(self, down: Down) -> None:
        """A bound needs a prior for all that a client has, and outputs that are linear in β."""
        if self.bias or self.gamma > 0:
            given = "the run is FedVI with a bias or a posterior over θ"
            raise UserError(f"{given}, but a certificate is for FedVI with bias=False and gamma=0; train one")
        size, key = self.sizes, jax.random.key(0)
        h = jax.random.normal(key, (3, size.shared + size.local))
        beta = jax.random.normal(jax.random.fold_in(key, 1), (size.local, size.outputs))
        without, whole = (self._outputs(down.theta, one, jnp.zeros(size.outputs), h) for one in (jnp.zeros_like(beta), beta))
        if not bool(jnp.allclose(whole, without + h[:, size.shared :] @ beta, rtol=1e-3, atol=1e-3)):
            raise UserError(f"a certificate draws outputs that are linear in the last layer, but those of {self.model} are not")

    def gibbs(self, key: PRNGKeyArray, down: Down, rows: Data, draws: int) -> tuple[Float[Array, "m n k"], Float[Array, ""]]:
        """Outputs are linear in β, so that a draw of β for each row is a normal number for each of its outputs."""
        q = self.adapt(key, down, Local(None), rows).q
        assert q is not None
        theta = self._mean(down.theta)
        h = self.model.features(theta.network, rows.x)  # type: ignore[misc]
        base, local = self._outputs(theta, jnp.zeros_like(q.mean), q.bias, h), h[:, self.sizes.shared :]
        noise = jax.random.normal(key, (draws, *base.shape))
        outputs = (base + local @ q.mean)[None] + jnp.sqrt(local**2 @ q.sigma**2)[None] * noise
        return outputs, self.divergence(q)

    def _outputs(self, theta: Any, beta: Any, bias: Any, h: Any) -> Float[Array, "n k"]:
        return self.model.readout(self.with_head(theta, beta, bias), h)  # type: ignore[misc]

    def with_head(self, theta: Theta, beta: Float[Array, "l k"], bias: Float[Array, " k"]) -> Params:
        """The network with a last layer of its own, whose kernel is W_g above β."""
        head = theta.network["head"]
        whole = {"kernel": jnp.concatenate([head["kernel"], beta]), "bias": head["bias"] + bias}
        return {**theta.network, "head": whole}

    def _mean(self, theta: Any) -> Theta:
        return theta.mean if isinstance(theta, MeanField) else theta

    def _constructor(self) -> Model:
        return _constructor(self.sizes, self.constructor)

    def _global_term(self, q: MeanField) -> Float[Array, ""]:
        """γ/|D| KL(q(θ) ‖ t(θ))."""
        if self.D is None:
            raise UserError("D is not set: with γ > 0 the prior of θ is weighed against the rows of all clients; give D")
        sigma = jax.tree.map(lambda mean: jnp.full_like(mean, self.sigma_theta), q.mean)
        return self.gamma / self.D * gaussian.kl(q, gaussian.Prior(trees.zeros(q.mean), sigma))


@functools.cache
def _constructor(size: Sizes, hidden: tuple[int, ...]) -> Model:
    numbers = Categorical((2 * size.local + 1) * size.outputs)  # so many outputs; they are no logits
    return mlp((size.shared,), numbers, hidden, init="lecun")
