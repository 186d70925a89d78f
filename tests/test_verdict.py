"""The silos' evidence, the correction of q(Z_G) by it, and the verdict: against exact answers and quadrature."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hierarchy import DEVIATION, EVIDENCE, MEAN, NOISE, SPREAD, Y, partition, population, silo

import fedbayes as fb
from fedbayes import wire
from fedbayes.algorithms.evidence import Evidence, Told
from fedbayes.engine.silo_data import plan
from fedbayes.errors import UserError
from fedbayes.models.structured import Structured
from fedbayes.primitives import evidence, gaussian
from fedbayes.primitives.variational import Family, Shared, Silo
from fedbayes.results.coordinates import Standardised
from fedbayes.results.correction import Corrected, Sampler, corrected
from fedbayes.results.structured_text import is_warning, verdict
from fedbayes.results.verdict import VERDICTS, Case, assess, moments

GRID = np.linspace(-1.0, 3.0, 33)[:, None]


def told(population, silo, data, z, inner=32, seed=0):
    """What a silo tells from the q(Z_L | Z_G) that training starts with."""
    family, structured = Family(), Structured(population, silo)
    key = jax.random.key(0)
    shared, eta = family.init_shared(key, structured, data), family.init_local(key, structured, data)
    one = Silo(family, structured, data)
    return jax.jit(lambda key, z: evidence.told(one, key, shared, eta, z, inner))(jax.random.key(seed), jnp.asarray(z))


def test_the_evidence_of_a_plate_is_exact():
    found = told(population, silo, {"y": jnp.asarray(Y)}, GRID.astype(np.float32))
    exact = dist.Normal(GRID, np.hypot(SPREAD, NOISE)).log_prob(Y[None]).sum(axis=1)
    np.testing.assert_allclose(found.evidence, exact, atol=1e-3)
    assert float(jnp.abs(found.difference).max()) < 1e-3


def test_the_evidence_of_a_silo_with_latents_in_and_outside_plates_is_exact():
    def nested(mean, data):
        level = numpyro.sample("level", dist.Normal(mean, 1.0))
        with numpyro.plate("units", len(data["y"])):
            effect = numpyro.sample("effect", dist.Normal(0.0, SPREAD))
            numpyro.sample("y", dist.Normal(level + effect, NOISE), obs=data["y"])

    found = told(population, nested, {"y": jnp.asarray(Y)}, GRID.astype(np.float32))
    covariance = np.ones((12, 12)) + (SPREAD**2 + NOISE**2) * np.eye(12)
    exact = [dist.MultivariateNormal(mean * np.ones(12), covariance).log_prob(Y) for mean in GRID[:, 0]]
    np.testing.assert_allclose(found.evidence, np.array(exact), atol=2e-3)


def test_the_evidence_of_latents_that_are_not_gaussian_is_that_of_quadrature():
    def rates(mean, data):
        with numpyro.plate("units", len(data["y"]), dim=-2):
            level = numpyro.sample("level", dist.Normal(mean, 2.0))
            with numpyro.plate("times", 4, dim=-1):
                numpyro.sample("y", dist.Bernoulli(logits=level), obs=data["y"])

    y = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]] * 10, np.float32)
    found = told(population, rates, {"y": jnp.asarray(y)}, GRID.astype(np.float32))
    level = np.linspace(-25, 25, 4001)
    ones = y.sum(axis=1)[:, None]
    logs = ones * -np.logaddexp(0, -level) + (4 - ones) * -np.logaddexp(0, level)
    exact = []
    for mean in GRID[:, 0]:
        density = np.exp(logs - 0.5 * ((level - mean) / 2) ** 2) / (2 * math.sqrt(2 * math.pi))
        exact.append(np.log(density.sum(axis=1) * (level[1] - level[0])).sum())
    np.testing.assert_allclose(found.evidence - np.array(exact), 0, atol=0.15)  # of a sum over 40 units


def test_evidence_rounds_send_sums_alone():
    data = partition(5, 7)
    algorithm = plan(fb.SFVI(population, silo), data, 3)
    leaves = wire.manifest(Evidence(algorithm), data["s0"])
    wire.check(leaves)
    up = [leaf for leaf in leaves if leaf.message == "up"]
    assert {leaf.reduction for leaf in up} == {"sum"}
    assert sum(leaf.bytes for leaf in up) == 8 * Evidence(algorithm).points + 16
    with pytest.raises(UserError, match="inner is 20, but it is a multiple of 16"):
        Evidence(algorithm, inner=20)


@pytest.fixture(scope="module")
def right():
    return fb.simulate(fb.SFVI(population, silo, lr=0.05, decay=1e-3), partition(6, 6), 2500)


def test_a_right_q_has_no_warning_and_its_evidence_is_that_of_the_data(right):
    found = right.result["verdict"]
    assert found["verdict"] == found["local"] == "good"
    assert found["checks"]["corrected"] is False
    assert found["checks"]["khat"] < 0.5
    assert not is_warning(right.result)
    assert "verdict: good" in str(right)
    z = np.array([[MEAN - DEVIATION], [MEAN], [MEAN + 2 * DEVIATION]], np.float32)
    log_posterior = dist.Normal(MEAN, DEVIATION).log_prob(z[:, 0])
    np.testing.assert_allclose(right.log_density(z) - log_posterior, EVIDENCE, atol=2e-3)


@pytest.mark.parametrize("change", ["narrow", "wide", "shifted"])
def test_a_wrong_q_is_warned_of_or_corrected(right, change):
    q = right.shared.eta
    wrong = {
        "narrow": q._replace(log_scale=q.log_scale - math.log(2)),
        "wide": q._replace(log_scale=q.log_scale + math.log(1.5)),
        "shifted": q._replace(mean=q.mean + 0.4 * DEVIATION),
    }[change]
    fit = fb.SiloFit(right.algorithm, Shared(wrong, {}), right.names, right.result, right.history, right.simulation)
    found = fit.assess(correct=False).verdict
    assert found["verdict"] == "family too small"
    assert found["next"] == "correct it: fit.correct()"
    assert any("mean" in reason for reason in found["reasons"])
    assert fit.corrected is None
    found = fit.assess().verdict
    assert found["verdict"] == "good"
    assert found["checks"]["corrected"] is True
    drawn = np.asarray(fit.draws(4000)["mean"])
    assert drawn.mean() == pytest.approx(MEAN, abs=0.06 * DEVIATION)
    assert drawn.std() == pytest.approx(DEVIATION, rel=0.05)
    before = fit.corrected
    fit.assess()
    np.testing.assert_array_equal(fit.corrected, before)
    assert np.asarray(fit.draws(4000, corrected=False)["mean"]).std() == pytest.approx(
        math.exp(float(wrong.log_scale[0])), rel=0.05
    )


def test_a_scale_near_zero_is_corrected_to_its_quadrature(tmp_path):
    """Few groups: the posterior of log τ has a long tail to the left, which no Gaussian has."""

    def scale():
        return numpyro.sample("tau", dist.HalfNormal(1.0))

    def groups(tau, data):
        with numpyro.plate("groups", len(data["y"])):
            effect = numpyro.sample("effect", dist.Normal(0.0, tau))
            numpyro.sample("y", dist.Normal(effect, 0.5), obs=data["y"])

    y = np.array([0.3, -0.5, 0.8, -0.2, 0.5, -0.9], np.float32)
    data = {"a": {"y": y[:3]}, "b": {"y": y[3:]}}
    log_tau = np.linspace(-14, 3, 20001)
    tau = np.exp(log_tau)
    logs = -0.5 * tau**2 + log_tau
    logs = logs + sum(-0.5 * one**2 / (tau**2 + 0.25) - 0.5 * np.log(tau**2 + 0.25) for one in y)
    weight = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    mean, sd = moments(tau, weight)
    mean_log, sd_log = moments(log_tau, weight)
    fit = fb.simulate(fb.SFVI(scale, groups, lr=0.03), data, 1500, folder=tmp_path / "run")
    assert fit.result["verdict"]["verdict"] == "good"
    assert fit.result["verdict"]["checks"]["corrected"] is True
    plain, mended = (np.asarray(fit.draws(4000, corrected=one)["tau"]) for one in (False, None))
    assert abs(math.log(np.log(plain).std() / sd_log)) > 0.2
    assert mended.mean() == pytest.approx(mean, abs=0.06 * sd)
    assert mended.std() == pytest.approx(sd, rel=0.06)
    assert np.log(mended).mean() == pytest.approx(mean_log, abs=0.1 * sd_log)
    assert np.log(mended).std() == pytest.approx(sd_log, rel=0.12)
    again = fb.open(tmp_path / "run", algorithm=fb.SFVI(scale, groups, lr=0.03))
    np.testing.assert_array_equal(again.draws(100)["tau"], fit.draws(100)["tau"])


SCHOOLS = np.array([28, 8, -3, 7, -1, 1, 18, 12.0]), np.array([15, 10, 16, 11, 9, 11, 10, 18.0])


def schools():
    """Eight schools with the effects among the global latents, in their natural form: a funnel."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    return numpyro.sample("theta", dist.Normal(mu, tau).expand([8]).to_event(1))


@pytest.fixture(scope="module")
def funnel():
    """Mean and standard deviation of μ, log τ and θ_1, by a grid over μ and log τ."""
    y, s = SCHOOLS
    mu, log_tau = np.meshgrid(np.linspace(-25, 30, 300), np.linspace(-13, 5, 500), indexing="ij")
    variance = s**2 + np.exp(2 * log_tau)[..., None]
    logs = -0.5 * (mu / 5) ** 2 + log_tau - np.log1p((np.exp(log_tau) / 5) ** 2)
    logs = logs + (-0.5 * (y - mu[..., None]) ** 2 / variance - 0.5 * np.log(variance)).sum(axis=-1)
    weight = np.exp(logs - logs.max()).ravel()
    weight /= weight.sum()
    precision = 1 / s[0] ** 2 + np.exp(-2 * log_tau)
    theta = (y[0] / s[0] ** 2 + mu * np.exp(-2 * log_tau)) / precision
    first = moments(theta.ravel(), weight)
    return [
        moments(mu.ravel(), weight),
        moments(log_tau.ravel(), weight),
        (first[0], math.sqrt(first[1] ** 2 + float(weight @ (1 / precision).ravel()))),
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_funnel_among_the_global_latents_is_sampled_from_neck_to_mouth(funnel, seed):
    y, s = SCHOOLS
    q = gaussian.from_moments(
        jnp.asarray([4.4, 1.5, *[5.0] * 8]), jnp.diag(jnp.asarray([3.3, 0.6, *[4.0] * 8], jnp.float32) ** 2)
    )
    structured = Structured(schools, silo)
    frame = Standardised.of(structured, {}, q)
    assert frame is not None
    z = np.asarray(frame.back(frame.to(np.ones((2, 10)))[0]))
    np.testing.assert_allclose(z, 1.0, rtol=1e-5)

    def log_prior(z):
        return np.asarray(jax.vmap(lambda one: structured.log_population({}, one))(jnp.asarray(z, jnp.float32)))

    def ask(z, round):
        logs = (-0.5 * ((y - z[:, 2:]) / s) ** 2).sum(axis=1)
        return Told(logs, np.zeros(len(z)), 0, 0, 0, 0)

    sampler = Sampler(q, log_prior, ask, seed, frame=frame)
    found = corrected(sampler)
    assert found.reliable
    for column, (mean, sd) in enumerate(funnel):
        own = moments(found.z[:, column], found.weights)
        assert own[0] == pytest.approx(mean, abs=0.12 * sd)
        assert own[1] == pytest.approx(sd, rel=0.15)


def case(**options):
    q = gaussian.init_global(1, full=True)
    given = {"bounds": [], "health": {}, "why_not": "it cannot be asked", "samples": True} | options
    normal = {"log_prior": lambda z: -0.5 * np.sum(z**2, axis=1), "numbers": lambda z: {"mean": z[:, 0]}}
    return Case(q=q, ask=lambda z, round: Told(np.zeros(len(z)), np.zeros(len(z)), 0, 0, 0, 0), **normal, **given)


HEALTHY = {"rhat": 1.01, "ess": 400.0, "divergences": 0, "draws": 4000, "skew": 0.2, "kurtosis": 0.3, "converged": True}


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ({}, "not checked"),
        (HEALTHY, "good"),
        (HEALTHY | {"converged": False, "moved": 0.4}, "not converged"),
        (HEALTHY | {"rhat": 1.3}, "not converged"),
        (HEALTHY | {"noise": 0.5}, "Monte Carlo noise"),
        (HEALTHY | {"divergences": 300}, "Monte Carlo noise"),
        (HEALTHY | {"skew": -1.8}, "family too small"),
    ],
)
def test_where_silos_cannot_be_asked_the_training_is_judged(health, expected):
    found = assess(case(health=health)).verdict
    assert found["verdict"] == expected
    assert found["verdict"] in VERDICTS
    assert "it cannot be asked" in found["reasons"][-1]
    assert found["next"]


def test_tails_that_q_lacks_are_corrected_where_its_moments_seem_right():
    """A t density with four degrees of freedom, to which q's standard deviation is fitted: k̂ is large and the error small."""
    longer = case(why_not="")._replace(log_prior=lambda z: -2.5 * np.log1p(z[:, 0] ** 2 / 2))
    found = assess(longer)
    assert found.verdict["checks"]["khat"] > 0.5
    assert abs(math.log(assess(longer, correct=False).verdict["checks"]["ratio"])) < 0.1
    assert found.verdict["checks"]["corrected"]
    mean, sd = moments(found.corrected.z[:, 0], found.corrected.weights)
    assert abs(mean) < 0.05
    assert sd == pytest.approx(1.0, rel=0.05)  # √2 times the scale √½


def test_the_silos_evidence_decides_where_there_is_one():
    assert assess(case(why_not="", health=HEALTHY | {"skew": 1.8})).verdict["verdict"] == "good"
    assert assess(case(why_not="", health=HEALTHY | {"rhat": 1.4})).verdict["verdict"] == "not converged"
    far = case(why_not="")._replace(log_prior=lambda z: -0.5 * np.sum((z - 1) ** 2, axis=1))
    rising = far._replace(bounds=[float(round) for round in range(50)])
    assert assess(far, correct=False).verdict["verdict"] == "family too small"
    assert assess(rising, correct=False).verdict["verdict"] == "not converged"
    noisy = case(why_not="")._replace(ask=lambda z, round: Told(np.zeros(len(z)), 4 * z[:, 0], 0, 0, 0, 0))
    assert assess(noisy._replace(samples=False)).verdict["verdict"] == "Monte Carlo noise"
    assert assess(noisy._replace(health=HEALTHY | {"skew": 1.8})).verdict["verdict"] == "Monte Carlo noise"
    chains = assess(noisy._replace(health=HEALTHY))
    assert chains.verdict["verdict"] == "good"
    assert chains.corrected is None  # whose weights would be the noise's


def test_an_older_result_is_read_and_not_believed():
    old = {"posterior": {}, "theta": {}, "bound": -3.0, "khat": None, "ess": None}
    assert verdict(old) == "verdict: not checked (an earlier version made this run). Next: fit again; bound -3.00"
    assert "k̂ 0.30, effective share 90 %" in verdict({**old, "khat": 0.3, "ess": 0.9})
    assert is_warning(old)


def test_a_correction_is_refused_where_there_are_too_many_latents():
    def many():
        return numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([50]).to_event(1))

    def sums(mean, data):
        numpyro.sample("y", dist.Normal(mean.sum(), 1.0), obs=data["y"])

    fit = fb.simulate(fb.SFVI(many, sums), {"a": {"y": Y}}, 3)
    assert fit.result["verdict"]["verdict"] != "good"
    with pytest.raises(UserError, match="there are 50 global latents, but draws of more than 40 cannot be corrected"):
        fit.correct()


def test_seven_scales_that_touch_zero_among_twenty_latents_have_their_tails():
    n, touching = 20, 7
    mean, sd = np.r_[np.zeros(n - touching), np.full(touching, -0.45)], np.r_[np.ones(n - touching), np.full(touching, 0.65)]
    q = gaussian.Global(jnp.asarray(mean, jnp.float32), jnp.asarray(np.log(sd), jnp.float32), None)

    def ask(z, number):
        logs = z[:, n - touching :]  # of half-normal scales
        evidence = np.sum(logs - np.exp(2 * logs) / 2, axis=1) - np.sum(z[:, : n - touching] ** 2, axis=1) / 2
        return Told(evidence, np.zeros(len(z)), *np.zeros(4))

    found = corrected(Sampler(q, lambda z: np.zeros(len(z)), ask, seed=1))
    centre = found.weights @ found.z
    right = np.sqrt(np.pi**2 / 8)  # standard deviation of log |e|, e ~ N(0, 1)
    ratio = np.sqrt(found.weights @ (found.z - centre) ** 2)[n - touching :] / right
    assert found.enough
    assert ratio.min() > 0.85, ratio
    assert ratio.max() < 1.15, ratio


@pytest.mark.parametrize(("khat", "rounds"), [(0.5, 6), (0.9, 4)])
def test_weights_that_are_reliable_and_too_few_get_more_rounds(khat, rounds):
    class Slow:
        rounds = 0

        def round(self):
            self.rounds += 1
            even = np.full(10, 0.1)
            return Corrected(np.zeros((10, 20)), even, khat, 150.0 * self.rounds, self.rounds, 0, (even, even))

    assert corrected(Slow()).rounds == rounds  # of twenty latents, 800 effective draws are enough
