"""FedPop: a shared representation under personal heads with a population prior (Kotelevskii et al. 2022, FedSOUL).

    y ~ p(y | x, φ, z_i),   z_i ~ N(μ, σ²) weight by weight:  the body φ is shared, the head z_i is the client's
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Params, setting
from fedbayes.errors import UserError
from fedbayes.primitives.averaging import Stepping
from fedbayes.primitives.training import Training, descend, drawn, mean_loss, rows


class Server(NamedTuple):
    """The body φ, the population's μ and σ² of the head, the rounds behind them, and the server's optimiser's state if any."""

    phi: Params
    mu: Params
    variance: Params
    round: Int[Array, ""]
    optimiser: Any = None


class Local(NamedTuple):
    """The draws of the client's head that were kept, the last of which goes on, and whether there are any."""

    z: Params
    own: Bool[Array, ""]


class Down(NamedTuple):
    """φ, the population prior and this round's step size."""

    phi: Params
    mu: Params
    variance: Params
    lr: Float[Array, ""]


class Up(NamedTuple):
    """The client's φ, the mean of its kept heads and of their squared distance from μ, and its training loss."""

    phi: Mean[Params]
    z: Mean[Params]
    square: Mean[Params]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class FedPop(Stepping[Server, Local, Down, Up]):
    """Heads are sampled from their posterior on the client; body and population prior are learnt together.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedPop(mlp((64,), Categorical(10))).keep
    5
    """

    personal: tuple[str, ...] = ("head",)
    """Paths of the layers that stay with the client."""
    steps: int = 10
    """M, Langevin steps in a round."""
    keep: int = setting(5, least=1)
    """The last so many are kept."""
    eta: float = setting(1e-4, above=0)
    """η, the Langevin step size."""
    sigma: float = setting(0.1, above=0)
    """σ of the population prior at the start."""
    least: float = 1e-3
    """σ does not fall below this."""
    prior_step: float = setting(0.1, least=0, most=1)
    """How far the prior moves to its new value in a round; 0 keeps it fixed."""
    adapt_steps: int = 100
    """Langevin steps in `adapt`."""
    draws: int = 10
    """Heads from the population that predict for a client without its own."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9)
    """A client's epochs on φ; its batch is also that of a Langevin step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > self.steps:
            raise UserError(f"keep is {self.keep} of {self.steps} steps; keep at least 1 and at most all of them")
        if self.adapt_steps < self.keep:
            raise UserError(f"adapt_steps is {self.adapt_steps}, but {self.keep} draws are kept; take at least as many")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """Body and μ as the network starts."""
        mu, phi = trees.split(self.model.init(key), self.personal)
        phi, start, optimiser = self.server_step.start(phi)
        return Server(phi, mu, jax.tree.map(lambda leaf: jnp.full(leaf.shape, self.sigma**2), mu), start, optimiser)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """No draws yet."""
        mu, _ = trees.split(self.model.init(key), self.personal)
        return Local(jax.tree.map(lambda leaf: jnp.zeros((self.keep, *leaf.shape)), mu), jnp.bool_(False))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """φ, the population prior and the round's step size."""
        return Down(server.phi, server.mu, server.variance, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Langevin on the head, then shared epochs."""
        for_z, key = jax.random.split(key)
        kept = self.langevin(for_z, down, local, data, self.steps)

        def F(phi: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
            return jnp.mean(jax.vmap(lambda z: mean_loss(self.model, trees.merge(phi, z), batch))(kept))

        phi, loss = descend(self.model, F, down.phi, self.train, down.lr, key, data)
        square = jax.tree.map(lambda z, mu: jnp.mean((z - mu[None]) ** 2, axis=0), kept, down.mu)
        return Up(phi, jax.tree.map(lambda z: jnp.mean(z, axis=0), kept), square, loss), Local(kept, jnp.bool_(True))

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The mean body, or a step towards it; a damped M-step for the prior."""

        def variance(old: Array, square: Array, mean: Array, mu: Array) -> Array:
            new = jnp.maximum(square - (mean - mu) ** 2, self.least**2)  # around the new mean
            return old + self.prior_step * (new - old)

        spread = jax.tree.map(variance, server.variance, up.square, up.z, server.mu)
        mu = jax.tree.map(lambda old, new: old + self.prior_step * (new - old), server.mu, up.z)
        phi, number, optimiser = self.server_step.next(server.phi, server.round, server.optimiser, up.phi)
        return Server(phi, mu, spread, number, optimiser)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Langevin on the head, longer than in a round."""
        return Local(self.langevin(key, down, local, data, self.adapt_steps), jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """The client's draws of its head, or the population's where it has none."""

        def population(number: Any) -> Params:
            noise = trees.normal_like(jax.random.fold_in(key, number), down.mu)
            return jax.tree.map(lambda mu, v, e: mu + jnp.sqrt(v) * e, down.mu, down.variance, noise)

        count = max(self.draws, self.keep)
        fresh = jax.vmap(population)(jnp.arange(count))
        own = jax.tree.map(lambda z: z[jnp.arange(count) % self.keep], local.z)
        heads = trees.choose(local.own, own, fresh)
        return jax.vmap(lambda z: self.model.apply(trees.merge(down.phi, z), x))(heads)

    def langevin(self, key: PRNGKeyArray, down: Down, local: Local, data: Data, steps: int) -> Params:
        """The last `keep` of so many draws, from where the client's chain stands or from μ."""
        start = jax.tree.map(lambda z, mu: jnp.where(local.own, z[-1], mu), local.z, down.mu)

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
