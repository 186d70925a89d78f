"""FedRep, FedRecon and kNN-Per against what is known exactly: special cases, least squares, scikit-learn, brute force."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same, simulated
from scipy.special import softmax
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from fedbayes import trees, wire
from fedbayes.algorithm import Data
from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedbabu import FedBABU
from fedbayes.algorithms.fedper import FedPer
from fedbayes.algorithms.fedrecon import FedRecon
from fedbayes.algorithms.fedrep import FedRep
from fedbayes.algorithms.knn_per import GRID, LEAST, KNNPer
from fedbayes.data import Clients
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Bernoulli, Categorical, Normal, from_functions, mlp
from fedbayes.primitives.training import Training, halves, mean_loss, shuffle

pytestmark = pytest.mark.slow  # what is special to methods of comparison; the table has what all must do

TRAIN = Training(epochs=2, batch=8, lr=0.1, momentum=0.5)
TUNE = Training(epochs=3, batch=8, lr=0.05)
FULL = Training(epochs=1, batch=1000, lr=0.3)
NONE = Training(epochs=0)
KEY = jax.random.key(3)


def rows_of(data, index, length=None):
    """A client's rows; its padding, where a length asks for some, holds numbers that would show anywhere."""
    count = int(data.train_counts[index])
    x, y, mask = (jnp.asarray(leaf[0]) for leaf in data.train([index], length or count))
    return Data(jnp.where(mask[:, None], x, 1e3), jnp.where(mask, y, 1), mask)


@functools.cache
def program(algorithm, method):
    """A method compiled, once for all tests of algorithms that are equal."""
    return jax.jit(getattr(algorithm, method))


def started(algorithm, data):
    """What a client receives and holds before round 1."""
    down = algorithm.broadcast(KEY, program(algorithm, "init_server")(KEY))
    return down, program(algorithm, "init_local")(jax.random.key(4), data)


def sgd(model, moving, fixed, data, steps, lr, momentum=0.0):
    """Full batches by hand: v ← m v + ∇, moving ← moving − lr v."""
    gradient = jax.jit(jax.grad(lambda moving: mean_loss(model, trees.merge(moving, fixed), data)))
    velocity = trees.zeros(moving)
    for _ in range(steps):
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient(moving))
        moving = jax.tree.map(lambda w, v: w - lr * v, moving, velocity)
    return moving


def two_layers():
    """y = xWh + noise: a quadratic in the head h, whose optimum is that of least squares on the features xW."""

    def init(key):
        one, other = jax.random.split(key)
        return {"body": jax.random.normal(one, (4, 2)), "head": jax.random.normal(other, (2, 1))}

    def apply(params, x):
        return x @ params["body"] @ params["head"]

    return from_functions(init, apply, Normal(scale=1.0), shape=(4,))


def regression(count=12, length=16):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(length, 4)), generator.normal(size=length)
    return Data(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jnp.arange(length) < count)


def least_squares(body, data):
    features, y = (np.asarray(part, np.float64)[np.asarray(data.mask)] for part in (data.x @ body, data.y))
    return np.linalg.lstsq(features, y, rcond=None)[0][:, None]


def two_kinds(count=16, rows=40):
    """Clients of two kinds with opposite labels: one network for all is right on half of the rows."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count * rows, 4)).astype(np.float32)
    y = ((x[:, 0] > 0) ^ np.repeat(np.arange(count) % 2 == 1, rows)).astype(np.int32)
    return Clients.build(x, y, np.repeat(np.arange(count), rows), test=0.3, name="kinds").hold_out(4, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedRep, FedRecon])
def test_a_shared_body_serves_clients_whose_labels_are_opposite(model, kind):
    train = Training(epochs=2, batch=10, lr=0.1, momentum=0.9)
    first = {FedRep: "head", FedRecon: "reconstruct"}[kind]
    algorithm = kind(model, train=train, **{first: dataclasses.replace(train, epochs=5)}, tune=Training(20, "sgd", 10, 0.1))
    summary = assess(simulated(algorithm, two_kinds(), 15), ("global", "adapted")).summary()
    assert summary["adapted"]["unseen"]["accuracy"]["rows"] > 0.9
    assert summary["global"]["unseen"]["accuracy"]["rows"] < 0.8


# FedRep


def test_rep_without_head_epochs_takes_the_steps_of_fedbabu_on_the_body(clients, model):
    data = rows_of(clients, 1)
    rep, babu = FedRep(model, head=NONE, train=TRAIN, population=False), FedBABU(model, train=TRAIN)
    down, local = started(rep, data)
    up, kept = program(rep, "client")(KEY, down, local, data)
    assert_same(kept.personal, local.personal)
    fixed = babu.broadcast(KEY, babu.init_server(KEY))._replace(body=down.shared, head=local.personal)
    expected, _ = program(babu, "client")(jax.random.split(KEY)[1], fixed, babu.init_local(KEY, data), data)
    assert_close(up.shared, expected.body, 1e-6)
    assert_close(up.loss, expected.loss, 1e-6)


def test_rep_and_fedper_take_the_same_first_step_of_the_body_where_the_head_stays(clients, model):
    """One full batch: FedPer's gradient in the body is that at the starting head."""
    data = rows_of(clients, 1)
    rep, per = FedRep(model, head=NONE, train=FULL, population=False), FedPer(model, train=FULL, population=False)
    down, local = started(rep, data)
    up, _ = program(rep, "client")(KEY, down, local, data)
    expected, other = program(per, "client")(KEY, started(per, data)[0], local, data)
    assert_close(up.shared, expected.shared, 1e-6)
    assert np.abs(other.personal["head"]["kernel"] - local.personal["head"]["kernel"]).max() > 1e-3


def test_rep_round_is_the_two_phases_written_down(clients, model):
    data = rows_of(clients, 1, 40)
    algorithm = FedRep(model, head=Training(3, "sgd", 1000, 0.2, 0.5), train=Training(2, "sgd", 1000, 0.1, 0.9))
    down, local = started(algorithm, data)
    up, kept = program(algorithm, "client")(KEY, down, local, data)
    personal = sgd(model, down.population.mean, down.shared, data, 3, 0.2, 0.5)
    assert_close(kept.personal, personal, 1e-6)
    assert_close(up.shared, sgd(model, down.shared, personal, data, 2, 0.1, 0.9), 1e-6)
    assert float(up.weight) == clients.train_counts[1]


def test_rep_head_phase_ends_at_least_squares_and_the_body_steps_from_there():
    model, data = two_layers(), regression()
    long = Training(epochs=3000, batch=100, lr=0.1, momentum=0.9)
    algorithm = FedRep(model, head=long, train=FULL, tune=long, uniform=True)
    down, local = started(algorithm, data)
    up, kept = program(algorithm, "client")(KEY, down, local, data)
    best = least_squares(down.shared["body"], data)
    np.testing.assert_allclose(kept.personal["head"], best, atol=1e-5)
    x, y = (np.asarray(part, np.float64)[:12] for part in (data.x, data.y))
    body = np.asarray(down.shared["body"], np.float64)
    expected = body - FULL.lr * x.T @ (x @ body @ best - y[:, None]) @ best.T / 12
    np.testing.assert_allclose(up.shared["body"], expected, atol=1e-5)
    assert float(up.weight) == 1
    np.testing.assert_allclose(program(algorithm, "adapt")(KEY, down, local, data).personal["head"], best, atol=1e-5)


def test_rep_head_has_a_schedule_of_its_own(model):
    head = Training(lr=0.4, decay_at=(0.5,), decay=0.5)
    algorithm = FedRep(model, head=head, train=Training(lr=0.1)).planned(10)
    state = algorithm.init_server(KEY)
    steps = [algorithm.broadcast(KEY, state._replace(round=jnp.int32(behind))) for behind in (4, 5)]
    np.testing.assert_allclose([(down.lr, down.head_lr) for down in steps], [(0.1, 0.4), (0.1, 0.2)])


def test_without_a_population_the_head_never_leaves_and_of_recon_only_its_start_is_sent(clients, model):
    for algorithm in (FedRep(model, train=TRAIN, population=False), FedRecon(model, train=TRAIN, population=False)):
        leaves = wire.manifest(algorithm, clients.example)
        wire.check(leaves)
        up = [leaf for leaf in leaves if leaf.message == "up"]
        assert all("head" not in leaf.path for leaf in up)
        assert {leaf.path for leaf in up} > {"weight", "loss"}
        sent = [leaf.path for leaf in leaves if leaf.message == "down" and "head/" in leaf.path]
        assert sent == ([] if isinstance(algorithm, FedRep) else ["start/head/bias", "start/head/kernel"])
        depends = {source for leaf in up for source in wire.sources(leaf) if source.startswith("local")}
        assert depends == ({"local/personal"} if isinstance(algorithm, FedRep) else set())


# FedRecon


def test_recon_without_reconstruction_is_sgd_on_everybody(clients, model):
    """One full batch, and all rows are query: the mean of Δ is lr times the gradient over all rows at l⁰."""
    algorithm = FedRecon(model, shared=True, reconstruct=NONE, train=FULL, server_lr=0.5, server_momentum=0.9, population=False)
    simulation = Simulation(algorithm.planned(3), clients)
    start, shared = simulation.state.start, simulation.state.shared
    everybody = [rows_of(clients, index) for index in clients.participants]
    pooled = Data(*(jnp.concatenate(parts) for parts in zip(*everybody, strict=True)))
    for _ in range(3):
        simulation.step()
    assert_close(simulation.state.shared, sgd(model, shared, start, pooled, 3, 0.5 * FULL.lr, 0.9), 1e-6)
    assert_same(simulation.state.start, start)


@pytest.mark.parametrize("shared", [False, True])
def test_recon_round_is_the_two_phases_written_down(clients, model, shared):
    data = rows_of(clients, 1, 40)
    algorithm = FedRecon(
        model, shared=shared, reconstruct=Training(4, "sgd", 1000, 0.2, 0.5), train=Training(2, "sgd", 1000, 0.1, 0.9)
    )
    down, local = started(algorithm, data)
    up, kept = program(algorithm, "client")(KEY, down, local, data)
    support, query = (data, data) if shared else halves(jax.random.split(KEY, 3)[0], data)
    personal = sgd(model, down.start, down.shared, support, 4, 0.2, 0.5)
    g = sgd(model, down.shared, personal, query, 2, 0.1, 0.9)
    assert_close(up.delta, jax.tree.map(jnp.subtract, down.shared, g), 1e-6)
    count = int(clients.train_counts[1])
    assert float(up.weight) == (count if shared else count - count // 2)
    assert not jax.tree.leaves((local, kept))


def test_recon_halves_divide_the_rows_and_only_those():
    divide = jax.jit(lambda data: [half.mask for half in halves(KEY, data)])
    for count in (0, 1, 2, 7, 8):
        data = regression(count, 8)
        first, second = (np.asarray(mask) for mask in divide(data))
        assert not (first & second).any()
        assert ((first | second) == np.asarray(data.mask)).all()
        assert first.sum() == count // 2
        longer = divide(regression(count, 50))
        np.testing.assert_array_equal(longer[0][:8], first)
        np.testing.assert_array_equal(longer[1][:8], second)


def test_recon_halves_are_drawn_anew_and_each_row_is_in_either():
    data = regression(10)
    masks = jax.jit(jax.vmap(lambda key: halves(key, data)[0].mask))(jax.random.split(KEY, 400))
    shares = np.asarray(masks, float).mean(axis=0)
    assert np.abs(shares[:10] - 0.5).max() < 0.1
    assert not shares[10:].any()


def test_recon_of_one_row_trains_under_the_start(clients, model):
    data = rows_of(clients, 1)._replace(mask=jnp.arange(int(clients.train_counts[1])) < 1)
    algorithm = FedRecon(model, reconstruct=TRAIN, train=FULL)
    down, local = started(algorithm, data)
    up, _ = program(algorithm, "client")(KEY, down, local, data)
    assert float(up.weight) == 1
    step = sgd(model, down.shared, down.start, data, 1, FULL.lr)
    assert_close(up.delta, jax.tree.map(jnp.subtract, down.shared, step), 1e-6)


def test_recon_adapts_to_least_squares_whatever_was_before():
    data = regression()
    algorithm = FedRecon(two_layers(), tune=Training(epochs=3000, batch=100, lr=0.1, momentum=0.9))
    down, fresh = started(algorithm, data)
    adapt = program(algorithm, "adapt")
    found = adapt(KEY, down, fresh, data)
    np.testing.assert_allclose(found.personal["head"], least_squares(down.shared["body"], data), atol=1e-5)
    assert_same(adapt(KEY, down, found, data), found)
    predict = program(algorithm, "predict")
    np.testing.assert_allclose(predict(KEY, down, found, data.x)[0], data.x @ down.shared["body"] @ found.personal["head"])
    np.testing.assert_allclose(predict(KEY, down, fresh, data.x)[0], data.x @ down.shared["body"] @ down.start["head"])


# kNN-Per


@pytest.fixture(scope="module")
def digits():
    """A network for digits, 83 rows of them to remember and 50 to predict."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    data = Data(jnp.asarray(x[:90]), jnp.asarray(y[:90]), jnp.arange(90) < 83)
    return mlp((64,), Categorical(10), hidden=(16,)), data, jnp.asarray(x[100:150])


def remembered(algorithm, data):
    """The shared model at its start, and what a client has after `adapt`."""
    down, fresh = started(algorithm, data)
    return down, program(algorithm, "adapt")(KEY, down, fresh, data)


def distribution(algorithm, down, local, x):
    draws = program(algorithm, "predict")(KEY, down, local, x)
    assert draws.shape == (1, len(x), algorithm.model.likelihood.outputs)
    return softmax(np.asarray(draws[0], np.float64), axis=1)


def p_of_w(model, down, x):
    """What the shared model says."""
    return softmax(np.asarray(model.apply(down.params, x), np.float64), axis=1)


def sklearn_kNN(algorithm, down, x, y, queries):
    """p_kNN by scikit-learn, with a column for each label and ε added as the docstring says."""
    classifier = KNeighborsClassifier(algorithm.k, weights=lambda d: np.exp(-d / algorithm.scale), algorithm="brute")
    features = jax.jit(algorithm.model.features)
    classifier.fit(np.asarray(features(down.params, x), np.float64), np.asarray(y))
    found = np.zeros((len(queries), 10))
    found[:, classifier.classes_] = classifier.predict_proba(np.asarray(features(down.params, queries), np.float64))
    return (1 - 10 * LEAST) * found + LEAST


def test_knn_with_no_share_is_fedavg(clients, model):
    knn, avg = KNNPer(model, train=TRAIN, share=0.0), FedAvg(model, train=TRAIN)
    one, other = (simulated(algorithm, clients, 4, cohort=3) for algorithm in (knn, avg))
    assert_same(one.state, other.state)
    data = rows_of(clients, 1)
    local = program(knn, "adapt")(KEY, one.down(), one.fresh, data)
    expected = program(avg, "predict")(KEY, other.down(), other.fresh, data.x)
    found = program(knn, "predict")(KEY, one.down(), local, data.x)
    np.testing.assert_allclose(found, jax.nn.log_softmax(expected, axis=2), atol=1e-6)
    assert_same(program(knn, "predict")(KEY, one.down(), one.fresh, data.x), expected)


def test_knn_of_one_neighbour_and_no_model_says_the_label_of_the_nearest_row(digits):
    model, data, x = digits
    algorithm = KNNPer(model, k=1, share=1.0)
    down, local = remembered(algorithm, data)
    features = [np.asarray(model.features(down.params, rows), np.float64) for rows in (x, data.x[:83])]
    nearest = np.linalg.norm(features[0][:, None] - features[1][None], axis=2).argmin(axis=1)
    p = distribution(algorithm, down, local, x)
    np.testing.assert_array_equal(p.argmax(axis=1), np.asarray(data.y)[nearest])
    np.testing.assert_allclose(p.max(axis=1), 1 - 9 * LEAST, atol=1e-6)
    own = distribution(algorithm, down, local, data.x[:83])
    np.testing.assert_array_equal(own.argmax(axis=1), data.y[:83])


@pytest.mark.parametrize(("k", "scale"), [(10, 1.0), (4, 0.1)])
def test_knn_is_that_of_scikit_learn(digits, k, scale):
    model, data, x = digits
    algorithm = KNNPer(model, k=k, scale=scale, share=1.0)
    down, local = remembered(algorithm, data)
    expected = sklearn_kNN(algorithm, down, data.x[:83], data.y[:83], x)
    np.testing.assert_allclose(distribution(algorithm, down, local, x), expected, atol=1e-5)
    mixed = distribution(algorithm, down, local._replace(share=jnp.float32(0.3)), x)
    np.testing.assert_allclose(mixed, 0.3 * expected + 0.7 * p_of_w(model, down, x), atol=1e-5)


@pytest.mark.parametrize("choose", ["likelihood", "accuracy"])
def test_knn_share_is_the_best_of_the_grid_on_held_out_rows(digits, choose):
    model, data, _ = digits
    algorithm = KNNPer(model, k=2, scale=0.5, criterion=choose, fold=4)
    down, local = remembered(algorithm, data)
    order = np.asarray(shuffle(KEY, data))[:83]
    held, others = order[:21], order[21:]
    kNN = sklearn_kNN(algorithm, down, data.x[others], data.y[others], data.x[held])
    p_w = p_of_w(model, down, data.x[held])
    merits = []
    for share in np.linspace(0, 1, 101):
        p, y = share * kNN + (1 - share) * p_w, np.asarray(data.y)[held]
        right = p[np.arange(21), y]
        merits.append(np.log(right).mean() if choose == "likelihood" else (p.argmax(axis=1) == y).mean())
    best = int(np.argmax(merits))
    assert float(local.share) == GRID[best]
    assert 0 < best < 100
    assert merits[best] > max(merits[0], merits[-1] if choose == "likelihood" else 0) + 0.01
    assert int(local.datastore.mask.sum()) == 83


def test_knn_does_not_see_the_padding(digits):
    model, data, x = digits
    algorithm = KNNPer(model, k=5)
    short = jax.tree.map(lambda leaf: leaf[:83], data)
    junk = Data(*(jnp.pad(leaf, [(0, 40)] + [(0, 0)] * (leaf.ndim - 1)) for leaf in short))
    junk = junk._replace(x=jnp.where(junk.mask[:, None], junk.x, x[:1]), y=jnp.where(junk.mask, junk.y, 7))
    down, local = remembered(algorithm, short)
    _, other = remembered(algorithm, junk)
    assert float(local.share) == float(other.share)
    p, q = (distribution(algorithm, down, one, x) for one in (local, other))
    np.testing.assert_allclose(p, q, atol=1e-6)
    assert not np.asarray(other.datastore.features)[83:].any()


def test_knn_remembers_as_many_rows_as_it_may(digits):
    model, data, _ = digits
    features = np.asarray(model.features(started(KNNPer(model), data)[0].params, data.x))
    for capacity, count in ((20, 20), (100, 83)):
        _, local = remembered(KNNPer(model, capacity=capacity), data)
        assert local.datastore.mask.shape == (capacity,)
        assert int(local.datastore.mask.sum()) == count
        own = np.abs(np.asarray(local.datastore.features)[:count, None] - features[None]).max(axis=2) < 1e-6
        assert (own[:, :83].sum(axis=1) == 1).all()
        assert len(np.unique(own.argmax(axis=1))) == count
        np.testing.assert_array_equal(np.asarray(data.y)[own.argmax(axis=1)], local.datastore.y[:count])


def test_knn_of_few_rows(digits):
    """With fewer than k all of them vote; with one there is nothing to choose λ by, with none there is no vote."""
    model, data, x = digits
    chosen, forced = KNNPer(model), KNNPer(model, share=1.0)
    for count in (0, 1, 3):
        few = data._replace(mask=jnp.arange(90) < count)
        down, local = remembered(chosen, few)
        if count < 2:
            assert float(local.share) == 0
            np.testing.assert_allclose(distribution(chosen, down, local, x), p_of_w(model, down, x), atol=1e-6)
        _, local = remembered(forced, few)
        expected = p_of_w(model, down, x)
        if count:
            expected = sklearn_kNN(dataclasses.replace(forced, k=count), down, data.x[:count], data.y[:count], x)
        np.testing.assert_allclose(distribution(forced, down, local, x), expected, atol=1e-5)


def test_knn_of_one_logit_is_that_of_two_labels(clients):
    single = mlp((4,), Bernoulli(), hidden=(8,))

    def readout(params, features):
        logit = single.readout(params, features)
        return jnp.concatenate([jnp.zeros_like(logit), logit], axis=1)

    def apply(params, x):
        return readout(params, single.features(params, x))

    double = from_functions(single.init, apply, Categorical(2), features=single.features, readout=readout)
    data = rows_of(clients, 1, 40)
    (down, one), (_, two) = (remembered(KNNPer(model, k=3), data) for model in (single, double))
    assert float(one.share) == float(two.share) > 0
    logit = program(KNNPer(single, k=3), "predict")(KEY, down, one, data.x)
    assert logit.shape == (1, 40, 1)
    expected = distribution(KNNPer(double, k=3), down, two, data.x)[:, 1]
    np.testing.assert_allclose(jax.nn.sigmoid(logit[0, :, 0]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: FedRecon(model, server_lr=0.0), "the server's lr is 0.0 and its momentum 0.0, but the step is above 0"),
        (lambda model: FedRecon(model, server_momentum=1.0), "the server's lr is 1.0 and its momentum 1.0, but"),
        (lambda model: FedRep(model, personal=("tail",)).init_server(KEY), "no parameter lies under 'tail'"),
        (lambda model: KNNPer(model, k=0), "k is 0, but it is at least 1"),
        (lambda model: KNNPer(model, fold=1), "fold is 1, but it is at least 2"),
        (lambda model: KNNPer(model, capacity=0), "capacity is 0, but it is at least 1"),
        (lambda model: KNNPer(model, scale=0.0), "scale is 0.0, but it divides distances and must be above 0"),
        (
            lambda model: KNNPer(model, share=1.5),
            "share is 1.5, but it is the share of the neighbours and must be at least 0",
        ),
        (lambda model: KNNPer(model, criterion="brier"), "criterion is 'brier', but it is likelihood or accuracy"),
        (
            lambda model: KNNPer(mlp((4,), Normal())).init_server(KEY),
            r"kNN-Per counts labels of neighbours, but the model has Normal\(scale=1.0\); use Categorical or Bernoulli",
        ),
        (
            lambda model: KNNPer(dataclasses.replace(model, features=None)).init_server(KEY),
            "kNN-Per compares what the last layer of a network sees, but the model mlp has no features; give",
        ),
    ],
)
def test_bad_settings_get_one_sentence(make, sentence, model):
    with pytest.raises(UserError, match=sentence):
        make(model)
