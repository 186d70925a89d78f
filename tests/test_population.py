"""Clients without layers of their own start from the population: the mean, and the spread, of what the others keep."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same
from table import POPULATED, TABLE, method

import fedbayes as fb
from fedbayes import wire
from fedbayes.algorithm import Reduce, declared
from fedbayes.algorithms.ditto import Ditto
from fedbayes.algorithms.fedper import FedPer
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess, modes_of
from fedbayes.evaluation.differences import differences
from fedbayes.primitives import gaussian, population
from fedbayes.primitives.population import Moments
from fedbayes.report import page, records
from fedbayes.report.format import distinct

KEY = jax.random.key(3)
KEEPING = [method(name) for name in POPULATED if name != "fedrecon"]  # which rebuilds its layers in each round


def planned(name, model, clients, **settings):
    return dataclasses.replace(TABLE[name](model), **settings).planned(3, **clients.facts)


def run(algorithm, clients, rounds, **options):
    simulation = Simulation(algorithm, clients, seed=5, **options)
    for _ in simulation.advance(rounds):
        pass
    return simulation


def layers(local):
    """Means and variances of what clients keep."""
    if hasattr(local, "eta"):
        return local.eta.mean, jax.tree.map(lambda rho: gaussian.deviation(rho) ** 2, local.eta.rho)
    return local.personal, None


# The moments


def test_in_cohorts_every_reply_counts_the_same_until_there_are_as_many_as_clients_then_the_last_count_most():
    values = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    state = population.start(jnp.float32(7.0), jnp.float32(100.0))
    for round, pair in enumerate(values):
        sums = jax.tree.map(lambda *parts: sum(parts), *(population.sent(z, state.mean, jnp.float32(0.5)) for z in pair))
        state = population.next(state, sums, N=6)
        if round < 3:  # all replies so far, and nothing of where the network started
            seen = values[: round + 1]
            np.testing.assert_allclose(state.mean, seen.mean(), atol=1e-5)
            np.testing.assert_allclose(state.variance, seen.var() + 0.5, rtol=1e-4)
            last = np.float32(state.mean)
        else:  # a third of the clients replaces a third of the mean
            last = last * 2 / 3 + pair.mean() / 3
            np.testing.assert_allclose(state.mean, last, atol=1e-5)
        assert float(state.replies) == min(2 * round + 2, 6)


def test_moments_far_from_zero_lose_no_digits():
    values = np.float32(1000) + np.random.default_rng(0).normal(size=50).astype(np.float32)
    state = population.start(jnp.float32(1000), jnp.float32(0))
    for _ in range(3):
        sums = Moments(*map(sum, zip(*(population.sent(z, state.mean, jnp.float32(0)) for z in values), strict=True)))
        state = population.next(state, sums, N=50)
        np.testing.assert_allclose(state.variance, values.astype(np.float64).var(), rtol=1e-3)


# In rounds


@pytest.mark.parametrize("name", KEEPING)
def test_a_newcomer_starts_at_the_mean_of_the_participants_layers(name, model, clients):
    simulation = run(planned(name, model, clients), clients, 2)
    kept, variance = layers(simulation.local.get(clients.participants))
    found = simulation.state.population
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), kept)
    assert_close(found.mean, mean, 1e-5)
    assert float(found.replies) == len(clients.participants)
    if variance is not None:  # of the mixture: within clients and between them
        total = jax.tree.map(lambda v, z: v.mean(axis=0) + z.var(axis=0), variance, kept)
        assert_close(found.variance, total, 1e-5)
        own = layers(simulation.fresh._replace(eta=simulation.algorithm._begin(simulation.down(), simulation.fresh)))
        assert_close(own, (mean, total), 1e-5)
    algorithm, down, x = simulation.algorithm, simulation.down(), jnp.asarray(clients.rows(str(clients.names[0]))[0])
    as_own = simulation.fresh._replace(own=jnp.bool_(True))
    if variance is None:
        as_own = as_own._replace(personal=mean)
    else:
        rho = jax.tree.map(lambda v: gaussian.rho_of(jnp.sqrt(v)), total)
        as_own = as_own._replace(eta=gaussian.MeanField(mean, rho))
    fresh, moved = (algorithm.predict(KEY, down, local, x) for local in (simulation.fresh, as_own))
    np.testing.assert_allclose(fresh, moved, atol=1e-4)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([2], 32))
    for step in (jax.jit(algorithm.adapt), lambda *given: jax.jit(algorithm.client)(*given)[1]):
        assert_close(step(KEY, down, simulation.fresh, data), step(KEY, down, as_own, data), 1e-4)


@pytest.mark.parametrize("name", KEEPING)
def test_all_start_alike_and_one_that_trained_goes_on_with_its_own(name, model, clients):
    algorithm = planned(name, model, clients)
    simulation = run(algorithm, clients, 1, cohort=2)
    before = Simulation(algorithm, clients, seed=5)
    start = before.state.population.mean
    assert_same(start, algorithm.init_server(fb.engine.keys.of_start(5)[0]).population.mean)
    assert np.asarray(simulation.local.get(np.arange(6)).own).sum() == 2
    own = jax.tree.map(lambda leaf: leaf[0], simulation.local.get(simulation.chosen(1)[:1]))
    moved = simulation.down()
    elsewhere = moved._replace(population=moved.population._replace(mean=jax.tree.map(lambda leaf: leaf + 1, start)))
    x = jnp.asarray(clients.rows(str(clients.names[0]))[0])
    assert_same(algorithm.predict(KEY, moved, own, x), algorithm.predict(KEY, elsewhere, own, x))


def test_recon_rebuilds_from_the_mean_of_what_was_rebuilt(model, clients):
    algorithm = dataclasses.replace(planned("fedrecon", model, clients), uniform=True)
    simulation = Simulation(algorithm, clients, seed=5)
    down, key = simulation.down(), fb.engine.keys.of_round(5, 1)
    ups = []
    for index in clients.participants:
        data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([index], 32))
        ups.append(jax.jit(algorithm.client)(fb.engine.keys.fold(key, np.uint32(index)), down, simulation.fresh, data)[0])
    moved = jax.tree.map(lambda *parts: sum(parts) / len(ups), *(up.population.first for up in ups))
    simulation.step()
    assert_close(simulation.state.start, jax.tree.map(jnp.add, down.start, moved), 1e-5)


@pytest.mark.parametrize("name", [method(name, often=POPULATED) for name in POPULATED])
def test_only_sums_leave_and_nothing_of_it_without_a_population(name, model, clients):
    algorithm = planned(name, model, clients)
    assert declared(algorithm.up_type)["population"] is Reduce.SUM
    leaves = wire.manifest(algorithm, clients.example)
    wire.check(leaves)
    sent = {leaf.path.split("/")[1] for leaf in leaves if leaf.message == "up" and leaf.path.startswith("population/")}
    assert sent == ({"first", "second", "clients"} if name == "bpfed" else {"first", "clients"})
    alone = wire.manifest(planned(name, model, clients, population=False), clients.example)
    assert not [leaf for leaf in alone if "population" in leaf.path]
    layer = algorithm.personal[0]
    assert not [leaf for leaf in alone if leaf.message == "up" and f"/{layer}/" in f"/{leaf.path}/"]


# Methods with a global model


@pytest.mark.parametrize("name", [method(name) for name in ("ditto", "apfl", "pfedme", "pfedbayes")])
def test_a_newcomer_of_a_method_with_a_global_model_starts_there(name, model, clients):
    """Whatever the fresh state holds, it is not used."""
    simulation = run(planned(name, model, clients), clients, 1)
    algorithm, down = simulation.algorithm, simulation.down()
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([2], 32))
    field = simulation.fresh._fields[0]
    junk = simulation.fresh._replace(**{field: jax.tree.map(lambda leaf: leaf + 9, getattr(simulation.fresh, field))})
    assert_same(*(algorithm.predict(KEY, down, local, data.x) for local in (simulation.fresh, junk)))
    for step in (jax.jit(algorithm.adapt), jax.jit(algorithm.client)):
        assert_same(step(KEY, down, simulation.fresh, data), step(KEY, down, junk, data))
    assert modes_of(algorithm) == ("global", "personal", "adapted")


# Evaluation


def test_without_a_global_model_its_mode_is_refused_and_left_out(model, clients, tmp_path):
    alone = FedPer(model, population=False)
    with pytest.raises(UserError, match="FedPer with these settings has no global model, as a client that has no layers"):
        fb.simulate(alone, clients, 1, modes=("global",), folder=tmp_path / "no")
    assert not (tmp_path / "no").exists()
    fit = fb.simulate(alone, clients, 2, folder=tmp_path / "run", evaluate_every=1)
    assert {mode: set(groups) for mode, groups in fit.result["metrics"].items()} == {
        "personal": {"participating"},
        "adapted": {"participating", "unseen"},
    }
    assert fit.result["modes"] == ["personal", "adapted"]
    assert fb.open(tmp_path / "run").evaluation.summary() == fit.evaluation.summary()
    with pytest.raises(UserError, match=r"no global model.*adapt it to rows, or name a client"):
        fit.predict(clients.rows(str(clients.names[0]))[0])
    with pytest.raises(UserError, match="no global model"):
        assess(fit.simulation, ("global", "adapted"))
    tempered = fb.Tempered(alone)
    assert modes_of(tempered) == ("personal", "adapted")
    # Against a method that has all modes
    other = fb.simulate(Ditto(model), clients, 1)
    found = differences("a", {0: fit.evaluation}, "b", {0: other.evaluation})
    assert {(one.mode, one.group) for one in found} == {
        ("personal", "participating"),
        ("adapted", "participating"),
        ("adapted", "unseen"),
    }
    record = records.load(tmp_path / "run")
    assert distinct(record, "unseen") == ["adapted"]
    assert distinct(record, "participating") == ["personal", "adapted"]
    assert page.report([tmp_path / "run"]).exists()


# On data with a known effect


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedper", "fedrep", "bpfed"])
def test_newcomers_of_digits_gain_and_the_global_mode_is_far_above_chance(name):
    clients = fb.data.load("digits", partition="dirichlet:1", clients=20, hold_out=5)
    model = fb.network("mlp", clients, hidden=(32,))
    algorithm = fb.algorithms.find(name)(model)
    if name == "bpfed":
        train = fb.Training(epochs=2, optimiser="adam", batch=32, lr=0.005)
        algorithm = type(algorithm).paper(model, train=train, tune=dataclasses.replace(train, epochs=5))
    found = {}
    for shared in (True, False):
        fit = fb.simulate(dataclasses.replace(algorithm, population=shared), clients, 15)
        found[shared] = {mode: groups.get("unseen") for mode, groups in fit.evaluation.summary().items()}
    adapted = {shared: found[shared]["adapted"] for shared in found}
    assert adapted[True]["log_score"]["rows"] > adapted[False]["log_score"]["rows"]
    assert adapted[True]["accuracy"]["rows"] >= adapted[False]["accuracy"]["rows"] - 0.01
    assert found[True]["global"]["accuracy"]["rows"] > 0.7
