"""Kinds of algorithm that fit a structured model by a variational family: SFVI and its relatives."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes.algorithm import DownT, LocalDraws, LocalT, ServerT, StructuredAlgorithm, UpT
from fedbayes.primitives import variational
from fedbayes.primitives.dependence import linked
from fedbayes.primitives.variational import Family, Locals, Shared, Silo


@dataclasses.dataclass(frozen=True)
class Variational(StructuredAlgorithm[ServerT, LocalT, DownT, UpT]):
    """q(Z_G) is shared, q(Z_L | Z_G) the silo's own; `server.bound` is the bound, `down.shared` η_G and θ."""

    family: Family = Family()
    _: dataclasses.KW_ONLY
    adapt_steps: int = 1000
    """Steps of a silo that never trained."""

    @property
    @abc.abstractmethod
    def lr(self) -> float:
        """Adam's step size."""

    def prepared(self, data: Any) -> Any:
        """A silo's data with the dependency structure that is found in it; an encoder names plates, so it keeps them."""
        return linked(self.structured, data, regroup=self.family.encoder is None)

    def at(self, data: Any) -> Silo:
        """A silo with these data."""
        return Silo(self.family, self.structured, data)

    def metrics(self, server: Any) -> dict[str, Float[Array, ""]]:
        """The bound."""
        return {"bound": server.bound}

    def adapt(self, key: PRNGKeyArray, down: Any, local: LocalT, data: Any) -> LocalT:
        """η_L of a silo that may never have trained, with q(Z_G) as it is."""
        start, optimiser = self.eta(local, down.shared), optax.adam(self.lr)
        eta = variational.adapt(self.at(data), optimiser, self.adapt_steps, key, down.shared, start)
        return self.local_from(local, eta, down.shared)

    def local_draws(self, key: PRNGKeyArray, down: Any, local: LocalT, data: Any, count: int) -> LocalDraws:
        """Independent draws from q, as one chain."""
        draws = variational.posterior_draws(self.at(data), key, down.shared, self.eta(local, down.shared), count)
        z_G, z_L = jax.tree.map(lambda leaf: leaf[None], draws)
        return LocalDraws(z_G, z_L, jnp.zeros((1, count), bool))

    def predict(self, key: PRNGKeyArray, down: Any, local: LocalT, x: Any) -> Any:
        """Posterior predictive draws of what a silo observes, by site."""
        return variational.predict(self.at(x), key, down.shared, self.eta(local, down.shared))


@dataclasses.dataclass(frozen=True)
class Centred(Variational[ServerT, LocalT, DownT, UpT]):
    """A silo keeps η_L with the μ_G that it was written with, `local.centre`: it may miss rounds in which μ_G moves."""

    def eta(self, local: Any, shared: Shared) -> Locals:
        """η_L, moved from the μ_G that it was written with to that of `shared`."""
        return variational.moved(local.eta, shared, local.centre)

    def local_from(self, local: Any, eta: Locals, shared: Shared) -> LocalT:
        """η_L of another fit, and its μ_G."""
        return local._replace(eta=eta, centre=shared.eta.mean)
