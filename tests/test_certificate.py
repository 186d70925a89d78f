"""Certificates: the inverse of kl, what is refused, and that the bound holds as often as it says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedbayes import certificate
from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedvi import FedVI
from fedbayes.data import Clients
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Normal, linear, mlp
from fedbayes.simulator import Simulation
from fedbayes.training import Training


@pytest.mark.parametrize(("share", "slack"), [(0.0, 0.1), (0.1, 0.05), (0.5, 0.01), (0.9, 0.3)])
def test_kl_inverse_inverts(share, slack):
    p = certificate.kl_inverse(share, slack)
    coins = scipy.stats.entropy([share, 1 - share], [p, 1 - p])
    assert p > share
    assert coins == pytest.approx(slack, rel=1e-6) or (p == pytest.approx(1) and coins <= slack)


def population(count, n, seed, unseen):
    """Clients that differ in whether the second column says y or not y; the first column lies on the side of which it is."""
    random = np.random.default_rng(seed)
    beta = random.normal(size=(count, 1))
    around, v = beta + 0.5 * random.normal(size=(count, n)), random.normal(size=(count, n))
    chance = 1 / (1 + np.exp(-4 * beta * v))
    y = (random.random((count, n)) < chance).astype(np.int32)
    x = np.stack([around, v], axis=-1).reshape(-1, 2)
    half = np.tile(np.arange(n) >= n // 2, count)
    return Clients.build(
        x,
        y.ravel(),
        np.repeat(np.arange(count), n),
        is_test=half,
        unseen=np.arange(count) >= count - unseen,
        classes=["a", "b"],
    )


def trained(data, rounds, cohort=50):
    algorithm = FedVI(
        linear((2,), Categorical(2)),
        local=0.5,
        constructor=(16,),
        tau=1.0,
        sigma0=2.0,
        mean_scale=1.0,
        sigma_scale=0.1,
        bias=False,
        train=Training(batch=200, lr=0.1),
        server_lr=1.0,
    ).planned(rounds)
    simulation = Simulation(algorithm, data, seed=0, cohort=cohort)
    for _ in range(rounds):
        simulation.step()
    return simulation


def test_bounds_hold_on_new_clients_and_say_something():
    """1,000 new clients with 200 labelled rows each, 2,000 more rows to know their error by: at most δ = 5 % violations."""
    simulation = trained(population(150, 200, 0, 1), 150)
    new = population(1000, 2200, 1, 999)
    algorithm, down = simulation.algorithm, simulation.down()
    risks = jax.jit(jax.vmap(lambda key, rows: certificate._risks(algorithm, 20, key, down, rows)))
    gibbs = jax.jit(jax.vmap(lambda key, q, rows: error(algorithm, key, down, q, rows)))
    x, y = new.x.reshape(1000, 2200, 2), new.y.reshape(1000, 2200)
    first, rest = rows_of(x[:, :200], y[:, :200]), rows_of(x[:, 200:], y[:, 200:])
    keys = jax.random.split(jax.random.key(0), 1000)
    errors, _, divergence = risks(keys, first)
    q = jax.jit(jax.vmap(lambda rows: algorithm.adapt(jax.random.key(0), down, None, rows)))(first)
    true = np.asarray(gibbs(keys, q, rest))
    bounds = np.array([certificate.bound(float(e), float(d), 200, 20, 0.05) for e, d in zip(errors, divergence, strict=True)])
    assert (true > bounds).mean() <= 0.05
    assert bounds.max() < 1
    assert np.median(bounds - true) < 0.2  # it is not only true


def rows_of(x, y):
    from fedbayes.algorithm import Data

    return Data(jnp.asarray(x), jnp.asarray(y), jnp.ones(y.shape, bool))


def error(algorithm, key, down, local, rows):
    outputs = algorithm.predict(key, down, local, rows.x)
    return jnp.mean(jnp.argmax(outputs, axis=-1) != rows.y.astype(jnp.int32)[None])


@pytest.fixture(scope="module")
def small():
    return trained(population(30, 40, 0, 5), 5, 10)


def test_a_certificate_reads_in_one_line(small):
    found = certificate.certify(small, "29")
    assert found.rows == 20
    assert found.gibbs <= found.bound <= 1
    assert str(found).startswith(f"29: error ≤ {found.bound:.3f}")
    more = certificate.certify(small, "29", delta=0.5)
    assert more.bound < found.bound


def test_more_divergence_and_fewer_rows_weaken_the_bound():
    bounds = [certificate.bound(0.1, d, n, 100, 0.05) for d, n in ((1.0, 200), (5.0, 200), (5.0, 50))]
    assert bounds == sorted(bounds)
    exact = certificate.kl_inverse(
        certificate.kl_inverse(0.1, math.log(1 / 0.0005) / 20000), (1.0 + math.log(2 * math.sqrt(200) / 0.0495)) / 200
    )
    assert bounds[0] == pytest.approx(exact, rel=1e-9)


def test_refusals(small, clients, model):
    with pytest.raises(UserError, match="took part in training, so the shared model depends on its rows"):
        certificate.certify(small, "0")
    with pytest.raises(UserError, match="delta is 2"):
        certificate.certify(small, "29", delta=2.0)
    with pytest.raises(UserError, match="the run is FedAvg, but a certificate is for FedVI with bias=False"):
        certificate.certify(Simulation(FedAvg(model), clients), "0")
    with pytest.raises(UserError, match="with a bias or a posterior over θ"):
        certificate.certify(Simulation(FedVI(model), clients), "0")
    numbers = mlp((4,), Normal(1.0), hidden=(8,))
    with pytest.raises(UserError, match="bounds a share of errors"):
        certificate.certify(Simulation(FedVI(numbers, bias=False), clients), "0")
