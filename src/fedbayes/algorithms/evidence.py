"""The evidence round: after training, silos tell log p(y_j | Z_G) at points that the server asks about.

    server:  sends η_G, θ and points z_1 … z_S on the real line
    silo:    sends log p(y_j | z_s) for each (primitives/evidence.py), and how its q(Z_L | Z_G) compares; keeps its state
    server:  has log p(z_s) + Σ_j log p(y_j | z_s), the log density of the posterior of Z_G up to a constant

It wraps the algorithm that was fitted and reads its local state through `eta`, so it is the same for all of them; it is not in
the registry, as nothing is trained. All that the server gets are sums over silos.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.algorithm import Algorithm, AnyStructured, Sum
from fedbayes.errors import UserError
from fedbayes.primitives import evidence
from fedbayes.primitives.variational import Shared, Silo

POINTS = 2000
"""Points of a round: 8 bytes each is what a silo sends."""
INNER = 32
"""Draws of a silo's latents for each of them."""
SHIFT, RATIO = 0.3, 1.3
"""A silo counts those of its latents whose mean is off by more standard deviations, and whose deviation by this factor."""


class Told(NamedTuple):
    """What silos tell together."""

    evidence: Float[Array, " s"]
    """Σ_j log p(y_j | z_s)."""
    difference: Float[Array, " s"]
    """The same by one half of the draws less that by the other."""
    latents: Float[Array, ""]
    """How many latents silos have of their own."""
    moved: Float[Array, ""]
    """How many of these have a mean under q(Z_L | Z_G) that is off by `SHIFT`."""
    scaled: Float[Array, ""]
    """How many have a standard deviation that is off by `RATIO`."""
    silos: Float[Array, ""]
    """How many silos answered."""


class Server(NamedTuple):
    """η_G and θ, the points, and what was told about them."""

    shared: Shared
    points: Float[Array, "s n"]
    told: Told


class Down(NamedTuple):
    """η_G and θ, and the points."""

    shared: Shared
    points: Float[Array, "s n"]


class Up(NamedTuple):
    """A silo's part of `Told`."""

    evidence: Sum[Float[Array, " s"]]
    difference: Sum[Float[Array, " s"]]
    latents: Sum[Float[Array, ""]]
    moved: Sum[Float[Array, ""]]
    scaled: Sum[Float[Array, ""]]
    silos: Sum[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Evidence(Algorithm[Server, Any, Down, Up]):
    """What silos are asked after training; `fitted` is what trained."""

    fitted: AnyStructured
    points: int = POINTS
    inner: int = INNER

    def __post_init__(self) -> None:
        if self.inner < 16 or self.inner % 16:
            raise UserError(f"inner is {self.inner}, but it is a multiple of 16: two halves of draws from several proposals")

    def asking(self, shared: Shared, points: Any) -> Server:
        """The server's state before a round about these points."""
        nothing = Told(jnp.zeros(self.points), jnp.zeros(self.points), *(jnp.zeros(()) for _ in range(4)))
        return Server(shared, jnp.asarray(points, shared.eta.mean.dtype), nothing)

    def up_shapes(self, dtype: Any) -> Up:
        """The shapes of what a silo sends, for numbers of this type."""
        each, one = jax.ShapeDtypeStruct((self.points,), dtype), jax.ShapeDtypeStruct((), jnp.float32)
        return Up(each, each, one, one, one, one)  # type: ignore[arg-type]

    def init_server(self, key: PRNGKeyArray) -> Server:
        """The fitted algorithm's start, and no points yet."""
        shared = self.fitted.shared(self.fitted.init_server(key))
        return self.asking(shared, jnp.zeros((self.points, shared.eta.mean.size)))

    def init_local(self, key: PRNGKeyArray, data: Any) -> Any:
        """What the fitted algorithm keeps."""
        return self.fitted.init_local(key, data)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """η_G, θ and the points."""
        return Down(server.shared, server.points)

    def client(self, key: PRNGKeyArray, down: Down, local: Any, data: Any) -> tuple[Up, Any]:
        """The silo's evidence; its state stays as it is."""
        silo = Silo(self.fitted.family, self.fitted.structured, data)
        own = evidence.told(silo, key, down.shared, self.fitted.eta(local, down.shared), down.points, self.inner)
        moved, scaled = own.shift > SHIFT, jnp.abs(jnp.log(own.ratio)) > jnp.log(RATIO)
        up = Up(
            own.evidence,
            own.difference,
            latents=jnp.float32(own.shift.size),
            moved=jnp.sum(moved, dtype=jnp.float32),
            scaled=jnp.sum(scaled, dtype=jnp.float32),
            silos=jnp.float32(1),
        )
        return up, local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """What was told."""
        return server._replace(told=Told(*up))

    def adapt(self, key: PRNGKeyArray, down: Down, local: Any, data: Any) -> Any:
        """Nothing is fitted."""
        return local

    def predict(self, key: PRNGKeyArray, down: Down, local: Any, x: Any) -> Any:
        """An evidence round predicts nothing; the fitted algorithm does."""
        raise UserError("an evidence round predicts nothing; ask the algorithm that was fitted")
