"""SFVI: structured federated variational inference (Hassan, Salomone, Mengersen, Algorithm 1 with equations S4–S7).

    L̂_0 = log p_θ(Z_G) − log q(Z_G)                          at the server
    L̂_j = log p_θ(y_j, Z_Lj | Z_G) − log q(Z_Lj | Z_G)        at silo j
    server:  draw ε_G, send θ, η_G, ε_G;  then step θ and η_G along ∇L̂_0 + Σ_j g_j
    silo:    Z_G from ε_G, Z_Lj from its own ε_L;  send g_j = ∇_{η_G, θ} L̂_j, and step its own η_Lj along ∇L̂_j

Gradients are "sticking the landing": the variational parameters inside log q are held fixed. Algorithm 1 as printed leaves out
log p(Z_L | Z_G) and the server's ∇L̂_0, and S7 a ∇_θ; here they are as S4–S6 derive them. Steps are Adam's.

With `bound` = K > 1 the silo's term is the locally enhanced bound (Geffner and Domke 2022): for each element of a plate
log 1/K Σ_k p(y, Z_L^k | Z_G) / q(Z_L^k | Z_G), which is still a sum over silos; its gradients are the ordinary ones.

The sum of the g_j is all that the server sees. What a silo keeps is η_Lj and its optimiser's state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from fedbayes import gaussian
from fedbayes.algorithm import Sum
from fedbayes.models.structured import Structured, Values
from fedbayes.trees import other_peoples_code


class Globals(NamedTuple):
    """What all silos share: η_G and θ."""

    eta: gaussian.Global
    theta: Values


class Server(NamedTuple):
    """η_G, θ, the state of Adam, and the number of iterations behind them."""

    shared: Globals
    optimiser: Any
    round: Int[Array, ""]


class Local(NamedTuple):
    """η_L by plate, and the state of the silo's own Adam."""

    eta: dict[str, gaussian.Local]
    optimiser: Any


class Down(NamedTuple):
    """η_G, θ and the noise that Z_G is drawn with, one line for each Monte Carlo sample."""

    shared: Globals
    noise: Float[Array, "s n"]


class Up(NamedTuple):
    """g_j and the silo's term of the bound."""

    gradient: Sum[Globals]
    bound: Sum[Float[Array, ""]]


Noise = dict[str, Float[Array, "s k blocks d"]]


@dataclasses.dataclass(frozen=True)
class SFVI:
    """Structured federated variational inference over silos that each have their own latents."""

    population: Callable[[], Any]
    """Samples what all silos share."""
    silo: Callable[[Any, Any], None]
    """Samples a silo's own latents and observes its data."""
    full: bool = True
    """Whether q(Z_G) has a full covariance; else it is mean-field."""
    coupled: bool = True
    """Whether the local mean depends on Z_G, by C."""
    moving_scale: bool = False
    """Whether the local log-scale depends on Z_G too, by D."""
    lr: float = 0.01
    """Adam's step size, on the server and at the silos."""
    decay: float = 1.0
    """What remains of the step size at the end of `rounds`, falling geometrically."""
    rounds: int | None = None
    """Length of that decay; by default the rounds of the run."""
    draws: int = 1
    """Monte Carlo samples in an iteration."""
    bound: int = 1
    """K, importance-weighted draws for each local latent."""
    start: float = 0.1
    """Standard deviations at the start."""

    @property
    def structured(self) -> Structured:
        """The two functions as densities."""
        return Structured(self.population, self.silo)

    def planned(self, rounds: int) -> SFVI:
        """This with the length of the decay set, where it was not."""
        return self if self.rounds is not None else dataclasses.replace(self, rounds=rounds)

    def init_server(self, key: PRNGKeyArray, data: Any) -> Server:
        """N(0, start² I), and θ as the model has it; the data of any silo tells which θ there are."""
        structured = self.structured
        eta = gaussian.init_global(structured.size(), self.start, full=self.full)
        shared = Globals(eta, structured.theta(data))
        return Server(shared, self._adam().init(shared), jnp.int32(0))

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """η_L for the latents that this silo's data asks for."""
        structured = self.structured
        n, options = structured.size(), {"coupled": self.coupled, "moving_scale": self.moving_scale}
        eta = {name: gaussian.init_local(*shape, n, self.start, **options) for name, shape in structured.blocks(data).items()}
        return Local(eta, self._adam().init(eta))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """η_G, θ and fresh ε_G."""
        return Down(server.shared, jax.random.normal(key, (self.draws, server.shared.eta.mean.size)))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """One iteration with fresh ε_L."""
        return self.respond(self.noise(key, local), down, local, data)

    def noise(self, key: PRNGKeyArray, local: Local) -> Noise:
        """ε_L for every Monte Carlo sample and importance draw; latents in no plate are drawn once a sample."""
        found = {}
        for place, (name, q) in enumerate(local.eta.items()):
            shape = (self.draws, self.bound if name else 1, *q.mean.shape)
            found[name] = jax.random.normal(jax.random.fold_in(key, place), shape)
        return found

    def respond(self, noise: Noise, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """g_j of (S5), and the silo's own step along (S6)."""

        def mean_bound(shared: Globals, eta: dict[str, gaussian.Local]) -> Float[Array, ""]:
            bounds = jax.vmap(lambda noise_G, noise_L: self._silo_bound(shared, eta, noise_G, noise_L, data))
            return jnp.mean(bounds(down.noise, noise))

        value, (gradient, own) = jax.value_and_grad(mean_bound, argnums=(0, 1))(down.shared, local.eta)
        eta, optimiser = self._ascend(local.eta, own, local.optimiser)
        return Up(gradient, value), Local(eta, optimiser)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """Ascend along (S4) and (S7): the server's own term and the silos' sum."""

        own = jax.grad(lambda shared: self.own_bound(down._replace(shared=shared)))(server.shared)
        gradient = jax.tree.map(jnp.add, own, up.gradient)
        shared, optimiser = self._ascend(server.shared, gradient, server.optimiser)
        return Server(shared, optimiser, server.round + 1)

    def own_bound(self, down: Down) -> Float[Array, ""]:
        """L̂_0, the server's own term of the bound."""
        (eta, theta), fixed = down.shared, jax.lax.stop_gradient(down.shared.eta)

        def term(noise: Float[Array, " n"]) -> Float[Array, ""]:
            z = gaussian.draw_global(eta, noise)
            return self.structured.log_population(theta, z) - gaussian.log_global(fixed, z)

        return jnp.mean(jax.vmap(term)(down.noise))

    def _silo_bound(
        self, shared: Globals, eta: dict[str, gaussian.Local], noise_G: Float[Array, " n"], noise_L: Noise, data: Any
    ) -> Float[Array, ""]:
        z_G = gaussian.draw_global(shared.eta, noise_G)
        # Sticking the landing holds for one draw; of a log-mean-exp the ordinary gradient is the unbiased one.
        fixed = jax.lax.stop_gradient if self.bound == 1 else (lambda tree: tree)
        offset, fixed_offset = z_G - shared.eta.mean, z_G - fixed(shared.eta.mean)

        def weights(noise: dict[str, Float[Array, "blocks d"]]) -> dict[str, Float[Array, " blocks"]]:
            z_L = {name: gaussian.draw_local(q, noise[name], offset) for name, q in eta.items()}
            terms = self.structured.log_silo(shared.theta, z_G, z_L, data)
            for name, q in eta.items():
                terms[name] = terms[name] - gaussian.log_local(fixed(q), z_L[name], fixed_offset)
            return terms

        draws = {name: jnp.broadcast_to(value, (self.bound, *value.shape[1:])) for name, value in noise_L.items()}
        each = jax.vmap(weights)(draws) if draws else jax.tree.map(lambda leaf: leaf[None], weights({}))
        count = math.log(self.bound) if draws else 0.0
        return sum((jnp.sum(jax.nn.logsumexp(part, axis=0) - count) for part in each.values()), jnp.zeros(()))

    def _adam(self) -> optax.GradientTransformation:
        if self.decay == 1.0 or self.rounds is None:
            return optax.adam(self.lr)
        return optax.adam(optax.exponential_decay(self.lr, self.rounds, self.decay))

    def _ascend(self, values: Any, gradient: Any, state: Any) -> tuple[Any, Any]:
        with other_peoples_code():
            updates, state = self._adam().update(jax.tree.map(jnp.negative, gradient), state)
        return optax.apply_updates(values, updates), state
