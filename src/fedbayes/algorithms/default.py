"""The algorithm that fits a NumPyro model where nobody names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedbayes.algorithm import AnyStructured
from fedbayes.algorithms.ep import EP
from fedbayes.algorithms.sfvi import SFVI
from fedbayes.models.structured import Structured
from fedbayes.primitives.variational import Family

MOST = 120
"""Global latents up to which EP is the default: the most at which it was measured (docs/results/panel.md). It is right there
where SFVI's standard deviations are not, and takes 24 to 42 times as long."""
MEAN_FIELD = 500
"""Global latents from which on SFVI's q(Z_G) is mean-field by default."""


def default(population: Callable[[], Any], silo: Callable[[Any, Any], None], data: Any = None) -> tuple[AnyStructured, str]:
    """EP; for a model that it is not made for, SFVI and a sentence that says why. `data` is a silo's, for θ that `silo` names.

    >>> import numpyro, numpyro.distributions as dist
    >>> def population():
    ...     return numpyro.sample("weights", dist.Normal(0, 1).expand([200]))
    >>> def silo(weights, data):
    ...     numpyro.sample("y", dist.Normal(weights.sum(), 1.0), obs=data["y"])
    >>> algorithm, why = default(population, silo)
    >>> type(algorithm).__name__, why
    ('SFVI', 'SFVI is used: the model has 200 global latents, and EP is for at most 120')
    """
    structured = Structured(population, silo)
    n = structured.size()
    if theta := structured.theta(data):
        return SFVI(population, silo), f"SFVI is used: EP has no θ, and the model has {', '.join(theta)}"
    if n > MOST:
        family = Family() if n <= MEAN_FIELD else Family.mean_field()
        return SFVI(population, silo, family), f"SFVI is used: the model has {n} global latents, and EP is for at most {MOST}"
    return EP(population, silo), ""
