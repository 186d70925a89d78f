"""FedVI: amortised posteriors of personal parameters, from rows with or without labels (Vedadi et al. 2023, sections 3, 5, D).

    θ ~ t(θ);   for each client k:  β_k ~ r(β) = N(0, σ0²),   y_ik ~ ℓ(Y | f(θ, β_k, x_ik))              (1, 25)

`form="experts"`, the default. h = h(x; θ') are the network's features; all of them are global, and β acts on local ones:

    outputs            W h + b + βᵀu + b_β,    u = h P: at most `rank` features;  P and the deviations s of r are parts of θ
    r(β, b_β)          N(0, σ0² diag s²), s starts at ½ and is learnt; σ0 = 1, or what the federation chooses
    q(β, b_β | support) ∝ r · Π_i e_i:  of a row with a label, e_i is its likelihood, as a Gaussian at the current mean of β;
                       of a row without, e_i has the natural parameters that the posterior constructor g(h; θ'') gives
    client:  minimise  −1/|B| Σ_B log ℓ(y | θ, 0) − 1/|query| Σ_query log E_q ℓ(y | θ, β) + τ/|B| KL(q ‖ r)
             support: the first m rows of B, m uniform in 0 … |B|/2, in one of four steps without their labels; query: the rest
    adapt:   q of all rows, by `steps` steps; its covariance times `temperature`

Precisions of experts are not negative and add up, so q contracts as 1/n (`primitives.experts`); with a normal likelihood of
known scale it is exact. Where the noise of a number is learnt, that of a client with a β of its own is c times as large, log c
a part of θ. Without `adapt` a client has β = 0, and the first term of the loss trains that. With γ > 0 `adapt` makes a q for
each draw of θ, and `predict` draws β from the q of its θ.

`form="mean"`, the paper's, which `FedVI.paper` gives. Of d features the first are global, the others local, and μ, σ and b_β
of q(β | support) = N(μ, diag σ²) follow from the mean over the support of g(h_global(x); θ'') (`primitives.mean_layer`):

    client:  minimise  1/|query| Σ_query −log ℓ(y | θ, β) + τ/|B| KL(q(β | support) ‖ r(β)),   β ~ q           (8, 24)
    server:  SGD with momentum on Σ_k n_k (θ − θ_k) / Σ_k n_k, in both forms
    adapt:   q(β | all rows of the client): no label is looked at, nothing is trained

Support and query are the halves of a minibatch B; with `shared`, all of it each. This q does not know n, c_σ = 1/100 pins σ at
σ0, and the network learns to do without the local features, whose noise it cannot lower: β = 0 predicts as well.

With γ > 0, q(θ) = N(θ, diag s²): each local step draws θ, and the server adds the gradient of γ/|D| KL(q(θ) ‖ N(0, σ_θ² I))
that (8) has, once for each step; the paper leaves this for later.

Reference:
    Vedadi et al. Federated variational inference: towards improved personalization and generalization. 2023.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, Sum, fact, setting
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Model, mlp
from fedbayes.models.beliefs import Beliefs, Marginals, together
from fedbayes.primitives import gaussian
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.mean_layer import MeanLayer, Posterior
from fedbayes.primitives.optimisers import Optimiser, ServerStep
from fedbayes.primitives.own_layer import WIDTHS, Layer, Own
from fedbayes.primitives.training import Training, descend, mean_loss, rows


class Sizes(NamedTuple):
    """Features that all clients share, features of their own, and outputs."""

    shared: int
    local: int
    outputs: int


class Theta(NamedTuple):
    """θ: the embedding and the global classifier, as the network has them, and the constructor of posteriors."""

    network: Params
    constructor: Params


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
    """A shared network and a client's rows, with or without labels, give a posterior of the client's own last layer.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedVI(mlp((64,), Categorical(10), hidden=(128,))).sizes
    Sizes(shared=128, local=32, outputs=10)
    >>> FedVI.paper(mlp((64,), Categorical(10), hidden=(128,))).sizes
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
    """q(β): a product over rows, with their labels where there are any; or the paper's, of a mean over rows without labels."""
    rank: int = setting(32, least=1)
    """Experts: local features, at most; a network with no more features has as many."""
    steps: int = setting(10, least=1)
    """Experts: steps towards the mode of β in `adapt`; training takes 1, which is exact for numbers."""
    temperature: float = setting(1.0, least=0, choose=(1.0, 0.0, 1.0))
    """Experts: what multiplies q's covariance in `adapt`; 0 is the mode alone."""
    local: float = setting(0.2, above=0, below=1, which="is a share of the features")
    """Mean: share of the embedding's features, the last of them, that are local."""
    constructor: tuple[int, ...] = (64,)
    """Hidden layers of the posterior constructor."""
    tau: float = setting(1e-3, least=0, which="weighs a divergence")
    """τ, the weight of KL(q(β) ‖ r(β)); 1 is Bayes' rule for the rows of a batch."""
    sigma0: float | None = setting(1.0, above=0, which="is a standard deviation", choose=WIDTHS)
    """σ0, the deviation of r(β); with experts it multiplies the learnt ones. None: √(2/(local features + outputs)), or 1."""
    mean_scale: float = 0.1
    """Mean: c_μ."""
    sigma_scale: float = 0.01
    """Mean: c_σ."""
    bias: bool = True
    """With True, there is a personal bias b_β too; in the paper's form no prior holds it."""
    shared: bool = False
    """Mean: whether support and query are the whole minibatch each, instead of a half each."""
    gamma: float = setting(0.0, least=0, which="weighs a divergence")
    """γ, the weight of KL(q(θ) ‖ t(θ)); with 0, θ is a point."""
    sigma_theta: float = setting(1.0, above=0, which="is a standard deviation")
    """σ_θ, the deviation of t(θ); only with γ > 0."""
    rho: float = -5.0
    """Where deviations of q(θ) start, log(1 + e^ρ); only with γ > 0."""
    draws: int = setting(50, least=1)
    """Draws of β that a prediction averages."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9, clip=10.0)
    """A client's round. Without `clip` it diverges on clients of many rows, whose posteriors are narrow and step often."""
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
            theta = Theta(network, self.layer.start(jax.random.fold_in(key, 2), constructor))
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
        """q(β) from the client's rows; with experts from their labels too, where there are any."""
        if self.form == "mean":
            network, constructor = _mean(down.theta)
            h = self.model.features(network, data.x)  # type: ignore[misc]
            return Local(self.mean_layer.posterior(constructor, h, data.mask))
        if isinstance(posterior := down.theta, MeanField):  # one q(β) for each draw of θ
            each = jax.vmap(lambda key: self.own(gaussian.draw(key, posterior), data)[0])
            return Local(each(jax.random.split(key, self.draws)), key)
        return Local(self.own(_mean(down.theta), data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of β, and with γ > 0 of θ; the global classifier alone where there is no q(β)."""
        if isinstance(local.q, Own):
            return self._draws(key, down, local, local.q, x)

        def one(key: PRNGKeyArray) -> Float[Array, "n k"]:
            for_theta, for_beta = jax.random.split(key)
            theta = gaussian.draw(for_theta, down.theta) if isinstance(down.theta, MeanField) else down.theta
            if self.form == "experts":
                return self.model.apply(theta.network, x)
            layer = self.mean_layer
            return self.model.apply(layer.with_head(theta.network, *layer.drawn(for_beta, local.q)), x)  # type: ignore[arg-type]

        if local.q is None and not isinstance(down.theta, MeanField):
            return one(key)[None]
        return jax.vmap(one)(jax.random.split(key, self.draws))  # what does not depend on the draw is computed once

    @property
    def deterministic(self) -> FedVI | None:
        """θ as a point; in the paper's form β without noise and without a prior too. With experts q(β) cannot do without."""
        if self.form == "mean":
            return dataclasses.replace(self, sigma0=1e-6, tau=0.0, gamma=0.0)
        return dataclasses.replace(self, gamma=0.0) if self.gamma > 0 else None

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """β after `adapt`, and θ with γ > 0. With experts β's prior has learnt scales, from before `adapt` on."""
        posterior, prior = {}, {}
        if isinstance(local.q, Own):
            posterior["beta"] = local.q.marginals
        elif local.q is not None:
            posterior["beta"] = Marginals(local.q.mean, local.q.sigma)
        if self.form == "experts":
            prior["beta"] = self.layer.prior(_mean(down.theta).constructor)
        elif posterior or self.gamma > 0:
            prior["beta"] = self.mean_layer.prior
        if isinstance(down.theta, MeanField):
            posterior["theta"] = gaussian.marginals(down.theta)
            prior["theta"] = Marginals(*self._prior(down.theta))
        return Beliefs(together(posterior), together(prior))

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """Another q(β) with the bias and correlations as they are, another q(θ); with experts other scales of β's prior."""
        if beliefs.posterior is not None:
            mean, deviation = beliefs.posterior
            if "theta" in mean:
                down = down._replace(theta=gaussian.mean_field(Marginals(mean["theta"], deviation["theta"])))
            if isinstance(local.q, Own):
                local = local._replace(q=local.q.moved(Marginals(mean["beta"], deviation["beta"])))
            elif local.q is not None:
                local = Local(local.q._replace(mean=mean["beta"], sigma=deviation["beta"]))
        if beliefs.prior is not None and self.form == "experts":
            theta = _mean(down.theta)
            theta = theta._replace(constructor=self.layer.with_prior(theta.constructor, beliefs.prior.deviation["beta"]))
            down = down._replace(theta=down.theta._replace(mean=theta) if isinstance(down.theta, MeanField) else theta)
        return down, local

    @property
    def labels_optional(self) -> bool:
        """The default form reads labels where there are any; the paper's never does."""
        return self.form == "experts"

    @property
    def layer(self) -> Layer:
        """The last layer's own part in the default form."""
        size, sigma0 = self.sizes, 1.0 if self.sigma0 is None else self.sigma0
        return Layer(self.model, self._constructor(), size.local, size.outputs, self.bias, sigma0)

    @property
    def mean_layer(self) -> MeanLayer:
        """The same in the paper's form."""
        size = self.sizes
        sigma0 = self.sigma0 if self.sigma0 is not None else math.sqrt(2 / (size.local + size.outputs))
        return MeanLayer(self.model, self._constructor(), *size, self.bias, sigma0, self.mean_scale, self.sigma_scale)

    def own(self, theta: Theta, data: Data) -> tuple[Own, Float[Array, ""]]:
        """With experts, q(β) and KL(q(β) ‖ r(β))."""
        return self.layer.posterior(*theta, data, self.steps, self.temperature)

    def _draws(self, key: PRNGKeyArray, down: Down, local: Local, q: Own, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        def one(key: PRNGKeyArray, theta: Theta, q: Own) -> Float[Array, "n k"]:
            h = self.model.features(theta.network, x)  # type: ignore[misc]
            beta = q.mean + q.root @ jax.random.normal(key, q.mean.shape)
            return self.layer.shifted(theta.network, h, q.noise, self.layer.features(theta.constructor, h) @ beta)

        each = jax.random.split(key, self.draws)
        if not isinstance(down.theta, MeanField):
            return jax.vmap(one, in_axes=(0, None, None))(each, down.theta, q)
        count = len(q.mean)
        theta = jax.vmap(lambda key: gaussian.draw(key, down.theta))(jax.random.split(local.key, count))  # type: ignore[arg-type]
        place = jnp.arange(self.draws) % count
        return jax.vmap(one)(each, *jax.tree.map(lambda leaf: leaf[place], (theta, q)))

    @property
    def choices(self) -> dict[str, tuple[float, ...]]:
        """σ0 and temperature; nothing in the paper's form."""
        return super().choices if self.form == "experts" else {}

    @property
    def first_candidate(self) -> str:
        """The posterior under the prior that was learnt."""
        return "the learnt prior"

    def _loss(self, lam: Any, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        for_theta, key = jax.random.split(key)
        theta: Theta = gaussian.draw(for_theta, lam) if isinstance(lam, MeanField) else lam
        if self.form == "experts":
            nll, divergence = self.layer.episode(*theta, key, batch)
            nll = mean_loss(self.model, theta.network, batch) + nll
        else:
            nll, divergence = self.mean_layer.episode(*theta, key, batch, self.shared)
        return nll + self.tau / jnp.maximum(rows(batch), 1) * divergence

    def check_gibbs(self, down: Down) -> None:
        """A bound needs a prior for all that a client has, and outputs that are linear in β."""
        if self.gamma > 0 or (self.bias and self.form == "mean"):
            given = "the run is FedVI with a bias or a posterior over θ"
            raise UserError(f"{given}, but a certificate is for FedVI with bias=False and gamma=0; train one")
        if self.form == "mean":  # experts add effects to the last layer's outputs, and all of them have a prior
            self.mean_layer.check_linear(_mean(down.theta).network)

    def gibbs(self, key: PRNGKeyArray, down: Down, rows: Data, draws: int) -> tuple[Float[Array, "m n k"], Float[Array, ""]]:
        """Outputs are linear in β, so that a draw of β for each row is a normal number for each of its outputs."""
        theta = _mean(down.theta)
        if self.form == "mean":
            return self.mean_layer.gibbs(*theta, key, rows, draws)
        own, divergence = self.own(theta, rows)
        return self.layer.gibbs(*theta, key, own, rows.x, draws), divergence

    def _constructor(self) -> Model:
        size = self.sizes
        each = (size.local + 1) * (size.outputs + 1) if self.form == "experts" else (2 * size.local + 1) * size.outputs
        return _constructor(size.shared, each, self.constructor)

    def _global_term(self, q: MeanField) -> Float[Array, ""]:
        """γ/|D| KL(q(θ) ‖ t(θ))."""
        if self.D is None:
            raise UserError("D is not set: with γ > 0 the prior of θ is weighed against the rows of all clients; give D")
        return self.gamma / self.D * gaussian.kl(q, self._prior(q))

    def _prior(self, q: MeanField) -> gaussian.Prior:
        """t(θ)."""
        return gaussian.Prior(trees.zeros(q.mean), jax.tree.map(lambda mean: jnp.full_like(mean, self.sigma_theta), q.mean))


@functools.cache
def _constructor(inputs: int, outputs: int, hidden: tuple[int, ...]) -> Model:
    return mlp((inputs,), Categorical(outputs), hidden, init="lecun")  # so many outputs; they are no logits


def _mean(theta: Any) -> Theta:
    return theta.mean if isinstance(theta, MeanField) else theta
