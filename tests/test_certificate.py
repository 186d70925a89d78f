"""Certificates: the inverse of kl, what is refused, and that the bound holds as often as it says."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fedbayes.algorithms.fedavg import FedAvg
from fedbayes.algorithms.fedvi import FedVI
from fedbayes.cli import main
from fedbayes.data import Clients
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation import pac_bayes
from fedbayes.models import Categorical, Normal, linear, mlp
from fedbayes.primitives.training import Training


@pytest.mark.parametrize(("share", "slack"), [(0.0, 0.1), (0.1, 0.05), (0.5, 0.01), (0.9, 0.3)])
def test_kl_inverse_inverts(share, slack):
    p = pac_bayes.kl_inverse(share, slack)
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
    algorithm = FedVI.paper(
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


@pytest.mark.slow
def test_bounds_hold_on_new_clients_and_say_something():
    """1,000 new clients with 200 labelled rows each, 2,000 more rows to know their error by: at most δ = 5 % violations."""
    simulation = trained(population(150, 200, 0, 1), 150)
    new = population(1000, 2200, 1, 999)
    algorithm, down = simulation.algorithm, simulation.down()
    risks = jax.jit(jax.vmap(lambda key, rows: pac_bayes._risks(algorithm, 20, key, down, simulation.fresh, rows)))
    gibbs = jax.jit(jax.vmap(lambda key, q, rows: error(algorithm, key, down, q, rows)))
    x, y = new.x.reshape(1000, 2200, 2), new.y.reshape(1000, 2200)
    first, rest = rows_of(x[:, :200], y[:, :200]), rows_of(x[:, 200:], y[:, 200:])
    keys = jax.random.split(jax.random.key(0), 1000)
    errors, _, divergence, *_ = risks(keys, first)
    q = jax.jit(jax.vmap(lambda rows: algorithm.adapt(jax.random.key(0), down, None, rows)))(first)
    true = np.asarray(gibbs(keys, q, rest))
    bounds = np.array([pac_bayes.bound(float(e), float(d), 200, 20, 0.05) for e, d in zip(errors, divergence, strict=True)])
    assert (true > bounds).mean() <= 0.05
    assert bounds.max() < 1
    assert np.median(bounds - true) < 0.2  # it is not only true


def test_a_posterior_that_chases_labels_needs_the_divergence():
    """Labels at random, so that the true risk is ½, and q around the best fit: without KL the bound breaks, with it not."""
    random = np.random.default_rng(0)
    n, d, scale, trials = 60, 40, 0.1, 100
    broken = {"with": 0, "without": 0}
    for _ in range(trials):
        x, y = random.normal(size=(n, d)), random.choice([-1.0, 1.0], size=n)
        mean = 2 * np.linalg.lstsq(x, y, rcond=None)[0]
        draws = mean + scale * random.normal(size=(50, n, d))  # one β for each row
        errors = float(np.mean(np.sign(np.einsum("mnd,nd->mn", draws, x)) != y))
        divergence = 0.5 * float(d * (scale**2 - 1 - 2 * math.log(scale)) + mean @ mean)
        broken["with"] += pac_bayes.bound(errors, divergence, n, 50, 0.05) < 0.5
        broken["without"] += pac_bayes.bound(errors, 0.0, n, 50, 0.05) < 0.5
    assert broken["with"] <= 0.05 * trials
    assert broken["without"] > 0.9 * trials


def test_the_constant_of_the_bound():
    """Maurer's Σ_k C(n, k) (k/n)^k (1 − k/n)^(n − k) ≤ 2 √n, for every n that is checked."""
    for n in range(1, 200):
        k = np.arange(n + 1)
        logs = scipy.stats.binom.logpmf(k, n, k / n)
        assert np.exp(logs).sum() <= 2 * math.sqrt(n)


def test_the_estimate_of_the_risk_is_bounded_as_often_as_it_says():
    """One draw for each of 40 rows with chances of their own: their mean is above its bound in at most δ' = 5 % of cases."""
    random = np.random.default_rng(1)
    chance = random.uniform(0, 0.4, 40)
    shares = (random.random((4000, 40)) < chance).mean(axis=1)
    bounds = np.array([pac_bayes.kl_inverse(float(share), math.log(1 / 0.05) / 40) for share in shares])
    assert 0.0 < (bounds < chance.mean()).mean() <= 0.05


def test_draws_in_closed_form_are_those_of_the_network(small):
    """A draw of β for each row, as numbers for its outputs, errs as often as networks with a draw of β do."""
    algorithm, down, data = small.algorithm, small.down(), small.data
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([29], 20))
    errors, *_ = pac_bayes._risks(algorithm, 4000, jax.random.key(0), down, small.fresh, rows)
    many = dataclasses.replace(algorithm, draws=4000)
    local = many.adapt(jax.random.key(0), down, None, rows)
    assert float(errors) == pytest.approx(float(error(many, jax.random.key(1), down, local, rows)), abs=0.02)


def test_a_readout_that_is_not_linear_is_refused(small):
    model = small.algorithm.model
    bent = dataclasses.replace(model, readout=lambda params, h: jnp.tanh(model.readout(params, h)))
    simulation = Simulation(dataclasses.replace(small.algorithm, model=bent), small.data, seed=0)
    with pytest.raises(UserError, match="linear in the last layer"):
        pac_bayes.certify(simulation, "29")


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
    found = pac_bayes.certify(small, "29")
    assert found.rows == 20
    assert found.gibbs <= found.bound <= 1
    assert str(found).startswith(f"29: error of one draw ≤ {found.bound:.3f}")
    more = pac_bayes.certify(small, "29", delta=0.5)
    assert more.bound < found.bound


def test_direct_bounds_are_binomial_limits_from_rows_that_had_no_part(small):
    """Errors counted here by hand: of the model from every other row on the rest, and of the shared model on all."""
    found = pac_bayes.certify(small, "29")
    algorithm, down, place = small.algorithm, small.down(), small.data.index("29")
    x, y = small.data.rows("29")
    key = pac_bayes.keys.fold(pac_bayes.keys.of_round(small.seed, small.round), np.uint32(place))

    def wrong(local):
        likely = jax.nn.softmax(algorithm.predict(key, down, local, jnp.asarray(x)), axis=-1).mean(axis=0)
        return np.asarray(jnp.argmax(likely, axis=-1)) != y

    half = wrong(algorithm.adapt(key, down, small.fresh, rows_of(x[::2], y[::2])))[1::2]
    shared = wrong(small.fresh)
    assert (found.half_rows, found.half_wrong, found.shared_wrong) == (10, half.sum(), shared.sum())
    assert found.half_bound == pytest.approx(upper(half))
    assert found.shared_bound == pytest.approx(upper(shared))


def upper(wrong):
    """The upper end of SciPy's exact interval, of which it leaves 5 % out on each side."""
    return scipy.stats.binomtest(int(wrong.sum()), len(wrong)).proportion_ci(0.9, method="exact").high


def test_the_direct_bound_holds_as_often_as_it_says():
    for chance in (0.02, 0.1, 0.4):
        k = np.arange(31)
        bounds = np.array([pac_bayes.clopper_pearson(int(errors), 30, 0.05) for errors in k])
        assert scipy.stats.binom.pmf(k, 30, chance)[bounds < chance].sum() <= 0.05


def test_more_divergence_and_fewer_rows_weaken_the_bound():
    bounds = [pac_bayes.bound(0.1, d, n, 100, 0.05) for d, n in ((1.0, 200), (5.0, 200), (5.0, 50))]
    assert bounds == sorted(bounds)
    exact = pac_bayes.kl_inverse(
        pac_bayes.kl_inverse(0.1, math.log(1 / 0.0005) / 20000), (1.0 + math.log(2 * math.sqrt(200) / 0.0495)) / 200
    )
    assert bounds[0] == pytest.approx(exact, rel=1e-9)


def test_refusals(small, clients, model):
    with pytest.raises(UserError, match="took part in training, so the shared model depends on its rows"):
        pac_bayes.certify(small, "0")
    with pytest.raises(UserError, match="delta is 2"):
        pac_bayes.certify(small, "29", delta=2.0)
    with pytest.raises(UserError, match="the run is FedAvg, but a certificate is for FedVI with bias=False"):
        pac_bayes.certify(Simulation(FedAvg(model), clients), "0")
    with pytest.raises(UserError, match="with a bias or a posterior over θ"):
        pac_bayes.certify(Simulation(FedVI.paper(model), clients), "0")
    numbers = mlp((4,), Normal(1.0), hidden=(8,))
    with pytest.raises(UserError, match="bounds a share of errors"):
        pac_bayes.certify(Simulation(FedVI(numbers, bias=False), clients), "0")


def test_command_prints_certificates_of_a_run_and_refuses_a_damaged_one(tmp_path, capsys):
    folder, words = (
        tmp_path / "run",
        "run fedvi --no-bias --constructor 8 --model mlp:8 --rounds 2 --cohort 5 --hold-out 2 --out",
    )
    assert main([*words.split(), str(folder)]) == 0
    assert main(["certify", str(folder), "--draws", "20", "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 2
    for one in found:
        assert one["half_bound"] == pac_bayes.clopper_pearson(one["half_wrong"], one["half_rows"], 0.05)
        assert one["shared_bound"] == pac_bayes.clopper_pearson(one["shared_wrong"], one["rows"], 0.05)
    out = capsys.readouterr().out
    assert "median bound" in out
    assert "Clopper–Pearson" in out
    (folder / "command.json").write_text("{")
    assert main(["certify", str(folder)]) == 2
    assert "command.json cannot be read" in capsys.readouterr().err
    assert main(["certify", str(tmp_path)]) == 2
    assert "holds no finished run" in capsys.readouterr().err
