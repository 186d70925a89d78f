"""Draws at the server from the prior times silos' factors: a funnel whose posterior is known by quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from fedbayes.models import frames
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian, tilted
from fedbayes.primitives.gaussian import Natural

Y, NOISE = np.array([1.1, -0.4, 0.3, -0.9, 2.0, 0.1]), np.array([0.3, 0.3, 1.0, 1.0, 0.3, 3.0])


def effects():
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    return numpyro.sample("effects", dist.Normal(0.0, scale).expand([len(Y)]).to_event(1))


def nothing(effects, data):
    numpyro.sample("y", dist.Normal(effects[0], 1.0), obs=data["y"])


def test_a_funnel_is_what_quadrature_says():
    log_scale = np.linspace(-9, 4, 4001)
    scale = np.exp(log_scale)[:, None]
    log_p = log_scale - scale[:, 0] ** 2 / 8 - 0.5 * np.sum(np.log(scale**2 + NOISE**2) + Y**2 / (scale**2 + NOISE**2), axis=1)
    weights = np.exp(log_p - log_p.max())
    weights /= weights.sum()
    shrunk = scale**2 / (scale**2 + NOISE**2)
    mean = weights @ (shrunk * Y)
    variance = weights @ (shrunk * NOISE**2 + (shrunk * Y) ** 2) - mean**2
    middle = weights @ log_scale
    spread = np.sqrt(weights @ (log_scale - middle) ** 2)

    precision = np.diag(np.append(0.0, NOISE**-2))
    factors = Natural(jnp.float32(np.append(0.0, Y / NOISE**2)), jnp.float32(precision))
    q = gaussian.from_moments(jnp.zeros(len(Y) + 1), jnp.eye(len(Y) + 1))  # so that its coordinates are Z_G
    first = tilted.draws(Structured(effects, nothing), 2000, jax.random.key(0), q, factors)
    found = tilted.draws(Structured(effects, nothing), 2000, jax.random.key(1), q, factors, first.z)
    for one in (first, found):  # chains may go on from where others are
        matches(one, middle, spread, mean, variance)


def matches(found, middle, spread, mean, variance):
    assert found.health.rhat < 1.05
    z = np.asarray(found.z)
    assert z[:, 0].mean() == pytest.approx(middle, abs=0.1 * spread)
    assert z[:, 0].std() == pytest.approx(spread, rel=0.1)
    np.testing.assert_allclose((z[:, 1:].mean(axis=0) - mean) / np.sqrt(variance), 0.0, atol=0.1)  # in units of its error
    np.testing.assert_allclose(z[:, 1:].std(axis=0), np.sqrt(variance), rtol=0.1)


def test_levels_of_a_hierarchy_are_counted():
    def flat():
        return numpyro.sample("a", dist.Normal(0.0, 1.0)), numpyro.sample("b", dist.Normal(0.0, 3.0))

    def three():
        top = numpyro.sample("top", dist.HalfNormal(2.0))
        middle = numpyro.sample("middle", dist.Normal(0.0, top))
        return numpyro.sample("bottom", dist.Normal(middle, jnp.exp(middle)))

    def unit():
        return numpyro.sample("effect", dist.Normal(0.0, numpyro.sample("scale", dist.HalfNormal(1.0))))

    assert [frames.depth(Structured(one, nothing)) for one in (flat, effects, unit, three)] == [1, 2, 2, 3]
