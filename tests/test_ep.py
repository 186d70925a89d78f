"""EP against posteriors that are known, at its defaults, and on what it must refuse or say."""

import logging

import arviz as az
import jax
import jax.numpy as jnp
import nested
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hierarchy import DEVIATION, MEAN, OWN, WEIGHT, Y, partition, population, silo

import fedbayes as fb
from fedbayes import wire
from fedbayes.engine.silo_data import plan, read
from fedbayes.errors import UserError
from fedbayes.primitives import factored, gaussian, matching, sampling, tilted
from fedbayes.primitives.gaussian import Natural

QUICK = {"draws": 40, "most": 80}


@pytest.fixture(scope="session")
def hierarchy():
    return fb.fit(population, silo, partition(4, 4, 4))


def test_exact_on_a_conjugate_hierarchy(hierarchy):
    q = hierarchy.shared.eta
    assert float(abs(q.mean[0] - MEAN)) < 0.05 * DEVIATION
    assert float(jnp.exp(q.log_scale[0])) == pytest.approx(DEVIATION, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_exact_on_a_nested_normal_model(seed):
    q = fb.fit(nested.population, nested.silo, nested.DATA, seed=seed).shared.eta
    assert float(abs(q.mean[0] - nested.MEANS[0])) < 0.05 * nested.DEVIATIONS[0]
    assert float(jnp.exp(q.log_scale[0])) == pytest.approx(nested.DEVIATIONS[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hierarchy", "nested"])
def test_more_draws_more_digits(model):
    functions, data, mean, deviation = {
        "hierarchy": ((population, silo), partition(4, 4, 4), MEAN, DEVIATION),
        "nested": ((nested.population, nested.silo), nested.DATA, nested.MEANS[0], nested.DEVIATIONS[0]),
    }[model]
    q = fb.simulate(fb.EP(*functions, draws=2000, most=8000, tolerance=0.01), data).shared.eta
    assert float(abs(q.mean[0] - mean)) < 0.02 * deviation
    assert float(jnp.exp(q.log_scale[0])) == pytest.approx(deviation, rel=0.02)


def test_it_stops_by_itself_and_says_so(hierarchy):
    assert hierarchy.result["rounds"] == hierarchy.simulation.round < 15
    assert hierarchy.result["verdict"]["verdict"] == "good"
    assert hierarchy.result["verdict"]["checks"]["health"]["converged"]
    assert hierarchy.result["bound"] is None


def test_local_posteriors_are_draws_by_chain(hierarchy):
    found = hierarchy.local_posterior("s1", 2000)
    assert found.posterior.sizes["chain"] == 4
    effect = found.posterior["effect"]
    expected = WEIGHT * Y[4:8] + (1 - WEIGHT) * MEAN
    np.testing.assert_allclose(effect.mean(("chain", "draw")), expected, atol=0.05)
    spread = np.hypot(OWN, (1 - WEIGHT) * DEVIATION)
    np.testing.assert_allclose(effect.std(("chain", "draw")), spread, rtol=0.1)
    assert float(az.rhat(found)["effect"].max()) < 1.02
    assert not found.sample_stats["diverging"].any()


def test_a_gaussian_without_local_latents_has_no_monte_carlo_error():
    """Control variates make moments exact: draws of N(m, C) with their own gradients, few of them."""
    generator = np.random.default_rng(0)
    root = np.tril(generator.normal(size=(3, 3))) + 2 * np.eye(3)
    covariance, mean = root @ root.T, np.array([1.0, -2.0, 0.5])
    u = mean + generator.normal(size=(4, 60, 3)) @ root.T
    gradient = -(u - mean) @ np.linalg.inv(covariance)
    draws = sampling.Draws(jnp.float32(u), {}, jnp.float32(gradient), jnp.zeros((4, 60), bool), jnp.ones(()), jnp.int32(60))
    found = matching.gaussian_of(draws)
    np.testing.assert_allclose(found.natural.precision, np.linalg.inv(covariance), atol=2e-4)
    np.testing.assert_allclose(found.natural.shift, np.linalg.solve(covariance, mean), atol=2e-4)
    assert float(jnp.sqrt(found.noise.precision).max()) < 1e-4


def test_noise_is_what_it_says():
    """Half of the gradient's variance is of latents that are not Z_G, so that there is an error: the jackknife tells it."""

    def estimate(key):
        for_u, for_l = jax.random.split(key)
        u = jax.random.normal(for_u, (4, 100, 2))
        gradient = -u + jax.random.normal(for_l, (4, 100, 2))  # E g = 0 and E u gᵀ = −I still hold
        return matching.gaussian_of(sampling.Draws(u, {}, gradient, jnp.zeros((4, 100), bool), jnp.ones(()), jnp.int32(100)))

    found = jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(0), 300))
    shift, precision = found.natural.shift, jnp.diagonal(found.natural.precision, axis1=1, axis2=2)
    np.testing.assert_allclose(shift.mean(axis=0), 0.0, atol=0.02)
    np.testing.assert_allclose(precision.mean(axis=0), 1.0, atol=0.02)  # the bias of an inverse is gone
    said = jnp.sqrt(found.noise.shift.mean(axis=0))
    np.testing.assert_allclose(shift.std(axis=0), said, rtol=0.2)
    said = jnp.sqrt(jnp.diagonal(found.noise.precision, axis1=1, axis2=2).mean(axis=0))
    np.testing.assert_allclose(precision.std(axis=0), said, rtol=0.3)


def test_factors_keep_their_meaning_when_q_moves():
    generator = np.random.default_rng(1)
    old, new = (
        gaussian.from_moments(jnp.float32(100 * generator.normal(size=2)), jnp.float32(a @ a.T + np.eye(2)))
        for a in generator.normal(size=(2, 2, 2))
    )
    factor = Natural(jnp.float32([0.3, -0.2]), jnp.float32([[0.5, 0.1], [0.1, -0.2]]))
    z = [jnp.float32(point) for point in generator.normal(size=(2, 2)) + np.asarray(old.mean)]
    before, after = (
        [float(gaussian.log_factor(f, factored.standardised(q, one))) for one in z]
        for f, q in ((factor, old), (factored.rewritten(factor, old, new), new))
    )
    rounding = 4 * float(np.finfo(np.float32).eps) * max(map(abs, after))  # of two numbers whose difference is small
    assert before[0] - before[1] == pytest.approx(after[0] - after[1], rel=1e-2, abs=rounding)


def collinear(count, seed):
    generator = np.random.default_rng(seed)
    x = 1000 + generator.normal(size=(count, 1)) + 0.02 * generator.normal(size=(count, 3))
    y = 40.0 + x @ np.array([0.5, -0.2, 0.1]) + generator.normal(size=count)
    return {"x": np.float32(x), "y": np.float32(y)}


def regression():
    return numpyro.sample("slopes", dist.Normal(0.0, 3.0).expand([3]).to_event(1)), numpyro.sample("level", dist.Normal(0, 200))


def rows(population, data):
    slopes, level = population
    numpyro.sample("y", dist.Normal(level + data["x"] @ slopes, 1.0), obs=data["y"])


@pytest.mark.slow
def test_raw_units_and_collinear_columns_in_single_precision():
    silos = {f"s{i}": collinear(40, i) for i in range(3)}
    fit = fb.simulate(fb.EP(regression, rows), silos)
    x = np.concatenate([np.column_stack([one["x"], np.ones(40)]).astype(float) for one in silos.values()])
    y = np.concatenate([one["y"].astype(float) for one in silos.values()])
    covariance = np.linalg.inv(x.T @ x + np.diag([1 / 9, 1 / 9, 1 / 9, 1 / 200**2]))
    mean, sd = covariance @ x.T @ y, np.sqrt(np.diag(covariance))
    draws = fit.draws(4000)
    found = np.column_stack([draws["slopes"], draws["level"]])
    assert fit.result["verdict"]["verdict"] == "good"
    assert np.abs((found.mean(axis=0) - mean) / sd).max() < 0.1
    np.testing.assert_allclose(found.std(axis=0), sd, rtol=0.1)


@pytest.mark.slow
def test_a_silo_without_information_keeps_a_flat_factor():
    def two():
        return numpyro.sample("a", dist.Normal(0.0, 2.0)), numpyro.sample("b", dist.Normal(0.0, 2.0))

    def one_of(population, data):
        value = population[1] if data.get("second") else population[0]
        numpyro.sample("y", dist.Normal(value, 1.0), obs=data["y"])

    y = np.float32([1.0, 2.0, 3.0])
    fit = fb.simulate(fb.EP(two, one_of, **QUICK), {"a": {"y": y}, "b": {"y": y, "second": True}}, correct=False)
    q = fit.shared.eta
    np.testing.assert_allclose(q.mean, 6 / 3.25, atol=0.02)
    np.testing.assert_allclose(jnp.exp(q.log_scale), 3.25**-0.5, rtol=0.02)
    own = fit.simulation.own("a")
    assert abs(float(own.factor.precision[1, 1])) < 0.02


def test_a_silo_whose_chains_never_move_is_named():
    def broken(mean, data):
        numpyro.factor("root", jnp.sqrt(mean - mean))  # finite, and its gradient is not
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])

    fit = fb.simulate(fb.EP(population, broken, **QUICK), {"south": {"y": Y[:4]}}, rounds=2, correct=False)
    verdict = fit.result["verdict"]
    assert verdict["verdict"] == "not converged"
    assert any("the chains of silo 'south' do not move" in reason for reason in verdict["reasons"])
    assert "the log density of silo 'south' and its gradient are finite" in verdict["next"]
    assert np.isfinite(fit.shared.eta.mean).all()
    assert not np.any(fit.simulation.own("south").change.precision)


def test_silos_that_differ_in_float_precision_are_fitted_as_one_type():
    silos = {"north": {"y": Y[:4].astype(np.float64)}, "south": {"y": Y[4:8]}}
    assert {array.dtype for _, arrays in read(silos, fb.EP(population, silo)).parts for array in arrays} == {Y.dtype}


def weird(population, data):
    numpyro.sample("y", dist.HalfNormal(1.0), obs=data["y"] + 0 * population)


def improper():
    return numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))


def coin(population, data):
    faces = numpyro.sample("faces", dist.Bernoulli(0.5))
    numpyro.sample("y", dist.Normal(1.0 * faces, 1.0), obs=data["y"])


def with_theta():
    return numpyro.sample("mean", dist.Normal(0.0, 2.0)) + numpyro.param("shift", 0.0)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ((population, weird), "silo 'south': the log density of y is not finite at 5 draws from the prior"),
        ((improper, silo), "mu is ImproperUniform, of which nothing can be drawn; give it a proper prior"),
        ((population, coin), "silo 'north': faces in silo is discrete"),
        ((with_theta, silo), "EP has no θ, but the model has shift; give it a prior, or use SFVI"),
    ],
)
def test_refuses_in_a_sentence(functions, message):
    silos = {"north": {"y": np.abs(Y[:4])}, "south": {"y": -np.abs(Y[:4])}}
    with pytest.raises(UserError, match=message):
        fb.simulate(fb.EP(*functions), silos)


def test_the_default_is_said_where_it_is_not_ep(caplog):
    with caplog.at_level(logging.WARNING, "fedbayes"):
        fit = fb.fit(with_theta, silo, partition(6, 6), rounds=5)
    assert fit.result["algorithm"] == "SFVI"
    assert "SFVI is used: EP has no θ, and the model has shift" in caplog.text


def test_settings_are_checked():
    with pytest.raises(UserError, match="most is 50, but it is at least draws"):
        fb.EP(population, silo, draws=100, most=50)


def test_numbers_keep_the_users_precision():
    """Chains and factors in double precision where JAX has it, from shapes alone; the verdict's draws too."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        algorithm = plan(fb.EP(population, silo), partition(3, 3), 3)
        data = {"y": jnp.zeros(3)}
        sent = wire.manifest(algorithm, algorithm.prepared(data))
        assert {leaf.dtype for leaf in sent if leaf.path.startswith(("change", "noise", "shared"))} == {"float64"}
        q, factors = gaussian.init_global(1, full=True), factored.flat(1)
        found = jax.eval_shape(lambda key: tilted.draws(algorithm.structured, 40, key, q, factors), jax.random.key(0))
        assert found.z.dtype == jnp.float64
