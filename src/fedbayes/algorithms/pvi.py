"""PVI: partitioned variational inference (Ashman et al. 2022) for models with latents of the silos' own.

    q(Z_G) = t_0(Z_G) Π_j t_j(Z_G),   all Gaussian, in natural parameters;  t_0 stands for the prior p(Z_G)
    silo:    q_\\j = q / t_j,   q_j = argmax E[log q_\\j(Z_G) − log q_j(Z_G) + L̂_j],   Δ_j = ρ (q_j / q)
             by steps of Adam in q_j and in its own q(Z_Lj | Z_G);  sends Δ_j;  t_j ← t_j · Δ_j
    server:  q ← q · Π_j Δ_j

Each q_j is right about its own data in the light of what the others have said so far, so a few rounds are enough. Factors and
the server's step are those of `primitives/factored.py`.

The prior's factor t_0 is the second-order expansion of log p(Z_G), averaged over q: the prior itself where it is Gaussian.
The bound of a round is that of the q which the round began with, and of the silos' q(Z_L | Z_G) after it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes.algorithm import Sum, fact
from fedbayes.errors import UserError
from fedbayes.primitives import factored, gaussian, prior_factor, variational
from fedbayes.primitives.factored import over, power, rewritten, standard
from fedbayes.primitives.gaussian import Global, Natural
from fedbayes.primitives.structured import Centred
from fedbayes.primitives.variational import Family, Locals, Shared

DRAWS = 64
"""Draws for the bound."""


class Server(NamedTuple):
    """t_0 and q, t_0 in q's coordinates, and what part of each round's change was taken."""

    prior: Natural
    shared: Shared
    accepted: Float[Array, " rounds"]
    round: Int[Array, ""]
    bound: Float[Array, ""]


class Local(NamedTuple):
    """η_L and the μ_G that it was written with; q as last received, and in its coordinates t_j before its last change, and that
    change; the round it was made in."""

    eta: Locals
    centre: Float[Array, " n"]
    q: Global
    factor: Natural
    change: Natural
    round: Int[Array, ""]


class Down(NamedTuple):
    """q, and what part of each round's change was taken."""

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
        """q at the prior."""
        factored.check(self, "PVI")
        q, prior = prior_factor.start(self.structured, key)
        return Server(prior, Shared(q, {}), jnp.zeros(self.rounds or 0), jnp.int32(0), jnp.zeros(()))

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """η_L for the latents that this silo's data asks for, and t_j = 1."""
        n = self.structured.size()
        one, q = factored.flat(n), gaussian.init_global(n, full=True)
        return Local(self.family.init_local(key, self.structured, data), jnp.zeros(n), q, one, one, jnp.int32(0))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """q, and what the silos need to know of their last changes."""
        return Down(server.shared, server.accepted, server.round)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """q_j by a search of its own, and Δ_j."""
        q, factor = down.shared.eta, factored.arrived(local, down)
        cavity, one = factored.cavity(factor), standard(q.mean.size)
        begin = self.family.init_shared(key, self.structured, data)  # not the prior, which may be wide
        shared = jax.tree.map(lambda a, b: jnp.where(down.round == 0, a, b), begin, down.shared)
        optimiser = variational.adam(self.lr, self.decay, self.steps)
        log_cavity = lambda _, z: gaussian.log_factor(cavity, factored.standardised(q, z))  # noqa: E731
        (shared, eta), _, _ = variational.local_search(
            self.at(data), log_cavity, 1.0, optimiser, self.steps, key, (shared, self.eta(local, shared))
        )
        change = power(over(rewritten(one, shared.eta, q), one), self.damping)
        new = Local(eta, shared.eta.mean, q, factor, change, down.round)
        value = variational.silo_bound(self.at(data), key, down.shared, self.eta(new, down.shared), DRAWS)
        return Up(change, value, jnp.ones(())), new

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """As much of the change as leaves q proper, and t_0 anew."""
        q, prior, part = prior_factor.after(self.structured, key, server.shared.eta, server.prior, up.change, matched=False)
        accepted = server.accepted.at[server.round].set(part)
        noise = jax.random.normal(key, (4 * DRAWS, q.mean.size))
        own, _ = variational.own_gradient(self.structured.log_population, server.shared, noise)
        share = 1.0 if self.silos is None else self.silos / up.silos
        return Server(prior, Shared(q, {}), accepted, server.round + 1, own + share * up.bound)

    def factors(self, server: Server) -> Natural:
        """Π_j t_j = q / t_0."""
        return over(standard(server.shared.eta.mean.size), server.prior)
