"""What every algorithm must do, whatever it is: each test runs for each row of the table."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same
from table import TABLE

from fedbayes import wire
from fedbayes.algorithm import Algorithm, Data, NetworkAlgorithm, declared
from fedbayes.algorithms import find, names
from fedbayes.engine import clients as engine
from fedbayes.engine import keys
from fedbayes.engine.clients import Simulation
from fedbayes.evaluation.assess import assess

GOLDEN = Path(__file__).parent / "golden"

# One worker for all tests of an algorithm: they share its compiled programs.
each_algorithm = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in TABLE])
OFTEN = ("fedavg", "fedper", "fedhb-niw", "fedhb-mixture", "fedvi", "bpfed")
"""What a cohort becomes is the simulator's doing: for that, some algorithms of each kind are enough each time."""
some_often = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([] if name in OFTEN else [pytest.mark.slow])])
        for name in TABLE
    ],
)
ROUNDS = 30
"""Of the run that schedules are planned for: one number, as each is another program."""


def test_every_registered_algorithm_has_a_row():
    assert set(TABLE) == set(names("clients"))


def simulated(algorithm, data, rounds=3, **options):
    simulation = Simulation(algorithm.planned(ROUNDS), data, cohort=3, seed=5, **options)
    for _ in range(rounds):
        simulation.step()
    return simulation


def one_client(clients, index, length):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([index], length))


@each_algorithm
def test_is_a_final_frozen_dataclass_with_declared_uploads(name, model):
    algorithm = TABLE[name](model)
    assert type(algorithm).__bases__ == (NetworkAlgorithm,)
    assert isinstance(algorithm, find(name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.model = None
    assert set(declared(algorithm.up_type)) == set(algorithm.up_type._fields)


@each_algorithm
def test_messages_are_as_they_were(name, model, clients):
    """The golden file shows any change of a message as a diff; write it anew on purpose by deleting it."""
    leaves = wire.manifest(TABLE[name](model).planned(ROUNDS), one_client(clients, 0, 8))
    path = GOLDEN / f"{name}.txt"
    if not path.exists():
        path.write_text(wire.text(leaves))
        pytest.fail(f"{path.name} was missing and has been written: look at it and commit it")
    assert wire.text(leaves) == path.read_text()


@each_algorithm
def test_sends_nothing_private_as_it_is(name, model, clients):
    wire.check(wire.manifest(TABLE[name](model).planned(ROUNDS), one_client(clients, 0, 8)))


@some_often
def test_bytes_of_a_round_hold_no_local_state_and_no_row(name, model, clients):
    algorithm = TABLE[name](model).planned(ROUNDS)
    simulation = simulated(algorithm, clients)
    index = int(clients.participants[0])
    data = one_client(clients, index, 32)
    local = jax.tree.map(lambda leaf: leaf[0], simulation.local.get(np.array([index])))
    up, new = jax.jit(algorithm.client)(keys.of_round(5, 4), simulation.down(), local, data)
    sent = wire.pack(jax.device_get(up)) + wire.pack(jax.device_get(simulation.down()))
    rows = list(np.asarray(data.x)[np.asarray(data.mask)])
    for secret in [*rows, *jax.tree.leaves(local), *jax.tree.leaves(new)]:
        if (secret := np.asarray(secret)).nbytes > 8:  # a flag or a count is in any message by chance
            assert secret.tobytes() not in sent


@some_often
def test_vmap_and_loop_agree(name, model, clients):
    algorithm = TABLE[name](model)
    mapped, looped = (simulated(algorithm, clients, clients=mode) for mode in ("vmap", "loop"))
    ids = np.arange(len(clients))
    assert_close(mapped.state, looped.state, 1e-5)
    assert_close(mapped.local.get(ids), looped.local.get(ids), 1e-5)


@some_often
def test_groups_of_any_width_agree(name, model, clients):
    algorithm = TABLE[name](model)
    assert_close(simulated(algorithm, clients).state, simulated(algorithm, clients, width=1).state, 1e-5)


@some_often
def test_padding_changes_nothing(name, model, clients):
    algorithm = TABLE[name](model).planned(ROUNDS)
    simulation = Simulation(algorithm, clients)
    down, local, key = simulation.down(), simulation.fresh, jax.random.key(3)
    short, long = (one_client(clients, 2, length) for length in (int(clients.train_counts[2]), 32))
    for method in (jax.jit(algorithm.client), jax.jit(algorithm.adapt)):
        assert_close(method(key, down, local, short), method(key, down, local, long), 1e-6)


@some_often
def test_what_lies_in_the_padding_does_not_matter(name, model, clients):
    algorithm = TABLE[name](model).planned(ROUNDS)
    simulation = Simulation(algorithm, clients)
    data = one_client(clients, 2, 32)
    junk = Data(jnp.where(data.mask[:, None], data.x, 1e9), jnp.where(data.mask, data.y, 1), data.mask)
    arguments = (jax.random.key(3), simulation.down(), simulation.fresh)
    client = jax.jit(algorithm.client)
    assert_close(client(*arguments, data), client(*arguments, junk), 0)


@some_often
def test_same_seed_same_bits_other_seed_other_bits(name, model, clients):
    algorithm = TABLE[name](model)
    one, again = (simulated(algorithm, clients) for _ in range(2))
    assert_same(one.state, again.state)
    other = Simulation(algorithm.planned(ROUNDS), clients, cohort=3, seed=6)
    for _ in range(3):
        other.step()
    assert any(
        (np.asarray(a) != b).any() for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True)
    )


@some_often
def test_messages_survive_the_wire(name, model, clients):
    algorithm = TABLE[name](model).planned(ROUNDS)
    simulation = Simulation(algorithm, clients)
    down = jax.device_get(simulation.down())
    up, _ = jax.jit(algorithm.client)(jax.random.key(0), down, simulation.fresh, one_client(clients, 1, 32))
    for message in (down, jax.device_get(up)):
        assert_same(wire.unpack(wire.pack(message), message, "message", finite=True), message)


@some_often
def test_learns(name, model, clients):
    """A line divides the classes, so every method's best mode must get nearly all of it, also on unseen clients."""
    simulation = simulated(TABLE[name](model), clients, rounds=ROUNDS)
    figures = assess(simulation).summary()["adapted"]
    assert figures["participating"]["accuracy"]["rows"] >= 0.85
    assert figures["unseen"]["accuracy"]["rows"] >= 0.75
    assert figures["participating"]["log_score"]["rows"] > -0.45


@some_often
def test_unseen_clients_keep_nothing_from_training(name, model, clients):
    simulation = simulated(TABLE[name](model), clients)
    assert not simulation.local.trained()[clients.unseen].any()


@some_often
def test_one_trace_for_each_bucket(name, model, clients, monkeypatch):
    """A second simulation with another seed, and later rounds, trace nothing new."""
    monkeypatch.setattr(engine, "ONE_LENGTH", 0)
    algorithm = TABLE[name](model)
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Counted(NetworkAlgorithm[type(None), type(None), type(None), algorithm.up_type]):
        inner: Algorithm

        def __getattribute__(self, method):
            if method in ("init_server", "init_local", "broadcast", "server", "adapt", "predict", "model"):
                return getattr(object.__getattribute__(self, "inner"), method)
            return object.__getattribute__(self, method)

        def init_server(self, key): ...
        def init_local(self, key, data): ...
        def broadcast(self, key, server): ...
        def server(self, key, server, down, up): ...
        def adapt(self, key, down, local, data): ...
        def predict(self, key, down, local, x): ...

        def client(self, key, down, local, data):
            traced.append(data.mask.shape)
            return self.inner.client(key, down, local, data)

    counted = Counted(algorithm.planned(ROUNDS))
    for seed in (0, 1):
        simulation = Simulation(counted, clients, cohort=3, seed=seed)
        for _ in range(4):
            simulation.step()
    assert len(simulation.buckets) == 2
    assert len(traced) == len(simulation.buckets)
