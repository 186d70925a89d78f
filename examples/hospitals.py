"""Recovery in six hospitals: a linear mixed model with an intercept for each. Run: fedbayes fit examples/hospitals.py.

    recovery = intercept_j + effects · (age, severity, treated) + noise,    intercept_j ~ Normal(mean, between),
    noise ~ Normal(0, within).

Hospitals share the effects, the mean and the spread of their intercepts and the spread of the noise; its own intercept stays in
a hospital. The data is made up, from a fixed seed, for hospitals of 20 to 200 patients. The truth is -0.5, -1.0 and 0.8 for
the effects, 2 for mean, 0.6 for between and 1 for within.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist

_PATIENTS = {"north": 20, "east": 35, "south": 60, "west": 90, "centre": 140, "university": 200}


def population():
    effects = numpyro.sample("effects", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    within = numpyro.sample("within", dist.HalfNormal(2.0))
    return effects, mean, between, within


def silo(population, data):
    effects, mean, between, within = population
    # Also the smallest hospital's patients say more about its intercept than the other hospitals do, so it needs no
    # standardising: given the data it hardly depends on the mean and the spread.
    intercept = numpyro.sample("intercept", dist.Normal(mean, between))
    with numpyro.plate("patients", len(data["recovery"])):
        expected = intercept + data["covariates"] @ effects
        numpyro.sample("recovery", dist.Normal(expected, within), obs=data["recovery"])


def silos():
    generator = np.random.default_rng(0)
    found = {}
    for name, count in _PATIENTS.items():
        age, severity = generator.normal(size=(2, count))  # both standardised
        covariates = np.stack([age, severity, generator.integers(0, 2, count)], axis=1)
        intercept = generator.normal(2.0, 0.6)
        recovery = intercept + covariates @ np.array([-0.5, -1.0, 0.8]) + generator.normal(size=count)
        found[name] = {"covariates": covariates.astype(np.float32), "recovery": recovery.astype(np.float32)}
    return found
