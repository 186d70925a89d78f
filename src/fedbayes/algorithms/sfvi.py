"""SFVI: structured federated variational inference (Hassan, Salomone, Mengersen, Algorithm 1 with equations S4–S7).

    L̂_0 = log p_θ(Z_G) − log q(Z_G)                          at the server
    L̂_j = log p_θ(y_j, Z_Lj | Z_G) − log q(Z_Lj | Z_G)        at silo j
    server:  draw ε_G, send θ, η_G, ε_G;  then step θ and η_G along ∇L̂_0 + Σ_j g_j
    silo:    Z_G from ε_G, Z_Lj from its own ε_L;  send g_j = ∇_{η_G, θ} L̂_j, and step its own η_Lj along ∇L̂_j

Algorithm 1 as printed leaves out log p(Z_L | Z_G) and the server's ∇L̂_0, and S7 a ∇_θ; here they are as S4–S6 derive them.
Steps are Adam's. Where some silos are absent, the sum over those that answer is scaled by J / |S|.

The sum of the g_j is all that the server sees. What a silo keeps is η_Lj and its optimiser's state.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.algorithm import Sum, fact
from fedbayes.primitives import variational
from fedbayes.primitives.structured import Variational
from fedbayes.primitives.variational import Locals, Noise, Shared


class Server(NamedTuple):
    """η_G and θ, the state of Adam, and the bound in the last iteration."""

    shared: Shared
    optimiser: Any
    bound: Float[Array, ""]


class Local(NamedTuple):
    """η_L by plate, and the state of the silo's own Adam."""

    eta: Locals
    optimiser: Any


class Down(NamedTuple):
    """η_G, θ and the noise that Z_G is drawn with, one line for each Monte Carlo sample."""

    shared: Shared
    noise: Float[Array, "s n"]


class Up(NamedTuple):
    """g_j, the silo's term of the bound, and 1, which counts who answered."""

    gradient: Sum[Shared]
    bound: Sum[Float[Array, ""]]
    silos: Sum[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class SFVI(Variational[Server, Local, Down, Up]):
    """Structured federated variational inference over silos that each have their own latents."""

    default_rounds: ClassVar[int] = 5000
    starts_anywhere: ClassVar[bool] = True

    lr: float = 0.01
    """Adam's step size, on the server and at the silos; of means, in units of the prior's scale that shrink as q does."""
    decay: float = 0.1
    """What remains of the step size at the end of `rounds`, falling geometrically."""
    silos: int | None = fact("silos")
    """J; by default the silos of the run."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """Around the prior, and θ as the model has it."""
        shared = self.family.init_shared(key, self.structured, self.example)
        return Server(shared, self._adam().init(shared), jnp.zeros(()))

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """η_L for the latents that this silo's data asks for."""
        eta = self.family.init_local(key, self.structured, data)
        return Local(eta, self._adam().init(eta))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """η_G, θ and fresh ε_G."""
        return Down(server.shared, jax.random.normal(key, (self.family.draws, server.shared.eta.mean.size)))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """One iteration with fresh ε_L."""
        _, noise, indices = variational.chance(self.at(data), key)
        return self.respond(noise, down, local, data, indices)

    def respond(
        self, noise: Noise, down: Down, local: Local, data: Any, indices: dict[str, Any] | None = None
    ) -> tuple[Up, Local]:
        """g_j of (S5), and the silo's own step along (S6)."""
        arguments = (down.shared, local.eta, down.noise, noise, indices or {})
        value, gradient, own = variational.silo_gradient(self.at(data), *arguments)
        units = variational.local_units(self.at(data), down.shared, local.eta)
        new = variational.ascend(self._adam(), local.eta, own, local.optimiser, units)
        return Up(gradient, value, jnp.ones(())), Local(*new)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """Ascend along (S4) and (S7): the server's own term and the silos' sum."""
        own, gradient = variational.own_gradient(self.structured.log_population, server.shared, down.noise)
        share = 1.0 if self.silos is None else self.silos / up.silos
        gradient = jax.tree.map(lambda one, other: one + share * other, gradient, up.gradient)
        units = variational.shared_units(self.family, server.shared)
        shared, optimiser = variational.ascend(self._adam(), server.shared, gradient, server.optimiser, units)
        return Server(shared, optimiser, own + share * up.bound)

    def _adam(self) -> optax.GradientTransformation:
        return variational.adam(self.lr, self.decay, self.rounds)
