"""pFedBayes and FedPop against what is known exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from fedbayes.algorithm import Data
from fedbayes.algorithms import fedpop
from fedbayes.algorithms.fedpop import FedPop
from fedbayes.algorithms.pfedbayes import Local, PFedBayes
from fedbayes.errors import UserError
from fedbayes.models import Normal, from_functions
from fedbayes.primitives import gaussian
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.training import Training

NOISE, ROWS = 0.5, 8


def line():
    """y = x · w + noise, one feature in the body and one in the head."""

    def init(key):
        return {"body": {"w": jnp.zeros(1)}, "head": {"w": jnp.zeros(1)}}

    def apply(params, x):
        return (x @ jnp.concatenate([params["body"]["w"], params["head"]["w"]]))[:, None]

    return from_functions(init, apply, Normal(scale=NOISE), shape=(2,))


def data(seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(ROWS, 2)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0]) + NOISE * generator.normal(size=ROWS)).astype(np.float32)
    return Data(jnp.asarray(x), jnp.asarray(y), jnp.ones(ROWS, bool))


def test_kl_is_numpyro_s():
    q, p = (
        MeanField({"w": jax.random.normal(jax.random.key(i), (5,))}, {"w": jax.random.normal(jax.random.key(i + 9), (5,))})
        for i in (0, 1)
    )
    a, b = (dist.Normal(one.mean["w"], jax.nn.softplus(one.rho["w"])) for one in (q, p))
    np.testing.assert_allclose(gaussian.kl(q, p), dist.kl_divergence(a, b).sum(), rtol=1e-5)


def test_pfedbayes_fits_the_best_mean_field_posterior():
    """ζ = 1 and one batch: q maximises the usual bound, whose optimum is known for a linear model."""
    rows = data()
    algorithm = PFedBayes(
        line(), zeta=1.0, personal_steps=1, spread=0.0, rho=0.5413, tune=Training(4000, "adam", ROWS, lr=0.01)
    )
    state = algorithm.init_server(jax.random.key(0))  # w = N(0, 1) for each weight: log(1 + e^0.5413) = 1
    down = algorithm.broadcast(jax.random.key(0), state)
    fresh = algorithm.init_local(jax.random.key(0), rows)
    q = algorithm.adapt(jax.random.key(1), down, fresh, rows).q
    x, y = np.asarray(rows.x, float), np.asarray(rows.y, float)
    precision = x.T @ x / NOISE**2 + np.eye(2)
    mean = np.linalg.solve(precision, x.T @ y / NOISE**2)
    deviation = 1 / np.sqrt(np.diag(precision))  # of the best factorised Gaussian
    found = np.concatenate([q.mean["body"]["w"], q.mean["head"]["w"]])
    sigma = jax.nn.softplus(jnp.concatenate([q.rho["body"]["w"], q.rho["head"]["w"]]))
    np.testing.assert_allclose(found, mean, atol=0.3 * deviation.min())
    np.testing.assert_allclose(sigma, deviation, rtol=0.15)


def test_pfedbayes_copy_of_w_moves_towards_q_and_the_server_averages_it():
    rows = data()
    algorithm = PFedBayes(line(), train=Training(1, "adam", ROWS, lr=0.01), beta=0.5)
    state = algorithm.init_server(jax.random.key(0))
    down = algorithm.broadcast(jax.random.key(0), state)
    q = MeanField({"body": {"w": jnp.ones(1)}, "head": {"w": -jnp.ones(1)}}, state.w.rho)
    up, local = algorithm.client(jax.random.key(1), down, Local(q, jnp.bool_(True)), rows)
    assert float(gaussian.kl(local.q, up.w)) < float(gaussian.kl(local.q, state.w))
    new = algorithm.server(jax.random.key(2), state, down, up)
    halfway = jax.tree.map(lambda a, b: (a + b) / 2, state.w, up.w)
    np.testing.assert_allclose(new.w.mean["body"]["w"], halfway.mean["body"]["w"], rtol=1e-6)


def test_langevin_samples_the_head_s_posterior():
    rows, sigma, mu = data(), 0.7, 0.4
    algorithm = FedPop(line(), keep=4000, steps=5000, eta=0.01, adapt_steps=5000, train=Training(batch=ROWS))
    down = fedpop.Down({"body": {"w": jnp.ones(1)}, "head": None}, _head(mu), _head(sigma**2), jnp.float32(0))
    fresh = algorithm.init_local(jax.random.key(0), rows)
    z = np.asarray(algorithm.langevin(jax.random.key(1), down, fresh, rows, 5000)["head"]["w"])
    x, y = np.asarray(rows.x, float), np.asarray(rows.y, float)
    precision = (x[:, 1] ** 2).sum() / NOISE**2 + 1 / sigma**2
    mean = (x[:, 1] @ (y - x[:, 0]) / NOISE**2 + mu / sigma**2) / precision
    assert z.mean() == pytest.approx(mean, abs=0.15 / np.sqrt(precision))
    assert z.std() == pytest.approx(1 / np.sqrt(precision), rel=0.1)


def _head(value):
    return {"body": {"w": None}, "head": {"w": jnp.full(1, value)}}


def test_the_population_prior_is_learnt():
    """Its M-step has the mean and the variance of all heads, whatever the old mean was."""
    algorithm = FedPop(line(), prior_step=1.0)
    heads = np.random.default_rng(0).normal(3.0, 0.5, size=(6, 5))  # of six clients, five kept each
    state = algorithm.init_server(jax.random.key(0))._replace(mu=_head(1.0))
    up = fedpop.Up(state.phi, _head(heads.mean()), _head(((heads - 1.0) ** 2).mean()), jnp.float32(0))
    new = algorithm.server(jax.random.key(1), state, None, up)
    np.testing.assert_allclose(new.mu["head"]["w"], heads.mean(), rtol=1e-5)
    np.testing.assert_allclose(new.variance["head"]["w"], heads.var(), rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedPop(line(), keep=11), "keep is 11 of 10 steps; keep at least 1 and at most all of them"),
        (lambda: FedPop(line(), adapt_steps=2), "adapt_steps is 2, but 5 draws are kept; take at least as many"),
        (lambda: PFedBayes(line(), draws=0), "draws is 0, but it is at least 1"),
        (lambda: dataclasses.replace(PFedBayes(line()), beta=0.0), "beta is 0.0, but it is above 0 and at most 1"),
    ],
)
def test_bad_settings_get_one_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
