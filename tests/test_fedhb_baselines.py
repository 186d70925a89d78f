"""The methods that FedHB is compared with, against what is known exactly: dense algebra, special cases, plain EM."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same, simulated

from fedbayes.algorithm import Data
from fedbayes.algorithms.ensemble import NONE, Ensemble
from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedbe import FedBE, mean_of
from fedbayes.algorithms.fedbe import Up as BEUp
from fedbayes.algorithms.fedem import FedEM
from fedbayes.algorithms.fedpa import FedPA, shrunken_solve
from fedbayes.algorithms.fedpa import Up as PAUp
from fedbayes.algorithms.fedpop import FedPop
from fedbayes.data import Clients
from fedbayes.data.unlabelled import Unlabelled
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Normal, from_functions, mlp
from fedbayes.primitives.training import Training

pytestmark = pytest.mark.slow  # what is special to methods of comparison; the table has what all must do

TRAIN = Training(epochs=2, batch=8, lr=0.1, momentum=0.5)
TUNE = Training(epochs=3, batch=8, lr=0.05)
KEY = jax.random.key(3)


def rows_of(data, index):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([index], int(data.train_counts[index])))


def adapted(simulation, data, index=0):
    return simulation.algorithm.adapt(KEY, simulation.down(), simulation.fresh, rows_of(data, index))


def part(tree, index=0):
    return jax.tree.map(lambda leaf: leaf[index], tree)


# FedPA


@pytest.mark.parametrize("rho", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_pa_recursion_is_the_dense_solve(count, rho):
    samples = np.random.default_rng(count).normal(loc=2.0, size=(count, 5))
    alpha = 1 / (1 + (count - 1) * rho)
    S = np.cov(samples.T) if count > 1 else np.zeros((5, 5))
    expected = np.linalg.solve(alpha * np.eye(5) + (1 - alpha) * S, -samples.mean(axis=0))
    np.testing.assert_allclose(shrunken_solve(jnp.asarray(samples, jnp.float32), rho), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [True, False])
def test_pa_before_its_first_sample_is_fedavg(clients, model, uniform):
    pa = FedPA(model, train=TRAIN, tune=TUNE, burn_in_rounds=9, server_lr=1.0, server_momentum=0.0, uniform=uniform)
    avg = FedAvg(model, train=TRAIN, tune=TUNE, uniform=uniform)
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (pa, avg))
    assert_close(one.state.params, other.state.params, 1e-6)
    assert_close(adapted(one, clients).params, adapted(other, clients).params, 1e-6)


def test_pa_with_one_sample_of_one_step_is_fedavg(clients, model):
    """One minibatch an epoch: the mean of the iterates of the last epoch is where the client ends."""
    train = dataclasses.replace(TRAIN, batch=1000, epochs=3)
    pa = FedPA(model, train=train, burn_in_epochs=2, burn_in_rounds=0, rho=1.0, server_lr=1.0, server_momentum=0.0)
    assert pa.samples == 1
    one, other = (simulated(algorithm, clients, 4) for algorithm in (pa, FedAvg(model, train=train)))
    assert_close(one.state.params, other.state.params, 1e-6)


def test_pa_samples_after_a_quarter_of_the_run(model):
    algorithm = FedPA(model).planned(20)
    state = algorithm.init_server(KEY)
    flags = [bool(algorithm.broadcast(KEY, state._replace(round=jnp.int32(behind))).sampling) for behind in range(20)]
    assert flags == [False] * 5 + [True] * 15


def mean_only():
    """y = w + noise: a row's gradient is w − y, so that every iterate of SGD can be written down."""

    def init(key):
        return {"w": jnp.zeros(2)}

    def apply(params, x):
        return (x @ params["w"])[:, None]

    return from_functions(init, apply, Normal(scale=1.0), shape=(2,))


def test_pa_samples_are_the_means_over_epochs_and_give_delta_through_the_dense_solve():
    """Full batches on a quadratic, so that each iterate is known and is a sample."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(6, 2)), generator.normal(size=6)
    data = Data(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jnp.ones(6, bool))
    rho, lr, momentum, w0 = 0.5, 0.2, 0.5, np.array([1.0, -1.0])
    algorithm = FedPA(
        mean_only(), train=Training(epochs=4, batch=6, lr=lr, momentum=momentum), burn_in_epochs=1, burn_in_rounds=0, rho=rho
    )
    state = algorithm.init_server(KEY)._replace(params={"w": jnp.asarray(w0, jnp.float32)})
    up, _ = algorithm.client(KEY, algorithm.broadcast(KEY, state), algorithm.init_local(KEY, data), data)
    w, velocity, iterates = w0, np.zeros(2), []
    for _ in range(4):
        velocity = momentum * velocity + x.T @ (x @ w - y) / 6
        w = w - lr * velocity
        iterates.append(w)
    samples = np.array(iterates[1:])
    alpha = 1 / (1 + 2 * rho)
    expected = np.linalg.solve(alpha * np.eye(2) + (1 - alpha) * np.cov(samples.T), w0 - samples.mean(axis=0))
    np.testing.assert_allclose(up.delta["w"], expected, rtol=1e-4)


@pytest.mark.slow
def test_pa_sample_of_an_epoch_is_the_mean_of_its_iterates(clients, model):
    """With ρ = 0, Δ = w − x̄, where x̄ of one epoch is the mean of its iterates, which are followed here one by one."""
    data = rows_of(clients, 1)
    options = {"burn_in_rounds": 0, "rho": 0.0}
    algorithm = FedPA(model, train=Training(epochs=1, batch=7, lr=0.1), burn_in_epochs=0, **options)
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    up, _ = algorithm.client(KEY, down, algorithm.init_local(KEY, data), data)
    order = jnp.argsort(jax.random.bits(jax.random.fold_in(KEY, 0), (len(data.y),)))
    w, total, count = down.params, jax.tree.map(jnp.zeros_like, down.params), 0
    for start in range(0, len(data.y), 7):
        rows = order[start : start + 7]
        gradient = jax.grad(lambda w, rows=rows: -model.likelihood.log_prob(model.apply(w, data.x[rows]), data.y[rows]).mean())(
            w
        )
        w = jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient)
        total, count = jax.tree.map(jnp.add, total, w), count + 1
    assert count > 2
    assert_close(up.delta, jax.tree.map(lambda w, total: w - total / count, down.params, total), 1e-6)


def test_pa_stays_at_the_mode_of_the_pooled_posterior_and_fedavg_does_not():
    """Three Gaussian posteriors, each as samples with its exact mean and covariance; as ρ grows, Σ̂ goes to S."""
    generator = np.random.default_rng(2)
    means = generator.normal(size=(3, 2))
    factors = generator.normal(size=(3, 2, 2)) + np.eye(2)
    spread = np.sqrt(3 / 2)  # four points ±L_k: Σ (x − x̄)(x − x̄)ᵀ / 3 = 2/3 spread² L Lᵀ
    samples = np.stack([mean + spread * np.concatenate([L.T, -L.T]) for mean, L in zip(means, factors, strict=True)])
    precisions = np.stack([np.linalg.inv(L @ L.T) for L in factors])
    pooled = np.linalg.solve(precisions.sum(axis=0), np.einsum("ijk,ik->j", precisions, means))

    def fixed_point(rho):
        lr = 0.5 / np.linalg.eigvalsh(precisions.mean(axis=0))[-1] if rho == 1e3 else 0.2
        algorithm = FedPA(mean_only(), rho=rho, burn_in_rounds=0, server_lr=lr, server_momentum=0.5)

        def round(_, state):
            ours = jnp.asarray(samples, jnp.float32) - state.params["w"][None, None]
            deltas = jax.vmap(lambda one: shrunken_solve(one, rho))(ours)
            return algorithm.server(KEY, state, None, PAUp({"w": deltas.mean(axis=0)}, jnp.float32(3), jnp.float32(0)))

        return jax.lax.fori_loop(0, 2000, round, algorithm.init_server(KEY)).params["w"]

    def mode(rho):
        """Where Σ_i Σ̂_i⁻¹ (w − μ_i) = 0, with the shrunken covariances as matrices."""
        alpha = 1 / (1 + 3 * rho)
        shrunken = [np.linalg.inv(alpha * np.eye(2) + (1 - alpha) * L @ L.T) for L in factors]
        return np.linalg.solve(sum(shrunken), sum(P @ mean for P, mean in zip(shrunken, means, strict=True)))

    assert np.abs(pooled - means.mean(axis=0)).max() > 0.1
    np.testing.assert_allclose(mode(1e9), pooled, rtol=1e-6)
    for rho in (0.01, 1.0, 1e3):
        np.testing.assert_allclose(fixed_point(rho), mode(rho), rtol=1e-4)
    np.testing.assert_allclose(fixed_point(1e3), pooled, rtol=5e-3)
    np.testing.assert_allclose(fixed_point(0.0), means.mean(axis=0), rtol=1e-5)


# FedEM


def test_em_of_one_component_is_fedavg(clients, model):
    em = FedEM(model, K=1, train=TRAIN, tune=TUNE, fine_tune=True)
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (em, FedAvg(model, train=TRAIN, tune=TUNE)))
    assert_close(part(one.state.theta), other.state.params, 1e-6)
    assert_close(part(adapted(one, clients).theta), adapted(other, clients).params, 1e-6)


@pytest.mark.slow
def test_em_shares_are_those_of_plain_em(clients, model):
    algorithm = FedEM(model, K=3, train=TRAIN, em_steps=7)
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    fresh = algorithm.init_local(KEY, rows_of(clients, 1))
    for index in (1, 2):
        data = rows_of(clients, index)
        log_p = [model.likelihood.log_prob(model.apply(part(down.theta, k), data.x), data.y) for k in range(3)]
        p = np.exp(np.array(log_p, np.float64))
        pi, found = np.full(3, 1 / 3), []
        for _ in range(7):
            q = pi[:, None] * p
            pi = (q / q.sum(axis=0)).mean(axis=1)
            found.append(pi)
        np.testing.assert_allclose(algorithm.client(KEY, down, fresh, data)[1].pi, found[0], atol=1e-6)
        np.testing.assert_allclose(algorithm.adapt(KEY, down, fresh, data).pi, found[-1], atol=1e-6)
        assert np.abs(found[-1] - 1 / 3).max() > 0.01


def test_em_components_step_along_the_weighted_gradient(clients, model):
    """One full batch: θ_k − lr/n Σ q_k ∇(−log p)."""
    data, lr = rows_of(clients, 1), 0.3
    algorithm = FedEM(model, K=2, train=Training(epochs=1, batch=1000, lr=lr))
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    fresh = algorithm.init_local(KEY, data)._replace(pi=jnp.array([0.2, 0.8]))
    up, _ = algorithm.client(KEY, down, fresh, data)
    joint = jnp.array([[0.2], [0.8]]) * jnp.exp(algorithm.log_likelihoods(down.theta, data))
    q = joint / joint.sum(axis=0, keepdims=True)
    for k in range(2):

        def weighted(theta, k=k):
            return -(q[k] * model.likelihood.log_prob(model.apply(theta, data.x), data.y)).mean()

        theta = part(down.theta, k)
        expected = jax.tree.map(lambda a, b: a - lr * b, theta, jax.grad(weighted)(theta))
        assert_close(part(up.theta, k), expected, 1e-6)


def test_em_predicts_in_the_shares_of_the_client(model):
    algorithm = FedEM(model, K=3, draws=10)
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    x = jnp.ones((2, 4))
    local = algorithm.init_local(KEY, None)._replace(pi=jnp.array([0.5, 0.0, 0.5]))
    outputs = [model.apply(part(down.theta, k), x) for k in (0, 2)]
    draws = algorithm.predict(KEY, down, local, x)
    assert_close(list(draws), [outputs[0]] * 5 + [outputs[1]] * 5, 1e-6)


def two_kinds(count, seed=0, rows=40):
    """Clients of two kinds with opposite labels: one network is right on half of the rows, two with shares on all."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count * rows, 4)).astype(np.float32)
    kind = np.repeat(np.arange(count) % 2, rows)
    y = ((x[:, 0] > 0) ^ (kind == 1)).astype(np.int32)
    return Clients.build(x, y, np.repeat(np.arange(count), rows), test=0.3, name="kinds")


def test_em_learns_two_kinds_of_clients_and_tells_new_ones_from_their_rows(model):
    data = two_kinds(16).hold_out(4, seed=1)
    algorithm = FedEM(model, K=2, train=Training(epochs=3, batch=10, lr=0.1, momentum=0.9))
    summary = assess(simulated(algorithm, data, 30)).summary()
    assert summary["adapted"]["unseen"]["accuracy"]["rows"] > 0.9
    assert summary["personal"]["participating"]["accuracy"]["rows"] > 0.9
    assert summary["global"]["unseen"]["accuracy"]["rows"] < 0.8


# FedBE


def unlabelled(count=40):
    return Unlabelled(np.random.default_rng(4).normal(size=(count, 4)).astype(np.float32))


def three_models(model):
    """With weights so large that they disagree."""
    params = jax.vmap(model.init)(jax.random.split(KEY, 3))
    return BEUp(jax.tree.map(lambda leaf: 4 * leaf, params), jnp.array([1.0, 2.0, 5.0]), jnp.float32(0))


@pytest.mark.slow
@pytest.mark.parametrize("swa", [True, False])
def test_be_of_one_client_without_samples_is_fedavg(clients, model, swa):
    """Every teacher is the student, so the divergence is 0 and distilling changes nothing."""
    data = two_kinds(1)
    distil = Training(epochs=5, batch=8, lr=0.1, momentum=0.9)
    be = FedBE(model, unlabelled=unlabelled(), samples=0, train=TRAIN, tune=TUNE, distil=distil, swa=swa, cycle=4)
    one, other = (simulated(algorithm, data, 3) for algorithm in (be, FedAvg(model, train=TRAIN, tune=TUNE)))
    assert_close(one.state.params, other.state.params, 1e-5)
    assert_close(adapted(one, data).params, adapted(other, data).params, 1e-5)


def test_be_without_distillation_is_fedavg(clients, model):
    be = FedBE(model, unlabelled=unlabelled(), train=TRAIN, distil=Training(epochs=0))
    one, other = (simulated(algorithm, clients, 3, cohort=3) for algorithm in (be, FedAvg(model, train=TRAIN)))
    assert_close(one.state.params, other.state.params, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("posterior", ["gaussian", "dirichlet"])
def test_be_labels_are_the_mean_over_teachers(model, posterior):
    rows, up = unlabelled(300), three_models(model)
    algorithm = FedBE(model, unlabelled=rows, samples=2, posterior=posterior)
    x, average = jnp.asarray(rows.x), mean_of(up.params, up.n)
    assert_close(average, jax.tree.map(lambda leaf: (leaf[0] + 2 * leaf[1] + 5 * leaf[2]) / 8, up.params), 1e-6)
    teachers = [average, *(algorithm.sample(key, average, up) for key in jax.random.split(KEY, 2))]
    teachers += [part(up.params, index) for index in range(3)]
    expected = np.mean([np.asarray(jax.nn.softmax(model.apply(teacher, x), axis=1)) for teacher in teachers], axis=0)
    np.testing.assert_allclose(algorithm.labels(KEY, average, up, x), expected, atol=1e-6)


@pytest.mark.slow
def test_be_samples_have_the_moments_of_the_clients(model):
    up = three_models(model)
    average = mean_of(up.params, up.n)
    keys = jax.random.split(jax.random.key(9), 20_000)
    weights, kernel = np.array([1, 2, 5]) / 8, np.asarray(up.params["head"]["kernel"])
    mean = np.tensordot(weights, kernel, axes=1)
    for posterior in ("gaussian", "dirichlet"):
        algorithm = FedBE(model, posterior=posterior, alpha=2.0)
        draws = jax.vmap(lambda key, one=algorithm: one.sample(key, average, up)["head"]["kernel"])(keys)
        if posterior == "gaussian":
            deviation = np.sqrt(np.tensordot(weights, (kernel - mean) ** 2, axes=1))
            np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.02)
            np.testing.assert_allclose(draws.std(axis=0), deviation, rtol=0.03)
        else:  # convex combinations of the clients' models
            assert (draws >= kernel.min(axis=0)[None] - 1e-6).all()
            assert (draws <= kernel.max(axis=0)[None] + 1e-6).all()


@pytest.mark.slow
def test_be_cycles_and_their_mean_are_as_written_down(model):
    """Full batches without momentum: each step, the fall of the step size and the mean at the cycles' ends by hand."""
    rows, up, lr, cycle = unlabelled(), three_models(model), 0.5, 3
    x, start = jnp.asarray(rows.x), mean_of(up.params, up.n)
    distil = Training(epochs=7, batch=1000, lr=lr)
    algorithm = FedBE(model, unlabelled=rows, samples=0, distil=distil, cycle=cycle)
    labels = algorithm.labels(KEY, start, up, x)

    def cross_entropy(w):
        return -jnp.sum(labels * jax.nn.log_softmax(model.apply(w, x), axis=1), axis=1).mean()

    w, ends = start, []
    for number in range(7):
        step = lr * (1 - 0.6 * (number % cycle + 1) / cycle)
        w = jax.tree.map(lambda a, b, step=step: a - step * b, w, jax.grad(cross_entropy)(w))
        ends += [w] if (number + 1) % cycle == 0 else []
    expected = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *ends)
    state = algorithm.init_server(KEY)
    assert_close(algorithm.server(KEY, state, None, up).params, expected, 1e-5)
    assert float(cross_entropy(expected)) < float(cross_entropy(start)) - 1e-3


def test_be_holds_its_rows_in_the_state_and_not_in_the_program(model):
    algorithm = FedBE(model, unlabelled=unlabelled(3000), samples=1)
    state, up = algorithm.init_server(KEY), three_models(model)

    def constants(function, *arguments):
        return sum(np.size(constant) for constant in jax.make_jaxpr(function)(*arguments).consts)

    assert constants(algorithm.init_server, KEY) >= 3000 * 4
    assert constants(algorithm.server, KEY, state, None, up) < 3000
    assert hash(algorithm) == hash(dataclasses.replace(algorithm))
    assert algorithm.planned(5) == algorithm.planned(5)
    assert algorithm != dataclasses.replace(algorithm, unlabelled=unlabelled(3000))


# Ensemble


@pytest.mark.slow
@pytest.mark.parametrize("use", ["preset", "ensemble"])
def test_ensemble_of_one_is_fedavg(clients, model, use):
    ensemble = Ensemble(model, K=1, use=use, train=TRAIN, tune=TUNE)
    avg = FedAvg(model, train=TRAIN, tune=TUNE, uniform=True)
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (ensemble, avg))
    assert_close(part(one.state.theta), other.state.params, 1e-6)
    assert_close(part(adapted(one, clients).theta), adapted(other, clients).params, 1e-6)


def test_ensemble_averages_each_group_by_itself_and_leaves_empty_ones_alone(clients, model):
    ensemble = Ensemble(model, K=3, train=TRAIN)
    avg = FedAvg(model, train=TRAIN, uniform=True)
    simulation = Simulation(ensemble.planned(1), clients, seed=2)
    before = simulation.state.theta
    simulation.step()
    key = jax.random.fold_in(jax.random.key(2), 1)
    u = np.asarray(simulation.local.get(np.arange(len(clients))).u)
    groups = np.where(u == NONE, -1, np.floor(3 * u))
    assert (groups[clients.unseen] == -1).all()
    assert (groups[~clients.unseen] >= 0).all()
    for j in range(3):
        members = np.flatnonzero(groups == j)
        start = part(before, j)
        if not len(members):
            assert_same(part(simulation.state.theta, j), start)
            continue
        down = avg.broadcast(key, avg.init_server(key)._replace(params=start))
        each = [
            avg.client(jax.random.fold_in(key, int(i)), down, avg.init_local(key, None), rows_of(clients, i))[0]
            for i in members
        ]
        expected = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *(up.params for up in each))
        assert_close(part(simulation.state.theta, j), expected, 1e-6)
    assert len({*groups[~clients.unseen]}) > 1


@pytest.mark.slow
def test_ensemble_keeps_groups_and_makes_them_of_like_size(model):
    data = two_kinds(200, rows=4)
    simulation = simulated(Ensemble(model, K=4, train=TRAIN), data, 1)
    first = np.asarray(simulation.local.get(np.arange(200)).u)
    simulation.step()
    np.testing.assert_array_equal(simulation.local.get(np.arange(200)).u, first)
    counts = np.bincount(np.floor(4 * first).astype(int), minlength=4)
    assert counts.sum() == 200
    assert np.abs(counts - 50).max() < 4 * np.sqrt(200 * 0.25 * 0.75)


def test_ensemble_uses_the_preset_network_or_all(model):
    preset, all_of_them = (Ensemble(model, K=3, use=use, train=TRAIN, tune=TUNE) for use in ("preset", "ensemble"))
    down = preset.planned(1).broadcast(KEY, preset.init_server(KEY))
    x, data = jnp.ones((2, 4)), rows_of(two_kinds(1), 0)
    outputs = [model.apply(part(down.theta, j), x) for j in range(3)]
    fresh = preset.init_local(KEY, data)
    member = fresh._replace(u=jnp.float32(0.4))
    assert_close(list(preset.predict(KEY, down, fresh, x)), outputs, 1e-6)
    assert_close(list(preset.predict(KEY, down, member, x)), [outputs[1]] * 3, 1e-6)
    assert_close(list(all_of_them.predict(KEY, down, member, x)), outputs, 1e-6)
    avg = FedAvg(model, train=TRAIN, tune=TUNE)
    tuned = [
        avg.adapt(KEY, avg.broadcast(KEY, avg.init_server(KEY)._replace(params=part(down.theta, j))), None, data)
        for j in range(3)
    ]
    assert_close(part(preset.adapt(KEY, down, member, data).theta), tuned[1].params, 1e-6)
    every = all_of_them.adapt(KEY, down, member, data).theta
    for j in range(3):
        assert_close(part(every, j), tuned[j].params, 1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: FedPA(model, rho=-1.0), "rho is -1.0, but it weighs a covariance and must be at least 0"),
        (lambda model: FedPA(model, burn_in_epochs=5), "burn_in_epochs is 5 of 5 epochs, but each sample is an epoch"),
        (lambda model: FedPA(model, server_momentum=1.0), "the server's lr is 0.5 and its momentum 1.0, but"),
        (lambda model: FedPA(model).broadcast(KEY, FedPA(model).init_server(KEY)), "burn_in_rounds is not set and the run"),
        (lambda model: FedEM(model, K=0), "K is 0, but it is at least 1"),
        (lambda model: FedBE(model, samples=-1), "samples is -1, but it is at least 0"),
        (lambda model: FedBE(model, posterior="cauchy"), "posterior is 'cauchy', but it is gaussian or dirichlet"),
        (lambda model: FedBE(model).init_server(KEY), "FedBE distils on rows that the server has, but was given none"),
        (
            lambda model: FedBE(model, unlabelled=Unlabelled(np.zeros((3, 7), np.float32))).init_server(KEY),
            r"the server's rows have the shape \(7,\), but not the model's",
        ),
        (lambda model: FedPop(model, eta=-1.0), "eta is -1.0, but it is above 0"),
        (lambda model: FedEM(model, K=2.5).planned(3), "K is 2.5, but it is a whole number"),
        (lambda model: FedEM(model, train=Training(epochs=1.5)).planned(3), "epochs is 1.5, but it is a whole number"),
        (lambda model: FedPop(model, least=float("nan")).planned(3), "least is nan, but it is a number"),
        (lambda model: Unlabelled(np.zeros(3)), r"the unlabelled rows are float64\[3\], but they are numbers"),
        (
            lambda model: FedBE(mlp((4,), Normal()), unlabelled=unlabelled()).init_server(KEY),
            r"FedBE averages probabilities of classes, but the model has Normal\(scale=1.0\); use Categorical",
        ),
        (lambda model: Ensemble(model, K=0), "K is 0, but it is at least 1"),
        (lambda model: Ensemble(model, use="best"), "use is 'best', but it is preset or ensemble"),
    ],
)
def test_bad_settings_get_one_sentence(make, sentence, model):
    with pytest.raises(UserError, match=sentence):
        make(model)
