"""Cohorts, buckets, divergence, states on disk."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import assert_close, assert_same
from table import TABLE

from fedbayes.data import Clients
from fedbayes.engine import clients
from fedbayes.engine.clients import Simulation, buckets
from fedbayes.engine.local_state import States
from fedbayes.engine.round import Diverged, cohort_size
from fedbayes.errors import UserError
from fedbayes.primitives.training import Training


def test_cohorts_are_seeded_without_replacement_and_never_unseen(clients, model):
    algorithm = TABLE["fedavg"](model)
    one, other = (Simulation(algorithm, clients, cohort=3, seed=seed) for seed in (0, 1))
    drawn = [one.chosen(round) for round in range(1, 30)]
    assert all(len(set(ids)) == 3 and not clients.unseen[ids].any() for ids in drawn)
    assert {int(i) for ids in drawn for i in ids} == set(clients.participants.tolist())
    assert all((a == one.chosen(round)).all() for round, a in enumerate(drawn, 1))
    assert any((a != other.chosen(round)).any() for round, a in enumerate(drawn, 1))


def test_dropout_leaves_somebody(clients, model):
    simulation = Simulation(TABLE["fedavg"](model), clients, dropout=0.9)
    sizes = [len(simulation.chosen(round)) for round in range(1, 200)]
    assert min(sizes) == 1
    assert np.mean(sizes) == pytest.approx(0.9**4 + 4 * 0.1, abs=0.25)  # 0.4 expected, and one where it would be none
    assert simulation.step().round == 1


@pytest.mark.parametrize(
    ("cohort", "population", "message"),
    [
        (11, 10, "the cohort is 11 clients a round, but only 10 take part; choose at most that many"),
        (0, 10, "the cohort is 0, but a round needs at least one of the clients"),
        (0.01, 10, "the cohort is 0.01, but a round needs at least one of the clients"),
        (3, 0, "no client is left to train: all are held out"),
    ],
)
def test_impossible_cohorts(cohort, population, message):
    with pytest.raises(UserError, match=message):
        cohort_size(cohort, population)


def skewed():
    counts = np.array([3, 5, 9, 17, 40, 64, 64])
    client = np.repeat(np.arange(len(counts)), counts)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(len(client), 4)).astype(np.float32)
    return Clients.build(x, (x[:, 0] > 0).astype(np.int32), client, test=0.2)


def test_small_data_has_one_length_and_large_data_a_few(monkeypatch):
    data = skewed()
    assert len(buckets(data, 7)) == 1
    monkeypatch.setattr(clients, "ONE_LENGTH", 0)
    found = buckets(data, 7)
    assert 1 < len(found) <= 4
    assert sorted(np.concatenate([bucket.ids for bucket in found])) == list(range(7))
    for bucket in found:
        assert data.train_counts[bucket.ids].max() == bucket.train.length


def test_buckets_and_memory_budget_change_no_number(monkeypatch, model):
    data, algorithm = skewed(), TABLE["fedper"](model)

    def run(**options):
        simulation = Simulation(algorithm, data, cohort=5, **options)
        for _ in range(2):
            simulation.step()
        return simulation

    plain = run()
    monkeypatch.setattr(clients, "ONE_LENGTH", 0)
    ids = np.arange(len(data))
    for other in (run(), run(memory=1, width=1)):
        assert_close(other.state, plain.state, 1e-6)
        assert_close(other.local.get(ids), plain.local.get(ids), 1e-6)


@pytest.fixture
def exploding(clients, model):
    algorithm = dataclasses.replace(TABLE["fedavg"](model), train=Training(lr=1e30, batch=8, epochs=2))
    return lambda mode: Simulation(algorithm, clients, clients=mode)


def test_divergence_names_round_and_clients_and_keeps_the_state(exploding, clients):
    simulation = exploding("vmap")
    before = simulation.state
    with pytest.raises(Diverged, match=r"round 1 diverged on 4 of 4 clients \(.+\); try a smaller step size.*clients=\"loop\""):
        simulation.step()
    assert simulation.round == 0
    assert_same(simulation.state, before)


def test_loop_names_the_client_and_the_step(exploding, clients):
    # Six rows are one batch, so its first step is finite, if huge, and the second one, in the next epoch, is not.
    name = min(clients.participants, key=lambda i: clients.train_counts[i])
    assert clients.train_counts[name] <= 8
    with pytest.raises(
        Diverged, match=f"round 1, client '{clients.names[name]}': local step 1 of epoch 2 left numbers that are not finite"
    ):
        exploding("loop").step()


def test_an_exception_in_a_client_says_whose(clients, model):
    def broken(params, x):
        raise ZeroDivisionError

    algorithm = TABLE["fedavg"](dataclasses.replace(model, apply=broken))
    with pytest.raises(ZeroDivisionError) as caught:
        Simulation(algorithm, clients, clients="loop").step()
    assert any("in round 1" in note for note in caught.value.__notes__)


FRESH = {"a": np.zeros(3, np.float32), "b": np.int32(7)}


def states_of(ids, value):
    return {"a": np.full((len(ids), 3), value, np.float32), "b": np.full(len(ids), int(value), np.int32)}


def test_states_are_kept_and_the_others_are_fresh():
    states = States(FRESH, 5)
    states.put(np.array([1, 3]), states_of([1, 3], 2.0), 1)
    found = states.get(np.array([0, 3, 1]), slots=4)
    np.testing.assert_array_equal(found["a"][:, 0], [0, 2, 2, 0])
    np.testing.assert_array_equal(found["b"], [7, 2, 2, 7])
    assert states.trained().tolist() == [False, True, False, True, False]


def test_a_checkpoint_finds_the_states_it_had(tmp_path):
    """Whatever is written after a commit, also several times and half, the states of the commit are still there."""
    ids = np.array([0, 1])
    states = States(FRESH, 3, tmp_path)
    states.put(ids, states_of(ids, 1.0), 1)
    states.put(ids, states_of(ids, 2.0), 2)
    states.commit(2)
    states.put(ids, states_of(ids, 3.0), 3)
    states.put(np.array([0, 2]), states_of([0, 2], 4.0), 4)
    again = States(FRESH, 3, tmp_path)
    again.rewind(2)
    np.testing.assert_array_equal(again.get(np.arange(3))["a"][:, 0], [2, 2, 0])
    again.put(ids, states_of(ids, 3.0), 3)
    again.commit(3)
    third = States(FRESH, 3, tmp_path)
    third.rewind(3)
    np.testing.assert_array_equal(third.get(np.arange(3))["a"][:, 0], [3, 3, 0])


def test_memory_is_bytes_a_client_not_a_state(tmp_path):
    big = {"w": np.zeros(10_000, np.float32)}
    states = States(big, 100_000, tmp_path)
    states.put(np.array([99_999]), {"w": np.ones((1, 10_000), np.float32)}, 1)
    assert states.get(np.array([99_999]))["w"].sum() == 10_000
    assert (tmp_path / "states.bin").stat().st_blocks * 512 < 10 * 40_000  # a sparse file: only what was written


def test_states_of_a_tree_without_leaves_need_no_file():
    states = States((), 3)
    states.put(np.array([0]), (), 1)
    assert jax.tree.leaves(states.get(np.array([0, 1]))) == []
