"""BayesADMM against posteriors that are known, and its special cases against other methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

import fedbayes as fb
from fedbayes.data import Clients
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Normal, linear
from fedbayes.primitives.ivon import Ivon

NOISE, CLIENTS, ROWS = 0.5, 4, 50


@pytest.fixture(scope="module")
def regression():
    """Clients with the same coefficients and as many rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(CLIENTS * ROWS, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.3 + NOISE * random.normal(size=len(x))
    who = np.repeat(np.arange(CLIENTS), ROWS)
    return Clients.build(x, y.astype(np.float32), who, is_test=np.arange(len(x)) % 5 == 0)


@pytest.fixture(scope="module")
def model():
    return linear((3,), Normal(NOISE))


def posterior(data, prior=1.0):
    """Mean and precision of the weights given all training rows, the bias last."""
    rows = data.train(np.arange(CLIENTS), int(data.train_counts.max()))
    x, y = np.asarray(rows.x).reshape(-1, 3), np.asarray(rows.y).reshape(-1)
    design = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    precision = design.T @ design / NOISE**2 + np.eye(4) / prior**2
    return np.linalg.solve(precision, design.T @ y / NOISE**2), precision


def flat(tree):
    return np.concatenate([np.ravel(tree["head"]["kernel"]), np.ravel(tree["head"]["bias"])])


def test_the_posterior_of_linear_regression_is_exact(regression, model):
    algorithm = fb.BayesADMM(model, temperature=1.0, rho=1.0, train=fb.Training(epochs=60, batch=50, lr=0.1))
    q = fb.simulate(algorithm, regression, 40, modes=("global",), choose=False).simulation.state.start
    mean, precision = posterior(regression)
    right = np.diag(precision)
    assert np.abs(flat(q.mean) - mean).max() < 0.05 / np.sqrt(right.min())
    np.testing.assert_allclose(flat(q.precision), right, rtol=0.1)  # of the best mean-field Gaussian


def test_one_round_is_enough_where_weights_do_not_depend_on_each_other(model):
    x = np.tile(np.eye(3, dtype=np.float32) * 3, (40, 1))
    bias_free = np.tile(np.array([1.0, -2.0, 0.5], np.float32) * 3, 40)
    data = Clients.build(x, bias_free, np.repeat(np.arange(CLIENTS), 30), is_test=np.arange(120) % 30 > 26)
    fixed = fb.models.from_functions(
        lambda key: {"w": jnp.zeros(3)}, lambda w, x: jnp.sum(x * w["w"][None], axis=1, keepdims=True), Normal(NOISE)
    )
    algorithm = fb.BayesADMM(
        fixed,
        temperature=1.0,
        rho=1.0,
        gamma=1.0,
        steps=Ivon(momentum=0.5, memory=0.998),
        train=fb.Training(epochs=3000, batch=50, lr=0.1),
    )
    q = fb.simulate(algorithm, data, 1, modes=("global",)).simulation.state.start
    right = 1 + CLIENTS * 9 * 9 / NOISE**2
    np.testing.assert_allclose(q.precision["w"], np.full(3, right), rtol=0.1)
    assert np.abs(np.asarray(q.mean["w"]) - np.array([1.0, -2.0, 0.5]) * (1 - 1 / right)).max() < 0.1


def test_without_noise_its_fixed_point_is_the_mode(regression, model):
    algorithm = fb.BayesADMM(
        model,
        isotropic=True,
        temperature=1.0,
        prior=0.1,
        rho=1.0,
        gamma=0.5,
        steps=Ivon(momentum=0.0),
        train=fb.Training(epochs=50, batch=50, lr=0.1),
    )
    q = fb.simulate(algorithm, regression, 150, modes=("global",), choose=False).simulation.state.start
    np.testing.assert_allclose(flat(q.mean), posterior(regression, prior=0.1)[0], atol=2e-3)


def test_without_noise_and_sites_it_is_fedprox(regression, model):
    rho, prior, rows = 0.5, 0.5, 40
    pull = rho / prior**2 / rows
    lr = 0.02  # κ = rows/ρ over s_0 makes steps of FedProx's length
    admm = fb.BayesADMM(
        model,
        sites=False,
        isotropic=True,
        temperature=1.0,
        prior=prior,
        rho=rho,
        steps=Ivon(momentum=0.0),
        train=fb.Training(epochs=3, batch=50, lr=lr * pull),
    )
    prox = fb.FedProx(model, mu=pull, train=fb.Training(epochs=3, batch=50, lr=lr))
    one, other = (fb.Simulation(each.planned(2, **regression.facts), regression, seed=1) for each in (admm, prox))
    # The first broadcast of ADMM is the prior, that of FedProx its random start.
    state = one.state._replace(
        q=one.state.q._replace(shift=jax.tree.map(lambda w: w / prior**2, other.state.params)),
        start=one.state.start._replace(mean=other.state.params),
    )
    one.state = state
    for simulation in (one, other):
        simulation.step()
        simulation.step()
    assert_close(one.state.start.mean, other.state.params, 1e-5)


def flipped(share):
    """Two classes that a line divides, of whose training labels a share is wrong."""
    random = np.random.default_rng(2)
    x = random.normal(size=(1200, 4)).astype(np.float32)
    y = (x @ np.array([2.0, -1.0, 0.5, 0.0]) > 0).astype(np.int32)
    is_test = np.arange(1200) % 3 == 0
    wrong = ~is_test & (random.random(1200) < share) & (y == 1)  # on one side only, which moves the boundary
    return Clients.build(x, np.where(wrong, 1 - y, y), np.repeat(np.arange(6), 200), is_test=is_test)


def test_a_robust_loss_withstands_wrong_labels():
    data, model = flipped(0.35), linear((4,), Categorical(2))
    found = {}
    for robust in (0.0, 0.8):
        algorithm = fb.BayesADMM(model, robust=robust, train=fb.Training(epochs=2, batch=50, lr=0.1))
        fit = fb.simulate(algorithm, data, 20, modes=("global",), choose=False)
        found[robust] = fit.evaluation.summary()["global"]["participating"]["accuracy"]["rows"]
    assert found[0.8] > found[0.0] + 0.02


def test_what_cannot_be_is_refused(model):
    with pytest.raises(UserError, match=r"robust is 0\.5, but the target is a number"):
        fb.BayesADMM(model, robust=0.5)
    with pytest.raises(UserError, match="momentum is in steps"):
        fb.BayesADMM(model, train=fb.Training(momentum=0.9))
    with pytest.raises(UserError, match="N or D is not set"):
        fb.BayesADMM(model).init_server(jax.random.key(0))
