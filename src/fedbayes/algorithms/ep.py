"""EP: expectation propagation with NUTS in each silo (Vehtari, Gelman et al. 2020, "Expectation propagation as a way of life").

    q(Z_G) = t_0(Z_G) Π_j t_j(Z_G),   all Gaussian;  t_0 stands for the prior p(Z_G)
    silo:    tilted  q_\\j(Z_G) p(y_j, Z_Lj | Z_G)  with the cavity  q_\\j = q / t_j,  sampled by NUTS over (Z_G, Z_Lj)
             q_j = the Gaussian with the moments of the tilted Z_G,   Δ_j = (q_j / q)^ρ;  sends Δ_j;  t_j ← t_j Δ_j
    server:  q ← q Π_j Δ_j,  and t_0 by the moments of  q p / t_0

Local latents are sampled, not approximated. Chains go on from where they stopped. What Monte Carlo noise is left is known
(`matching.gaussian_of`) and added up: while q moves by more than its noise, ρ is `damping`; after that rounds are averaged,
each with its share of all draws so far, and draws double, until the noise of q is below `tolerance`. Then the run is over.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedbayes.algorithm import LocalDraws, StructuredAlgorithm, Sum, check_settings, fact, setting
from fedbayes.errors import UserError
from fedbayes.primitives import factored, gaussian, matching, prior_factor, sampling, variational
from fedbayes.primitives.dependence import linked
from fedbayes.primitives.factored import over, power
from fedbayes.primitives.gaussian import Global, Natural
from fedbayes.primitives.sampling import Chains, Draws, Health
from fedbayes.primitives.variational import Family, Locals, Shared

FAMILY = Family(moving_scale=True)
"""The form of q(Z_L | Z_G) that summarises draws."""
UNMIXED, SKEWED = 1.1, 1.0
"""A split r-hat, and a skewness of a tilted marginal, above which a silo is counted."""
NEAR = 0.1
"""Standard deviations of the prior within which chains start: a wide prior's draws are far from any data."""
BEYOND = 3.0
"""Standard errors beyond which a movement of q is more than noise."""
SLACK = 1.5
"""Times the tolerance: a run whose rounds are over has converged if q is within this."""


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
    draws: Float[Array, ""]
    weight: Float[Array, ""]
    """Draws that are averaged so far; 0 while q moves."""
    moved: Float[Array, ""]
    noise: Float[Array, ""]
    converged: Bool[Array, ""]
    done: Bool[Array, ""]
    checked: Checked


class Local(NamedTuple):
    """The chains; q as last received; in its coordinates t_j before the last change, and that change; the round and visits."""

    chains: Chains
    q: Global
    factor: Natural
    change: Natural
    round: Int[Array, ""]
    visits: Int[Array, ""]
    eta: Locals
    """q(Z_L | Z_G) from the last draws, for predictions and for the evidence."""
    centre: Float[Array, " n"]
    health: Health


class Down(NamedTuple):
    """q, ρ, draws to take, and what part of each round's change was taken."""

    shared: Shared
    accepted: Float[Array, " rounds"]
    round: Int[Array, ""]
    damping: Float[Array, ""]
    draws: Float[Array, ""]


class Checked(NamedTuple):
    """How many draws silos took and how many diverged; how many silos have chains that disagree, and a skewed Z_G."""

    draws: Float[Array, ""]
    divergences: Float[Array, ""]
    unmixed: Float[Array, ""]
    skewed: Float[Array, ""]


class Up(NamedTuple):
    """Δ_j^(1/ρ), its Monte Carlo noise, the state of the chains, and 1, which counts who answered."""

    change: Sum[Natural]
    noise: Sum[Noise]
    checked: Sum[Checked]
    silos: Sum[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class EP(StructuredAlgorithm[Server, Local, Down, Up]):
    """Expectation propagation: what NUTS on pooled data would give, in few rounds."""

    default_rounds: ClassVar[int] = 15
    stops: ClassVar[bool] = True
    samples: ClassVar[bool] = True

    damping: float = setting(0.7, above=0, most=1)
    """ρ while q moves."""
    chains: int = setting(4, least=2)
    """Chains in each silo."""
    draws: int = setting(200, least=20)
    """Draws a chain in the first rounds."""
    most: int = setting(800, least=20)
    """Draws a chain in one round, at most."""
    tolerance: float = setting(0.02, above=0)
    """Monte Carlo noise of q, in its standard deviations, at which the run ends."""
    silos: int | None = fact("silos")
    """J, for runs in which not all silos answer; by default the silos of the run."""
    family: Family = dataclasses.field(default=FAMILY, init=False)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.most < self.draws:
            raise UserError(f"most is {self.most}, but it is at least draws, which is {self.draws}")

    def prepared(self, data: Any) -> Any:
        """A silo's data with the dependency structure that is found in it, if chains can start there."""
        self.structured.check_start(data)
        return linked(self.structured, data)

    def init_server(self, key: PRNGKeyArray) -> Server:
        """q at the prior."""
        factored.check(self, "EP")
        q, prior = prior_factor.start(self.structured, key)
        zero = jnp.zeros(())
        where = (
            jnp.full((), self.damping, float),
            jnp.full((), self.draws, float),
            *(zero, zero, zero),
            *(jnp.bool_(False), jnp.bool_(False)),
            Checked(zero, zero, zero, zero),
        )
        return Server(prior, Shared(q, {}), jnp.zeros(self.rounds or 0), jnp.int32(0), *where)

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """Chains that have not begun, and t_j = 1."""
        n = self.structured.size()
        z_L = {name: jnp.zeros((self.chains, count, d)) for name, (count, d) in self.structured.blocks(data).items()}
        chains = Chains(
            jnp.zeros((self.chains, n)), z_L, jnp.full((), 0.1, float), {name: jnp.ones(z.shape[1:]) for name, z in z_L.items()}
        )
        one, q = factored.flat(n), gaussian.init_global(n, full=True)
        eta = FAMILY.init_local(key, self.structured, data)
        return Local(chains, q, one, one, jnp.int32(0), jnp.int32(0), eta, jnp.zeros(n), sampling.unknown_health())

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """q, and what the silos need to know of their last changes."""
        return Down(server.shared, server.accepted, server.round, server.damping, server.draws)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """The moments of the tilted distribution, and Δ_j."""
        q, factor = down.shared.eta, factored.arrived(local, down)
        cavity = factored.cavity(factor)
        draws, chains = self.sample(key, q, cavity, local, down.draws.astype(jnp.int32), data)
        tilted, noise = matching.gaussian_of(draws)
        health, eta = sampling.health(draws), matching.conditionals(draws, q)
        change = over(over(tilted, cavity), factor)
        stuck = health.moving < sampling.STUCK  # such draws say nothing
        change, noise = jax.tree.map(lambda leaf: jnp.where(stuck, 0.0, leaf), (change, noise))
        flags = (health.rhat > UNMIXED, health.skew > SKEWED)
        checked = Checked(health.draws, health.divergences, *(flag.astype(health.draws.dtype) for flag in flags))
        up = Up(change, Noise(noise.shift, jnp.diagonal(noise.precision)), checked, jnp.ones(()))
        applied = power(change, down.damping)
        return up, Local(chains, q, factor, applied, down.round, local.visits + 1, eta, q.mean, health)

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> Local:
        """Chains of a silo that may never have trained, with what its own data says of Z_G; nothing is sent."""
        _, new = self.client(key, down._replace(draws=jnp.full((), self.most, float)), local, data)
        return new._replace(change=factored.flat(self.structured.size()))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Any) -> Any:
        """Posterior predictive draws of what a silo observes, by site."""
        silo = variational.Silo(self.family, self.structured, x)
        return variational.predict(silo, key, down.shared, self.eta(local, down.shared))

    def eta(self, local: Local, shared: Shared) -> Locals:
        """q(Z_L | Z_G) of the last draws, moved from the μ_G that it was written with to that of `shared`."""
        return variational.moved(local.eta, shared, local.centre)

    def local_draws(self, key: PRNGKeyArray, down: Down, local: Local, data: Any, count: int) -> LocalDraws:
        """Draws of the silo's tilted distribution, from chains that go on."""
        each = max(1, -(-count // self.chains))
        algorithm = dataclasses.replace(self, draws=20, most=max(each, 20))
        cavity = factored.cavity(factored.arrived(local, down))
        draws, _ = algorithm.sample(key, down.shared.eta, cavity, local, jnp.int32(each), data)
        to_z = jax.vmap(jax.vmap(lambda u: gaussian.draw_global(down.shared.eta, u)))
        z_L = {name: value[:, :each] for name, value in draws.z.items()}
        return LocalDraws(to_z(draws.u[:, :each]), z_L, draws.diverging[:, :each])

    def sample(
        self, key: PRNGKeyArray, q: Global, cavity: Natural, local: Local, count: Int[Array, ""], data: Any
    ) -> tuple[Draws, Chains]:
        """Draws of the tilted distribution, in q's coordinates."""
        everyone = self.structured.everyone(data)

        def log_tilted(u: Float[Array, " n"], z_L: dict[str, Any]) -> Float[Array, ""]:
            terms = self.structured.log_silo({}, gaussian.draw_global(q, u), z_L, data, everyone)
            return gaussian.log_factor(cavity, u) + sum((jnp.sum(part) for part in terms.values()), jnp.zeros(()))

        for_start, for_chains = jax.random.split(key)
        first = local.visits == 0
        fresh_u = NEAR * jax.random.normal(for_start, local.chains.u.shape)
        prior = lambda key, u: self.structured.prior_local(key, {}, gaussian.draw_global(q, u), data)  # noqa: E731
        fresh_L = jax.vmap(prior)(jax.random.split(for_start, self.chains), fresh_u)
        u = jax.vmap(lambda u: factored.standardised(q, gaussian.draw_global(local.q, u)))(local.chains.u)
        start = local.chains._replace(
            u=jnp.where(first, fresh_u, u),
            z=jax.tree.map(lambda new, old: jnp.where(first, new, old), fresh_L, local.chains.z),
        )
        return sampling.nuts(log_tilted, for_chains, start, local.visits, count, self.most)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """As much of the change as leaves q proper, t_0 anew, and whether to go on."""
        change = power(up.change, down.damping)
        q, prior, part = prior_factor.after(self.structured, key, server.shared.eta, server.prior, change, matched=True)
        accepted = server.accepted.at[server.round].set(part)

        # In q's coordinates a shift moves the mean by as many sds, and a precision moves log sd by −½ of itself.
        size = jnp.concatenate([jnp.abs(up.change.shift), jnp.abs(jnp.diagonal(up.change.precision)) / 2])
        error = jnp.sqrt(jnp.concatenate([up.noise.shift, up.noise.precision / 4]))
        moved, largest = jnp.max(size, initial=0.0), jnp.max(error, initial=0.0)
        settled = (jnp.max(size / jnp.maximum(error, 1e-6), initial=0.0) < BEYOND) | (moved < SLACK * self.tolerance)
        averaging = (part == 1) & (settled | (server.weight > 0) & (moved < 5 * largest))
        taken = down.draws * (1.0 if self.silos is None else up.silos / self.silos)
        weight = jnp.where(averaging, server.weight + taken, 0.0)
        draws = jnp.where(averaging, jnp.minimum(2 * down.draws, self.most), down.draws)
        damping = jnp.where(averaging, draws / (weight + draws), self.damping)
        noise = largest * jnp.sqrt(taken / jnp.maximum(weight, taken))  # each round has its share of all draws
        enough = weight >= down.draws  # all silos have answered
        left = jnp.max(size - 2 * error, initial=0.0) * (1 - down.damping)  # of a movement beyond noise
        still = averaging & enough
        worst = jnp.maximum(noise, left)
        ends = (still & (worst < SLACK * self.tolerance), still & (worst < self.tolerance))
        progress = (damping, draws, weight, moved, noise, *ends, up.checked)
        return Server(prior, Shared(q, {}), accepted, server.round + 1, *progress)

    def factors(self, server: Server) -> Natural:
        """Π_j t_j = q / t_0."""
        return over(factored.standard(server.shared.eta.mean.size), server.prior)

    def stopped(self, server: Server) -> Bool[Array, ""]:
        """Whether q has stopped moving, and its noise is below the tolerance."""
        return server.done

    def health(self, server: Server, locals: dict[str, Local]) -> dict[str, Any]:
        """The state of the search, and of the silos' chains as far as they are known here."""
        found = {"moved": float(server.moved), "noise": float(server.noise), "converged": bool(server.converged)}
        found |= {name: float(value) for name, value in server.checked._asdict().items()}
        if not locals:
            return found
        silos = {name: {key: float(value) for key, value in one.health._asdict().items()} for name, one in locals.items()}
        worst = {"rhat": max, "ess": min, "moving": min, "skew": max, "kurtosis": max}
        found |= {key: of(one[key] for one in silos.values()) for key, of in worst.items()}
        return {**found, "silos": silos}

    def metrics(self, server: Server) -> dict[str, Float[Array, ""]]:
        """How far q would have moved in the last round, its noise, and ρ."""
        return {
            "moved": server.moved,
            "noise": server.noise,
            "damping": server.damping,
            "draws": server.draws,
        }
