"""Numeric targets in their own units: the network learns standardised numbers, everyone else sees the user's.

A network starts near zero. For a blood pressure of 120 ± 10 its first steps would be hundreds of deviations long, so the
mean and the deviation of the target go into the last step of `apply`, where they change no figure's unit.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fedbayes.models.likelihoods import Likelihood, Normal, Poisson
from fedbayes.models.model import Apply, Model, after, remembered
from fedbayes.trees import Params


@remembered
def in_units(model: Model, mean: float, deviation: float) -> Model:
    """The model whose outputs are those of `model` for a target with mean 0 and deviation 1.

    Normal with a learned scale: (mean + deviation a_0, log deviation + a_1). Normal with a known scale: mean + deviation a_0.
    Poisson: its logarithm is added to the log rate. Labels have no units.
    """
    shift, factor = _affine(model.likelihood, mean, deviation)

    def scaled(inner: Apply) -> Apply:
        def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n k"]:
            return inner(params, x) * jnp.array([factor], jnp.float32) + jnp.array([shift], jnp.float32)

        return apply

    return after(model, scaled) if shift or factor else model


def _affine(likelihood: Likelihood, mean: float, deviation: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if likelihood == Normal(scale=None):
        return (mean, math.log(deviation)), (deviation, 1.0)
    if isinstance(likelihood, Normal):
        return (mean,), (deviation,)
    if isinstance(likelihood, Poisson) and mean > 0:
        return (math.log(mean),), (1.0,)
    return (), ()
