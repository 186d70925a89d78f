"""IFCA, Ditto, APFL, Per-FedAvg and pFedMe against what is known exactly: FedAvg, training alone, quadratics, steps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same, simulated

from fedbayes.algorithm import Data
from fedbayes.algorithms.apfl import APFL, alpha_slope, mixed
from fedbayes.algorithms.ditto import Ditto
from fedbayes.algorithms.fedavg import FedAvg, Server
from fedbayes.algorithms.ifca import IFCA
from fedbayes.algorithms.per_fedavg import PerFedAvg
from fedbayes.algorithms.pfedme import PFedMe
from fedbayes.data import Clients
from fedbayes.engine import keys
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Normal, from_functions
from fedbayes.primitives.training import Training, mean_loss

pytestmark = pytest.mark.slow  # what is special to methods of comparison; the table has what all must do

TRAIN = Training(epochs=2, batch=8, lr=0.1, momentum=0.5)
TUNE = Training(epochs=3, batch=8, lr=0.05)
KEY = jax.random.key(3)


def rows_of(data, index):
    """Padded to one length, so that all clients share a program."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([index], int(data.train_counts.max())))


def part(tree, index=0):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def adapted(simulation, data, index=0):
    algorithm = simulation.algorithm
    return jax.jit(algorithm.adapt)(KEY, simulation.down(), simulation.fresh, rows_of(data, index))


def line():
    """y = x·w + noise: the loss is a quadratic, whose optimum and whose every step can be written down."""

    def init(key):
        return {"w": jax.random.normal(key, (2,))}

    def apply(params, x):
        return (x @ params["w"])[:, None]

    return from_functions(init, apply, Normal(scale=1.0), shape=(2,))


def line_rows(count=12, seed=0):
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(count, 2)), generator.normal(size=count)
    return x, y, Data(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jnp.ones(count, bool))


def two_kinds(counts, seed=0):
    """Clients of two kinds in turn, whose coefficients have opposite signs; without noise, so that each kind has its line."""
    generator = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(counts)), counts)
    x = generator.normal(size=(len(client), 2)).astype(np.float32)
    y = np.where(client % 2 == 1, -1, 1) * (x @ COEFFICIENTS)
    return Clients.build(x, y.astype(np.float32), client, test=0.3, name="kinds")


COEFFICIENTS = np.array([2.0, -1.0])


def alone(avg, data, index, start, rounds, seed=0):
    """Where a client comes to in some rounds of FedAvg's local training that never hears of the others."""
    client, rows, params = jax.jit(avg.client), rows_of(data, index), start
    for number in range(1, rounds + 1):
        key = keys.fold(keys.of_round(seed, number), np.uint32(index))
        down = avg.broadcast(key, Server(params, jnp.int32(number - 1)))
        params = client(key, down, avg.init_local(key, None), rows)[0].params
    return params


# IFCA


def test_ifca_of_one_model_is_fedavg(clients, model):
    ifca = IFCA(model, K=1, noise=0.3, train=TRAIN, tune=TUNE, fine_tune=True)
    avg = FedAvg(model, train=TRAIN, tune=TUNE)
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (ifca, avg))
    assert_close(part(one.state.theta), other.state.params, 1e-6)
    assert_close(adapted(one, clients).params, adapted(other, clients).params, 1e-6)


@pytest.mark.parametrize("uniform", [False, True])
def test_ifca_averages_each_cluster_by_itself_and_leaves_empty_ones_alone(uniform):
    data, model = two_kinds([10, 30, 14, 22, 40, 18]), line()
    ifca, avg = IFCA(model, K=3, train=TRAIN, uniform=uniform), FedAvg(model, train=TRAIN, uniform=uniform)
    simulation = Simulation(ifca.planned(1), data, seed=2)
    starts = {"w": jnp.array([[1.0, 0.0], [9.0, 9.0], [-1.0, 0.0]])}
    simulation.state = simulation.state._replace(theta=starts)
    simulation.step()
    assert_same(part(simulation.state.theta, 1), part(starts, 1))
    client = jax.jit(avg.client)
    for cluster, members in ((0, [0, 2, 4]), (2, [1, 3, 5])):
        ends, weights = [], []
        for i in members:
            key = keys.fold(keys.of_round(2, 1), np.uint32(i))
            down = avg.broadcast(key, Server(part(starts, cluster), jnp.int32(0)))
            up, _ = client(key, down, avg.init_local(key, None), rows_of(data, i))
            ends.append(np.asarray(up.params["w"]))
            weights.append(float(up.weight))
        assert len(set(weights)) == (1 if uniform else 3)
        np.testing.assert_allclose(simulation.state.theta["w"][cluster], np.average(ends, axis=0, weights=weights), atol=1e-6)


@pytest.mark.parametrize("noise", [None, 0.5])
def test_ifca_finds_two_kinds_of_clients_and_new_ones_find_theirs(noise):
    data = two_kinds([30] * 12).hold_out(4, seed=1)
    kinds = np.arange(12) % 2
    assert {*kinds[data.unseen]} == {0, 1}
    ifca = IFCA(line(), K=2, noise=noise, train=Training(epochs=3, batch=10, lr=0.1))
    simulation = simulated(ifca, data, 15, cohort=6)
    adapt, down = jax.jit(simulation.algorithm.adapt), simulation.down()
    found = np.array([int(adapt(KEY, down, simulation.fresh, rows_of(data, i)).cluster) for i in range(12)])
    assert (found == kinds).all() or (found == 1 - kinds).all()
    for kind, sign in ((0, 1), (1, -1)):
        np.testing.assert_allclose(down.theta["w"][found[kind]], sign * COEFFICIENTS, atol=1e-3)
    summary = assess(simulation).summary()
    assert summary["adapted"]["unseen"]["rmse"]["rows"] < 0.01
    assert summary["global"]["unseen"]["rmse"]["rows"] > 1


def test_ifca_predicts_with_all_models_until_it_has_chosen(clients, model):
    plain, tuning = (IFCA(model, K=3, train=TRAIN, tune=TUNE, fine_tune=fine_tune) for fine_tune in (False, True))
    down = plain.broadcast(KEY, jax.jit(plain.init_server)(KEY))
    data, x, apply = rows_of(clients, 1), jnp.ones((2, 4)), jax.jit(model.apply)
    loss = jax.jit(lambda params: mean_loss(model, params, data))
    outputs = [apply(part(down.theta, j), x) for j in range(3)]
    best = int(np.argmin([float(loss(part(down.theta, j))) for j in range(3)]))
    fresh = plain.init_local(KEY, data)
    assert jax.tree.leaves(fresh) == []
    assert_close(list(plain.predict(KEY, down, fresh, x)), outputs, 1e-6)
    chosen = jax.jit(plain.adapt)(KEY, down, fresh, data)
    assert (int(chosen.cluster), chosen.params) == (best, None)
    assert_close(list(plain.predict(KEY, down, chosen, x)), [outputs[best]], 1e-6)
    avg = FedAvg(model, train=TRAIN, tune=TUNE)
    start = avg.broadcast(KEY, Server(part(down.theta, best), jnp.int32(0)))
    expected = jax.jit(avg.adapt)(KEY, start, avg.init_local(KEY, data), data).params
    tuned = jax.jit(tuning.adapt)(KEY, down, fresh, data)
    assert_close(tuned.params, expected, 1e-6)
    assert_close(list(tuning.predict(KEY, down, tuned, x)), [apply(expected, x)], 1e-6)


def test_ifca_starts_around_one_network_where_noise_is_given(model):
    start, one = jax.jit(IFCA(model, K=200, noise=0.3).init_server)(KEY).theta, model.init(KEY)
    assert_close(part(start), one, 1e-6)
    for leaf, centre in zip(jax.tree.leaves(start), jax.tree.leaves(one), strict=True):
        apart = np.asarray(leaf[1:] - centre[None])
        np.testing.assert_allclose([apart.mean(), apart.std()], [0, 0.3], atol=0.06)


# Ditto


def test_ditto_shares_what_fedavg_shares(clients, model):
    ditto, avg = Ditto(model, lam=0.7, personal_epochs=1, train=TRAIN), FedAvg(model, train=TRAIN)
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (ditto, avg))
    assert_close(one.state, other.state, 1e-6)
    x = jnp.ones((2, 4))
    outputs = [simulation.algorithm.predict(KEY, simulation.down(), simulation.fresh, x) for simulation in (one, other)]
    assert_close(*outputs, 1e-6)


def test_ditto_without_a_pull_is_training_alone(clients, model):
    ditto = Ditto(model, lam=0.0, personal_epochs=2, train=TRAIN)
    simulation = simulated(ditto, clients, 3)
    w0 = Simulation(ditto.planned(3), clients).state.params
    for index in clients.participants[:2]:
        own = simulation.local.get(np.array([index]))
        assert own.own.all()
        assert_close(part(own.v), alone(FedAvg(model, train=TRAIN), clients, index, w0, 3), 1e-6)
    never = simulation.local.get(np.flatnonzero(clients.unseen))
    assert not never.own.any()


@pytest.mark.parametrize(("lam", "trained"), [(0.1, False), (1.0, True), (5.0, True)])
def test_ditto_comes_to_the_optimum_of_its_quadratic(lam, trained):
    """∇F + λ(v − w) = 0 at v = (XᵀX/n + λ)⁻¹ (Xᵀy/n + λw), from w and from any v."""
    x, y, data = line_rows()
    descent = Training(epochs=600, batch=100, lr=0.1)
    ditto = Ditto(line(), lam=lam, personal_epochs=600, train=Training(epochs=1, batch=100, lr=0.1), tune=descent)
    w = np.array([3.0, -2.0])
    down = ditto.broadcast(KEY, ditto.init_server(KEY)._replace(params={"w": jnp.asarray(w, jnp.float32)}))
    local = ditto.init_local(KEY, data)._replace(v={"w": jnp.array([50.0, 70.0])}, own=jnp.bool_(trained))
    expected = np.linalg.solve(x.T @ x / 12 + lam * np.eye(2), x.T @ y / 12 + lam * w)
    up, after = jax.jit(ditto.client)(KEY, down, local, data)
    for found in (after, jax.jit(ditto.adapt)(KEY, down, local, data)):
        np.testing.assert_allclose(found.v["w"], expected, atol=2e-5)
        draws = ditto.predict(KEY, down, found, data.x)
        np.testing.assert_allclose(draws, (x @ expected)[None, :, None], atol=1e-4)
    np.testing.assert_allclose(up.params["w"], w - 0.1 * x.T @ (x @ w - y) / 12, atol=1e-5)


def test_ditto_goes_on_from_its_own_model(clients, model):
    """With λ = 0 and no personal epochs, v stays where it was; a new client's is w."""
    ditto = Ditto(model, lam=0.0, personal_epochs=0, train=TRAIN)
    down, data = ditto.broadcast(KEY, ditto.init_server(KEY)), rows_of(clients, 1)
    fresh, client = ditto.init_local(KEY, data), jax.jit(ditto.client)
    assert_same(client(KEY, down, fresh, data)[1].v, down.params)
    v = model.init(jax.random.key(9))
    assert_same(client(KEY, down, fresh._replace(v=v, own=jnp.bool_(True)), data)[1].v, v)


# APFL


@pytest.mark.parametrize("options", [{"alpha": 0.0, "adaptive": False}, {"alpha": 0.5, "every": "batch", "uniform": True}])
def test_apfl_shares_what_fedavg_shares(clients, model, options):
    avg = FedAvg(model, train=TRAIN, uniform=options.get("uniform", False))
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (APFL(model, train=TRAIN, **options), avg))
    assert_close(one.state, other.state, 1e-6)
    x = jnp.ones((2, 4))
    expected = other.algorithm.predict(KEY, other.down(), other.fresh, x)
    assert_close(one.algorithm.predict(KEY, one.down(), one.fresh, x), expected, 1e-6)
    if not options["alpha"]:  # the mixture is w, whatever v is
        own = part(one.local.get(one.chosen(4)[:1]))
        assert own.own
        assert_close(one.algorithm.predict(KEY, one.down(), own, x), expected, 1e-6)


def test_apfl_with_all_weight_on_its_own_model_is_training_alone(clients, model):
    apfl = APFL(model, alpha=1.0, adaptive=False, train=TRAIN)
    simulation = simulated(apfl, clients, 3)
    w0, x = Simulation(apfl.planned(3), clients).state.params, jnp.ones((2, 4))
    for index in clients.participants[:2]:
        own = part(simulation.local.get(np.array([index])))
        expected = alone(FedAvg(model, train=TRAIN), clients, index, w0, 3)
        assert_close(own.v, expected, 1e-6)
        assert float(own.alpha) == 1
        assert_close(apfl.predict(KEY, simulation.down(), own, x)[0], model.apply(expected, x), 1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_apfl_slope_of_alpha_is_that_of_the_loss(clients, model, alpha):
    data, v, w = rows_of(clients, 1), model.init(KEY), model.init(jax.random.key(4))

    @jax.jit
    def slopes(alpha):
        def F(alpha):
            return mean_loss(model, jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w), data)

        at_mixture = jax.grad(lambda params: mean_loss(model, params, data))(mixed(alpha, v, w))
        return alpha_slope(v, w, at_mixture), jax.grad(F)(alpha)

    found, expected = slopes(jnp.float32(alpha))
    assert abs(float(expected)) > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def by_hand(x, y, w, v, alpha, lr, steps, moving, every):
    """Algorithm 1 on a quadratic with full batches."""
    for number in range(steps):
        slope = x.T @ (x @ (alpha * v + (1 - alpha) * w) - y) / len(y)
        changed = np.clip(alpha - lr * (v - w) @ slope, 0, 1) if every or number == 0 else alpha
        new_w = w - lr * x.T @ (x @ w - y) / len(y) if moving else w
        w, v, alpha = new_w, v - lr * alpha * slope, changed
    return w, v, alpha


@pytest.mark.parametrize("lr", [0.05, 0.5])
@pytest.mark.parametrize("every", ["round", "batch"])
def test_apfl_steps_are_those_of_the_paper(every, lr):
    x, y, data = line_rows(seed=1)
    full = Training(epochs=5, batch=100, lr=lr)
    apfl = APFL(line(), alpha=0.25, every=every, train=full, tune=full)
    w, v = np.array([1.0, -1.0]), np.array([-0.5, 1.5])
    down = apfl.broadcast(KEY, apfl.init_server(KEY)._replace(params={"w": jnp.asarray(w, jnp.float32)}))
    fresh = apfl.init_local(KEY, data)
    own = fresh._replace(v={"w": jnp.asarray(v, jnp.float32)}, own=jnp.bool_(True))
    client, adapt = jax.jit(apfl.client), jax.jit(apfl.adapt)
    for local, start in ((own, v), (fresh, w)):
        up, after = client(KEY, down, local, data)
        expected = by_hand(x, y, w, start, 0.25, lr, 5, True, every == "batch")
        assert_close([up.params["w"], after.v["w"], after.alpha], list(expected), 1e-5)
        after = adapt(KEY, down, local, data)
        _, *expected = by_hand(x, y, w, start, 0.25, lr, 5, False, True)
        assert_close([after.v["w"], after.alpha], expected, 1e-5)
        assert after.own
        assert float(after.alpha) != 0.25
        mixture = expected[1] * expected[0] + (1 - expected[1]) * w
        np.testing.assert_allclose(apfl.predict(KEY, down, after, data.x)[0, :, 0], x @ mixture, atol=1e-5)


def test_apfl_cuts_alpha_to_a_share():
    _, _, data = line_rows(seed=1)
    found = set()
    for sign in (-1.0, 1.0):
        apfl = APFL(line(), train=Training(epochs=1, batch=100, lr=1000.0))
        down = apfl.broadcast(KEY, apfl.init_server(KEY)._replace(params={"w": jnp.array([1.0, -1.0])}))
        local = apfl.init_local(KEY, data)._replace(v={"w": jnp.array([1.0, -1.0]) * (1 + sign / 2)}, own=jnp.bool_(True))
        found.add(float(jax.jit(apfl.client)(KEY, down, local, data)[1].alpha))
    assert found == {0.0, 1.0}


# Ditto and APFL


@pytest.mark.parametrize(
    "make",
    [
        lambda train, tune: Ditto(line(), lam=0.01, train=train, tune=tune),
        lambda train, tune: APFL(line(), every="batch", train=train, tune=tune),
    ],
)
def test_personal_models_serve_clients_of_two_kinds_and_the_shared_one_none(make):
    data = two_kinds([30] * 8).hold_out(2, seed=1)
    train, tune = (Training(epochs=epochs, batch=10, lr=0.1) for epochs in (3, 40))
    simulation = simulated(make(train, tune), data, 20)
    summary = assess(simulation).summary()
    assert summary["personal"]["participating"]["rmse"]["rows"] < 0.1
    assert summary["global"]["participating"]["rmse"]["rows"] > 1
    assert summary["adapted"]["unseen"]["rmse"]["rows"] < 0.1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: IFCA(model, K=0), "K is 0, but it is at least 1"),
        (
            lambda model: IFCA(model, noise=0.0),
            "noise is 0.0, but it tells models apart that start alike and must be above 0",
        ),
        (lambda model: Ditto(model, lam=-1.0), "lam is -1.0, but it weighs a squared distance and must be at least 0"),
        (lambda model: Ditto(model, personal_epochs=-1), "personal_epochs is -1, but it counts epochs and must be at least 0"),
        (lambda model: APFL(model, alpha=1.5), "alpha is 1.5, but it is a share and must be at least 0 and at most 1"),
        (lambda model: APFL(model, every="year"), "every is 'year', but it is round or batch"),
    ],
)
def test_bad_settings_get_one_sentence(make, sentence, model):
    with pytest.raises(UserError, match=sentence):
        make(model)


# Per-FedAvg


def one_step(algorithm, data, w):
    """Where a client's round of one full-batch step leads from w."""
    down = algorithm.broadcast(KEY, Server({"w": jnp.asarray(w, jnp.float32)}, jnp.int32(0)))
    up, local = jax.jit(algorithm.client)(KEY, down, algorithm.init_local(KEY, data), data)
    return np.asarray(up.params["w"]), np.asarray(local.theta["w"])


def same_rows(count=6):
    """Rows that are all alike, so that both halves of any shuffle have the same loss, with Hessian x xᵀ."""
    x, y = np.array([1.0, -2.0]), 0.7
    return x, y, Data(jnp.tile(jnp.asarray(x, jnp.float32), (count, 1)), jnp.full(count, y, jnp.float32), jnp.ones(count, bool))


@pytest.mark.parametrize("first_order", [False, True])
def test_per_fedavg_step_by_hand(first_order):
    x, y, data = same_rows()
    w, alpha, beta, hessian = np.array([0.3, 0.4]), 0.1, 0.2, np.outer(x, x)
    inner = w - alpha * x * (x @ w - y)
    slope = x * (x @ inner - y)
    slope = slope if first_order else (np.eye(2) - alpha * hessian) @ slope
    algorithm = PerFedAvg(line(), alpha=alpha, first_order=first_order, train=Training(batch=100, lr=beta))
    found, own = one_step(algorithm, data, w)
    np.testing.assert_allclose(found, w - beta * slope, atol=1e-6)
    np.testing.assert_allclose(own, found - alpha * x * (x @ found - y), atol=1e-6)


def test_per_fedavg_halves_have_the_hessian_of_one_and_the_slope_of_the_other():
    """Each of the two ways to split two rows is drawn by some key, and the step is that of the split."""
    x, y, data = line_rows(2)
    w, alpha, algorithm = np.array([0.3, 0.4]), 0.1, PerFedAvg(line(), alpha=0.1, train=Training(batch=100, lr=0.2))
    expected = []
    for first, second in ((0, 1), (1, 0)):
        inner = w - alpha * x[first] * (x[first] @ w - y[first])
        slope = (np.eye(2) - alpha * np.outer(x[first], x[first])) @ (x[second] * (x[second] @ inner - y[second]))
        expected.append(w - 0.2 * slope)
    found, _ = one_step(algorithm, data, w)
    assert min(np.abs(found - one).max() for one in expected) < 1e-6


def test_per_fedavg_without_a_personal_step_is_fedavg_on_half_the_rows():
    _, _, data = same_rows()
    one, _ = one_step(PerFedAvg(line(), alpha=0.0, train=Training(batch=100, lr=0.2)), data, [0.3, 0.4])
    avg = FedAvg(line(), train=Training(batch=100, lr=0.2))
    down = avg.broadcast(KEY, Server({"w": jnp.array([0.3, 0.4])}, jnp.int32(0)))
    up, _ = avg.client(KEY, down, avg.init_local(KEY, data), data)
    np.testing.assert_allclose(one, up.params["w"], atol=1e-6)


# pFedMe


def test_pfedme_moves_towards_the_proximal_point():
    x, y, data = line_rows()
    A, b, w, lam, eta = x.T @ x / len(y), x.T @ y / len(y), np.array([0.3, 0.4]), 2.0, 0.1
    theta = np.linalg.solve(A + lam * np.eye(2), b + lam * w)
    algorithm = PFedMe(line(), lam=lam, K=200, personal_lr=0.1, train=Training(batch=100, lr=eta))
    found, own = one_step(algorithm, data, w)
    np.testing.assert_allclose(own, theta, atol=1e-5)
    np.testing.assert_allclose(found, w - eta * lam * (w - theta), atol=1e-5)
    down = algorithm.broadcast(KEY, Server({"w": jnp.asarray(w, jnp.float32)}, jnp.int32(0)))
    adapted = algorithm.adapt(KEY, down, algorithm.init_local(KEY, data), data)
    np.testing.assert_allclose(adapted.theta["w"], theta, atol=1e-5)  # w is held, so epochs change nothing more


def test_pfedme_server_moves_by_beta():
    algorithm = PFedMe(line(), beta=0.25)
    server = Server({"w": jnp.array([1.0, 2.0])}, jnp.int32(0))
    _, _, data = line_rows()
    up, _ = algorithm.client(KEY, algorithm.broadcast(KEY, server), algorithm.init_local(KEY, data), data)
    moved = algorithm.server(KEY, server, None, up).params["w"]
    np.testing.assert_allclose(moved, 0.75 * server.params["w"] + 0.25 * up.params["w"], atol=1e-6)


def test_pfedme_and_per_fedavg_refuse_bad_options():
    for make, word in (
        (lambda: PFedMe(line(), K=0), "K is 0"),
        (lambda: PFedMe(line(), lam=-1.0), "lam is -1"),
        (lambda: PFedMe(line(), train=Training(momentum=0.9)), "momentum"),
        (lambda: PerFedAvg(line(), alpha=-0.1), "alpha is -0.1"),
        (lambda: PerFedAvg(line(), adapt_steps=0), "adapt_steps is 0"),
    ):
        with pytest.raises(UserError, match=word):
            make()
