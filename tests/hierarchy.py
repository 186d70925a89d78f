"""A normal hierarchy whose posterior is known: mean ~ N(0, s²), effect_i ~ N(mean, τ²), y_i ~ N(effect_i, σ²)."""

import numpy as np
import numpyro
import numpyro.distributions as dist

PRIOR, SPREAD, NOISE = 2.0, 0.7, 0.5
Y = (1.3 + np.random.default_rng(3).normal(size=12) * np.hypot(SPREAD, NOISE)).astype(np.float32)
PRECISION = 1 / PRIOR**2 + len(Y) / (SPREAD**2 + NOISE**2)
MEAN, DEVIATION = Y.sum() / (SPREAD**2 + NOISE**2) / PRECISION, PRECISION**-0.5
WEIGHT = SPREAD**2 / (SPREAD**2 + NOISE**2)
OWN = SPREAD * NOISE / np.hypot(SPREAD, NOISE)
EVIDENCE = float(
    dist.MultivariateNormal(np.zeros(12), PRIOR**2 * np.ones((12, 12)) + (SPREAD**2 + NOISE**2) * np.eye(12)).log_prob(Y)
)


def population():
    return numpyro.sample("mean", dist.Normal(0.0, PRIOR))


def silo(mean, data):
    with numpyro.plate("units", data["y"].shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mean, SPREAD))
        numpyro.sample("y", dist.Normal(effect, NOISE), obs=data["y"])


def sampled(mean, data):
    """The same with four of the units in an iteration."""
    with numpyro.plate("units", data["y"].shape[0], subsample_size=4) as rows:
        effect = numpyro.sample("effect", dist.Normal(mean, SPREAD))
        numpyro.sample("y", dist.Normal(effect, NOISE), obs=data["y"][rows])


def partition(*counts):
    return {f"s{i}": {"y": part} for i, part in enumerate(np.split(Y, np.cumsum(counts)[:-1]))}
