"""Cases whose answer is known: quadratics, fixed effects, and special cases that equal another method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same
from table import TABLE, TRAIN

from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedbabu import FedBABU
from fedbayes.algorithms.fedper import FedPer
from fedbayes.algorithms.fedprox import FedProx
from fedbayes.algorithms.scaffold import Scaffold
from fedbayes.data import Clients
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.models import Normal, from_functions
from fedbayes.primitives.training import Training

SLOPES, OFFSETS, COUNTS = np.array([1.5, -2.0]), np.array([0.3, -1.0, 2.0]), [12, 20, 31]
ONE_STEP = Training(epochs=1, batch=1000, lr=0.3)


@pytest.fixture(scope="module")
def regression():
    """Three clients with one slope and three intercepts."""
    generator = np.random.default_rng(7)
    client = np.repeat(np.arange(3), COUNTS)
    x = generator.normal(size=(len(client), 2)).astype(np.float32)
    y = (x @ SLOPES + OFFSETS[client] + 0.1 * generator.normal(size=len(client))).astype(np.float32)
    return Clients.build(x, y, client, test=0.2)


@pytest.fixture(scope="module")
def linear():
    """y ~ N(x·slope + intercept, 1), both starting at zero."""

    def apply(params, x):
        return x @ params["slope"][:, None] + params["intercept"][None, None]

    return from_functions(lambda key: {"slope": jnp.zeros(2), "intercept": jnp.float32(0)}, apply, Normal(1.0))


def training_rows(clients):
    parts = [clients.train([i], int(clients.train_counts[i])) for i in range(len(clients))]
    return [np.asarray(part.x[0], np.float64) for part in parts], [np.asarray(part.y[0], np.float64) for part in parts]


def run(algorithm, clients, rounds):
    simulation = Simulation(algorithm.planned(rounds), clients)
    for _ in range(rounds):
        simulation.step()
    return simulation


def test_fedavg_with_one_full_step_is_gradient_descent_on_all_rows(regression, linear):
    """Weighted by rows, the mean of the clients' steps is the pooled step, so it ends at ordinary least squares."""
    simulation = run(FedAvg(linear, train=ONE_STEP), regression, 300)
    xs, ys = training_rows(regression)
    x = np.column_stack([np.concatenate(xs), np.ones(sum(map(len, ys)))])
    expected = np.linalg.lstsq(x, np.concatenate(ys), rcond=None)[0]
    np.testing.assert_allclose(simulation.state.params["slope"], expected[:2], atol=1e-5)
    np.testing.assert_allclose(simulation.state.params["intercept"], expected[2], atol=1e-5)


def equal_clients(regression):
    """Least squares with every client counted the same."""
    xs, ys = training_rows(regression)
    x = np.concatenate([np.column_stack([x, np.ones(len(x))]) / np.sqrt(len(x)) for x in xs])
    return np.linalg.lstsq(x, np.concatenate([y / np.sqrt(len(y)) for y in ys]), rcond=None)[0]


def test_fedavg_uniform_counts_clients_not_rows(regression, linear):
    simulation = run(FedAvg(linear, train=ONE_STEP, uniform=True), regression, 300)
    np.testing.assert_allclose(simulation.state.params["slope"], equal_clients(regression)[:2], atol=1e-5)


def test_scaffold_reaches_the_optimum_from_which_local_steps_drift(regression, linear):
    """Ten steps a round: FedAvg ends where the clients' pulls balance, SCAFFOLD where the mean gradient is zero."""
    several = Training(epochs=10, batch=1000, lr=0.3)
    drifted = run(FedAvg(linear, train=several, uniform=True), regression, 200).state.params
    state = run(Scaffold(linear, train=several, N=3), regression, 200).state
    expected = equal_clients(regression)
    np.testing.assert_allclose([*state.x["slope"], state.x["intercept"]], expected, atol=1e-5)
    assert np.abs(np.array([*drifted["slope"], drifted["intercept"]]) - expected).max() > 0.05
    np.testing.assert_allclose(state.c["slope"], 0, atol=1e-5)  # the mean gradient there


def test_scaffolds_control_variates_are_mean_gradients(regression, linear):
    """After one full step from x, c_i is client i's gradient at x and c their mean, over all clients that there are."""
    simulation = run(Scaffold(linear, train=ONE_STEP, N=3), regression, 1)
    xs, ys = training_rows(regression)
    gradients = np.array([-(x.T @ y) / len(y) for x, y in zip(xs, ys, strict=True)])  # x starts at zero
    np.testing.assert_allclose(simulation.local.get(np.arange(3)).c["slope"], gradients, atol=1e-5)
    np.testing.assert_allclose(simulation.state.c["slope"], gradients.mean(axis=0), atol=1e-5)
    half = run(Scaffold(linear, train=ONE_STEP, N=6), regression, 1)
    np.testing.assert_allclose(half.state.c["slope"], gradients.mean(axis=0) / 2, atol=1e-5)


def test_scaffold_with_one_client_is_fedavg(model, clients):
    alone = clients.hold_out(len(clients.participants) - 1)
    plain = Training(epochs=2, batch=8, lr=0.2)
    scaffold, average = (
        run(algorithm, alone, 4) for algorithm in (Scaffold(model, train=plain, N=1), FedAvg(model, train=plain))
    )
    assert_close(scaffold.state.x, average.state.params, 1e-6)


def test_scaffold_says_what_it_needs(model, clients):
    with pytest.raises(UserError, match=r"train is sgd with momentum 0.9 and lr 0.1, but SCAFFOLD's clients take plain steps"):
        Scaffold(model, train=Training(momentum=0.9))
    with pytest.raises(UserError, match="SCAFFOLD's server needs the number of clients; give N"):
        Simulation(Scaffold(model), clients).step()


def test_fedprox_client_reaches_the_minimum_of_its_pulled_quadratic(regression, linear):
    """min_w |y − Xw|²/2n + μ/2 |w − w0|² is (XᵀX/n + μI)⁻¹ (Xᵀy/n + μ w0)."""
    algorithm = FedProx(linear, mu=0.7, tune=Training(epochs=400, batch=1000, lr=0.3))
    simulation = Simulation(algorithm, regression)
    start = {"slope": jnp.array([0.5, 0.5]), "intercept": jnp.float32(-1)}
    data = jax.tree.map(lambda leaf: leaf[0], regression.train([1], 40))
    found = algorithm.adapt(jax.random.key(0), simulation.down()._replace(params=start), simulation.fresh, data).params
    xs, ys = training_rows(regression)
    x = np.column_stack([xs[1], np.ones(len(xs[1]))])
    n, w0 = len(x), np.array([0.5, 0.5, -1.0])
    expected = np.linalg.solve(x.T @ x / n + 0.7 * np.eye(3), x.T @ ys[1] / n + 0.7 * w0)
    np.testing.assert_allclose([*found["slope"], found["intercept"]], expected, atol=1e-5)


def test_fedprox_without_pull_is_fedavg(model, clients):
    prox, average = (
        run(algorithm, clients, 3) for algorithm in (FedProx(model, mu=0.0, train=TRAIN), FedAvg(model, train=TRAIN))
    )
    assert_close(prox.state, average.state, 1e-6)


def test_fedper_reaches_the_fixed_effects_estimate(regression, linear):
    """A shared slope under personal intercepts is least squares with one dummy for each client."""
    simulation = run(FedPer(linear, personal=("intercept",), train=ONE_STEP), regression, 300)
    xs, ys = training_rows(regression)
    dummies = np.repeat(np.eye(3), [len(y) for y in ys], axis=0)
    expected = np.linalg.lstsq(np.column_stack([np.concatenate(xs), dummies]), np.concatenate(ys), rcond=None)[0]
    np.testing.assert_allclose(simulation.state.shared["slope"], expected[:2], atol=1e-5)
    np.testing.assert_allclose(simulation.local.get(np.arange(3)).personal["intercept"], expected[2:], atol=1e-5)


def test_fedbabu_never_moves_its_head(model, clients):
    algorithm = TABLE["fedbabu"](model)
    start, after = Simulation(algorithm, clients).state, run(algorithm, clients, 3).state
    assert_same(after.head, start.head)
    assert not np.allclose(after.body["body"]["dense0"]["kernel"], start.body["body"]["dense0"]["kernel"])


def test_fedbabu_with_one_full_step_moves_the_body_as_uniform_fedavg_does(model, clients):
    """The gradient of the body does not know whether the head is frozen."""
    step = Training(epochs=1, batch=1000, lr=0.1)
    babu = run(FedBABU(model, train=step), clients, 1).state.body
    average = run(FedAvg(model, train=step, uniform=True), clients, 1).state.params
    assert_close(babu["body"], average["body"], 1e-6)


@pytest.mark.parametrize(("part", "moved"), [("full", {"body", "head"}), ("body", {"body"}), ("head", {"head"})])
def test_fedbabu_adapts_the_part_it_is_told(model, clients, part, moved):
    algorithm = dataclasses.replace(TABLE["fedbabu"](model), part=part)
    simulation = Simulation(algorithm, clients)
    data = jax.tree.map(lambda leaf: leaf[0], clients.train([1], 32))
    tuned = algorithm.adapt(jax.random.key(0), simulation.down(), simulation.fresh, data).params
    start = {**simulation.state.body, "head": simulation.state.head["head"]}
    changed = {name for name in start if not np.allclose(jax.tree.leaves(tuned[name])[1], jax.tree.leaves(start[name])[1])}
    assert changed == moved


def test_adam_and_clipping_are_optax_s(regression, linear):
    """One full-batch step: Adam's first is lr · sign of the gradient; a clipped one has the length lr · clip."""
    data = jax.tree.map(lambda leaf: leaf[0], regression.train([0], 40))

    def moved(**settings):
        algorithm = FedAvg(linear, train=Training(epochs=1, batch=1000, lr=0.05, **settings))
        simulation = Simulation(algorithm, regression)
        params = algorithm.client(jax.random.key(0), simulation.down(), simulation.fresh, data)[0].params
        return np.array([*params["slope"], params["intercept"]])

    np.testing.assert_allclose(np.abs(moved(optimiser="adam")), 0.05, rtol=1e-3)
    assert np.linalg.norm(moved(clip=0.1)) == pytest.approx(0.05 * 0.1, rel=1e-4)


def test_the_step_size_decays_where_it_should(model, clients):
    algorithm = FedBABU(model).planned(8)
    simulation = Simulation(algorithm, clients, cohort=2)
    rates = []
    for _ in range(8):
        rates.append(float(simulation.down().lr))
        simulation.step()
    np.testing.assert_allclose(rates, [0.1] * 4 + [0.01] * 2 + [0.001] * 2, rtol=1e-6)
