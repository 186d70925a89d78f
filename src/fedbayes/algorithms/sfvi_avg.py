"""SFVI-Avg: SFVI with local steps between rounds (Hassan, Salomone, Mengersen, section 3.2 and Algorithm 2).

    silo:    m steps up    E[log p_θ(Z_G) − log q(Z_G)] + N/N_j · E[L̂_j]     in its own copy of θ, η_G and in η_Lj
    server:  θ ← J⁻¹ Σ_j θ_j,    q(Z_G) ← the Wasserstein barycentre of the q_j(Z_G):
             μ = J⁻¹ Σ_j μ_j;    σ = J⁻¹ Σ_j σ_j where covariances are diagonal, else a fixed point (Bures)

As printed only log p(Z_L, y | Z_G) is scaled by N/N_j, which makes local posteriors too narrow by about √(N_j/N); here the
whole local term is. Diagonal families send means that add up; a full covariance needs each silo's own (Stack).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.algorithm import Mean, Stack, fact
from fedbayes.errors import UserError
from fedbayes.models.sites import Values
from fedbayes.primitives import gaussian, variational
from fedbayes.primitives.structured import Centred
from fedbayes.primitives.variational import Locals, Shared


class Server(NamedTuple):
    """η_G and θ, and the silos' mean estimate of the bound at the end of the last round."""

    shared: Shared
    bound: Float[Array, ""]


class Local(NamedTuple):
    """η_L by plate, the μ_G that it was written with, and the state of the silo's Adam for all that it steps."""

    eta: Locals
    centre: Float[Array, " n"]
    optimiser: Any


class Down(NamedTuple):
    """η_G and θ."""

    shared: Shared


class Up(NamedTuple):
    """θ_j and q_j(Z_G): its mean, and its standard deviations or, where covariances are full, its covariance."""

    theta: Mean[Values]
    mean: Mean[Float[Array, " n"]]
    scale: Mean[Float[Array, " n"] | None]
    covariances: Stack[Float[Array, "n n"] | None]
    bound: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class SFVIAvg(Centred[Server, Local, Down, Up]):
    """SFVI that averages posteriors after local steps: few rounds, at a price in accuracy."""

    default_rounds: ClassVar[int] = 50

    steps: int = 100
    """m, local steps in a round."""
    lr: float = 0.01
    """Adam's step size."""
    decay: float = 0.1
    """What remains of the step size at the end of `rounds`, falling geometrically."""
    rows: int | None = fact("rows")
    """N, the observations of all silos; by default those of the run."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """Around the prior, and θ as the model has it."""
        return Server(self.family.init_shared(key, self.structured, self.example), jnp.zeros(()))

    def init_local(self, key: PRNGKeyArray, data: Any) -> Local:
        """η_L for the latents that this silo's data asks for."""
        eta, shared = self.family.init_local(key, self.structured, data), self.family.init_shared(key, self.structured, data)
        return Local(eta, shared.eta.mean, self._adam().init((shared, eta)))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """η_G and θ."""
        return Down(server.shared)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Any) -> tuple[Up, Local]:
        """m steps as if every silo's data were like this one's."""
        if self.rows is None:
            raise UserError(
                "rows is not set: SFVI-Avg scales a silo's term by N / N_j, so give N, the observations of all silos"
            )
        scale = self.rows / self.structured.rows(data)
        start = (down.shared, self.eta(local, down.shared))
        (shared, eta), optimiser, (own, value) = variational.local_search(
            self.at(data), self.structured.log_population, scale, self._adam(), self.steps, key, start, local.optimiser
        )
        q = shared.eta
        deviations, covariance = (None, gaussian.covariance(q)) if self.family.full else (jnp.exp(q.log_scale), None)
        return Up(shared.theta, q.mean, deviations, covariance, own + scale * value), Local(eta, q.mean, optimiser)

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The mean of the θ_j and the barycentre of the q_j(Z_G)."""
        if up.covariances is None:
            assert up.scale is not None
            eta = gaussian.Global(up.mean, jnp.log(up.scale), None)
        else:
            eta = gaussian.barycentre(up.mean, up.covariances)
        return Server(Shared(eta, up.theta), up.bound)

    def _adam(self) -> optax.GradientTransformation:
        return variational.adam(self.lr, self.decay, None if self.rounds is None else self.rounds * self.steps)
