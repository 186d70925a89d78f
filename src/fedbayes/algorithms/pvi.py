"""PVI: partitioned variational inference (Ashman et al. 2022) for models with latents of the silos' own.

    q(Z_G) = t_0(Z_G) Π_j t_j(Z_G),   all Gaussian, in natural parameters;  t_0 stands for the prior p(Z_G)
    silo:    q_\\j = q / t_j,   q_j = argmax E[log q_\\j(Z_G) − log q_j(Z_G) + L̂_j],   Δ_j = ρ (q_j / q)
             by steps of Adam in q_j and in its own q(Z_Lj | Z_G);  sends Δ_j;  t_j ← t_j · Δ_j
    server:  q ← q · Π_j Δ_j

Each q_j is right about its own data in the light of what the others have said so far, so a few rounds are enough. A factor t_j
may have a negative precision, q may not: the server takes 1, ½, ¼ … of a round's change, whichever is the first that leaves
q proper, and says so with the next broadcast, so that the silos' factors and q stay one.

The prior's factor t_0 is the second-order expansion of log p(Z_G), averaged over q: the prior itself where it is Gaussian.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes.algorithm import Sum, fact
from fedbayes.errors import UserError
from fedbayes.primitives import gaussian, variational
from fedbayes.primitives.gaussian import Natural
from fedbayes.primitives.structured import Centred
from fedbayes.primitives.variational import Family, Locals, Shared

HALVINGS = 10
DRAWS = 256
"""Draws for the moments of the prior, in pairs μ ± δ."""


class Server(NamedTuple):
    """t_0, the product of the t_j, q as a Gaussian, and what part of each round's change was taken."""

    prior: Natural
    factors: Natural
    shared: Shared
    accepted: Float[Array, " rounds"]
    round: Int[Array, ""]
    bound: Float[Array, ""]


class Local(NamedTuple):
    """η_L and the μ_G that it was written with; t_j before its last change, that change, and the round it was made in."""

    eta: Locals
    centre: Float[Array, " n"]
    factor: Natural
    change: Natural
    round: Int[Array, ""]


class Down(NamedTuple):
    """q, where a silo's search starts (q itself after round 1), and what part of each round's change was taken."""

    q: Natural
    shared: Shared
    accepted: Float[Array, " rounds"]
    round: Int[Array, ""]


class Up(NamedTuple):
    """Δ_j, the silo's term of the bound, and 1, which counts who answered."""

    change: Sum[Natural]
    bound: Sum[Float[Array, ""]]
    silos: Sum[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class PVI(Centred[Server, Local, Down, Up]):
    """Partitioned variational inference: the posterior of pooled data in few rounds."""

    default_rounds: ClassVar[int] = 20

    family: Family = Family()
    """Which posteriors are searched; q(Z_G) has a full covariance."""
    damping: float = 0.5
    """ρ, what part of its change a silo makes."""
    steps: int = 1000
    """Local steps in a round."""
    lr: float = 0.02
    """Adam's step size at the start of a round's search."""
    decay: float = 0.01
    """What remains of it at the end of the search."""
    silos: int | None = fact("silos")
    """J, for the bound where some silos are absent; by default the silos of the run."""

    def __post_init__(self) -> None:
        if not self.family.full:
            raise UserError("PVI needs a full covariance for the global latents (Family(full=True)); use SFVI for many of them")
        if self.family.encoder is not None:
            raise UserError("PVI has no θ, which an encoder's weights are; use SFVI or SFVI-Avg, or no encoder")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """No factor, and the prior's moments for its own; the search starts at N(0, start² I)."""
        shared = self.family.init_shared(key, self.structured, self.example)
        if shared.theta:
            raise UserError(f"PVI has no θ, but the model has {', '.join(shared.theta)}; give it a prior, or use SFVI")
        if self.rounds is None:
            raise UserError("rounds is not set; call algorithm.planned(rounds) first")
        z = jax.vmap(self.structured.prior_draw)(jax.random.split(key, 40 * DRAWS))
        prior = gaussian.natural(gaussian.from_moments(jnp.mean(z, axis=0), jnp.atleast_2d(jnp.cov(z, rowvar=False))))
        none = jax.tree.map(jnp.zeros_like, prior)
        return Server(prior, none, shared, jnp.zeros(self.rounds), jnp.int32(0), jnp.zeros(()))

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """η_L for the latents that this silo's data asks for, and t_j = 1."""
        n = self.structured.size()
        one = Natural(jnp.zeros(n), jnp.zeros((n, n)))
        return Local(self.family.init_local(key, self.structured, data), jnp.zeros(n), one, one, jnp.int32(0))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """q, and what the silos need to know of their last changes."""
        return Down(_times(server.prior, server.factors), server.shared, server.accepted, server.round)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """q_j by a search of its own, and Δ_j."""
        factor = _times(local.factor, _power(local.change, down.accepted[local.round]))
        cavity = _times(down.q, _power(factor, -1.0))
        start = (down.shared, self.eta(local, down.shared))
        optimiser = variational.adam(self.lr, self.decay, self.steps)
        (shared, eta), _, (_, value) = variational.local_search(
            self.at(data), lambda _, z: gaussian.log_factor(cavity, z), 1.0, optimiser, self.steps, key, start
        )
        change = _power(_times(gaussian.natural(shared.eta), _power(down.q, -1.0)), self.damping)
        return Up(change, value, jnp.ones(())), Local(eta, shared.eta.mean, factor, change, down.round)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """As much of the change as leaves q proper, and t_0 anew."""
        part = _proper_part(down.q, up.change)
        factors = _times(server.factors, _power(up.change, part))
        prior = self._prior_factor(key, gaussian.from_natural(_times(server.prior, factors)))
        part_of_prior = _proper_part(_times(server.prior, factors), _times(prior, _power(server.prior, -1.0)))
        prior = _times(server.prior, _power(_times(prior, _power(server.prior, -1.0)), part_of_prior))
        shared = Shared(gaussian.from_natural(_times(prior, factors)), {})
        accepted = server.accepted.at[server.round].set(part)
        noise = jax.random.normal(key, (DRAWS, shared.eta.mean.size))
        own, _ = variational.own_gradient(self.structured.log_population, shared, noise)
        share = 1.0 if self.silos is None else self.silos / up.silos
        return Server(prior, factors, shared, accepted, server.round + 1, own + share * up.bound)

    def _prior_factor(self, key: PRNGKeyArray, q: gaussian.Global) -> Natural:
        """Λ = −E_q ∇² log p and the shift for which E_q ∇ log t_0 = E_q ∇ log p."""
        half = jax.random.normal(key, (DRAWS // 2, q.mean.size))
        z = jax.vmap(lambda noise: gaussian.draw_global(q, noise))(jnp.concatenate([half, -half]))
        log_p = lambda z: self.structured.log_population({}, z)  # noqa: E731
        gradient, hessian = jax.vmap(jax.grad(log_p))(z), jax.vmap(jax.hessian(log_p))(z)
        precision = -jnp.mean(hessian, axis=0)
        return Natural(jnp.mean(gradient, axis=0) + precision @ q.mean, precision)


def _times(one: Natural, other: Natural) -> Natural:
    return jax.tree.map(jnp.add, one, other)


def _power(factor: Natural, exponent: Any) -> Natural:
    return jax.tree.map(lambda leaf: leaf * exponent, factor)


def _proper_part(q: Natural, change: Natural) -> Float[Array, ""]:
    """The first of 1, ½, ¼ … 0 for which q · change^part has a covariance."""
    parts = jnp.asarray([*(0.5**power for power in range(HALVINGS)), 0.0])
    roots = jax.vmap(lambda part: jnp.linalg.cholesky(_times(q, _power(change, part)).precision))(parts)
    return parts[jnp.argmax(jnp.isfinite(roots).all(axis=(1, 2)))]
