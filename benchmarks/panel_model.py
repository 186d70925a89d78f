"""A model of the panel: over silos as fedbayes has it, and pooled for NUTS."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, Reparam
from numpyro.infer.util import log_density

from fedbayes.models.sites import on_real_line
from fedbayes.models.structured import Structured

Data = dict[str, Any]


class Whitened(Reparam):
    """A multivariate normal as its location plus its Cholesky factor times standard normals."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:
        """The site's value, from standard normals of its shape."""
        fn, expand, _ = self._unwrap(fn)
        standard = numpyro.sample(f"{name}_standard", dist.Normal(jnp.zeros((*expand, *fn.event_shape)), 1.0).to_event(1))
        return None, fn.loc + jnp.einsum("...ij,...j->...i", fn.scale_tril, standard)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model over silos, and the same one over pooled rows."""

    name: str
    title: str
    population: Callable[[], Any]
    silo: Callable[[Any, Any], None]
    silos: dict[str, Data]
    pooled: Callable[[Any], None]
    """All silos in one NumPyro model, as one would write it with the rows in one place."""
    together: Any
    """What `pooled` reads."""
    standardised: tuple[str, ...] = ()
    """Sites that NUTS samples on their standard scale."""
    exact: dict[str, tuple[float, float]] | None = None
    """Mean and standard deviation of each global latent, where there is a closed form."""
    heavy: tuple[str, ...] = ()
    """Global latents without a mean or a variance on their own scale, which are compared on the log scale only."""
    note: str = ""
    target_accept: float = 0.95
    """Of NUTS on the pooled rows."""

    @property
    def structured(self) -> Structured:
        """The model as fedbayes has it."""
        return Structured(self.population, self.silo)

    def standardising(self, site: Any) -> Reparam | None:
        """How NUTS samples a site, for `handlers.reparam`."""
        if site["name"] not in self.standardised:
            return None
        fn = site["fn"]
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        return Whitened() if isinstance(fn, dist.MultivariateNormal) else LocScaleReparam(0)

    def judge(self, data: Any) -> None:
        """`pooled` in the parametrisation in which NUTS samples it; the global latents are sites of the same names."""
        with handlers.reparam(config=self.standardising):
            self.pooled(data)

    @property
    def global_names(self) -> list[str]:
        """The global latents and what the population calls deterministic."""
        return self.structured.global_names()

    @property
    def positive(self) -> set[str]:
        """The global latents that are positive, which are compared on the log scale."""
        found = handlers.trace(handlers.seed(self.population, 0)).get_trace()
        return {name for name, site in found.items() if site["type"] == "sample" and _is_positive(site["fn"].support)}


def _is_positive(support: Any) -> bool:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support in (dist.constraints.positive, dist.constraints.nonnegative)


def joined(silos: dict[str, Data], counts: tuple[str, ...] = (), index: dict[str, str] | None = None) -> Data:
    """The rows of all silos after each other: `counts` are added up, and an index moves on by the count that it names.

    "silo" has each row's silo as a number, for the first array's rows.
    """
    index = index or {}
    parts: dict[str, list[Any]] = {}
    before = dict.fromkeys(counts, 0)
    for place, data in enumerate(silos.values()):
        rows = 0
        for key, value in data.items():
            if key not in counts:
                parts.setdefault(key, []).append(np.atleast_1d(value) + (before[index[key]] if key in index else 0))
                rows = rows or len(parts[key][-1])
        parts.setdefault("silo", []).append(np.full(rows, place, np.int32))
        for key in counts:
            before[key] += data[key]
    return {**{key: np.concatenate(value) for key, value in parts.items()}, **before, "silos": len(silos)}


def reals(*values: Any) -> tuple[Any, ...]:
    """Arrays in single precision."""
    return tuple(np.asarray(value, np.float32) for value in values)


def check(model: Model, points: int = 3, seed: int = 0) -> float:
    """The largest difference between the silos' summed log density and the pooled one at random points."""
    structured, random = model.structured, np.random.default_rng(seed)
    latents = structured.global_latents()
    theta: Data = {}
    worst = 0.0
    for _ in range(points):
        z = jnp.asarray(0.3 * random.standard_normal(structured.size()))
        total = structured.log_population(theta, z)
        values = {name: structured.global_values(theta, z)[name] for name in (latent.name for latent in latents)}
        real = on_real_line(latents, {"": z[None]})
        jacobians: Any = sum(
            jnp.sum(latent.transform.log_abs_det_jacobian(real[latent.name], values[latent.name])) for latent in latents
        )
        parts: dict[str, list[Any]] = {}
        for data in model.silos.values():
            blocks = structured.blocks(data)
            local = {plate: jnp.asarray(0.3 * random.standard_normal(size)) for plate, size in blocks.items()}
            total = total + sum(jnp.sum(term) for term in structured.log_silo(theta, z, local, data).values())
            of_silo = structured.local_latents(data)
            for name, value in on_real_line(of_silo, local).items():
                outside = next(one.plate.name == "" for one in of_silo if one.name == name)
                parts.setdefault(name, []).append(value[None] if outside else value)
        values |= {name: jnp.concatenate(value) for name, value in parts.items()}
        pooled = log_density(model.pooled, (model.together,), {}, values)[0] + jacobians
        if not (math.isfinite(total) and math.isfinite(pooled)):
            return math.inf
        worst = max(worst, abs(float(total - pooled)) / max(1.0, abs(float(pooled))))
    return worst
