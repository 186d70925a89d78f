"""EP: expectation propagation with NUTS in each silo (Vehtari, Gelman et al. 2020, "Expectation propagation as a way of life").

    q(Z_G) = t_0(Z_G) Π_j t_j(Z_G),   all Gaussian;  t_0 stands for the prior p(Z_G)
    silo:    tilted  q_\\j(Z_G) p(y_j, Z_Lj | Z_G)  with the cavity  q_\\j = q / t_j,  sampled by NUTS over (Z_G, Z_Lj)
             q_j = the Gaussian with the moments of the tilted Z_G,   Δ_j = (q_j / q)^ρ;  sends Δ_j;  t_j ← t_j Δ_j
    server:  q ← q Π_j Δ_j,  and t_0 by the moments of  q p / t_0

Local latents are sampled, not approximated. Chains go on from where they stopped. What Monte Carlo noise is left is known
(`sampling.gaussian_of`) and added up: while q moves by more than its noise, ρ is `damping`; after that rounds are averaged,
each with its share of all draws so far, and draws double, until the noise of q is below `tolerance`. Then the run is over.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedbayes.algorithm import Sum, fact, setting
from fedbayes.errors import UserError
from fedbayes.primitives import factored, gaussian, sampling
from fedbayes.primitives.factored import over, power, rewritten, standard, times
from fedbayes.primitives.gaussian import Global, Natural
from fedbayes.primitives.sampling import Chains, Draws
from fedbayes.primitives.structured import Centred
from fedbayes.primitives.variational import Family, Locals, Shared

BEYOND = 3.0
"""Standard errors beyond which a movement of q is more than noise."""


class Noise(NamedTuple):
    """Monte Carlo variances of q's natural parameters, in q's coordinates: of the shift and of the precision's diagonal."""

    shift: Float[Array, " n"]
    precision: Float[Array, " n"]


class Server(NamedTuple):
    """t_0 and q, what part of each round's change was taken, and where the search stands."""

    prior: Natural
    shared: Shared
    accepted: Float[Array, " rounds"]
    round: Int[Array, ""]
    damping: Float[Array, ""]
    draws: Int[Array, ""]
    weight: Float[Array, ""]
    """Draws that are averaged so far; 0 while q moves."""
    moved: Float[Array, ""]
    noise: Float[Array, ""]
    converged: Bool[Array, ""]


class Local(NamedTuple):
    """The chains; q as it was last received; t_j before its last change, and that change, in its coordinates; the round."""

    chains: Chains
    q: Global
    factor: Natural
    change: Natural
    round: Int[Array, ""]
    visits: Int[Array, ""]
    eta: Locals
    centre: Float[Array, " n"]


class Down(NamedTuple):
    """q, ρ, draws to take, and what part of each round's change was taken."""

    shared: Shared
    accepted: Float[Array, " rounds"]
    round: Int[Array, ""]
    damping: Float[Array, ""]
    draws: Int[Array, ""]


class Up(NamedTuple):
    """Δ_j^(1/ρ), its Monte Carlo noise, how many transitions diverged, and 1, which counts who answered."""

    change: Sum[Natural]
    noise: Sum[Noise]
    divergences: Sum[Float[Array, ""]]
    silos: Sum[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class EP(Centred[Server, Local, Down, Up]):
    """Expectation propagation: what NUTS on pooled data would give, in few rounds."""

    default_rounds: ClassVar[int] = 15
    lr: ClassVar[float] = 0.0

    family: Family = Family()
    damping: float = setting(0.7, above=0, most=1)
    """ρ while q moves."""
    chains: int = setting(4, least=2)
    """Chains in each silo."""
    draws: int = setting(200, least=20)
    """Draws a chain in the first rounds."""
    most: int = setting(800, least=20)
    """Draws a chain in one round, at most."""
    tolerance: float = setting(0.03, above=0)
    """Monte Carlo noise of q, in its standard deviations, at which the run ends."""
    silos: int | None = fact("silos")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """q at the prior."""
        if theta := self.structured.theta(self.example):
            raise UserError(f"EP has no θ, but the model has {', '.join(theta)}; give it a prior, or use SFVI")
        if self.rounds is None:
            raise UserError("rounds is not set; call algorithm.planned(rounds) first")
        q, prior = factored.prior_start(self.structured, key)
        zero = jnp.zeros(())
        where = (jnp.float32(self.damping), jnp.int32(self.draws), zero, zero, zero, jnp.bool_(False))
        return Server(prior, Shared(q, {}), jnp.zeros(self.rounds), jnp.int32(0), *where)

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """Chains that have not begun, and t_j = 1."""
        n = self.structured.size()
        z_L = {
            name: jnp.zeros((self.chains, count, d)) for name, (count, d) in self.structured.blocks(data).items()
        }
        chains = Chains(jnp.zeros((self.chains, n)), z_L, jnp.float32(0.1), {name: jnp.ones(z.shape[1:]) for name, z in z_L.items()})
        one, q = factored.flat(n), gaussian.init_global(n, 1.0, full=True)
        eta = self.family.init_local(key, self.structured, data)
        return Local(chains, q, one, one, jnp.int32(0), jnp.int32(0), eta, jnp.zeros(n))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """q, and what the silos need to know of their last changes."""
        return Down(server.shared, server.accepted, server.round, server.damping, server.draws)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """The moments of the tilted distribution, and Δ_j."""
        q = down.shared.eta
        taken = times(local.factor, power(local.change, down.accepted[local.round]))
        factor = rewritten(taken, local.q, q)
        cavity = factored.cavity(factor)
        draws, chains = self.sample(key, q, cavity, local, down.draws, data)
        tilted, noise = sampling.gaussian_of(draws)
        change = over(over(tilted, cavity), factor)
        divergences = jnp.sum(draws.diverging & sampling.draw_mask(draws)[None]).astype(jnp.float32)
        up = Up(change, Noise(noise.shift, jnp.diagonal(noise.precision)), divergences, jnp.ones(()))
        kept = Chains(jax.vmap(lambda u: gaussian.draw_global(q, u))(chains.u), *chains[1:])
        new = Local(kept, q, factor, power(change, down.damping), down.round, local.visits + 1, local.eta, q.mean)
        return up, new

    def sample(
        self, key: PRNGKeyArray, q: Global, cavity: Natural, local: Local, count: Int[Array, ""], data: Any
    ) -> tuple[Draws, Chains]:
        """Draws of the tilted distribution, in q's coordinates."""
        everyone, plates = self.structured.everyone(data), self.structured.plates(data)

        def log_tilted(u: Float[Array, " n"], z_L: dict[str, Any]) -> Float[Array, ""]:
            terms = self.structured.log_silo({}, gaussian.draw_global(q, u), z_L, data, everyone)
            return gaussian.log_factor(cavity, u) + sum((jnp.sum(part) for part in terms.values()), jnp.zeros(()))

        for_start, for_chains = jax.random.split(key)
        first = local.visits == 0
        fresh_u = 0.3 * jax.random.normal(for_start, local.chains.u.shape)
        prior = lambda key, u: self.structured.prior_local(key, {}, gaussian.draw_global(q, u), data)  # noqa: E731
        fresh_L = jax.vmap(prior)(jax.random.split(for_start, self.chains), fresh_u)
        u = jax.vmap(lambda z: factored.standardised(q, z))(local.chains.u)
        start = local.chains._replace(
            u=jnp.where(first, fresh_u, u),
            z_L=jax.tree.map(lambda new, old: jnp.where(first, new, old), fresh_L, local.chains.z_L),
        )
        return sampling.nuts(log_tilted, for_chains, start, local.visits, count, self.most)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """As much of the change as leaves q proper, t_0 anew, and whether to go on."""
        n = server.shared.eta.mean.size
        change = power(up.change, down.damping)
        part = factored.proper_part(standard(n), change)
        taken = power(change, part)
        q = factored.multiplied(server.shared.eta, taken)
        prior = rewritten(server.prior, server.shared.eta, q)
        q, prior = factored.prior_step(self.structured, key, q, prior)
        accepted = server.accepted.at[server.round].set(part)

        # In q's coordinates a shift moves the mean by as many sds, and a precision moves log sd by −½ of itself.
        size = jnp.concatenate([jnp.abs(up.change.shift), jnp.abs(jnp.diagonal(up.change.precision)) / 2])
        error = jnp.sqrt(jnp.concatenate([up.noise.shift, up.noise.precision / 4]))
        beyond = jnp.max(size / jnp.maximum(error, 1e-6), initial=0.0) > BEYOND
        still = (~beyond | (jnp.max(size, initial=0.0) < self.tolerance)) & (part == 1)
        weight = jnp.where(still | (server.weight > 0) & (jnp.max(size) < 5 * jnp.max(error)), server.weight + down.draws, 0.0)
        draws = jnp.where(weight > 0, jnp.minimum(2 * down.draws, self.most), down.draws)
        # The noise of an average over rounds: each has its share of the draws.
        noise = jnp.max(error, initial=0.0) * jnp.sqrt(down.draws / jnp.maximum(weight, down.draws))
        converged = (weight > 0) & (noise < self.tolerance)
        damping = jnp.where(weight > 0, draws / (weight + draws), self.damping)
        return Server(
            prior, Shared(q, {}), accepted, server.round + 1, damping, draws, weight, jnp.max(size, initial=0.0), noise, converged
        )

    def metrics(self, server: Server) -> dict[str, Float[Array, ""]]:
        """How far q would have moved in the last round, its noise, and ρ."""
        return {"moved": server.moved, "noise": server.noise, "damping": server.damping, "draws": server.draws.astype(jnp.float32)}
