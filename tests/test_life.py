"""The worth of each part of a posterior: against exact answers, for Bayesian methods at their defaults, and in a run's page."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, simulated
from table import TABLE, method, methods

import fedbayes as fb
from fedbayes import cli
from fedbayes.algorithms import find
from fedbayes.data import Clients
from fedbayes.engine import keys
from fedbayes.errors import UserError
from fedbayes.evaluation import dissect, life
from fedbayes.models import Normal, linear
from fedbayes.models.beliefs import Beliefs, Marginals, of_draws
from fedbayes.primitives.training import shuffle
from fedbayes.report.page import report

BAYESIAN = ("bpfed", "pfedbayes", "fedhb-niw", "fedhb-mixture", "fedvi", "fedpop")
NOISE, WIDTH = 0.5, 0.6


def regression(seed, clients, train, test, scales, widths=WIDTH):
    """Clients whose weights are N(w, widths²), features of these scales, and noise of a known deviation."""
    random = np.random.default_rng(seed)
    features, rows = len(scales), train + test
    x = random.normal(size=(clients, rows, features)) * scales
    own = random.normal(size=features) + widths * random.normal(size=(clients, features))
    y = np.einsum("cnf,cf->cn", x, own) + NOISE * random.normal(size=(clients, rows))
    owner, is_test = np.repeat(np.arange(clients), rows), np.tile(np.arange(rows) >= train, clients)
    flat = x.reshape(-1, features).astype(np.float32)
    return Clients.build(flat, y.ravel().astype(np.float32), owner, is_test=is_test, name="regression")


def heads(data, **settings):
    """FedPop whose whole model is the head of a linear regression with known noise: Laplace's approximation is exact."""
    model = linear(data.shape, Normal(NOISE))
    train = fb.Training(epochs=1, batch=50, lr=0.02)
    return fb.FedPop(model, sigma=WIDTH, train=train, **settings)


def posterior(x):
    """Covariance of (kernel, bias) after rows x, exact."""
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return rows, np.linalg.inv(rows.T @ rows / NOISE**2 + np.eye(rows.shape[1]) / WIDTH**2)


@pytest.fixture(scope="module")
def few():
    """Seven rows a client, of features whose scales differ, so that the posterior's scales do."""
    data = regression(0, 30, 7, 60, np.array([3.0, 1.0, 1.0, 0.2]))
    return data, fb.simulate(heads(data, draws=1000), data, rounds=15, choose=False)


def test_averaging_and_person_are_worth_the_exact_amount(few):
    """The gain of the exact predictive distribution over the mean's, and of one's own mean and covariance over others'."""
    data, fit = few
    found = fb.check(fit)["adapted"]
    mu = fit.shared.down.mu
    centre = np.append(np.asarray(mu["head"]["kernel"])[:, 0], np.asarray(mu["head"]["bias"]))
    gain = []
    for name in data.names:
        (x, y), (x_test, y_test) = data.rows(str(name)), data.rows(str(name), "test")
        rows, covariance = posterior(x)
        mean = covariance @ (rows.T @ y / NOISE**2 + centre / WIDTH**2)
        at = np.append(x_test, np.ones((len(x_test), 1)), axis=1)
        away, variance = y_test - at @ mean, NOISE**2 + np.einsum("ni,ij,nj->n", at, covariance, at)
        gain.append(np.mean((away**2 / NOISE**2 + np.log(NOISE**2) - away**2 / variance - np.log(variance)) / 2))
    assert found.parts["averaging"].mean == pytest.approx(np.mean(gain), rel=0.03)
    assert found.parts["averaging"].error == pytest.approx(np.std(gain, ddof=1) / len(gain) ** 0.5, rel=0.05)
    assert (found.word, found.averaging, found.scales) == ("alive", "alive", "alive")
    assert found.parts["scales: shuffled"].sign == 1
    assert found.parts["person"].sign == 1
    assert found.parts["one draw"].sign == 1
    assert "averaging is worth +" in found.verdict


def test_information_is_the_variance_of_the_mean_and_grows_elsewhere(few):
    data, fit = few
    spread = []
    for name in data.names:
        _, covariance = posterior(data.rows(str(name))[0])
        x = data.rows(str(name), "test")[0]
        at = np.append(x, np.ones((len(x), 1)), axis=1)
        spread.append(np.einsum("ni,ij,nj->n", at, covariance, at).mean())
    found = fb.check(fit, elsewhere=np.full((5, 4), 9.0, np.float32))["adapted"]
    assert found.information == pytest.approx(np.mean(spread), rel=0.02)
    assert found.elsewhere > 20 * found.information


def test_a_posterior_that_is_much_too_wide_is_harmful(few):
    found = fb.check(few[1].replace(temperature=30.0))["adapted"]
    assert (found.word, found.averaging) == ("harmful", "harmful")
    assert "the mean alone predicts better" in found.verdict


def test_without_a_spread_there_is_nothing_to_test(few):
    found = fb.check(few[1].replace(temperature=0.0))["adapted"]
    assert found.word == "point"
    assert found.divergence == {}  # infinite


def test_contraction_is_exact_in_the_conjugate_case():
    """The posterior's variance after 10, 100 and 1000 rows, against the inverse of the precision of the same rows."""
    data = regression(1, 8, 1100, 20, np.ones(4))
    fit = fb.simulate(heads(data, draws=300), data, rounds=2, choose=False)
    found = {one.rows: one for one in fb.check(fit)["adapted"].contraction}
    assert list(found) == [10, 100, 1000, 1100]
    for size, one in found.items():
        exact = []
        for client in range(len(data)):
            key = keys.fold(keys.fold(fit.shared.key, np.uint32(client)), np.uint32(keys.CHOOSE))
            rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([client], 1100))
            some = np.asarray(rows.x)[np.asarray(shuffle(key, rows))[:size]]
            exact.append(np.diag(posterior(some)[1]).mean())
        assert one.variance == pytest.approx(np.mean(exact), rel=0.05)
        assert one.prior == pytest.approx(WIDTH**2, rel=1e-4)
    assert found[100].variance / found[1000].variance == pytest.approx(10, rel=0.15)  # as 1/n


def test_a_population_prior_that_is_learnt_is_alive_where_clients_differ_in_some_features():
    data = regression(2, 40, 6, 60, np.ones(6), widths=np.array([2.0, 1.5, 0.0, 0.0, 0.0, 0.0]))
    algorithm = dataclasses.replace(heads(data, spread="feature", draws=50), sigma=0.8)
    found = fb.check(fb.simulate(algorithm, data, rounds=40, choose=False))["adapted"]
    assert all(found.parts[name].sign == 1 for name in life.PRIOR)
    assert "the prior's learnt scales +" in found.verdict


@methods("clients", often=("fedpop-laplace", "bpfed-population", "fedvi"))
def test_beliefs_go_back_to_where_they_came_from(name, model, clients):
    """`with_beliefs` of `beliefs` changes no prediction, and other scales are found again; in all states of a client."""
    simulation = simulated(TABLE[name](model), clients, 2)
    algorithm, down, key = simulation.algorithm, simulation.down(), jax.random.key(3)
    one = int(clients.participants[0])
    kept = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), simulation.local.get(np.array([one])))
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([one], 32))
    fresh = jax.tree.map(jnp.asarray, simulation.fresh)
    for local in (fresh, kept, algorithm.adapt(key, down, kept, rows)):
        found = algorithm.beliefs(down, local)
        states = algorithm.with_beliefs(down, local, found._replace(prior=None))
        assert_close(algorithm.predict(key, *states, rows.x), algorithm.predict(key, down, local, rows.x), 2e-4)
        if found.posterior is not None:
            q = Marginals(found.posterior.mean, jax.tree.map(lambda leaf: 0.7 * leaf, found.posterior.deviation))
            again = algorithm.beliefs(*algorithm.with_beliefs(down, local, Beliefs(q, None)))
            assert_close(again.posterior, q, 1e-5, 1e-4)
        if found.prior is not None:
            states = algorithm.with_beliefs(down, local, Beliefs(None, found.prior))
            assert_close(algorithm.beliefs(*states).prior, found.prior, 1e-5, 1e-4)


@pytest.fixture(scope="module")
def effect():
    """Clients with features and weights of their own."""
    return fb.data.synthetic(clients=20, rows=60, features=8, classes=4).hold_out(4)


@pytest.mark.parametrize("name", [method(name, often=("fedpop",)) for name in BAYESIAN])
def test_every_bayesian_method_at_its_defaults_is_told_what_it_is(name, effect):
    """The figures are finite, the log score is the evaluation's, and clients that differ are worth telling apart."""
    fit = fb.simulate(find(name)(fb.network("mlp", effect, hidden=(16,))), effect, rounds=20)
    found = fb.check(fit)
    for one in found.lives:
        assert one.word in ("alive", "inert", "harmful", "point")
        assert np.isfinite([*np.ravel(list(one.parts.values())), one.log_score, one.information, one.elsewhere]).all()
        scores = fit.evaluation.scores[one.mode]
        rows, chosen = np.asarray(scores.rows), ~fit.evaluation.unseen if one.mode == "personal" else slice(None)
        assert one.log_score == pytest.approx((scores.log_score[chosen] / rows[chosen]).mean(), abs=1e-4)
    assert life.Check.from_json(found.to_json()) == found
    if name == "fedpop":
        assert found["adapted"].parts["person"].sign == 1


@pytest.mark.parametrize("make", [fb.FedVI.paper, fb.FedVI], ids=["paper", "experts"])
def test_fedvis_prior_is_known_in_both_forms(make, effect):
    """A constant as published; by default learnt scales, which are measured, and a posterior that contracts."""
    fit = fb.simulate(make(fb.network("mlp", effect, hidden=(8,))), effect, rounds=5, choose=False)
    found, algorithm, theta = fb.check(fit, modes=("adapted",))["adapted"], fit.shared.algorithm, fit.shared.down.theta
    assert list(found.divergence) == ["beta"]
    assert found.divergence["beta"] > 0
    if algorithm.form == "mean":
        assert found.contraction[-1].prior == pytest.approx(algorithm.mean_layer.sigma0**2)
        return
    scales = np.asarray(algorithm.layer.deviations(theta.constructor))
    assert scales.std() > 0
    assert found.contraction[-1].prior == pytest.approx((scales**2).mean(), rel=1e-4)
    assert found.contraction[-1].variance < found.contraction[0].variance < found.contraction[0].prior
    assert set(life.PRIOR) <= set(found.parts)


@pytest.mark.parametrize("form", ["spike", "gaussian"])
def test_draws_of_fedhb_niw_for_newcomers_are_tested_though_clients_keep_nothing(form, effect):
    algorithm = fb.FedHBNIW(fb.network("mlp", effect, hidden=(8,)), form=form, draws=3)
    found = fb.check(fb.simulate(algorithm, effect, rounds=6, choose=False))
    assert np.isfinite([*np.ravel(list(found["global"].parts.values())), found["global"].log_score]).all()
    assert found["global"].draws == 3
    assert ("scales: shuffled" in found["adapted"].parts) == (form == "gaussian")


@pytest.mark.slow
def test_the_scales_of_bpfed_as_published_are_inert(effect):
    """Its standard deviations hardly move from where they start, and may be shuffled over weights."""
    fit = fb.simulate(fb.BPFed.paper(fb.network("mlp", effect, hidden=(8,))), effect, rounds=20)
    found = fb.check(fit, modes=("personal",))["personal"]
    assert found.scales == "inert"
    assert "inert" in found.verdict or "the learnt scales nothing" in found.verdict


@pytest.mark.slow
def test_a_twin_says_the_worth_of_noise_while_training(effect):
    algorithm = fb.BPFed(fb.network("mlp", effect, hidden=(8,)), draws=3)
    found = fb.check(fb.simulate(algorithm, effect, rounds=3), modes=("adapted",), twin=True)["adapted"]
    assert np.isfinite(found.parts["training"]).all()
    with pytest.raises(UserError, match="has no twin"):
        fb.check(fb.simulate(fb.FedAvg(algorithm.model), effect, rounds=1), twin=True)


def test_rows_of_others_and_too_few_clients_are_refused(few):
    data, fit = few
    with pytest.raises(UserError, match="60 clients, but the fit is of 30 others"):
        fb.check(fit, regression(0, 60, 7, 5, np.ones(4)))
    with pytest.raises(UserError, match="at least two"):
        fb.check(fit, most=1)
    with pytest.raises(UserError, match="there is no mode 'local'"):
        fb.check(fit, modes=("local",))
    with pytest.raises(UserError, match="networks over clients"):
        fb.check(data)


def test_permuted_rows_keep_each_features_values():
    rows = fb.Data(jnp.arange(24.0).reshape(2, 4, 3), jnp.zeros((2, 4)), jnp.arange(4)[None] < jnp.array([[4], [3]]))
    found = dissect._elsewhere(rows, None, 0)
    assert not (found == np.asarray(rows.x)).all()
    for client, count in ((0, 4), (1, 3)):
        np.testing.assert_array_equal(np.sort(found[client, :count], axis=0), np.asarray(rows.x)[client, :count])


def test_other_clients_are_never_oneself():
    others = dissect._others(np.random.default_rng(0).permutation(5), np.arange(5))
    assert others.shape == (5, 3)
    assert not (others == np.arange(5)[:, None]).any()
    assert dissect._others(np.array([1, 0]), np.arange(2)).tolist() == [[1], [0]]


def test_marginals_of_one_draw_have_no_spread():
    assert of_draws(jnp.ones((1, 3))).deviation.tolist() == [0.0, 0.0, 0.0]


def test_the_command_leaves_a_section_of_the_page(tmp_path, capsys):
    folder = tmp_path / "run"
    run = ["run", "fedpop", "--data", "digits", "--clients", "6", "--rounds", "1", "--model", "linear", "--out", str(folder)]
    assert cli.main(run) == 0
    assert "Not checked: fedbayes check" in report([folder]).read_text()
    capsys.readouterr()
    assert cli.main(["check", str(folder), "--most", "4", "--json", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr().out
    assert "averaging at prediction" in said
    assert "adapted: " in said
    text = report([folder]).read_text()
    assert "Is the uncertainty alive?</h2>" in text
    assert "averaging at prediction" in text
    (folder / "life.json").write_text("{}")
    assert "fedbayes check writes it anew" in report([folder]).read_text()
    assert cli.main(["check", str(tmp_path)]) == 2
    again = fb.check(fb.open(folder), fb.data.load("digits", clients=6), most=4)
    assert str(again).splitlines()[0] in said.replace("\n", " ") or again["adapted"].clients == 4
