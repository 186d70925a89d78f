"""FedPop: a shared representation under personal heads with a population prior (Kotelevskii et al. 2022, FedSOUL).

    y ~ p(y | x, φ, z_i),   z_i ~ N(μ, σ² V):  the body φ is shared, the head z_i is the client's

`form="laplace"`, the default, learns φ and μ as one network and fits a client's head by Laplace's approximation:

    client:  epochs on −1/n Σ log p(y | x, φ, μ) over φ and μ together
             of classes, every few rounds, log p(its rows | τ) for a few widths τ of the biases' prior (primitives/levels.py)
             with spread="feature" also its own mode ẑ_i under N(μ, σ² V), of which it sends ẑ_i − μ and (ẑ_i − μ)²
    server:  φ, μ ← means of the φ_i, μ_i by rows;   τ² ← E[τ² | clients];   V ← variance of the ẑ_i around their mean
    adapt:   ẑ = argmax Σ log p(y | x, φ, z) − Σ (z − μ)² / 2σ²V  by Newton,   draws of z from N(ẑ, T H⁻¹)
             H = JᵀWJ + diag(1/σ²V), 1/τ² for biases of classes; J = ∂outputs/∂z, W the Fisher information of a row's outputs

With mixture=True, σ is uncertain: p(z) = Σ_k π_k N(μ, σ_k² V) with σ_k from 0 to 1.6 and π_k ∝ e^bk, and a client's own rows
weigh the components (primitives/widths.py). A client that is like the others stays near μ and one that is not moves far, where
one σ for all would fail one of them; the federation chooses b. It suits few sites that differ much. Where a client's few rows
have one label alone, they favour wide priors, whose modes are too sure.

Where the noise of a number is learnt, φ's has absorbed how clients differ; under a head of its own a client has c times that.
H is not approximated further: with a dense head and a normal likelihood of known scale the posterior at T = 1 is exact. V is 1
for all weights (spread="one"), or one number for each feature: the variance of the ẑ_i, averaged over the outputs, relative to
its mean over all weights, shrunk towards 1 as `PSEUDO` clients would and damped by `prior_step`. So σ is the root mean square
of the spread in either case. At T = 1 directions that no row determines keep the prior's whole width, so only a narrow prior
predicts well; at T = 0, modes alone, a wide one often does. Biases of classes are a client's own shares of the classes: a few
rows settle them, where they say little of the other weights, so their width τ is another one. All participants tell it, also
where newcomers are too few to choose σ.

A client keeps nothing while it trains. Without `adapt` it predicts with μ, one draw: outputs of heads drawn from a wide
N(μ, σ² V) would be noise.

`form="langevin"` is the published protocol. There the prior is σ², weight by weight:

    client:  M Langevin steps on z_i, of which the last are kept:
             z ← z + η/2 ∇_z [Σ log p(y | x, φ, z) + log N(z; μ, σ²)] + √η ξ,    ξ ~ N(0, I)
             then shared epochs on φ: the mean over the kept z of −1/n Σ log p(y | x, φ, z)
    server:  φ ← mean of the φ_i;   μ ← mean of z̄_i,   σ² ← mean over clients and kept draws of (z − μ)²
    adapt:   Langevin steps alone, φ as it is

The prior's update is the M-step of EM over the kept draws, damped by `prior_step`. Gradients of a Langevin step are of a
minibatch, scaled to all rows. What is kept of z_i predicts: each is a posterior draw. A client without draws of its own
predicts with draws from N(μ, σ²), the population's.

Reference:
    Kotelevskii, Vono, Moulines, Durmus. FedPop: a Bayesian approach for personalised federated learning. NeurIPS 2022.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, OfPopulation, Params, Sum, setting
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Normal
from fedbayes.models.beliefs import Beliefs, Marginals, of_draws, redrawn
from fedbayes.primitives import laplace, levels, widths
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.training import Training, descend, drawn, fit, in_blocks, mean_loss, rows

WIDTHS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""σ_k of the mixture; 0 is μ itself."""
PSEUDO = 10
"""V is shrunk towards 1 as if so many clients had been seen whose heads spread alike in all features."""


class Server(NamedTuple):
    """The body φ, the population's μ and σ² or V of the head, the rounds behind them, the server's optimiser's state if any; of
    each width of the biases' prior how likely the participants' rows are under it."""

    phi: Params
    mu: Params
    variance: Params | None
    round: Int[Array, ""]
    optimiser: Any = None
    levels: Float[Array, " widths"] | None = None


class Local(NamedTuple):
    """Draws of the client's head, and whether there are any; with Laplace's form nothing before `adapt`, and then c too."""

    z: Params | None
    own: Bool[Array, ""] | None
    noise: Float[Array, ""] | None = None


class Down(NamedTuple):
    """φ, the population prior with τ² where that is learnt, this round's step size, and whether to tell of τ."""

    phi: Params
    mu: Params
    variance: Params | None
    lr: Float[Array, ""]
    square: Float[Array, ""] | None = None
    due: Bool[Array, ""] | None = None


class Up(NamedTuple):
    """The client's φ and its training loss; of its head what its form sends, all else None.

    laplace: the trained μ_i and the number of rows; of classes, every few rounds, log p(rows | τ) for each width; with
    spread="feature" also the mode's distance from μ, its square, and 1.
    langevin: the mean of the kept heads and of their squared distance from μ.
    """

    phi: Mean[Params]
    z: Mean[Params]
    square: Mean[Params | None]
    loss: Mean[Float[Array, ""]]
    distance: Mean[Params | None] = None
    clients: Sum[Float[Array, ""] | None] = None
    weight: Sum[Float[Array, ""] | None] = None
    levels: Sum[Float[Array, " widths"] | None] = None


@dataclasses.dataclass(frozen=True)
class FedPop(Stepping[Server, Local, Down, Up]):
    """Features are shared; a client's head has a posterior under a population prior.

    >>> import fedbayes as fb
    >>> clients = fb.data.synthetic(clients=8, rows=20, features=4, classes=3).hold_out(2)
    >>> fit = fb.simulate(FedPop(fb.network("mlp", clients, hidden=(8,)), draws=5), clients, rounds=2)
    >>> x, y = clients.rows(str(clients.names[clients.unseen][0]))
    >>> fit.adapt(x, y).draws(x).shape
    (5, 16, 3)
    """

    published: ClassVar[Mapping[str, Any]] = {
        "form": "langevin",
        "train": Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9),
    }

    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client; with log_scale also its noise, which is else that of the shared model."""
    form: Literal["laplace", "langevin"] = setting("laplace", "langevin")
    """How heads are fitted: by Newton and Laplace's approximation in `adapt`, or by Langevin steps also in every round."""
    mixture: bool = False
    """Laplace: whether the prior is a mixture of `WIDTHS`; else its width is σ."""
    tilt: float = setting(0.0, choose=(0.0, -0.7, 0.7))
    """Laplace, a mixture: b in π_k ∝ e^bk; below 0 it favours narrow priors, above 0 wide ones."""
    sigma: float = setting(0.1, above=0, choose=(0.1, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6))
    """σ of the population prior; with Langevin steps at the start."""
    level: float | None = setting(None, above=0)
    """Laplace: how many times as wide as σ the prior of the head's biases is. None: for classes its width τ is learnt, else 1;
    with a mixture 10 for classes."""
    spread: Literal["one", "feature"] = setting("one", "feature")
    """Laplace: whether σ is the same for all weights, or clients send how far their heads spread in each feature."""
    temperature: float | None = setting(None, least=0, choose=(1.0, 0.0, 0.1, 1.0))
    """Laplace: T, which multiplies the posterior's covariance; 0 is the mode. None: 0 for mixtures, else 1."""
    noise: float = setting(1.0, above=0, which="multiplies a standard deviation", choose=(1.0, 1.0, 0.7, 0.5, 0.35, 0.25))
    """Laplace, where the noise of a number is learnt: c, the part of it that is left under a head of the client's own."""
    draws: int | None = setting(None, least=1)
    """Posterior draws in a prediction, with Langevin steps also the population's, where it has none. None: 100 for numbers, as
    a mixture of few narrow normals misses their density, else 10; better 30 of a mixture of widths."""
    prior_step: float = setting(0.1, least=0, most=1)
    """How far the prior's variance, and with Langevin steps its mean, moves to its new value in a round; 0 keeps it fixed."""
    steps: int = 10
    """Langevin: M, steps in a round."""
    keep: int = setting(5, least=1)
    """Langevin: the last so many are kept."""
    eta: float = setting(1e-4, above=0)
    """Langevin: η, the step size."""
    least: float = 1e-3
    """Langevin: σ does not fall below this."""
    adapt_steps: int = 100
    """Langevin: steps in `adapt`."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's epochs; its batch is also that of a Langevin step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > self.steps:
            raise UserError(f"keep is {self.keep} of {self.steps} steps; keep at least 1 and at most all of them")
        if self.adapt_steps < self.keep:
            raise UserError(f"adapt_steps is {self.adapt_steps}, but {self.keep} draws are kept; take at least as many")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """Body and μ as the network starts."""
        network = self.model.init(key)
        mu, phi = self._split(network)
        if self.form == "laplace":
            relative = None if self.spread == "one" else jax.tree.map(lambda leaf: jnp.ones_like(_by_feature(leaf)), mu)
            told = jnp.zeros(len(levels.WIDTHS)) if self._learns_level else None
            return Server(phi, mu, relative, *self.server_step.start(network)[1:], told)
        phi, start, optimiser = self.server_step.start(phi)
        return Server(phi, mu, jax.tree.map(lambda leaf: jnp.full(leaf.shape, self.sigma**2), mu), start, optimiser)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No draws yet."""
        if self.form == "laplace":
            return Local(None, None)
        mu, _ = self._split(self.model.init(key))
        return Local(jax.tree.map(lambda leaf: jnp.zeros((self.keep, *leaf.shape)), mu), jnp.bool_(False))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """φ, the population prior and the round's step size."""
        down = Down(server.phi, server.mu, server.variance, self.train.lr_of(server.round + 1))
        if server.levels is None:
            return down
        return down._replace(square=levels.square(server.levels), due=levels.due(server.round))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs; with Langevin steps on the head before them, or the head's mode beside them."""
        if self.form == "langevin":
            return self._langevin_client(key, down, local, data)
        network, loss = fit(self.model, trees.merge(down.phi, down.mu), self.train, key, data, down.lr)
        z, phi = self._split(network)
        told = None if down.due is None else jax.lax.cond(down.due, self._told, levels.nothing, down, data)
        if self.spread == "one":
            return Up(phi, z, None, loss, weight=rows(data), levels=told), local
        distance = jax.tree.map(jnp.subtract, laplace.mode(self.head(down, data)), down.mu)
        square = jax.tree.map(jnp.square, distance)
        return Up(phi, z, square, loss, distance, jnp.float32(1), rows(data), told), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The means, or a step towards them; a damped step of the prior's variance."""
        if self.form == "langevin":
            return self._langevin_server(server, up)
        old, new = (trees.merge(one.phi, mu) for one, mu in ((server, server.mu), (up, up.z)))
        network, number, optimiser = self.server_step.next(old, server.round, server.optimiser, new)
        mu, phi = self._split(network)
        told = server.levels
        if told is not None and up.levels is not None:
            told = levels.after(told, server.round, up.levels)
        return Server(phi, mu, self._relative(server.variance, up), number, optimiser, told)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Draws from the posterior of the head, φ as it is."""
        if self.form == "langevin":
            return Local(self.langevin(key, down, local, data, self.adapt_steps), jnp.bool_(True))
        if self.mixture:
            for_folds, for_draws = jax.random.split(key)
            head_of, (settings, log_prior) = self._head_of(down, data), self._components
            mixed = widths.fitted(for_folds, head_of, settings, log_prior, data)
            z, _ = widths.draws(for_draws, head_of, settings, mixed, data.mask, self.count, self._T)
        else:
            head = self.head(down, data)
            z = laplace.draws(key, head, laplace.mode(head), self.count, self._T)
        return Local(z, jnp.bool_(True), jnp.asarray(self.noise, jnp.float32) if self._noisy else None)

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """The client's draws of its head; where it has none μ, or with Langevin steps draws from the population."""
        if local.z is None:
            return self.model.apply(trees.merge(down.phi, down.mu), x)[None]
        heads = local.z if self.form == "laplace" else self._langevin_heads(key, down, local)
        outputs = jax.vmap(lambda z: self.model.apply(trees.merge(down.phi, z), x))(heads)
        return outputs if local.noise is None else _quieter(outputs, local.noise)

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """Draws of the head, and the population prior."""
        variance = self._variance(down, self._square)
        prior = Marginals(down.mu, jax.tree.map(lambda v, mu: jnp.broadcast_to(jnp.sqrt(v), mu.shape), variance, down.mu))
        own = None if local.z is None else of_draws(local.z)
        return Beliefs(own if self.form == "laplace" or own is None else trees.choose(local.own, own, prior), prior)

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """Draws moved and scaled; with Langevin steps a client without its own has the population's."""
        new = beliefs.prior if self.form == "laplace" or beliefs.posterior is None else beliefs.posterior
        if new is not None:
            unit = self._variance(down._replace(variance=None), jnp.maximum(self._square, 1e-30))
            relative = jax.tree.map(lambda s, v: jnp.square(s) / v, new.deviation, unit)
            down = down._replace(mu=new.mean, variance=relative)
        if beliefs.posterior is not None and local.z is not None:
            local = local._replace(z=redrawn(local.z, beliefs.posterior))
        return down, local

    @property
    def choices(self) -> dict[str, tuple[float, ...]]:
        """For Laplace's form: b with a mixture; else σ and T, or for numbers σ and c, as T = 1 is exact and tells σ."""
        if self.form != "laplace":
            return {}
        found = super().choices
        if self.mixture:
            return {"tilt": found["tilt"]}
        if not self._noisy:
            return {name: found[name] for name in ("sigma", "temperature")}
        return {name: OfPopulation(found[name]) for name in ("sigma", "noise")}

    @property
    def first_candidate(self) -> str:
        """A narrow prior, or with a mixture even weights."""
        return "a mixture of even weights" if self.mixture else f"a prior of width {self.choices['sigma'][0]:g}"

    @property
    def count(self) -> int:
        """Draws in a prediction."""
        return self.draws or (100 if isinstance(self.model.likelihood, Normal) else 10)

    @property
    def _T(self) -> Any:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.mixture else 1.0

    @property
    def _learns_level(self) -> bool:
        """Whether the biases' prior has a width of its own, which participants tell."""
        plain = self.form == "laplace" and self.level is None and not self.mixture
        return plain and isinstance(self.model.likelihood, Categorical)

    @property
    def _noisy(self) -> bool:
        """True where the network gives the noise of a number."""
        return self.model.likelihood == Normal(scale=None)

    @property
    def _components(self) -> tuple[Float[Array, "k 1"], Float[Array, " k"]]:
        """σ_k, and log π_k up to a constant."""
        sigmas = jnp.asarray(WIDTHS) if self.mixture else jnp.asarray(self.sigma, jnp.float32)[None]
        return sigmas[:, None], self.tilt * jnp.arange(len(sigmas), dtype=jnp.float32)

    def head(self, down: Down, data: Data) -> laplace.Head:
        """The client's rows as a function of its head, under a population prior of width σ."""
        return self._head_of(down, data)(jnp.asarray(self.sigma, jnp.float32)[None], data.mask)

    def _head_of(self, down: Down, data: Data) -> widths.HeadOf:
        exists = data.mask.reshape(-1, *(1,) * (data.x.ndim - 1))
        x, y = jnp.where(exists, data.x, jnp.zeros_like(data.x)), jnp.where(data.mask, data.y, jnp.zeros_like(data.y))
        readout = self.model.apply
        if self.model.features is not None and self.model.readout is not None and self.personal == ("head",):
            readout, x = self.model.readout, in_blocks(self.model.features, down.phi, x)

        def outputs(z: Params) -> Float[Array, "n k"]:
            found = readout(trees.merge(down.phi, z), x)
            return _quieter(found, self.noise) if self._noisy else found

        def head(settings: Float[Array, " settings"], mask: Bool[Array, " n"]) -> laplace.Head:
            return laplace.Head(outputs, self.model.likelihood, y, mask, down.mu, self._variance(down, settings[0] ** 2))

        return head

    def _variance(self, down: Down, square: Float[Array, ""] | float) -> Params:
        """The variance of the population prior for a σ²; with Langevin steps, which learn it, 1 where there is none."""
        if self.form == "langevin":
            return jax.tree.map(jnp.ones_like, down.mu) if down.variance is None else down.variance
        relative = jax.tree.map(lambda leaf: jnp.float32(1), down.mu) if down.variance is None else down.variance
        level = (
            (10.0 if self.mixture and isinstance(self.model.likelihood, Categorical) else 1.0)
            if self.level is None
            else self.level
        )
        own = square * level**2 if down.square is None else down.square  # of biases
        return jax.tree.map(lambda v, mu: v * (own if mu.ndim == 1 else square), relative, down.mu)

    def _told(self, down: Down, data: Data) -> Float[Array, " widths"]:
        """log p(rows | τ) for each width τ, by the model that was received, which has seen these rows least."""
        head = self.head(down, data)
        return levels.evidence(head.outputs(down.mu), head.y, head.mask)

    @property
    def _square(self) -> Float[Array, ""]:
        """The variance of the prior relative to V: σ², or its mean over a mixture."""
        settings, log_prior = self._components
        return jnp.sum(jax.nn.softmax(log_prior) * settings[:, 0] ** 2)

    def _relative(self, old: Params | None, up: Up) -> Params | None:
        """V after a round: the spread of the modes by feature, relative to its mean over all weights."""
        if old is None or up.clients is None:
            return None
        spread = jax.tree.map(lambda square, mean: jnp.maximum(square - mean**2, 0.0), up.square, up.distance)
        leaves = jax.tree.leaves(spread)
        leaves = [leaf for leaf in leaves if leaf.ndim > 1 or not self._learns_level]  # else biases have a τ
        mean = sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves)
        share = (up.clients - 1) / (up.clients - 1 + PSEUDO)  # one client says nothing of a spread

        def step(old: Array, spread: Array) -> Array:
            found = jnp.where(mean > 0, _by_feature(spread) / jnp.where(mean > 0, mean, 1.0), 1.0)
            new = old + self.prior_step * (1 + share * (found - 1) - old)
            return old if spread.ndim == 1 and self._learns_level else new

        return jax.tree.map(step, old, spread)

    def _split(self, network: Params) -> tuple[Params, Params]:
        """The personal layers, which with Laplace's form may be all there are, and the others."""
        return trees.split(network, self.personal, whole=self.form == "laplace")

    def _langevin_client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        for_z, key = jax.random.split(key)
        kept = self.langevin(for_z, down, local, data, self.steps)

        def F(phi: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return jnp.mean(jax.vmap(lambda z: mean_loss(self.model, trees.merge(phi, z), batch))(kept))

        phi, loss = descend(self.model, F, down.phi, self.train, down.lr, key, data)
        square = jax.tree.map(lambda z, mu: jnp.mean((z - mu[None]) ** 2, axis=0), kept, down.mu)
        return Up(phi, jax.tree.map(lambda z: jnp.mean(z, axis=0), kept), square, loss), Local(kept, jnp.bool_(True))

    def _langevin_server(self, server: Server, up: Up) -> Server:
        def variance(old: Array, square: Array, mean: Array, mu: Array) -> Array:
            new = jnp.maximum(square - (mean - mu) ** 2, self.least**2)  # around the new mean
            return old + self.prior_step * (new - old)

        spread = jax.tree.map(variance, server.variance, up.square, up.z, server.mu)
        mu = jax.tree.map(lambda old, new: old + self.prior_step * (new - old), server.mu, up.z)
        phi, number, optimiser = self.server_step.next(server.phi, server.round, server.optimiser, up.phi)
        return Server(phi, mu, spread, number, optimiser)

    def _langevin_heads(self, key: PRNGKeyArray, down: Down, local: Local) -> Params:
        """The kept draws, or the population's."""

        def population(number: Any) -> Params:
            noise = trees.normal_like(jax.random.fold_in(key, number), down.mu)
            return jax.tree.map(lambda mu, v, e: mu + jnp.sqrt(v) * e, down.mu, down.variance, noise)

        count = max(self.count, self.keep)
        fresh = jax.vmap(population)(jnp.arange(count))
        own = jax.tree.map(lambda z: z[jnp.arange(count) % self.keep], local.z)
        return trees.choose(local.own, own, fresh)

    def langevin(self, key: PRNGKeyArray, down: Down, local: Local, data: Data, steps: int) -> Params:
        """The last `keep` of so many draws, from where the client's chain stands or from μ."""
        start = trees.choose(local.own, jax.tree.map(lambda z: z[-1], local.z), down.mu)

        def log_density(z: Params, batch: Data) -> Float[Array, ""]:
            fit = -rows(data) * mean_loss(self.model, trees.merge(down.phi, z), batch)
            prior = jax.tree.map(lambda z, mu, v: jnp.sum((z - mu) ** 2 / v), z, down.mu, down.variance)
            return fit - jax.tree.reduce(jnp.add, prior) / 2

        def step(number: Any, carry: Any) -> Any:
            z, kept = carry
            for_rows, for_noise = jax.random.split(jax.random.fold_in(key, number))
            noise, gradient = trees.normal_like(for_noise, z), jax.grad(log_density)(z, drawn(for_rows, data, self.train.batch))
            z = jax.tree.map(lambda z, g, e: z + self.eta / 2 * g + jnp.sqrt(self.eta) * e, z, gradient, noise)
            place = jnp.maximum(number - (steps - self.keep), 0)
            return z, jax.tree.map(lambda all, one: all.at[place].set(one), kept, z)

        kept = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.keep, *leaf.shape)), start)
        return jax.lax.fori_loop(0, steps, step, (start, kept))[1]


def _quieter(outputs: Float[Array, "*s n 2"], c: Any) -> Float[Array, "*s n 2"]:
    """Outputs with c times the noise."""
    return outputs.at[..., 1].add(jnp.log(c))


def _by_feature(leaf: Array) -> Array:
    """The mean over the outputs, which are the last axis; a scalar as it is."""
    return leaf if leaf.ndim == 0 else jnp.mean(leaf, axis=-1, keepdims=True)
