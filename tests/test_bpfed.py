"""BPFed and Gaussian networks against what is known exactly: special cases, conjugate regression, moments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, simulated

from fedbayes import trees, wire
from fedbayes.algorithm import Data
from fedbayes.algorithms.bpfed import BPFed
from fedbayes.algorithms.fedper import FedPer
from fedbayes.algorithms.fedrep import FedRep
from fedbayes.algorithms.lg_fedavg import LGFedAvg
from fedbayes.data import Clients
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Categorical, Normal, cnn, from_functions, mlp
from fedbayes.primitives import gaussian, gaussian_network
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.training import Training

TRAIN = Training(epochs=2, batch=8, lr=0.1, momentum=0.5)
TUNE = Training(epochs=3, batch=8, lr=0.05)
KEY = jax.random.key(3)
POINT = -200.0
"""ρ of a deviation of 0."""


# Special cases


@pytest.mark.parametrize("population", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("local", [pytest.param(True, marks=pytest.mark.slow), False])
def test_without_deviations_and_divergence_it_is_fedper(clients, model, local, population):
    options = {"train": TRAIN, "tune": TUNE, "population": population}
    bpfed = BPFed.paper(model, rho=POINT, kl=0.0, uniform=False, local_reparametrisation=local, draws=1, **options)
    one, other = (simulated(method, clients, 3, cohort=3) for method in (bpfed, FedPer(model, **options)))
    assert_close(one.state.zeta.mean, other.state.shared, 1e-6)
    assert_close(one.state.population, other.state.population, 1e-6)
    figures = [assess(simulation).scores for simulation in (one, other)]
    assert list(figures[0]) == [*(["global"] if population else []), "personal", "adapted"]
    for mode in figures[0]:
        assert_close(figures[0][mode].log_score, figures[1][mode].log_score, 1e-4)  # sums over rows of numbers near 1


def test_in_turns_it_is_fedrep(clients, model):
    options = {"head": TRAIN, "train": TUNE, "tune": TUNE, "uniform": True}
    bpfed = BPFed.paper(model, population=True, rho=POINT, kl=0.0, alternate=True, **options)
    one, other = (simulated(method, clients, 3, cohort=3) for method in (bpfed, FedRep(model, **options)))
    assert_close(one.state.zeta.mean, other.state.shared, 1e-6)


def test_with_the_split_turned_round_it_is_lg_fedavg(clients, model):
    options = {"train": TRAIN, "tune": TUNE}
    bpfed = BPFed.paper(model, personal=("body",), population=True, rho=POINT, kl=0.0, uniform=False, **options)
    one, other = (simulated(method, clients, 3, cohort=3) for method in (bpfed, LGFedAvg(model, train=TRAIN, tune=TUNE)))
    assert_close(one.state.zeta.mean, other.state.shared, 1e-6)


# Exact


def line(width):
    """y = x·w + noise of deviation ½; the first half of w is shared, the second personal."""
    half = width // 2

    def init(key):
        return {"shared": jnp.zeros(half), "own": jnp.zeros(width - half)}

    def apply(params, x):
        return (x @ jnp.concatenate([params["shared"], params["own"]]))[:, None]

    return from_functions(init, apply, Normal(scale=0.5), shape=(width,))


def regression(count, width=4, orthogonal=False, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, width))
    if orthogonal:
        x = np.linalg.qr(x)[0] * np.sqrt(count)
    y = x @ np.array([1.0, -0.5, 0.3, 2.0])[:width] + 0.5 * generator.normal(size=count)
    return Data(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), jnp.ones(count, bool))


def mean_field(data, mean, sigma):
    """The best mean-field Gaussian of a regression with noise ½ under N(mean, diag σ²): its mean, and 1/√Λ_jj."""
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y, np.float64)
    precision = x.T @ x / 0.25 + np.diag(1 / sigma**2)
    return np.linalg.solve(precision, x.T @ y / 0.25 + mean / sigma**2), 1 / np.sqrt(np.diag(precision))


def exact(rho=0.0, **options):
    """BPFed that takes many full-batch steps with many draws."""
    defaults = {"rho": rho, "personal": ("own",), "kl": 1.0, "M": 512, "local_reparametrisation": False}
    train = Training(epochs=600, optimiser="adam", batch=1000, lr=0.02)
    return BPFed(line(4), **{**defaults, "train": train, "tune": train, **options})


def settled(algorithm, zeta, eta, data, key=KEY):
    """One client's round, with ever smaller steps; the prior stays what it was."""
    client = jax.jit(functools.partial(algorithm._fit, reinforce=algorithm.reinforce), static_argnames="training")
    q = prior = merged(eta, zeta)
    for number, lr in enumerate((0.02, 0.005, 0.001)):
        q, _ = client(
            q, None, prior, training=algorithm.train, lr=jnp.float32(lr), key=jax.random.fold_in(key, number), data=data
        )
    return q


def parts(q):
    return (
        np.concatenate([q.mean["shared"], q.mean["own"]]),
        np.asarray(gaussian.deviation(jnp.concatenate([q.rho["shared"], q.rho["own"]]))),
    )


def test_regression_reaches_the_mean_field_optimum():
    algorithm, data = exact(), regression(30)
    server, local = algorithm.init_server(KEY), algorithm.init_local(KEY, data)
    q = settled(algorithm, server.zeta, local.eta, data)
    mean, sigma = parts(q)
    best_mean, best_sigma = mean_field(data, np.zeros(4), np.full(4, np.log(2.0)))
    np.testing.assert_allclose(mean, best_mean, atol=0.05 * best_sigma.min())
    np.testing.assert_allclose(sigma, best_sigma, rtol=0.02)


def test_two_rounds_on_halves_are_one_round_on_both():
    """With orthogonal columns the posterior is mean-field, so Bayes' rule can be taken in two steps."""
    algorithm, data = exact(), regression(40, orthogonal=True)
    first, second = (Data(*(jnp.asarray(np.asarray(leaf)[place::2]) for leaf in data)) for place in (0, 1))
    # Each half has to be orthogonal too, for its posterior to be mean-field.
    first, second = (half._replace(x=jnp.asarray(np.linalg.qr(half.x)[0] * np.sqrt(20.0))) for half in (first, second))
    both = Data(*(jnp.concatenate(pair) for pair in zip(first, second, strict=True)))
    server, local = algorithm.init_server(KEY), algorithm.init_local(KEY, data)
    at_once = parts(settled(algorithm, server.zeta, local.eta, both))
    q = settled(algorithm, server.zeta, local.eta, first)
    zeta = MeanField({"shared": q.mean["shared"], "own": None}, {"shared": q.rho["shared"], "own": None})
    eta = MeanField({"shared": None, "own": q.mean["own"]}, {"shared": None, "own": q.rho["own"]})
    in_two = parts(settled(algorithm, zeta, eta, second, jax.random.key(8)))
    np.testing.assert_allclose(in_two[0], at_once[0], atol=0.1 * at_once[1].min())
    np.testing.assert_allclose(in_two[1], at_once[1], rtol=0.05)


@pytest.mark.parametrize("reinforce", [True, False])
@pytest.mark.parametrize("alternate", [False, True])
def test_a_round_is_the_fit_from_its_prior(clients, model, alternate, reinforce):
    """In the second round the prior is what the client kept of the first and what the server made of it, not the start."""
    training = Training(2, "adam", 8, lr=0.02)
    algorithm = BPFed.paper(model, alternate=alternate, reinforce=reinforce, head=training, train=training)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([0], 8))
    server, local = algorithm.init_server(KEY), algorithm.init_local(jax.random.key(4), data)
    client, fit = jax.jit(algorithm.client), jax.jit(functools.partial(algorithm._fit, training=training, reinforce=reinforce))
    for round in range(2):
        down, key = algorithm.broadcast(KEY, server), jax.random.key(round)
        up, kept = client(key, down, local, data)
        assert up.zeta.first["head"]["kernel"] is None
        assert kept.eta.mean["body"]["dense0"]["kernel"] is None
        server = algorithm.server(KEY, server, down, up)
        first, second = jax.random.split(key)
        if alternate:
            eta, _ = fit(local.eta, down.zeta, local.eta, lr=down.lr, key=first, data=data)
            zeta, _ = fit(down.zeta, eta, down.zeta, lr=down.lr, key=second, data=data)
            q = merged(eta, zeta)
        else:
            prior = merged(local.eta, down.zeta)
            q, _ = fit(prior, None, prior, lr=down.lr, key=key, data=data)
        found = merged(kept.eta, server.zeta)
        assert_close(found.mean, q.mean, 1e-6)
        assert_close(jax.tree.map(gaussian.deviation, found.rho), jax.tree.map(gaussian.deviation, q.rho), 1e-6)
        local = kept


def merged(eta, zeta):
    return MeanField(*(trees.merge(*pair) for pair in zip(eta, zeta, strict=True)))


# Averages


@pytest.mark.parametrize(
    ("average", "mean", "sigma"),
    [
        ("wasserstein", 2.0, 0.75),
        ("precision", (1 / 0.25 + 3 / 1.0) / (1 / 0.25 + 1.0), np.sqrt(2 / (1 / 0.25 + 1.0))),
        ("plain", 2.0, None),
    ],
)
def test_averages_of_two_gaussians(model, average, mean, sigma):
    algorithm = BPFed(model, average=average)
    two = [MeanField({"w": jnp.array([m])}, {"w": gaussian.rho_of(jnp.array([s]))}) for m, s in ((1.0, 0.5), (3.0, 1.0))]
    sent = jax.tree.map(lambda a, b: (a + b) / 2, *(algorithm._sent(one) for one in two))
    found = algorithm._received(sent)
    assert_close(found.mean["w"], jnp.array([mean]), 1e-6)
    if sigma is None:
        assert_close(found.rho["w"], (two[0].rho["w"] + two[1].rho["w"]) / 2, 1e-6)
    else:
        assert_close(gaussian.deviation(found.rho["w"]), jnp.array([sigma]), 1e-6)


# What leaves


def test_without_a_population_only_the_shared_part_leaves(clients, model):
    algorithm = BPFed.paper(model)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([0], 8))
    report = wire.text(wire.manifest(algorithm, data))
    assert "zeta" in report
    assert "head" not in report


# Gaussian networks


def test_deviation_and_its_inverse():
    rho = jnp.linspace(-60.0, 20.0, 4001)
    expected = np.logaddexp(np.asarray(rho, np.float64), 0)
    np.testing.assert_allclose(gaussian.deviation(rho), expected, rtol=5e-7)
    np.testing.assert_allclose(gaussian.deviation(gaussian.rho_of(gaussian.deviation(rho))), expected, rtol=2e-6)
    np.testing.assert_allclose(
        jax.vmap(jax.grad(gaussian.deviation))(rho), 1 / (1 + np.exp(-np.asarray(rho, np.float64))), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["mlp", pytest.param("cnn", marks=pytest.mark.slow), "tied"])
def test_local_noise_has_the_moments_of_drawn_weights(kind):
    if kind == "tied":  # one matrix used twice: what is drawn for one use has to hold for the other

        def apply(w, x):
            return x @ w @ w

        def init(key):
            return jax.random.normal(key, (4, 4))

        x, q = jax.random.normal(KEY, (3, 4)), MeanField(init(KEY), jnp.full((4, 4), -1.0))
    else:
        network = mlp((6, 6), Categorical(3), hidden=(8,)) if kind == "mlp" else cnn((6, 6), Categorical(3), (2, 2), (8,))
        apply, x, q = network.apply, jax.random.normal(KEY, (3, 6, 6)), gaussian_network.init(network, KEY, -1.5)
    split = jax.random.split(jax.random.key(1), 20000)
    drawn = jax.jit(jax.vmap(lambda key: apply(gaussian.draw(key, q), x)))(split)
    local = jax.jit(jax.vmap(lambda key: gaussian_network.locally(apply, key, q, x)))(split)
    error = np.asarray(drawn.std(axis=0)) / np.sqrt(len(split))
    assert (np.abs(drawn.mean(axis=0) - local.mean(axis=0)) < 6 * error).all()
    np.testing.assert_allclose(local.std(axis=0), drawn.std(axis=0), rtol=0.05)


def test_noise_from_one_pool_has_the_moments_of_new_noise_in_every_direction():
    """Single weights, sums over the inputs of a unit, over units, over two layers: mean 0, the right variance, no memory."""
    shape = {"kernel": jnp.zeros((40, 20)), "bias": jnp.zeros(20)}
    q = MeanField(shape, jax.tree.map(lambda leaf: jnp.full(leaf.shape, gaussian.rho_of(jnp.float32(1.0))), shape))
    pool = jax.random.normal(KEY, (820 + gaussian_network.LARGE,))
    draws = jax.jit(jax.vmap(lambda key: gaussian.draw(key, q, pool)))(jax.random.split(jax.random.key(1), 20000))
    kernel, bias = np.asarray(draws["kernel"]), np.asarray(draws["bias"])
    directions = {
        "weight": kernel[:, 3, 5],
        "unit": kernel[:, :, 5].sum(axis=1) / np.sqrt(40),
        "row": kernel[:, 3].sum(axis=1) / np.sqrt(20),
        "all": kernel.sum(axis=(1, 2)) / np.sqrt(800),
        "layers": (kernel[:, :, 5].sum(axis=1) + bias[:, 5]) / np.sqrt(41),
    }
    for name, values in directions.items():
        assert abs(values.mean()) < 0.03, name
        assert abs(values.var() - 1) < 0.06, name
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03, name


def test_large_networks_draw_from_a_pool_that_changes_from_step_to_step():
    network = mlp((28, 28), Categorical(10), hidden=(32,))
    q = gaussian_network.init(network, KEY, 0.0)
    assert sum(leaf.size for leaf in jax.tree.leaves(q.mean)) >= gaussian_network.LARGE

    def fit(q, key, pool, batch):
        return jnp.sum(gaussian.draw(key, q, pool)["body"]["dense0"]["bias"] * jnp.arange(32.0))

    data = Data(jnp.zeros((4, 28, 28)), jnp.zeros(4, int), jnp.ones(4, bool))
    still = Training(epochs=1, batch=4, lr=0.0)
    values = [
        float(gaussian_network.follow(network, fit, None, None, q, q, still, jnp.float32(0), jax.random.key(seed), data)[2])
        for seed in range(3)
    ]
    assert len(set(values)) == 3
    twice = Training(epochs=2, batch=4, lr=0.0)
    both = float(gaussian_network.follow(network, fit, None, None, q, q, twice, jnp.float32(0), jax.random.key(0), data)[2])
    assert both != pytest.approx(values[0])  # the mean of two steps whose noise differs


def test_a_step_with_its_copy_by_hand():
    """(10) and (11) by SGD, on a minibatch: q moves under the fixed prior, then the copy moves towards q, both divided by n."""
    network, data = line(4), regression(30)
    algorithm = BPFed(network, ("own",), kl=2.0, rho=-1.0, reinforce=True, train=Training(epochs=1, batch=30, lr=0.1))
    server, local = algorithm.init_server(KEY), algorithm.init_local(KEY, data)
    prior = MeanField(*(trees.merge(*pair) for pair in zip(local.eta, server.zeta, strict=True)))
    q = jax.tree.map(lambda leaf: leaf + 0.3, prior)
    copy, _ = algorithm._fit(q, None, prior, algorithm.train, jnp.float32(0.1), KEY, data, True)
    steps = jax.random.fold_in(jax.random.fold_in(KEY, 0), np.uint32(0xFFFFFFFF))
    key = jax.random.fold_in(jax.random.fold_in(steps, 0), 0)
    slope = jax.grad(lambda q: gaussian_network.loss(network, key, q, data) + 2 / 30 * gaussian.kl(q, prior))(q)
    moved = jax.tree.map(lambda leaf, g: leaf - 0.1 * g, q, slope)
    slope = jax.grad(lambda w: 2 / 30 * gaussian.kl(moved, w))(prior)
    expected = jax.tree.map(lambda leaf, g: leaf - 0.1 * g, prior, slope)
    assert_close(copy, expected, 1e-5)


@pytest.mark.slow
def test_minibatches_weigh_the_divergence_by_all_rows():
    """With kl = 2 the rows count half; ten of thirty rows at a time come to the same optimum."""
    algorithm = exact(kl=2.0, M=64, train=Training(epochs=300, optimiser="adam", batch=10, lr=0.02))
    data = regression(30)
    mean, sigma = parts(settled(algorithm, algorithm.init_server(KEY).zeta, algorithm.init_local(KEY, data).eta, data))
    x, y = np.asarray(data.x, np.float64), np.asarray(data.y, np.float64)
    precision = x.T @ x / 0.25 / 2 + np.eye(4) / np.log(2.0) ** 2
    np.testing.assert_allclose(mean, np.linalg.solve(precision, x.T @ y / 0.25 / 2), atol=0.15 * sigma.min())
    np.testing.assert_allclose(sigma, 1 / np.sqrt(np.diag(precision)), rtol=0.05)


@pytest.mark.parametrize("kind", ["constant", "low rank", "gram", "whole numbers"])
def test_a_product_that_has_as_many_entries_as_rows_by_accident_is_no_layer(kind):
    applies = {
        "constant": lambda w, x: x @ (jnp.arange(6.0).reshape(3, 2) @ w),
        "low rank": lambda w, x: x @ (jnp.ones((3, 2)) @ jax.nn.relu(w)),
        "gram": lambda w, x: x @ (x.T @ jnp.concatenate([w, w[:1]])),
        "whole numbers": lambda w, x: x[:, :2] @ jnp.round(4 * w).astype(jnp.int32).astype(jnp.float32),
    }
    apply, x = applies[kind], jax.random.normal(KEY, (3, 3))
    q = MeanField(jnp.ones((2, 2)), jnp.full((2, 2), 0.0))
    split = jax.random.split(jax.random.key(1), 20000)
    drawn = jax.jit(jax.vmap(lambda key: apply(gaussian.draw(key, q), x)))(split)
    local = jax.jit(jax.vmap(lambda key: gaussian_network.locally(apply, key, q, x)))(split)
    np.testing.assert_allclose(local.std(axis=0), drawn.std(axis=0), rtol=0.05)


def test_padding_rows_change_no_other_rows_noise():
    q, x = MeanField(jnp.ones((2, 3)), jnp.zeros((2, 3))), jax.random.normal(KEY, (5, 3))
    for apply in (lambda w, x: x @ w.T, lambda w, x: jax.vmap(lambda row: w @ row)(x)):
        few, many = (gaussian_network.locally(apply, KEY, q, x[:n]) for n in (3, 5))
        np.testing.assert_allclose(few, many[:3], rtol=1e-6)


def test_local_noise_differs_between_rows_and_drawn_weights_do_not():
    network = mlp((4,), Categorical(2), hidden=())
    q, x = gaussian_network.init(network, KEY, 0.0), jnp.ones((2, 4))
    local, drawn = gaussian_network.locally(network.apply, KEY, q, x), network.apply(gaussian.draw(KEY, q), x)
    assert not np.allclose(local[0], local[1])
    assert np.allclose(drawn[0], drawn[1])


def test_local_noise_has_finite_slopes_where_nothing_comes_in():
    network = mlp((4,), Categorical(2), hidden=(3,))
    q = gaussian_network.init(network, KEY, -3.0)
    slope = jax.grad(lambda q: gaussian_network.locally(network.apply, KEY, q, jnp.zeros((2, 4))).sum())(q)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))


@pytest.mark.slow
def test_deviations_are_less_for_more_rows():
    """What small data leaves open shows in predictions: the epistemic part falls with the rows of a client."""
    generator = np.random.default_rng(0)
    client = np.repeat([0, 1], [20, 400])
    x = generator.normal(size=(len(client), 4)).astype(np.float32)
    y = (x[:, 0] + 0.5 * generator.normal(size=len(client)) > 0).astype(np.int64)
    network = mlp((4,), Categorical(2), hidden=())
    algorithm = BPFed(network, ("head/bias",), kl=1.0, rho=-1.0, train=Training(30, "adam", 20, lr=0.02), draws=100)
    scores = []
    for index in range(2):
        one = Clients.build(x[client == index], y[client == index], client[client == index], test=0.3, name="one")
        scores.append(assess(simulated(algorithm, one, 1), ("personal",)).summary()["personal"]["participating"])
    few, many = (score["mutual_information"]["rows"] for score in scores)
    assert many < few


def test_bad_options_are_refused(model):
    for options, word in (({"M": 0}, "M"), ({"kl": -1.0}, "kl"), ({"average": "mean"}, "average"), ({"draws": 0}, "draws")):
        with pytest.raises(UserError, match=word):
            BPFed(model, **options)
    for options, word in (({"rho": -200.0}, "rho"), ({"train": Training(weight_decay=0.1)}, "weight_decay")):
        with pytest.raises(UserError, match=word):
            BPFed(model, **options)
    with pytest.raises(UserError, match='give prior="last", or leave population=True'):
        BPFed(model, population=False)
    with pytest.raises(UserError, match="covers every parameter"):
        BPFed(model, ("body", "head")).init_server(KEY)


def test_rounds_of_adapt_have_the_last_posterior_as_prior(clients, model):
    bpfed = BPFed(model, prior="last", whole=False, train=TRAIN, tune=TUNE)
    down, local = bpfed.broadcast(KEY, bpfed.init_server(KEY)), bpfed.init_local(KEY, None)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([1], 30))
    twice = dataclasses.replace(bpfed, tune_rounds=2).adapt(KEY, down, local, data)
    once = bpfed.adapt(jax.random.fold_in(KEY, 0), down, local, data)
    assert_close(twice, bpfed.adapt(jax.random.fold_in(KEY, 1), down, once, data), 1e-6)
    with pytest.raises(UserError, match="tune_rounds is 0"):
        BPFed(model, tune_rounds=0)


def test_the_population_is_the_prior_of_every_round(clients, model):
    """What a client kept of its last round changes neither its next one nor `adapt`, but what it predicts."""
    bpfed = BPFed(model, train=TRAIN, tune=TUNE, draws=2)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([1], 30))
    down, new = bpfed.broadcast(KEY, bpfed.init_server(KEY)), bpfed.init_local(KEY, data)
    up, kept = bpfed.client(KEY, down, new, data)
    again, _ = bpfed.client(KEY, down, kept, data)
    assert_close(again, up, 0)
    assert_close(bpfed.adapt(KEY, down, kept, data), bpfed.adapt(KEY, down, new, data), 0)
    assert not np.allclose(bpfed.predict(KEY, down, kept, data.x), bpfed.predict(KEY, down, new, data.x))
    last, _ = dataclasses.replace(bpfed, prior="last").client(KEY, down, kept, data)
    assert not np.allclose(last.zeta.first["body"]["dense0"]["kernel"], up.zeta.first["body"]["dense0"]["kernel"])


def test_adapt_fits_all_layers_or_the_personal_ones_alone(clients, model):
    bpfed = BPFed(model, train=TRAIN, tune=TUNE)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([1], 30))
    down, new = bpfed.broadcast(KEY, bpfed.init_server(KEY)), bpfed.init_local(KEY, data)
    whole, head = bpfed.adapt(KEY, down, new, data), dataclasses.replace(bpfed, whole=False).adapt(KEY, down, new, data)
    assert head.zeta is None
    before = down.zeta.mean["body"]["dense0"]["kernel"]
    assert float(jnp.abs(whole.zeta.mean["body"]["dense0"]["kernel"] - before).max()) > 1e-3
    slow = dataclasses.replace(bpfed, tune=Training(epochs=50, batch=8, lr=1e-3))
    moved = []
    for kl in (0.0, 1.0):  # ζ is the prior of the layers that it gives
        found = dataclasses.replace(slow, kl=kl).adapt(KEY, down, new, data)
        moved.append(float(jnp.abs(found.zeta.mean["body"]["dense0"]["kernel"] - before).max()))
    assert moved[1] < moved[0] / 5
