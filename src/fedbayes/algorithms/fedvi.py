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
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum, fact, setting
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Model, Normal, mlp
from fedbayes.primitives import experts, gaussian
from fedbayes.primitives.experts import Effects
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.optimisers import Optimiser, ServerStep
from fedbayes.primitives.training import Training, descend, first_half, in_blocks, masked_mean, mean_loss, rows


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


class Own(NamedTuple):
    """q(β) of the default form: β and its bias are the last layer's own part; and log c, what changes of a number's noise."""

    mean: Float[Array, "*s r k"]
    root: Float[Array, "*s r r"]
    noise: Float[Array, "*s"] | None


class Server(NamedTuple):
    """θ, or with γ > 0 its posterior; the momentum of the server's steps; the number of rounds behind them."""

    theta: Theta | MeanField
    momentum: Any
    round: Int[Array, ""]


class Local(NamedTuple):
    """q(β) after `adapt`; nothing while training."""

    q: Posterior | Own | None
    key: PRNGKeyArray | None = None


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

    published: ClassVar[Mapping[str, Any]] = {
        "form": "mean",
        "sigma0": None,
        "constructor": (256, 256),
        "train": Training(epochs=1, batch=256, lr=0.02),
        "server_lr": 3.0,
        "server_momentum": 0.9,
    }

    model: Model
    """The network and its likelihood; on the command line linear (features are columns), mlp, mlp:256,128, cnn or mobilenet."""
    form: Literal["experts", "mean"] = setting("experts", "mean")
    """q(β): a product over rows, with their labels where there are any; or the paper's, of the mean over rows without labels."""
    rank: int = setting(32, least=1)
    """Experts: features that β acts on, at most; of fewer, all."""
    steps: int = setting(5, least=1, choose=(0, 1, 5))
    """Experts."""
    temperature: float = setting(1.0, least=0, choose=(0.0, 0.0, 1.0))
    """Experts."""
    trust: float = setting(1.0, least=0)
    """Experts."""
    local: float = setting(0.2, above=0, below=1, which="is a share of the features")
    """Share of the embedding's features, the last of them, that are local."""
    constructor: tuple[int, ...] = (64,)
    """Hidden layers of the posterior constructor."""
    tau: float = setting(1e-3, least=0, which="weighs a divergence")
    """τ, the weight of KL(q(β) ‖ r(β)); 1 is Bayes' rule for the rows of a batch."""
    sigma0: float | None = setting(1.0, above=0, which="is a standard deviation", choose=(0.0, 0.5, 1.0, 2.0))
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
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    server_lr: float = 1.0
    """Step size of the server; 3 is for rounds of one step, with several about 1 is enough."""
    server_momentum: float = 0.0
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
        if self.form == "experts":
            return Sizes(features, min(self.rank, features), outputs)
        local = min(max(1, round(self.local * features)), features - 1)
        if features < 2:
            raise UserError(f"{self.model} has {features} feature, but FedVI needs at least a global and a local one")
        return Sizes(features - local, local, outputs)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """θ at random."""
        network, constructor = self.model.init(key), self._constructor().init(jax.random.fold_in(key, 1))
        head = {**network["head"], "kernel": network["head"]["kernel"][: self.sizes.shared]}
        theta: Any = Theta({**network, "head": head}, constructor)
        if self.form == "experts":
            theta = Theta(network, self._start(jax.random.fold_in(key, 2), constructor))
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
        if self.form == "mean":
            theta = self._mean(down.theta)
            return Local(self.posterior(theta, self.model.features(theta.network, data.x), data.mask))  # type: ignore[misc]
        if isinstance(down.theta, MeanField):  # one q(β) for each draw of θ
            each = jax.vmap(lambda key: self._own(gaussian.draw(key, down.theta), data)[0])
            return Local(each(jax.random.split(key, self.draws)), key)
        return Local(self._own(down.theta, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of β, and with γ > 0 of θ; the global classifier alone where there is no q(β)."""

        if isinstance(local.q, Own):
            return self._draws(key, down, local, local.q, x)

        def one(key: PRNGKeyArray) -> Float[Array, "n k"]:
            for_theta, for_beta = jax.random.split(key)
            theta = gaussian.draw(for_theta, down.theta) if isinstance(down.theta, MeanField) else down.theta
            if self.form == "experts":
                return self.model.apply(theta.network, x)
            network = self.with_head(theta, *self._drawn(for_beta, local.q))
            return self.model.apply(network, x)

        if local.q is None and not isinstance(down.theta, MeanField):
            return one(key)[None]
        return jax.vmap(one)(jax.random.split(key, self.draws))  # what does not depend on the draw is computed once

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

    def _start(self, key: PRNGKeyArray, constructor: Params) -> Params:
        """Random orthonormal directions of features, deviations of the prior, a network that says nothing, and log c = 0."""
        size = self.sizes
        basis = jnp.linalg.qr(jax.random.normal(key, (size.shared, size.local)))[0]
        constructor = {**constructor, "head": jax.tree.map(jnp.zeros_like, constructor["head"])}
        noise = {"noise": jnp.zeros(())} if self.model.likelihood == Normal(scale=None) else {}
        return {"network": constructor, "basis": basis, "scale": jnp.full(size.local + 1, jnp.log(START)), **noise}

    def units(self, theta: Theta, h: Float[Array, "n d"]) -> Float[Array, "n r"]:
        """u of the last layer's own part: local features and 1, each times the prior's deviation of its weights."""
        scale = jnp.exp(theta.constructor["scale"]) * self._sigma
        one = jnp.full((len(h), 1), 1.0 if self.bias else 0.0)
        return jnp.concatenate([h @ theta.constructor["basis"], one], axis=1) * scale

    @property
    def _sigma(self) -> Any:
        return 1.0 if self.sigma0 is None else self.sigma0

    def shifted(self, theta: Theta, h: Float[Array, "n d"], noise: Any, delta: Float[Array, "n k"]) -> Float[Array, "n m"]:
        """The likelihood's parameters of rows whose last layer gives δ more, with c times the noise of a number."""
        head = theta.network["head"]

        def one(h: Float[Array, " d"], delta: Float[Array, " k"]) -> Float[Array, " m"]:
            return self.model.readout({**theta.network, "head": {**head, "bias": head["bias"] + delta}}, h[None])[0]  # type: ignore[misc]

        outputs = jax.vmap(one)(h, delta)
        return outputs if noise is None else outputs.at[:, 1].add(noise)

    def effects(self, theta: Theta, h: Float[Array, "n d"], data: Data, steps: Any, unroll: bool = False) -> Effects:
        """q in units of the prior, from rows, of which some may have labels."""
        size, known = self.sizes, data.mask & labelled(data.y)
        y, noise = jnp.where(known, data.y, jnp.zeros_like(data.y)), theta.constructor.get("noise")
        labels = experts.Labels(functools.partial(self.shifted, theta, h, noise), self.model.likelihood, y, known)
        slope, _ = experts.terms(labels, jnp.zeros((len(h), size.outputs)))
        given = jnp.concatenate([h, jax.lax.stop_gradient(slope), known[:, None].astype(h.dtype)], axis=1)
        said = self._constructor().apply(theta.constructor["network"], given)
        said = self.trust * jnp.sum(jnp.where(data.mask[:, None], jnp.concatenate([said[:, :-size.local - 1], jax.nn.softplus(said[:, -size.local - 1:] - QUIET)], axis=1), 0.0), axis=0)
        own = experts.Experts(said[: -size.local - 1].reshape(size.local + 1, size.outputs), said[-size.local - 1 :])
        return experts.product(self.units(theta, h), own, labels, steps, unroll=unroll)

    def _own(self, theta: Theta, data: Data) -> tuple[Own, Float[Array, ""]]:
        """q(β) from a client's rows, and KL(q(β) ‖ r(β))."""
        exists = data.mask.reshape(-1, *(1,) * (data.x.ndim - 1))
        h = in_blocks(self.model.features, theta.network, jnp.where(exists, data.x, jnp.zeros_like(data.x)))  # type: ignore[arg-type]
        q = self.effects(theta, h, data, self.steps)
        q = q.tempered(self.temperature)
        scale = jnp.exp(theta.constructor["scale"]) * self._sigma
        noise = theta.constructor.get("noise")
        noise = None if noise is None else jnp.where(jnp.asarray(self._sigma) > 0, noise, 0.0)
        return Own(scale[:, None] * q.mean, scale[:, None] * q.root, noise), q.divergence()

    def _draws(self, key: PRNGKeyArray, down: Down, local: Local, q: Own, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        def one(key: PRNGKeyArray, theta: Theta, q: Own) -> Float[Array, "n k"]:
            h = self.model.features(theta.network, x)  # type: ignore[misc]
            beta = q.mean + q.root @ jax.random.normal(key, q.mean.shape)
            features = jnp.concatenate([h @ theta.constructor["basis"], jnp.full((len(h), 1), 1.0 if self.bias else 0.0)], axis=1)
            return self.shifted(theta, h, q.noise, features @ beta)

        each = jax.random.split(key, self.draws)
        if not isinstance(down.theta, MeanField):
            return jax.vmap(lambda key: one(key, down.theta, q))(each)
        assert local.key is not None
        count = len(q.mean)
        theta = jax.vmap(lambda key: gaussian.draw(key, down.theta))(jax.random.split(local.key, count))
        place = jnp.arange(self.draws) % count
        return jax.vmap(one)(each, *jax.tree.map(lambda leaf: leaf[place], (theta, q)))

    def _experts_loss(self, lam: Any, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        for_theta, for_noise, for_size, for_labels = jax.random.split(key, 4)
        theta = gaussian.draw(for_theta, lam) if isinstance(lam, MeanField) else lam
        alone = mean_loss(self.model, theta.network, batch)
        h = self.model.features(theta.network, batch.x)  # type: ignore[misc]
        n = jnp.sum(batch.mask)
        size = jnp.floor(jax.random.uniform(for_size) * (n // 2 + 1)).astype(n.dtype)
        first = jnp.arange(len(h)) < size
        y = jnp.where(jax.random.uniform(for_labels) < HIDDEN, nobody(batch.y), batch.y)
        q = self.effects(theta, h, Data(batch.x, y, batch.mask & first), INNER, unroll=True)
        nll = self._predictive(theta, h, q, for_noise, batch.y)
        nll = masked_mean(nll, batch.mask & ~first)
        return (alone + nll) / 2 + self.tau / jnp.maximum(rows(batch), 1) * q.divergence()

    def _predictive(self, theta: Theta, h: Any, q: Effects, key: PRNGKeyArray, y: Any) -> Float[Array, " n"]:
        """−log E_q p(y | θ, β) of each row; by draws, for a normal likelihood exactly."""
        mean, variance = q.of(self.units(theta, h))
        outputs = functools.partial(self.shifted, theta, h, theta.constructor.get("noise"))
        likelihood = self.model.likelihood
        if isinstance(likelihood, Normal):
            at = outputs(mean)
            slope = outputs(mean + 1)[:, 0] - at[:, 0]
            noise = jnp.exp(at[:, 1]) if likelihood.scale is None else jnp.full(len(at), likelihood.scale)
            scale = jnp.sqrt(noise**2 + slope**2 * variance)
            return jnp.log(scale) + ((y.astype(at.dtype) - at[:, 0]) / scale) ** 2 / 2 + 0.9189385
        noise = jax.random.normal(key, (DRAWS, *mean.shape))
        each = jax.vmap(lambda e: likelihood.log_prob(outputs(mean + jnp.sqrt(variance + 1e-12)[:, None] * e), y))(noise)
        return jnp.log(DRAWS) - jax.nn.logsumexp(each, axis=0)

    @property
    def choices(self) -> dict[str, tuple[float, ...]]:
        return super().choices if self.form == "experts" else {}

    def _loss(self, lam: Any, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        if self.form == "experts":
            return self._experts_loss(lam, key, batch)
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
        size = self.sizes
        if self.form == "experts":
            return _numbers(size.shared + size.outputs + 1, (size.local + 1) * (size.outputs + 1), self.constructor)
        return _constructor(self.sizes, self.constructor)

    def _global_term(self, q: MeanField) -> Float[Array, ""]:
        """γ/|D| KL(q(θ) ‖ t(θ))."""
        if self.D is None:
            raise UserError("D is not set: with γ > 0 the prior of θ is weighed against the rows of all clients; give D")
        sigma = jax.tree.map(lambda mean: jnp.full_like(mean, self.sigma_theta), q.mean)
        return self.gamma / self.D * gaussian.kl(q, gaussian.Prior(trees.zeros(q.mean), sigma))


START = 0.5
QUIET = 6.0
HIDDEN = 0.25
DRAWS = 8
INNER = 1


def nobody(y: Array) -> Array:
    """Labels that are missing."""
    missing = jnp.nan if jnp.issubdtype(y.dtype, jnp.floating) else jnp.iinfo(y.dtype).min
    return jnp.full_like(y, missing)


def labelled(y: Array) -> Array:
    """Rows that have a label."""
    return ~jnp.isnan(y) if jnp.issubdtype(y.dtype, jnp.floating) else y != jnp.iinfo(y.dtype).min


@functools.cache
def _numbers(inputs: int, outputs: int, hidden: tuple[int, ...]) -> Model:
    return mlp((inputs,), Categorical(outputs), hidden, init="lecun")


@functools.cache
def _constructor(size: Sizes, hidden: tuple[int, ...]) -> Model:
    numbers = Categorical((2 * size.local + 1) * size.outputs)  # so many outputs; they are no logits
    return mlp((size.shared,), numbers, hidden, init="lecun")
