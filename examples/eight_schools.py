"""Eight schools, each a silo: the effect of coaching on a test, by school. Run: fedbayes fit examples/eight_schools.py.

    theta_j = mu + tau z_j,    z_j ~ Normal(0, 1),    y_j ~ Normal(theta_j, sigma_j).

A school has one number y, the estimate of its own experiment, and the estimate's standard error sigma (Rubin, 1981, Journal of
Educational Statistics 6). The schools share the mean effect mu and its spread tau; the effect theta of a school stays there.
"""

import numpy as np
import numpyro
import numpyro.distributions as dist

_ESTIMATES = (28, 8, -3, 7, -1, 1, 18, 12)
_STANDARD_ERRORS = (15, 10, 16, 11, 9, 11, 10, 18)


def population():
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    return mu, tau


def silo(population, data):
    mu, tau = population
    # One estimate says little about its school, so theta itself would have a spread that follows tau down to zero, which no
    # Gaussian has. Its standardised value z is close to a standard normal whatever tau is.
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    theta = numpyro.deterministic("theta", mu + tau * z)
    numpyro.sample("y", dist.Normal(theta, data["sigma"]), obs=data["y"])


def silos():
    schools = zip("ABCDEFGH", _ESTIMATES, _STANDARD_ERRORS, strict=True)
    return {name: {"y": np.array(y, np.float32), "sigma": np.array(sigma, np.float32)} for name, y, sigma in schools}
