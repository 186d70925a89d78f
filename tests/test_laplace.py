"""Laplace's approximation of a last layer, against conjugate posteriors and a generic optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from fedbayes.models import Bernoulli, Categorical, Normal, Poisson
from fedbayes.primitives import laplace
from fedbayes.primitives.laplace import Head
from fedbayes.primitives.small import semidefinite_root

ROWS, FEATURES = 12, 4
X = np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)
NOISE = 0.5


def head(likelihood, y, sigma=1.0, mask=None, x=X, mu=0.3):
    """A last layer without a bias, whose prior is N(mu, sigma²)."""
    k = likelihood.outputs
    x = jnp.asarray(x)

    def outputs(z):
        return x @ z["w"]

    mask = jnp.ones(len(x), bool) if mask is None else mask
    mean = {"w": jnp.full((x.shape[1], k), mu, jnp.float32), "other": None}
    return Head(outputs, likelihood, jnp.asarray(y), mask, mean, {"w": jnp.float32(sigma) ** 2, "other": None})


def numbers(seed=1):
    return (X @ np.arange(FEATURES) + np.random.default_rng(seed).normal(size=ROWS)).astype(np.float32)


def labels(classes, seed=2):
    return np.random.default_rng(seed).integers(classes, size=ROWS).astype(np.int32)


def conjugate(y, sigma, mu=0.3):
    precision = X.T.astype(float) @ X / NOISE**2 + np.eye(FEATURES) / sigma**2
    return np.linalg.solve(precision, X.T @ y / NOISE**2 + mu / sigma**2), np.linalg.inv(precision)


def products(posterior, z):
    """H, column by column."""
    product, shape = laplace.precision(posterior, z).product, z["w"].shape
    return jax.vmap(lambda u: product({"w": u.reshape(shape), "other": None})["w"].reshape(-1))(jnp.eye(z["w"].size))


def vectors(draws):
    return np.asarray(draws["w"]).reshape(len(draws["w"]), -1)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 30.0])
def test_linear_regression_is_the_conjugate_posterior(sigma):
    y = numbers()
    mean, covariance = conjugate(y, sigma)
    posterior = head(Normal(NOISE), y, sigma)
    z = laplace.mode(posterior)
    np.testing.assert_allclose(z["w"][:, 0], mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(products(posterior, z) / sigma**2, np.linalg.inv(covariance), rtol=1e-4, atol=1e-3)
    drawn = vectors(laplace.draws(jax.random.key(0), posterior, z, 4000, 0.25))
    deviation = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.05 * deviation.max())
    np.testing.assert_allclose(np.cov(drawn.T) / np.outer(deviation, deviation), 0.25 * _correlation(covariance), atol=0.03)


def fitted(posterior, count=3, temperature=1.0):
    """The mode and some draws, in one program."""

    def both():
        z = laplace.mode(posterior)
        return z["w"], laplace.draws(jax.random.key(0), posterior, z, count, temperature)["w"]

    return jax.jit(both)()


def _correlation(covariance):
    deviation = np.sqrt(np.diag(covariance))
    return covariance / np.outer(deviation, deviation)


@pytest.mark.parametrize("likelihood", [Categorical(3), Bernoulli(), Poisson()], ids=repr)
def test_the_mode_is_the_maximum_and_the_precision_the_hessian(likelihood):
    y = labels(max(2, likelihood.outputs))
    posterior = head(likelihood, y, 2.0)
    z = laplace.mode(posterior)

    def negative(flat):
        return -laplace.log_posterior(posterior, {"w": flat.reshape(FEATURES, -1), "other": None})

    value_and_slope = jax.jit(jax.value_and_grad(negative))
    start = np.full(z["w"].size, 0.3)
    found = scipy.optimize.minimize(lambda w: jax.tree.map(np.float64, value_and_slope(jnp.float32(w))), start, jac=True)
    hessian = np.asarray(jax.jit(jax.hessian(negative))(z["w"].reshape(-1)))
    deviation = 1 / np.sqrt(np.diag(hessian))
    np.testing.assert_allclose(z["w"].reshape(-1), found.x, atol=0.02 * deviation.min())
    assert negative(z["w"].reshape(-1)) <= found.fun + 1e-5
    np.testing.assert_allclose(products(posterior, z) / 4, hessian, rtol=1e-3, atol=1e-3)


def test_draws_have_the_inverse_hessian_as_covariance():
    posterior = head(Categorical(3), labels(3), 1.0)
    z = laplace.mode(posterior)
    covariance = np.linalg.inv(np.asarray(products(posterior, z), float))  # the test above has it as the Hessian
    drawn = vectors(laplace.draws(jax.random.key(1), posterior, z, 4000))
    deviation = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(np.cov(drawn.T) / np.outer(deviation, deviation), _correlation(covariance), atol=0.1)


def test_a_learnt_scale_leaves_the_posterior_of_the_mean_s_layer_exact():
    y = numbers()
    posterior = head(Normal(NOISE), y)
    inner = posterior.outputs

    def outputs(z):
        mean = inner(z)
        return jnp.concatenate([mean, jnp.full_like(mean, jnp.log(NOISE))], axis=1)

    learnt = Head(outputs, Normal(scale=None), posterior.y, posterior.mask, posterior.mean, posterior.variance)
    z, same = laplace.mode(posterior)["w"], laplace.mode(learnt)["w"]
    np.testing.assert_allclose(z, same, rtol=1e-5)
    z = {"w": z, "other": None}
    np.testing.assert_allclose(products(posterior, z), products(learnt, z), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("likelihood", [Categorical(3), Normal(NOISE), Poisson()], ids=repr)
def test_padding_changes_nothing(likelihood):
    y = labels(3) if likelihood.outputs == 3 else labels(4).astype(np.float32)
    x = np.concatenate([X, 7 * np.ones((5, FEATURES), np.float32)])
    longer = np.concatenate([y, np.ones(5, y.dtype)])
    padded = head(likelihood, longer, mask=jnp.arange(ROWS + 5) < ROWS, x=x)
    for short, long in zip(fitted(head(likelihood, y)), fitted(padded), strict=True):
        np.testing.assert_allclose(short, long, rtol=2e-5, atol=2e-5)


def test_zero_temperature_is_the_mode_and_zero_width_the_population():
    z, drawn = fitted(head(Categorical(3), labels(3)), 2, 0.0)
    np.testing.assert_array_equal(drawn, jnp.stack([z] * 2))
    none = head(Categorical(3), labels(3), sigma=0.0)
    np.testing.assert_array_equal(fitted(none, 1)[1][0], none.mean["w"])


def test_no_rows_leave_the_prior():
    posterior = head(Categorical(3), labels(3), sigma=2.0, mask=jnp.zeros(ROWS, bool))
    z, drawn = fitted(posterior, 2000)
    np.testing.assert_array_equal(z, posterior.mean["w"])
    assert drawn.std() == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize("likelihood", [Categorical(2), Bernoulli(), Poisson()], ids=repr)
def test_a_wide_prior_on_separable_rows_stays_finite(likelihood):
    y = (X[:, 0] > 0).astype(np.int32)
    posterior = head(likelihood, y, sigma=1000.0)
    z, drawn = fitted(posterior)
    assert laplace.log_posterior(posterior, {"w": z, "other": None}) > laplace.log_posterior(posterior, posterior.mean)
    assert np.isfinite(drawn).all()
    if likelihood == Bernoulli():
        assert ((X @ np.asarray(z)[:, 0] > 0) == y).all()


def test_vmapped_over_clients_and_traced_settings():
    ys = jnp.stack([jnp.asarray(labels(3, seed)) for seed in range(3)])
    sigmas, temperatures = jnp.float32([0.1, 1.0, 10.0]), jnp.float32([0.0, 0.1, 1.0])

    def one(y, sigma, temperature):
        posterior = head(Categorical(3), y, sigma)
        z = laplace.mode(posterior)
        return z["w"], laplace.draws(jax.random.key(0), posterior, z, 2, temperature)["w"]

    together = jax.jit(jax.vmap(one))(ys, sigmas, temperatures)
    for place in range(3):
        alone = one(ys[place], sigmas[place], temperatures[place])
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_allclose(a, b[place], rtol=2e-3, atol=2e-3)


def test_the_root_of_a_semidefinite_matrix():
    factor = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    matrix = factor @ factor.T
    root = np.asarray(semidefinite_root(jnp.asarray(matrix)))
    np.testing.assert_allclose(root @ root.T, matrix, atol=1e-5)
    np.testing.assert_array_equal(semidefinite_root(-jnp.eye(2)), np.zeros((2, 2)))
