"""FedHB against what is known exactly: special cases, conjugate posteriors, and the bound."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, simulated

from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedhb_mixture import FedHBMixture, squared_distances
from fedbayes.algorithms.fedhb_niw import FedHBNIW, Up, drop_columns
from fedbayes.algorithms.fedprox import FedProx
from fedbayes.data import Clients
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Categorical, Normal, from_functions, mlp, network
from fedbayes.models.beliefs import Beliefs
from fedbayes.primitives import several
from fedbayes.primitives.training import Training

TRAIN = Training(epochs=2, batch=8, lr=0.1, momentum=0.5)
TUNE = Training(epochs=3, batch=8, lr=0.05)
ROWS = 20


@pytest.fixture(scope="module")
def equal():
    """Five clients of 20 training rows each."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(5 * ROWS, 4)).astype(np.float32)
    y = (x @ np.array([2.0, -1.0, 0.5, 1.0]) + generator.normal(size=5 * ROWS) > 0).astype(np.int32)
    return Clients.build(x, y, np.repeat(np.arange(5), ROWS), test=0.0, name="equal")


def adapted(simulation, data, index=0):
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([index], ROWS))
    return simulation.algorithm.adapt(jax.random.key(3), simulation.down(), simulation.fresh, rows)


def niw(model, **options):
    return FedHBNIW.paper(model, **{"head": (), "p": 1.0, "lambda0": 0.0, "train": TRAIN, "tune": TUNE, **options})


def mixture(model, **options):
    return FedHBMixture.paper(model, **{"head": (), "K": 1, "shrink": False, "train": TRAIN, "tune": TUNE, **options})


@pytest.mark.parametrize("cohort", [None, 3])
def test_niw_without_dropout_and_with_a_fixed_scale_is_fedprox(equal, model, cohort):
    mu = 0.7
    prox = FedProx(model, mu=mu, train=TRAIN, tune=TUNE, uniform=True)
    one, other = (
        simulated(algorithm, equal, 5, cohort=cohort)
        for algorithm in (niw(model, prior="fixed", sigma0=(mu * ROWS) ** -0.5), prox)
    )
    assert_close(one.state.m0, other.state.params, 1e-6)
    assert_close(adapted(one, equal).m, adapted(other, equal).params, 1e-6)


@pytest.mark.parametrize("cohort", [None, 3])
def test_mixture_of_one_is_fedprox(equal, model, cohort):
    mu = 0.7
    prox = FedProx(model, mu=mu, train=TRAIN, tune=TUNE, uniform=True)
    one, other = (simulated(algorithm, equal, 5, cohort=cohort) for algorithm in (mixture(model, sigma2=1 / (mu * ROWS)), prox))
    assert_close(jax.tree.map(lambda leaf: leaf[0], one.state.r), other.state.params, 1e-6)
    assert_close(adapted(one, equal).m, adapted(other, equal).params, 1e-6)


def test_mixture_of_one_has_the_shrunken_mean_on_the_server(equal, model):
    sigma2 = 0.5
    plain, shrunken = (simulated(mixture(model, sigma2=sigma2, shrink=shrink), equal, 1).state.r for shrink in (False, True))
    assert_close(shrunken, jax.tree.map(lambda leaf: 5 / (5 + sigma2) * leaf, plain), 1e-6)


def test_flat_priors_are_fedavg(equal, model):
    average = simulated(FedAvg(model, train=TRAIN, tune=TUNE, uniform=True), equal, 5).state.params
    assert_close(simulated(niw(model, sigma0=1e6), equal, 5).state.m0, average, 1e-6)
    assert_close(simulated(niw(model, sigma0=1e6, prior="fixed"), equal, 5).state.m0, average, 1e-6)
    flat = simulated(mixture(model, sigma2=1e12), equal, 5).state.r
    assert_close(jax.tree.map(lambda leaf: leaf[0], flat), average, 1e-6)


NOISE = 0.5


def coordinates(d):
    """y = w_k + noise where x names coordinate k: every coordinate is a normal mean of its own."""

    def init(key):
        return {"body": {"w": jnp.zeros((d,))}}

    def apply(params, x):
        return (x @ params["body"]["w"])[:, None]

    return from_functions(init, apply, Normal(scale=NOISE), shape=(d,))


def normal_means(d, clients=6, rows=4):
    """Clients with `rows` rows of each of d coordinates; coordinate 0 has the same numbers whatever d is."""
    generators = [np.random.default_rng([5, k]) for k in range(d)]
    theta = np.stack([1.0 + 0.8 * generator.normal(size=clients) for generator in generators], axis=1)
    y = np.stack([theta[:, [k]] + NOISE * generator.normal(size=(clients, rows)) for k, generator in enumerate(generators)], 2)
    x = np.tile(np.repeat(np.eye(d, dtype=np.float32), rows, axis=0), (clients, 1))
    flat = y.transpose(0, 2, 1).reshape(-1).astype(np.float32)
    return Clients.build(x, flat, np.repeat(np.arange(clients), d * rows), test=0.0), y.mean(axis=1)


FULL = Training(epochs=300, batch=10_000, lr=0.05)


def test_server_and_clients_reach_the_posterior_of_the_conjugate_model():
    """Block by block: m_i is normal-normal given q(φ), and q(φ) is the textbook's NIG posterior given the m_i."""
    d, N, rows, sigma0 = 3, 6, 4, 0.3
    data, means = normal_means(d)
    algorithm = FedHBNIW.paper(
        coordinates(d), head=(), p=1.0, epsilon=0.0, lambda0=1.0, sigma0=sigma0, train=dataclasses.replace(FULL, lr=0.3)
    )
    state = simulated(algorithm, data, 40).state
    m0, V0 = np.zeros(d), np.full(d, (N + 3) * sigma0**2)
    for _ in range(40):
        precision, observed = (N + 3) / V0, rows / NOISE**2
        m = (observed * means + precision * m0) / (observed + precision)
        m0, V0 = _textbook(m, (N + 3) * sigma0**2)
    np.testing.assert_allclose(state.m0["body"]["w"], m0, rtol=1e-4)
    np.testing.assert_allclose(state.V0["body"]["w"], V0, rtol=1e-4)


def _textbook(m, Psi, kappa=1.0):
    """Posterior of a normal's mean and variance, in the form with the sample mean and scatter (Murphy 2007, section 6)."""
    N, mean = len(m), m.mean(axis=0)
    return N * mean / (kappa + N), Psi + ((m - mean) ** 2).sum(axis=0) + kappa * N / (kappa + N) * mean**2


def test_implicit_steps_with_momentum_end_where_the_pull_and_the_rows_balance():
    d, rows = 3, 4
    data, means = normal_means(d)
    with pytest.warns(UserWarning, match="literal"):
        algorithm = FedHBNIW.paper(
            coordinates(d), head=(), p=1.0, prior="literal", lambda0=1.0, train=dataclasses.replace(FULL, lr=0.1, momentum=0.9)
        ).planned(1, **data.facts)
    key = jax.random.key(0)
    state = algorithm.init_server(key)
    down = algorithm.broadcast(key, state._replace(m0={"body": {"w": jnp.full(d, 0.3)}}))
    up, _ = jax.jit(algorithm.client)(key, down, algorithm.init_local(key, None), _rows(data))
    precision, observed = np.asarray(algorithm._precision(down)["body"]["w"]), rows / NOISE**2
    expected = (observed * means[0] + precision * 0.3) / (observed + precision) - 0.3
    np.testing.assert_allclose(up.delta["body"]["w"], expected, rtol=1e-3)


def test_results_do_not_depend_on_the_number_of_other_coordinates():
    def first(d):
        # The mean over rows has d times as many rows: a step d times as long is the same step for each coordinate.
        train = dataclasses.replace(FULL, lr=0.05 * d, epochs=30)
        data, _ = normal_means(d)
        state = simulated(FedHBNIW.paper(coordinates(d), head=(), p=1.0, train=train), data, 4).state
        return float(state.m0["body"]["w"][0]), float(state.V0["body"]["w"][0])

    np.testing.assert_allclose(first(1), first(40), rtol=2e-5)


def test_empirical_bayes_finds_the_scale_that_makes_the_clients_most_likely():
    """Against a grid over the marginal likelihood of the m_i, which stay where they are as the prior is all but flat."""
    d, N = 40, 6
    data, means = normal_means(d)
    algorithm = FedHBNIW.paper(
        coordinates(d),
        head=(),
        p=1.0,
        epsilon=1e-6,
        lambda0=0.0,
        sigma0=3.0,
        empirical=True,
        train=dataclasses.replace(FULL, lr=2.0),
    ).planned(1, **data.facts)
    key, state = jax.random.key(0), algorithm.init_server(jax.random.key(0))
    up = jax.tree.map(jnp.zeros_like, algorithm.client(key, algorithm.broadcast(key, state), None, _rows(data))[0])
    m = jnp.asarray(means, jnp.float32)
    for _ in range(200):
        old = state.m0["body"]["w"]
        up = up._replace(
            delta={"body": {"w": (m - old[None]).mean(axis=0)}}, square={"body": {"w": ((m - old[None]) ** 2).mean(axis=0)}}
        )
        state = algorithm.server(key, state, None, up)
    scatter = ((means - means.mean(axis=0)) ** 2).sum(axis=0)
    grid = np.exp(np.linspace(-4, 4, 4001))
    evidence = [(3 * np.log(s) - (N + 3) * np.log(s + scatter)).sum() for s in grid]
    np.testing.assert_allclose(state.Sigma0["body"]["w"], grid[np.argmax(evidence)], rtol=3e-3)


def _rows(data):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([0], int(data.train_counts[0])))


def test_draws_of_a_new_client_are_student_t():
    data, _ = normal_means(2, clients=3)
    algorithm = FedHBNIW.paper(coordinates(2), head=(), sigma0=0.5, p=1.0, lambda0=1.0).planned(1, **data.facts)
    state = algorithm.init_server(jax.random.key(0))
    down = algorithm.broadcast(jax.random.key(0), state)
    w = jax.vmap(lambda key: algorithm.student_t(key, down)["body"]["w"])(jax.random.split(jax.random.key(1), 100_000))
    # t_6 with scale² = (l0 + 1)/l0 V0/6 where V0 = 6 · 0.25 and l0 = 4: variance 6/4 times that; E|t| of it in closed form.
    scale = np.sqrt(5 / 4 * 0.25)
    np.testing.assert_allclose(w.std(axis=0), scale * np.sqrt(6 / 4), rtol=0.02)
    np.testing.assert_allclose(np.quantile(w, [0.05, 0.95], axis=0)[1], 1.943 * scale, rtol=0.02)
    assert abs(np.corrcoef(np.abs(w).T)[0, 1]) < 0.02  # each weight has a variance of its own


@pytest.mark.parametrize("kind", ["niw", "mixture"])
def test_the_negative_bound_does_not_rise_on_a_fixed_cohort(kind, equal):
    """Where clients solve their own problem each round; a linear model, so that they can."""
    model = mlp((4,), Categorical(2), hidden=())
    train = Training(epochs=400, batch=ROWS, lr=0.3)
    algorithm = (
        FedHBNIW.paper(model, head=(), p=1.0, sigma0=0.3, elbo=True, train=train)
        if kind == "niw"
        else FedHBMixture.paper(model, head=(), K=2, sigma2=0.1, noise=1.0, shrink=True, elbo=True, train=train, start="best")
    )
    simulation = Simulation(algorithm.planned(12, **equal.facts), equal)
    bounds = [simulation.step().metrics["bound"] for _ in range(12)]
    assert all(after > before - 1e-3 for before, after in itertools.pairwise(bounds))
    assert bounds[-1] > bounds[0] + 0.1


def test_columns_are_kept_with_probability_p():
    m = {"kernel": jnp.ones((500, 3)), "bias": jnp.ones(3), "conv": jnp.ones((2, 2, 400, 5)), "scale": jnp.ones(())}
    m["depthwise"] = jnp.ones((3, 3, 400))
    dropped = drop_columns(jax.random.key(0), m, 0.7)
    rows = np.asarray(dropped["kernel"])
    assert (rows == rows[:, :1]).all()
    assert abs(rows[:, 0].mean() - 0.7) < 0.06
    channels = np.asarray(dropped["conv"])
    assert (channels == channels[:1, :1, :, :1]).all()
    assert abs(channels[0, 0, :, 0].mean() - 0.7) < 0.07
    filters = np.asarray(dropped["depthwise"])
    assert (filters == filters[:1, :1]).all()
    assert abs(filters[0, 0].mean() - 0.7) < 0.07
    assert set(np.unique(dropped["bias"])) in ({0.0}, {1.0})
    assert drop_columns(jax.random.key(0), m, 1.0) is m
    scales = np.asarray(drop_columns(jax.random.key(0), {"norm": {"scale": jnp.ones(400)}}, 0.7)["norm"]["scale"])
    assert abs(scales.mean() - 0.7) < 0.07


def test_dropout_is_part_of_what_a_client_minimises():
    """Two inputs that are always 1 and a target of 1: (1 − p(a + b))² + p(1 − p)(a² + b²) is least at a = b = 1/(1 + p)."""
    p = 0.5
    model = from_functions(
        lambda key: {"body": {"kernel": jnp.full((2, 1), 0.5)}},
        lambda params, x: x @ params["body"]["kernel"],
        Normal(scale=1.0),
        shape=(2,),
    )
    data = Clients.build(np.ones((8, 2), np.float32), np.ones(8, np.float32), np.repeat([0, 1], 4), test=0.0)
    train = Training(epochs=6000, batch=8, lr=0.003)
    algorithm = niw(model, p=p, sigma0=1e4, prior="fixed", train=train).planned(1, **data.facts)
    key = jax.random.key(0)
    down = algorithm.broadcast(key, algorithm.init_server(key))
    up, _ = jax.jit(algorithm.client)(key, down, algorithm.init_local(key, None), _rows(data))
    np.testing.assert_allclose(0.5 + up.delta["body"]["kernel"], 1 / (1 + p), atol=0.03)


def test_the_server_is_equation_18():
    """By hand, from three of five clients, with every term in it."""
    N, p, epsilon, lambda0, sigma0, nu0 = 5, 0.9, 0.3, 1.0, 0.4, 3
    algorithm = FedHBNIW.paper(coordinates(2), head=(), p=p, epsilon=epsilon, lambda0=lambda0, sigma0=sigma0, N=N, D=100)
    key = jax.random.key(0)
    state = algorithm.init_server(key)._replace(m0={"body": {"w": jnp.array([0.5, -1.0])}})
    m = np.array([[1.0, -0.5], [0.2, -2.0], [0.9, 0.3]])
    delta = m - np.array([0.5, -1.0])
    mean, square = ({"body": {"w": jnp.asarray(values.mean(0))}} for values in (delta, delta**2))
    up = Up(mean, square, jnp.float32(0), None)
    after = algorithm.server(key, state, None, up)
    m0 = p / (N + lambda0) * N / 3 * m.sum(0)
    rho = p * (m - m0) ** 2 + (1 - p) * m0**2
    V0 = (N + 3) / (N + nu0) * ((N + 3) * sigma0**2 + N * epsilon**2 + lambda0 * m0**2 + N / 3 * rho.sum(0))
    np.testing.assert_allclose(after.m0["body"]["w"], m0, rtol=1e-5)
    np.testing.assert_allclose(after.V0["body"]["w"], V0, rtol=1e-5)


def test_the_literal_prior_has_the_printed_numbers():
    """ν0 = d + 2, n0 = |D| + d + 2, l0 = |D| + 1; the mode of q(Σ) gives n0 + d + 1; Student's t has |D| + 3 degrees."""
    with pytest.warns(UserWarning, match="literal"):
        algorithm = FedHBNIW.paper(coordinates(7), head=(), prior="literal", lambda0=1.0, N=5, D=100)
    assert algorithm._prior({"body": {"w": jnp.zeros(7)}}) == (9, 109, 101, 117, 103)


def with_head():
    """y = body + head, both at 0 before rows are seen."""
    return from_functions(
        lambda key: {"body": {"w": jnp.zeros(1)}, "head": {"b": jnp.full(1, 0.4)}},
        lambda params, x: x * (params["body"]["w"] + params["head"]["b"])[None],
        Normal(scale=NOISE),
        shape=(1,),
    )


@pytest.mark.parametrize("kind", ["niw", "mixture"])
def test_personalisation_has_a_prior_for_the_head(kind):
    """Body and head share what the rows ask for in the ratio of their variances, here equal ones."""
    variance, rows = 0.09, 4
    data = Clients.build(np.ones((8, 1), np.float32), np.full(8, 2.0, np.float32), np.repeat([0, 1], rows), test=0.0)
    tune = Training(epochs=2000, batch=8, lr=0.05)
    algorithm = (
        FedHBNIW.paper(with_head(), p=1.0, prior="fixed", sigma0=variance**0.5, train=TRAIN, tune=tune)
        if kind == "niw"
        else FedHBMixture.paper(
            with_head(), K=1, sigma2=variance, train=TRAIN, tune=tune, noise=0.0, gate=mlp((1,), Categorical(2), ())
        )
    ).planned(1, **data.facts)
    key = jax.random.key(0)
    m = algorithm.adapt(key, algorithm.broadcast(key, algorithm.init_server(key)), None, _rows(data)).m
    step = (2.0 - 0.4) * variance / (2 * variance + NOISE**2 / rows)
    np.testing.assert_allclose(m["body"]["w"], step, rtol=1e-3)
    np.testing.assert_allclose(m["head"]["b"], 0.4 + step, rtol=1e-3)


@pytest.mark.parametrize("sigma0", [0.02, 0.1])
def test_a_client_of_one_row_ends_where_pull_and_row_balance(sigma0):
    """Though a gradient step on its pull would be far outside the stable range."""
    data = Clients.build(np.ones((61, 1), np.float32), np.full(61, 2.0, np.float32), np.repeat([0, 1], [1, 60]), test=0.0)
    train = Training(epochs=1000, batch=8, lr=0.1, momentum=0.9)
    assert train.lr / sigma0**2 > 2 * (1 + train.momentum)
    algorithm = niw(coordinates(1), sigma0=sigma0, train=train).planned(1, **data.facts)
    key = jax.random.key(0)
    up, _ = jax.jit(algorithm.client)(key, algorithm.broadcast(key, algorithm.init_server(key)), None, _rows(data))
    expected = 2.0 / NOISE**2 / (1 / NOISE**2 + 1 / sigma0**2)
    np.testing.assert_allclose(up.delta["body"]["w"], expected, rtol=1e-3)


@pytest.mark.parametrize("sigma2", [0.0004, 0.01])
def test_a_mixtures_client_of_one_row_does_too(sigma2):
    data = Clients.build(np.ones((61, 1), np.float32), np.full(61, 2.0, np.float32), np.repeat([0, 1], [1, 60]), test=0.0)
    train = Training(epochs=1000, batch=8, lr=0.1, momentum=0.9)
    assert train.lr / sigma2 > 2 * (1 + train.momentum)
    gate = mlp((1,), Categorical(2), ())
    algorithm = FedHBMixture.paper(coordinates(1), head=(), K=2, sigma2=sigma2, train=train, gate=gate, start="best").planned(
        1, **data.facts
    )
    key = jax.random.key(0)
    apart = {"body": {"w": jnp.array([[0.0], [sigma2**0.5]])}}  # so that both have a share
    down = algorithm.broadcast(key, algorithm.init_server(key)._replace(r=apart))
    up, _ = jax.jit(algorithm.client)(key, down, None, _rows(data))
    c, moved = np.array(up.c, np.float64), np.array(up.moved["body"]["w"], np.float64)[:, 0]
    w = float(moved[0] / c[0])
    assert 0.01 < c[0] < 0.99
    np.testing.assert_allclose((2.0 - w) / NOISE**2, moved.sum() / sigma2, rtol=1e-3)


def two_groups(clients, seed=0, rows=30):
    """Half the clients see rows around +2 and label them by a line, the others around −2 and label them the other way."""
    generator = np.random.default_rng(seed)
    group = np.arange(clients) % 2
    side = np.repeat(group, rows)
    x = generator.normal(size=(clients * rows, 4)).astype(np.float32)
    y = ((x[:, 0] > 0) ^ (side == 1)).astype(np.int32)
    x[:, 3] += np.where(side == 1, -2.0, 2.0)
    return Clients.build(x, y, np.repeat(np.arange(clients), rows), test=0.3, name="groups"), group


@pytest.mark.slow
def test_prototypes_find_the_groups_and_the_gate_sends_a_new_client_to_its_own():
    data, group = two_groups(40)
    data = data.hold_out(10, seed=1)
    model = mlp((4,), Categorical(2), hidden=(16,))
    algorithm = FedHBMixture.paper(
        model, head=(), K=2, noise=1.0, start="best", train=Training(epochs=5, batch=20, lr=0.1, momentum=0.9)
    )
    simulation = simulated(algorithm, data, 25, cohort=10)
    down, found = simulation.down(), []
    for index in range(len(data)):
        rows = _client(data, index)
        losses = [float(squared_distances(simulation.algorithm._best(down, rows), down.r)[j]) for j in range(2)]
        shares = np.asarray(algorithm.gate_shares(down, rows.x)).mean(axis=0)
        found.append((int(np.argmin(losses)), int(np.argmax(shares))))
    found = np.array(found)
    for column, members in ((0, ~data.unseen), (1, data.unseen)):  # prototypes of those that trained, the gate for new ones
        agreement = (found[members, column] == group[members]).mean()
        assert max(agreement, 1 - agreement) >= 0.95
    assert (found[:, 0] == found[:, 1]).mean() >= 0.95
    accuracy = assess(simulation).summary()["global"]["unseen"]["accuracy"]["rows"]
    assert accuracy > 0.9  # one network for all could be right in half of the rows where it does not see x[3]


def test_the_gate_of_numbers_sends_a_new_client_to_its_own_group():
    """A linear network with learnt noise, in units far from 1; one line for all would be off by the numbers' own deviation."""
    generator, client = np.random.default_rng(0), np.repeat(np.arange(30), 40)
    side = np.where(client % 2 == 1, -1, 1)
    x = generator.normal(size=(len(client), 4)).astype(np.float32)
    y = (100 + 30 * side * x[:, 0]).astype(np.float32)
    x[:, 3] += 4 * side
    data = Clients.build(x, y, client, test=0.3).hold_out(8, seed=1)
    train = Training(epochs=5, batch=20, lr=0.1, momentum=0.9)
    algorithm = FedHBMixture(network("linear", data), noise=1.0, start="best", train=train)
    simulation = simulated(algorithm, data, 15)
    assert assess(simulation, modes=("global",)).summary()["global"]["unseen"]["rmse"]["rows"] < 10


def _client(data, index):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([index], int(data.train_counts[index])))


def test_no_component_dies(equal, model):
    """A prototype far from everyone stays where it is, and starts again beside the one that has the clients."""
    algorithm = mixture(model, K=2, shrink=True, patience=3).planned(9, **equal.facts)
    simulation = Simulation(algorithm, equal)
    far = jax.tree.map(lambda leaf: leaf.at[1].add(50.0), simulation.state.r)
    simulation.state = simulation.state._replace(r=far)
    algorithm_best = dataclasses.replace(algorithm, start="best")
    simulation.algorithm = algorithm_best
    for round in range(1, 4):
        simulation.step()
        norm = float(sum(jnp.sum(leaf[1] ** 2) for leaf in jax.tree.leaves(simulation.state.r)))
        if round < 3:
            assert norm > 1000
            assert int(simulation.state.idle[1]) == round
    apart = squared_distances(jax.tree.map(lambda leaf: leaf[0], simulation.state.r), simulation.state.r)[1]
    assert 0 < float(apart) < 1


def test_the_literal_prior_warns_and_its_implicit_step_is_stable(equal):
    model = mlp((4,), Categorical(2), hidden=(400,))
    with pytest.warns(UserWarning, match="the literal prior pulls harder the more weights a network has") as said:
        algorithm = FedHBNIW.paper(model, prior="literal", head=(), train=TRAIN).planned(3, **equal.facts)
    assert len(said) == 1
    simulation = simulated(algorithm, equal, 3)
    of = algorithm._prior(simulation.state.m0)
    strength = of.pull / min(float(leaf.max()) for leaf in jax.tree.leaves(simulation.state.V0)) / ROWS
    assert strength * TRAIN.lr > 2  # a gradient step of this size would have diverged
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(simulation.state))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda model: FedHBNIW.paper(model, p=0.0), "p is 0.0, but it is the share of columns that are kept"),
        (lambda model: FedHBNIW.paper(model, sigma0=0.0), "sigma0 is 0.0, but it is a standard deviation and must be above 0"),
        (lambda model: FedHBNIW.paper(model, prior="wide"), "prior is 'wide', but it is coordinate, literal or fixed"),
        (lambda model: FedHBNIW.paper(model).init_server(jax.random.key(0)), "N is not set: FedHB's server counts the clients"),
        (lambda model: FedHBMixture.paper(model, K=0), "K is 0, but it is at least 1"),
        (lambda model: FedHBMixture.paper(model, K=2.5).planned(3), "K is 2.5, but it is a whole number"),
        (lambda model: FedHBNIW.paper(model, head_scale=float("nan")).planned(3), "head_scale is nan, but it is a number"),
        (
            lambda model: FedHBMixture.paper(model, head=(), head_scale=3.0, N=3).init_server(jax.random.key(0)),
            "head_scale is 3, but no layer is frozen",
        ),
        (lambda model: FedHBMixture.paper(model, start="far"), "start is 'far', but it is centre or best"),
        (lambda model: FedHBNIW(model, start="last"), "start and pool are for the Gaussian form, but form is spike"),
        (lambda model: FedHBNIW(model, form="gaussian", empirical=True), "the Gaussian form learns its prior"),
        (lambda model: FedHBNIW.paper(model, prior="fixed", empirical=True), "Σ0 is learnt for the coordinate prior"),
    ],
)
def test_bad_settings_get_one_sentence(make, sentence, model):
    with pytest.raises(UserError, match=sentence):
        make(model)


@pytest.mark.parametrize("start", ["mean", "last"])
def test_gaussian_clients_learn_the_variance_of_a_normal_hierarchy(start):
    """Against restricted maximum likelihood and the exact posterior under it, though a round is a single step."""
    d, N, rows = 4, 20, 4
    data, means = normal_means(d, clients=N, rows=rows)
    algorithm = FedHBNIW(
        coordinates(d), form="gaussian", start=start, temperature=0.9
    )  # given, so that all clients train in all rounds
    algorithm = dataclasses.replace(algorithm, tune=Training(epochs=60, batch=50, lr=0.1, momentum=0.5))
    simulation = simulated(algorithm, data, 100)
    state, v = simulation.state, NOISE**2 / rows
    exact = ((means - means.mean(axis=0)) ** 2).sum() / (d * (N - 1)) - v
    sigma2 = float(state.apart.variance["body"]["w"])
    assert abs(sigma2 / exact - 1) < 0.1
    deviation = np.sqrt((sigma2 + v) / N)
    np.testing.assert_allclose(state.m0["body"]["w"], means.mean(axis=0), atol=0.05 * deviation)
    np.testing.assert_allclose(sigma2 / state.apart.clients["body"]["w"], deviation**2, rtol=0.1)
    if start == "last":
        kept = simulation.local.get(np.arange(N))
        w = sigma2 / (sigma2 + v)
        variance = w * v + (1 - w) ** 2 * deviation**2
        expected = w * means + (1 - w) * means.mean(axis=0)
        np.testing.assert_allclose(kept.m["body"]["w"], expected, atol=0.05 * np.sqrt(variance))
        np.testing.assert_allclose(kept.s2["body"]["w"], np.full((N, d), variance), rtol=0.1)


@pytest.mark.parametrize("head", [(), ("head",)])
@pytest.mark.parametrize("start", ["mean", "last"])
def test_beliefs_of_the_gaussian_form_go_back_to_where_they_came_from(start, head, model, clients):
    """The state that holds the same beliefs predicts the same, and other scales are found again."""
    algorithm = FedHBNIW(model, form="gaussian", start=start, head=head, sigma0=0.5, train=TRAIN, tune=TRAIN)
    simulation = simulated(algorithm, clients, 6)
    algorithm, key = simulation.algorithm, jax.random.key(3)
    down = simulation.down()._replace(heat=jnp.float32(0.3))
    one = int(clients.participants[0])
    kept = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), simulation.local.get(np.array([one])))
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([one], 32))
    fresh = jax.tree.map(jnp.asarray, simulation.fresh)
    adapted = algorithm.adapt(key, down, kept, rows)
    scales = []
    for local in (fresh, kept, adapted):
        q, prior = algorithm.beliefs(down, local)
        same = algorithm.with_beliefs(down, local, Beliefs(q, None))
        assert_close(algorithm.predict(key, *same, rows.x), algorithm.predict(key, down, local, rows.x), 2e-4)
        for found, place in ((q, 0), (prior, 1)):
            # Layers of the head that are not trained have a prior of their own, which stays.
            deviation = jax.tree.map(lambda leaf: 0.7 * leaf, found.deviation)
            if head and place == 1:
                deviation = {**deviation, "head": found.deviation["head"]}
            other = found._replace(deviation=deviation)
            given = Beliefs(other, None) if place == 0 else Beliefs(None, other)
            assert_close(algorithm.beliefs(*algorithm.with_beliefs(down, local, given))[place], other, 1e-5, 1e-4)
        scales.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(q.deviation)]))
    assert not np.allclose(scales[0], scales[2])
    assert algorithm.deterministic is None


def test_the_default_form_has_no_settings_of_the_gaussian_one(model):
    assert "temperature" not in FedHBNIW(model).choices
    assert "temperature" in FedHBNIW(model, form="gaussian").choices


def test_shares_of_the_gate_are_exact():
    outputs = jnp.log(jnp.array([[[0.9, 0.1]], [[0.2, 0.8]], [[0.5, 0.5]]]))
    shares = jnp.array([[0.537, 0.2, 0.263]])
    draws = several.blended(Categorical(2), outputs, several.overlaps(shares, 5))
    mixed = jax.nn.softmax(draws, axis=-1).mean(axis=0)
    np.testing.assert_allclose(mixed[0, 0], 0.537 * 0.9 + 0.2 * 0.2 + 0.263 * 0.5, rtol=1e-5)
