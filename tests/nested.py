"""A nested normal model whose posterior is known: y = mu + h_j + b_jd + e, wards d in silos j, with known variances."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from fedbayes.primitives import gaussian
from fedbayes.primitives.variational import Shared

PRIOR, BETWEEN, WITHIN, NOISE = 2.0, 0.7, 0.6, 0.8
SILOS, WARDS, ROWS = 3, 4, 3


def population():
    return numpyro.sample("mu", dist.Normal(0.0, PRIOR))


def silo(mu, data):
    h = numpyro.sample("h", dist.Normal(0.0, BETWEEN))
    with numpyro.plate("wards", WARDS):
        b = numpyro.sample("b", dist.Normal(0.0, WITHIN))
        numpyro.sample("y", dist.Normal((mu + h + b)[:, None], NOISE).expand([WARDS, ROWS]).to_event(1), obs=data["y"])


def _rows(random):
    effects = 1.0 + random.normal(0.0, BETWEEN) + random.normal(0.0, WITHIN, (WARDS, 1))
    return {"y": (effects + random.normal(0.0, NOISE, (WARDS, ROWS))).astype(np.float32)}


_random = np.random.default_rng(0)
DATA = {f"s{j}": _rows(_random) for j in range(SILOS)}
_silo, _ward = np.divmod(np.arange(SILOS * WARDS * ROWS) // ROWS, WARDS)
_design = np.zeros((len(_silo), 1 + SILOS + SILOS * WARDS))
_design[:, 0] = 1
_design[np.arange(len(_silo)), 1 + _silo] = 1
_design[np.arange(len(_silo)), 1 + SILOS + WARDS * _silo + _ward] = 1
_y = np.concatenate([data["y"].ravel() for data in DATA.values()]).astype(float)
_prior = np.repeat([PRIOR**2, BETWEEN**2, WITHIN**2], [1, SILOS, SILOS * WARDS])
PRECISION = np.diag(1 / _prior) + _design.T @ _design / NOISE**2
COVARIANCE = np.linalg.inv(PRECISION)
MEANS, DEVIATIONS = COVARIANCE @ _design.T @ _y / NOISE**2, np.sqrt(np.diagonal(COVARIANCE))
EVIDENCE = float(
    dist.MultivariateNormal(np.zeros(len(_y)), _design * _prior @ _design.T + NOISE**2 * np.eye(len(_y))).log_prob(_y)
)


def places(j):
    """Of silo j: where h and the b are among `MEANS`."""
    return 1 + j, slice(1 + SILOS + WARDS * j, 1 + SILOS + WARDS * (j + 1))


def exact(j):
    """The posterior as (η_G, θ) and as η_L of silo j."""
    h, wards = places(j)
    own = COVARIANCE[h, h] - COVARIANCE[h, 0] ** 2 / COVARIANCE[0, 0]
    inner = np.diagonal(PRECISION)[wards]
    C = -PRECISION[wards][:, [0, h]] / inner[:, None]
    shared = gaussian.Global(_real(MEANS[:1]), _real(np.log(DEVIATIONS[:1])), jnp.zeros((1, 1)))
    slope = COVARIANCE[h, 0] / COVARIANCE[0, 0]
    silo = gaussian.Local(_real([[MEANS[h]]]), _real([[np.log(own) / 2]]), None, _real([[[slope]]]), None)
    blocks = gaussian.Local(_real(MEANS[wards, None]), _real(-np.log(inner)[:, None] / 2), None, _real(C[:, None]), None)
    return Shared(shared, {}), {"": silo, "wards": blocks}


def _real(values):
    return jnp.asarray(values, jnp.float32)
