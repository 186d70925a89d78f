"""What every algorithm must do, whatever it is: each test runs for each row of the table.

`make test` runs all of them for a few methods of different shapes, `make test-all` for every method, and
`make test-method NAME=fedavg` for one.
"""

import dataclasses
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same
from hierarchy import MEAN, WEIGHT, Y, partition, population, silo
from table import TABLE, methods, registered

import fedbayes as fb
from fedbayes import wire
from fedbayes.algorithm import Algorithm, Data, NetworkAlgorithm, StructuredAlgorithm, declared
from fedbayes.algorithms import REGISTRY, find
from fedbayes.engine import clients as engine
from fedbayes.engine import silo_data, silos
from fedbayes.engine.clients import Simulation
from fedbayes.engine.silos import SiloSimulation
from fedbayes.evaluation.assess import assess

GOLDEN = Path(__file__).parent / "golden"
ROUNDS = 30
"""Of the run that schedules are planned for: one number, as each is another program."""


def one_client(clients, index, length):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([index], length))


class OverClients:
    """A method that trains a network, over the tests' clients."""

    kind, tolerance = NetworkAlgorithm, 1e-5

    def __init__(self, name, model, clients):
        self.clients, self.algorithm = clients, TABLE[name](model).planned(ROUNDS, **clients.facts)

    def start(self, *, seed=5, loop=False, **options):
        return Simulation(self.algorithm, self.clients, cohort=3, seed=seed, clients="loop" if loop else "vmap", **options)

    def locals(self, simulation):
        return simulation.local.get(np.arange(len(self.clients)))

    def holder(self, simulation):
        """A participant's local state and rows."""
        index = int(self.clients.participants[0])
        local = jax.tree.map(lambda leaf: leaf[0], simulation.local.get(np.array([index])))
        return local, one_client(self.clients, index, 32)

    def secrets(self, simulation, data, local):
        rows = np.asarray(data.x)[np.asarray(data.mask)]
        # A flag or a count is in any message by chance.
        return [*rows, *(leaf for leaf in map(np.asarray, jax.tree.leaves(local)) if leaf.nbytes > 8)]

    def manifest(self):
        return wire.manifest(self.algorithm, one_client(self.clients, 0, 8))


class OverSilos:
    """A method that fits a structured model, over silos of one hierarchy."""

    kind, tolerance = StructuredAlgorithm, 2e-4

    def __init__(self, name):
        self.data, self.row = partition(4, 4, 4), TABLE[name](population, silo)
        self.algorithm = silo_data.plan(self.row, self.data, ROUNDS)

    def start(self, *, seed=5, loop=False):
        return SiloSimulation(self.algorithm, self.data, seed=seed, loop=loop)

    def locals(self, simulation):
        return simulation.states

    def holder(self, simulation):
        return simulation.own("s1"), simulation.data("s1")

    def secrets(self, simulation, data, local):
        """Each observation, and each number of the posterior of the silo's own latents."""
        eta = self.algorithm.eta(local, self.algorithm.shared(simulation.state))
        return [entry for leaf in jax.tree.leaves((data, eta)) for entry in np.asarray(leaf).reshape(-1) if entry]

    def manifest(self):
        data = {"y": jnp.asarray(Y[5:])}
        algorithm = self.row
        if not isinstance(algorithm, fb.EP):  # which has no family to choose
            algorithm = dataclasses.replace(algorithm, family=fb.Family(moving_scale=True))  # the family that sends most
        return wire.manifest(silo_data.plan(algorithm, {"a": data}, 10), data)


@pytest.fixture
def method(name, model, clients):
    return OverClients(name, model, clients) if REGISTRY[registered(name)].kind == "clients" else OverSilos(name)


def advanced(simulation, rounds=3):
    for _ in simulation.advance(rounds):
        pass
    return simulation


def test_every_registered_algorithm_has_a_row():
    assert {registered(name) for name in TABLE} == set(REGISTRY)


# Cheap, so that they run for every method each time.


@methods(often=TABLE)
def test_is_a_final_frozen_dataclass_of_its_kind_with_declared_uploads(name, method):
    algorithm = method.algorithm
    assert type(algorithm) is find(registered(name))
    line = type(algorithm).__mro__[1:]
    assert all(inspect.isabstract(cls) for cls in line[: line.index(method.kind)])  # abstract or final
    with pytest.raises(dataclasses.FrozenInstanceError):
        algorithm.model = None
    assert set(declared(algorithm.up_type)) == set(algorithm.up_type._fields)


@methods(often=TABLE)
def test_messages_are_as_they_were(name, method, request):
    """The golden file shows any change of a message as a diff; write it anew on purpose by deleting it."""
    text, path = wire.text(method.manifest()), GOLDEN / f"{name}.txt"
    if request.config.getoption("--method") and not path.exists():
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing; make test-method NAME={name} writes it"
    assert text == path.read_text()


@methods(often=TABLE)
def test_sends_nothing_private_as_it_is(name, method):
    wire.check(method.manifest())


# All others, for either kind


@methods()
def test_bytes_of_a_round_hold_no_local_state_and_no_row(name, method):
    simulation = advanced(method.start())
    local, data = method.holder(simulation)
    up, new = jax.jit(method.algorithm.client)(jax.random.key(4), simulation.down(), local, data)
    sent = wire.pack(jax.device_get(up)) + wire.pack(jax.device_get(simulation.down()))
    for secret in [*method.secrets(simulation, data, local), *method.secrets(simulation, data, new)]:
        assert secret.tobytes() not in sent


@methods()
def test_messages_survive_the_wire(name, method):
    simulation = method.start()
    down = jax.device_get(simulation.down())
    up, _ = jax.jit(method.algorithm.client)(jax.random.key(0), down, *method.holder(simulation))
    for message in (down, jax.device_get(up)):
        assert_same(wire.unpack(wire.pack(message), message, "message", finite=True), message)


@methods()
def test_together_and_one_by_one_agree(name, method):
    together, looped = (advanced(method.start(loop=loop)) for loop in (False, True))
    tolerance = method.tolerance if name != "ep" else 0.01  # chains are chaotic: rounding grows with every step
    assert_close(together.state, looped.state, tolerance)
    assert_close(method.locals(together), method.locals(looped), tolerance)


@methods()
def test_same_seed_same_bits_other_seed_other_bits(name, method):
    one, again, other = (advanced(method.start(seed=seed)) for seed in (5, 5, 6))
    assert_same(one.state, again.state)
    pairs = zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True)
    assert any((np.asarray(a) != b).any() for a, b in pairs)


# Over clients


@methods("clients")
def test_groups_of_any_width_agree(name, method):
    assert_close(advanced(method.start()).state, advanced(method.start(width=1)).state, 1e-5)


@methods("clients")
def test_padding_changes_nothing(name, method, clients):
    simulation = method.start()
    down, local, key = simulation.down(), simulation.fresh, jax.random.key(3)
    short, long = (one_client(clients, 2, length) for length in (int(clients.train_counts[2]), 32))
    for step in (jax.jit(method.algorithm.client), jax.jit(method.algorithm.adapt)):
        assert_close(step(key, down, local, short), step(key, down, local, long), 1e-6, relative=1e-6)


@methods("clients")
def test_what_lies_in_the_padding_does_not_matter(name, method, clients):
    simulation = method.start()
    data = one_client(clients, 2, 32)
    junk = Data(jnp.where(data.mask[:, None], data.x, 1e9), jnp.where(data.mask, data.y, 1), data.mask)
    arguments = (jax.random.key(3), simulation.down(), simulation.fresh)
    client = jax.jit(method.algorithm.client)
    assert_close(client(*arguments, data), client(*arguments, junk), 0)


@methods("clients")
def test_learns(name, method, clients):
    """A line divides the classes, so every method's best mode must get nearly all of it, also on unseen clients."""
    found = assess(advanced(method.start(), ROUNDS)).summary()["adapted"]
    participating, unseen = ({metric: value["rows"] for metric, value in found[who].items()} for who in found)
    if "rmse" in participating:  # labels as numbers, whose standard deviation is 0.5
        assert max(participating["rmse"], unseen["rmse"]) < 0.4
    else:
        assert participating["accuracy"] >= 0.85
        assert unseen["accuracy"] >= 0.75
        assert participating["log_score"] > -0.45


@methods("clients")
def test_unseen_clients_keep_nothing_from_training(name, method, clients):
    assert not advanced(method.start()).local.trained()[clients.unseen].any()


@methods("clients")
def test_one_trace_for_each_bucket(name, method, clients, monkeypatch):
    """A second simulation with another seed, and later rounds, trace nothing new."""
    monkeypatch.setattr(engine, "ONE_LENGTH", 0)
    traced = []

    @dataclasses.dataclass(frozen=True)
    class Counted(NetworkAlgorithm[type(None), type(None), type(None), method.algorithm.up_type]):
        model: object = dataclasses.field(init=False)
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

    for seed in (0, 1):
        simulation = advanced(Simulation(Counted(method.algorithm), clients, cohort=3, seed=seed), 4)
    assert len(simulation.buckets) == 2
    assert len(traced) == len(simulation.buckets)


# Over silos


@methods("silos")
def test_bound_rises_and_the_mean_is_found(name, method):
    row = method.row if name == "ep" else dataclasses.replace(method.row, lr=0.05)
    fit = fb.simulate(row, method.data, 400)
    if name != "ep":  # which has no bound, and stops by itself
        assert fit.bound[-20:].mean() > fit.bound[:20].mean() + 1
    assert float(fit.draws(4000)["mean"].mean()) == pytest.approx(MEAN, abs=0.15)


@methods("silos")
def test_a_new_silo_is_fitted_and_changes_nothing_shared(name, method):
    fit = fb.simulate(method.row, method.data, 3)
    y = np.float32([5.0, 5.5])
    grown = fit.adapt("new", {"y": y})
    assert_same(grown.shared, fit.shared)
    found = grown.local_posterior("new", 2000).posterior
    expected = WEIGHT * y + (1 - WEIGHT) * float(found["mean"].mean())
    np.testing.assert_allclose(found["effect"][0].mean(axis=0), expected, atol=0.1)


@methods("silos")
def test_one_program_for_all_rounds(name, method):
    silos._stretch.clear_cache()
    advanced(advanced(method.start(), 5), 4)
    advanced(method.start(seed=1), 3)
    assert silos._stretch._cache_size() == 1
