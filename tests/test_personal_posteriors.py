"""pFedBayes and FedPop against what is known exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from conftest import assert_same, simulated

from fedbayes import trees
from fedbayes.algorithm import Data
from fedbayes.algorithms import fedpop
from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedpop import FedPop
from fedbayes.algorithms.pfedbayes import Local, PFedBayes
from fedbayes.data import Clients
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Categorical, Normal, from_functions, mlp
from fedbayes.primitives import gaussian
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.training import Training

NOISE, ROWS = 0.5, 8


def line():
    """y = x · w + noise, one feature in the body and one in the head."""

    def init(key):
        return {"body": {"w": jnp.zeros(1)}, "head": {"w": jnp.zeros(1)}}

    def apply(params, x):
        return (x @ jnp.concatenate([params["body"]["w"], params["head"]["w"]]))[:, None]

    return from_functions(init, apply, Normal(scale=NOISE), shape=(2,))


def data(seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(ROWS, 2)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0]) + NOISE * generator.normal(size=ROWS)).astype(np.float32)
    return Data(jnp.asarray(x), jnp.asarray(y), jnp.ones(ROWS, bool))


def test_kl_is_numpyro_s():
    q, p = (
        MeanField({"w": jax.random.normal(jax.random.key(i), (5,))}, {"w": jax.random.normal(jax.random.key(i + 9), (5,))})
        for i in (0, 1)
    )
    a, b = (dist.Normal(one.mean["w"], jax.nn.softplus(one.rho["w"])) for one in (q, p))
    np.testing.assert_allclose(gaussian.kl(q, p), dist.kl_divergence(a, b).sum(), rtol=1e-5)


def test_pfedbayes_fits_the_best_mean_field_posterior():
    """ζ = 1 and one batch: q maximises the usual bound, whose optimum is known for a linear model."""
    rows = data()
    algorithm = PFedBayes(
        line(), zeta=1.0, personal_steps=1, spread=0.0, rho=0.5413, tune=Training(4000, "adam", ROWS, lr=0.01)
    )
    state = algorithm.init_server(jax.random.key(0))  # w = N(0, 1) for each weight: log(1 + e^0.5413) = 1
    down = algorithm.broadcast(jax.random.key(0), state)
    fresh = algorithm.init_local(jax.random.key(0), rows)
    q = algorithm.adapt(jax.random.key(1), down, fresh, rows).q
    x, y = np.asarray(rows.x, float), np.asarray(rows.y, float)
    precision = x.T @ x / NOISE**2 + np.eye(2)
    mean = np.linalg.solve(precision, x.T @ y / NOISE**2)
    deviation = 1 / np.sqrt(np.diag(precision))  # of the best factorised Gaussian
    found = np.concatenate([q.mean["body"]["w"], q.mean["head"]["w"]])
    sigma = jax.nn.softplus(jnp.concatenate([q.rho["body"]["w"], q.rho["head"]["w"]]))
    np.testing.assert_allclose(found, mean, atol=0.3 * deviation.min())
    np.testing.assert_allclose(sigma, deviation, rtol=0.15)


def test_pfedbayes_copy_of_w_moves_towards_q_and_the_server_averages_it():
    rows = data()
    algorithm = PFedBayes(line(), train=Training(1, "adam", ROWS, lr=0.01), beta=0.5)
    state = algorithm.init_server(jax.random.key(0))
    down = algorithm.broadcast(jax.random.key(0), state)
    q = MeanField({"body": {"w": jnp.ones(1)}, "head": {"w": -jnp.ones(1)}}, state.w.rho)
    up, local = algorithm.client(jax.random.key(1), down, Local(q, jnp.bool_(True)), rows)
    assert float(gaussian.kl(local.q, up.w)) < float(gaussian.kl(local.q, state.w))
    new = algorithm.server(jax.random.key(2), state, down, up)
    halfway = jax.tree.map(lambda a, b: (a + b) / 2, state.w, up.w)
    np.testing.assert_allclose(new.w.mean["body"]["w"], halfway.mean["body"]["w"], rtol=1e-6)


def test_langevin_samples_the_head_s_posterior():
    rows, sigma, mu = data(), 0.7, 0.4
    algorithm = FedPop(line(), form="langevin", keep=4000, steps=5000, eta=0.01, adapt_steps=5000, train=Training(batch=ROWS))
    down = fedpop.Down({"body": {"w": jnp.ones(1)}, "head": None}, _head(mu), _head(sigma**2), jnp.float32(0))
    fresh = algorithm.init_local(jax.random.key(0), rows)
    z = np.asarray(algorithm.langevin(jax.random.key(1), down, fresh, rows, 5000)["head"]["w"])
    x, y = np.asarray(rows.x, float), np.asarray(rows.y, float)
    precision = (x[:, 1] ** 2).sum() / NOISE**2 + 1 / sigma**2
    mean = (x[:, 1] @ (y - x[:, 0]) / NOISE**2 + mu / sigma**2) / precision
    assert z.mean() == pytest.approx(mean, abs=0.15 / np.sqrt(precision))
    assert z.std() == pytest.approx(1 / np.sqrt(precision), rel=0.1)


def _head(value):
    return {"body": {"w": None}, "head": {"w": jnp.full(1, value)}}


def test_the_population_prior_is_learnt():
    """Its M-step has the mean and the variance of all heads, whatever the old mean was."""
    algorithm = FedPop(line(), form="langevin", prior_step=1.0)
    heads = np.random.default_rng(0).normal(3.0, 0.5, size=(6, 5))  # of six clients, five kept each
    state = algorithm.init_server(jax.random.key(0))._replace(mu=_head(1.0))
    up = fedpop.Up(state.phi, _head(heads.mean()), _head(((heads - 1.0) ** 2).mean()), jnp.float32(0))
    new = algorithm.server(jax.random.key(1), state, None, up)
    np.testing.assert_allclose(new.mu["head"]["w"], heads.mean(), rtol=1e-5)
    np.testing.assert_allclose(new.variance["head"]["w"], heads.var(), rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedPop(line(), keep=11), "keep is 11 of 10 steps; keep at least 1 and at most all of them"),
        (lambda: FedPop(line(), adapt_steps=2), "adapt_steps is 2, but 5 draws are kept; take at least as many"),
        (lambda: PFedBayes(line(), draws=0), "draws is 0, but it is at least 1"),
        (lambda: dataclasses.replace(PFedBayes(line()), beta=0.0), "beta is 0.0, but it is above 0 and at most 1"),
    ],
)
def test_bad_settings_get_one_sentence(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()


# FedPop by Laplace's approximation


def regression(hidden, likelihood, clients=6, count=15):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * count, 3)).astype(np.float32)
    slopes = np.repeat(rng.normal(1.0, 0.5, size=(clients, 3)), count, axis=0)
    y = ((x * slopes).sum(axis=1) + 0.3 * rng.normal(size=len(x))).astype(np.float32)
    return Clients.build(x, y, np.repeat(np.arange(clients), count), test=0.2, name="slopes").hold_out(1), mlp(
        (3,), likelihood, hidden=hidden
    )


def test_laplace_trains_as_fedavg_does(model, clients):
    """What is shared is FedAvg's network to the bit: by Laplace's form only `adapt` is another."""
    train = Training(epochs=2, batch=8, lr=0.2, momentum=0.5)
    pop, avg = (simulated(one(model, train=train), clients, 3, cohort=3) for one in (FedPop, FedAvg))
    assert_same(trees.merge(pop.state.phi, pop.state.mu), avg.state.params)
    x = jnp.asarray(clients.rows("1")[0])
    outputs = pop.algorithm.predict(jax.random.key(0), pop.down(), pop.fresh, x)
    assert_same(outputs, avg.algorithm.predict(jax.random.key(0), avg.down(), avg.fresh, x))


@pytest.mark.parametrize("likelihood", [Normal(0.3), Normal(scale=None)], ids=repr)
def test_laplace_adapts_to_the_conjugate_posterior_of_a_linear_model(likelihood):
    clients, model = regression((), likelihood)
    algorithm = FedPop(model, sigma=0.5, draws=4000, train=Training(lr=0.02))
    simulation = simulated(algorithm, clients, 2)
    down, (x, y) = simulation.down(), clients.rows(str(clients.names[clients.unseen][0]))
    rows = Data(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(x), bool))
    z = jax.jit(algorithm.adapt)(jax.random.key(0), down, simulation.fresh, rows).z["head"]
    drawn = np.concatenate([z["kernel"][..., 0], z["bias"]], axis=1)
    noise = 0.3 if likelihood.scale else float(jnp.exp(down.phi["log_scale"]))
    design = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(float)
    mu = np.concatenate([down.mu["head"]["kernel"][:, 0], down.mu["head"]["bias"]])
    covariance = np.linalg.inv(design.T @ design / noise**2 + np.eye(4) / 0.5**2)
    mean = covariance @ (design.T @ y / noise**2 + mu / 0.5**2)
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.06 * np.sqrt(covariance.max()))
    deviation = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((np.cov(drawn.T) - covariance) / np.outer(deviation, deviation), 0.0, atol=0.08)


def test_laplace_takes_traced_settings_and_a_width_of_zero_is_the_shared_network(model, clients):
    algorithm = FedPop(model, level=1.0, draws=2)
    simulation = Simulation(algorithm.planned(3), clients)
    down, data = simulation.down(), jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([2], 16))

    def outputs(sigma, temperature):
        chosen = object.__new__(FedPop)
        for field in dataclasses.fields(algorithm):
            object.__setattr__(chosen, field.name, getattr(algorithm, field.name))
        object.__setattr__(chosen, "sigma", sigma)
        object.__setattr__(chosen, "temperature", temperature)
        local = chosen.adapt(jax.random.key(0), down, simulation.fresh, data)
        return chosen.predict(jax.random.key(1), down, local, data.x)

    none, mode, spread = jax.jit(jax.vmap(outputs))(jnp.float32([0.0, 1.0, 1.0]), jnp.float32([1.0, 0.0, 1.0]))
    shared = algorithm.predict(jax.random.key(1), down, simulation.fresh, data.x)[0]
    np.testing.assert_allclose(none, jnp.stack([shared] * 2), atol=1e-6)
    np.testing.assert_array_equal(mode[0], mode[1])
    assert np.abs(spread[0] - spread[1]).max() > 0.1
    assert np.abs(mode[0] - shared).max() > 0.1


def test_relative_spread_finds_the_feature_in_which_clients_differ():
    """Σ(ẑ − μ) and Σ(ẑ − μ)² of many clients whose heads differ in one feature; few clients say little, one says nothing."""
    model = mlp((4,), Categorical(3), hidden=(2,))
    algorithm = FedPop(model, level=1.0, spread="feature", prior_step=1.0)
    state = algorithm.init_server(jax.random.key(0))

    def found(count):
        rng = np.random.default_rng(0)
        kernel, bias = rng.normal(0.5, 1.0, size=(count, 2, 3)) * np.float32([[[3.0], [1.0]]]), rng.normal(size=(count, 3))
        away = {"body": jax.tree.map(lambda _: None, state.phi["body"]), "head": {"kernel": kernel, "bias": bias}}
        mean, square = (jax.tree.map(lambda leaf, p=p: jnp.float32((leaf**p).mean(axis=0)), away) for p in (1, 2))
        up = fedpop.Up(state.phi, state.mu, square, jnp.float32(0), mean, jnp.float32(count), jnp.float32(count))
        return algorithm.server(jax.random.key(0), state, None, up).variance["head"]

    many, few, one = found(2000), found(5), found(1)
    total = 3 * (9 + 1 + 1) / 9  # of nine weights
    np.testing.assert_allclose(many["kernel"][:, 0], np.array([9, 1]) / total, rtol=0.1)
    np.testing.assert_allclose(3 * many["kernel"].sum() + 3 * many["bias"].sum(), 9, rtol=1e-5)  # 1 on average
    assert 1 < few["kernel"][0, 0] < many["kernel"][0, 0]
    np.testing.assert_array_equal(jnp.concatenate([one["kernel"][:, 0], one["bias"]]), 1.0)


def test_laplace_helps_newcomers_where_clients_differ():
    """Known between-client spread of the slopes: an unseen client with its own posterior is nearer than the shared model."""
    clients, model = regression((8,), Normal(scale=None), clients=12, count=30)
    found = assess(simulated(FedPop(model, sigma=0.3, train=Training(lr=0.02, batch=8)), clients, 15)).summary()
    for metric, better in (("rmse", -1), ("log_score", 1)):
        shared, own = (found[mode]["unseen"][metric]["rows"] for mode in ("global", "adapted"))
        assert better * own > better * shared


def test_a_client_s_own_noise_is_found_where_the_shared_one_is_too_wide():
    """The shared model's residuals hold the spread between clients; `log_scale` among the personal layers leaves it out."""
    clients, model = regression((), Normal(scale=None), clients=12, count=60)
    train = Training(lr=0.05, batch=16)
    scores = []
    for personal in (("head",), ("head", "log_scale")):
        algorithm = FedPop(model, personal=personal, sigma=0.5, spread="feature", train=train)
        scores.append(assess(simulated(algorithm, clients, 10)).summary()["adapted"]["unseen"]["log_score"]["rows"])
    assert scores[1] > scores[0] + 0.1
