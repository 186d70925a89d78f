"""A deployment's two sides in one process: the simulator's numbers, and what happens when sites fail."""

import dataclasses
import importlib.util
import itertools
import logging
import subprocess
import sys

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import assert_close, assert_same
from deployed import deployment, parts_of
from hierarchy import partition, population, silo
from table import TABLE, methods

import fedbayes as fb
from fedbayes import files, wire
from fedbayes.algorithms import REGISTRY, find
from fedbayes.cli.arguments import python_file
from fedbayes.deploy.coordinator import Coordinator
from fedbayes.deploy.experiment import Experiment, SiteData
from fedbayes.deploy.site import Site
from fedbayes.deploy.template import write_project
from fedbayes.engine.clients import Simulation
from fedbayes.engine.silo_data import plan
from fedbayes.engine.silos import SiloSimulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Categorical, mlp
from fedbayes.primitives.training import Training

ROUNDS = 3


@pytest.fixture
def clients(clients):
    """All of them take part."""
    return dataclasses.replace(clients, unseen=np.zeros(len(clients), bool))


@pytest.fixture
def everyone(clients):
    return parts_of(clients)


def assert_near(one, other):
    """Within 1e-6, or within 1e-6 of numbers that are large."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


def simulated(algorithm, clients, rounds=ROUNDS):
    simulation = Simulation(algorithm, clients, seed=5, clients="loop")  # vmap rounds otherwise, which Adam makes larger
    for _ in range(rounds):
        simulation.step()
    return simulation


@methods("clients", often=("fedper",))
def test_state_and_scores_are_the_simulators(name, model, clients, everyone, tmp_path):
    algorithm = TABLE[name](model).planned(ROUNDS, **clients.facts)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS)
    result = coordinator.finish(post)
    simulation = simulated(algorithm, clients)
    assert_near(coordinator.state, simulation.state)
    expected = assess(simulation).summary()
    for mode, groups in expected.items():
        found = result["metrics"][mode]["participating"]["log_score"]["rows"]
        assert found == pytest.approx(groups["participating"]["log_score"]["rows"], abs=1e-4)


@methods("silos", often=("sfvi",))
def test_structured_models_are_the_simulators(name, tmp_path):
    data = partition(5, 4, 3)
    algorithm = plan(TABLE[name](population, silo), data, ROUNDS)
    parts = [SiteData(one) for one in data.values()]
    coordinator, post = deployment(algorithm, parts, tmp_path, ROUNDS)
    coordinator.finish(post)
    # Chains are chaotic: they are the same where the program is, and a site's is that of one silo at a time.
    simulation = SiloSimulation(algorithm, data, seed=5, loop=name == "ep")
    for _ in simulation.advance(ROUNDS):
        pass
    assert_near(coordinator.state, simulation.state)


@pytest.mark.slow
def test_a_deployed_fit_has_the_simulators_verdict(tmp_path):
    data = partition(5, 4, 3)
    algorithm = plan(fb.PVI(population, silo, steps=300, lr=0.05), data, 8)
    coordinator, post = deployment(algorithm, [SiteData(one) for one in data.values()], tmp_path, 8)
    result = coordinator.finish(post)
    fit = fb.simulate(fb.PVI(population, silo, steps=300, lr=0.05), data, 8, seed=5)
    assert result["verdict"]["verdict"] == fit.result["verdict"]["verdict"] == "good"
    assert result["ess"] == pytest.approx(fit.result["ess"], abs=1e-3)
    assert result["estimates"]["mean"]["mean"] == pytest.approx(fit.result["posterior"]["mean"]["mean"], abs=0.05)
    assert result["verdict"]["checks"]["own"] == {"latents": 12, "moved": 0, "scaled": 0}
    # Every array that crossed is of one of the two manifests (the last broadcast is a round's, under `down`), and evidence
    # rounds left no site in another state.
    paths = {leaf.path for leaves in coordinator.experiment.manifests() for leaf in leaves}
    assert {path.removeprefix("down/") for arrays in post.seen for path in arrays} <= paths
    assert coordinator.counted == {0: 8, 1: 8, 2: 8}


def test_without_a_sites_evidence_the_verdict_says_so(tmp_path):
    def outside(mean, data):
        with numpyro.plate("units", 3):
            effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
        numpyro.sample("y", dist.Normal(effect.sum(), 1.0), obs=data["y"].sum())

    data = partition(6, 6)
    algorithm = plan(fb.SFVI(population, outside), data, 2)
    coordinator, post = deployment(algorithm, [SiteData(one) for one in data.values()], tmp_path, 2)
    verdict = coordinator.finish(post)["verdict"]
    assert verdict["verdict"] == "not checked"
    assert "site 0: y depends on latents of several elements of plate 'units' at once" in verdict["reasons"][-1]


def test_a_site_that_is_away_at_the_end_is_told_in_the_verdict(tmp_path):
    data = partition(6, 6)
    algorithm = plan(fb.PVI(population, silo, steps=3), data, 2)
    coordinator, post = deployment(algorithm, [SiteData(one) for one in data.values()], tmp_path, 2, patience=0.1)
    coordinator.step(post)
    coordinator.step(post)
    post.faults = {1: "away"}
    result = coordinator.finish(post)
    assert result["sites"] == [0]
    assert result["verdict"]["verdict"] == "not checked"
    assert "sites 1 cannot be reached" in result["verdict"]["reasons"][-1]


def fedper(model):
    return fb.FedPer(model, train=Training(epochs=2, batch=8, lr=0.1))


def without(algorithm, parts, tmp_path, gone, rounds=ROUNDS):
    """The state after rounds in which some sites are never counted; `gone` has (site, round)."""
    faults = dict.fromkeys(gone, "lost")
    coordinator, post = deployment(algorithm, parts, tmp_path / "without", rounds, faults, minimum=1)
    for _ in range(rounds):
        coordinator.step(post)
    return coordinator


@pytest.mark.parametrize(
    "fault",
    [
        "nan",
        "extra",
        "norm",
        "lost",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("shape", "dtype", "missing", "error", "old")),
    ],
)
def test_a_bad_answer_is_named_and_not_counted(fault, model, everyone, tmp_path, caplog):
    algorithm = fedper(model)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS, {(1, 2): fault}, minimum=1, norm=100.0)
    with caplog.at_level(logging.WARNING, "fedbayes"):
        for _ in range(ROUNDS):
            coordinator.step(post)
    assert any("round 2" in line and "1" in line for line in caplog.messages)
    assert_same(coordinator.state, without(algorithm, everyone, tmp_path, [(1, 2)]).state)
    assert coordinator.counted[1] == 3
    assert [entry["sites"] for entry in coordinator.history][1] == [0, *range(2, len(everyone))]


def test_an_answer_that_comes_twice_counts_once(model, everyone, tmp_path):
    algorithm = fedper(model)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS, {(1, 2): "twice"}, minimum=1)
    for _ in range(ROUNDS):
        coordinator.step(post)
    assert_same(coordinator.state, without(algorithm, everyone, tmp_path, []).state)


def test_a_lost_answer_leaves_no_trace_in_the_sites_state(model, everyone, tmp_path):
    """The site advanced, but the server did not count it: its next round starts where its last counted one ended."""
    algorithm = fedper(model)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS, {(1, 2): "lost"}, minimum=1)
    for _ in range(ROUNDS):
        coordinator.step(post)
    away, apart = deployment(algorithm, everyone, tmp_path / "away", ROUNDS, minimum=1)
    for number in range(1, ROUNDS + 1):
        apart.faults = {1: "away"} if number == 2 else {}
        away.step(apart)
    assert_same(coordinator.state, away.state)
    own = [one.places[1].personal for one in (post, apart)]
    coordinator.conclude(post)
    away.conclude(apart)
    assert_same(own[0](), own[1]())


def test_the_server_goes_on_from_its_checkpoint(model, everyone, tmp_path):
    algorithm = fedper(model)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS)
    coordinator.step(post)
    coordinator.step(post)
    for site in post.places.values():  # sites answered a third round, of which the server that died knew nothing
        site.train(coordinator.run, 3, 2, jax.device_get(algorithm.broadcast(jax.random.key(0), coordinator.state)))
    coordinator.kept.close()
    again = Coordinator(coordinator.experiment, coordinator.folder)
    assert again.round == 2
    again.finish(post)
    whole, apart = deployment(algorithm, everyone, tmp_path / "whole", ROUNDS)
    whole.finish(apart)
    assert_same(again.state, whole.state)
    assert [entry["round"] for entry in again.history] == [1, 2, 3]


def test_a_site_without_the_state_that_was_counted_refuses(model, everyone, tmp_path, caplog):
    """A lost folder, or one of an older day: the site says so and sends nothing, and what it has stays."""
    coordinator, post = deployment(fedper(model), everyone, tmp_path, ROUNDS, minimum=1)
    coordinator.step(post)
    coordinator.step(post)
    down = jax.device_get(coordinator.experiment.algorithm.broadcast(jax.random.key(0), coordinator.state))
    site = post.places[1]
    with pytest.raises(UserError, match="counted round 5"):
        site.train(coordinator.run, 6, 5, down)
    elsewhere = Site(coordinator.experiment, 1, tmp_path / "elsewhere", everyone[1])
    with pytest.raises(UserError, match="counted round 2"):
        elsewhere.train(coordinator.run, 3, 2, down)
    site.train(coordinator.run, 3, 2, down)  # the state after round 2 is still there


@pytest.mark.slow
def test_looking_changes_nothing(model, everyone, tmp_path):
    """A site that personalises reads its state; a round that was trained after the last broadcast stays."""
    coordinator, post = deployment(fedper(model), everyone, tmp_path, 1)
    coordinator.finish(post)
    site = post.places[0]
    down = jax.device_get(coordinator.experiment.algorithm.broadcast(jax.random.key(0), coordinator.state))
    site.train(coordinator.run, 2, 1, down)
    before = {path: path.read_bytes() for path in site.folder.rglob("*.bin")}
    site.personal()
    assert {path: path.read_bytes() for path in site.folder.rglob("*.bin")} == before


def test_two_in_one_folder_are_refused(model, everyone, tmp_path):
    coordinator, post = deployment(fedper(model), everyone, tmp_path, 1)
    with pytest.raises(UserError, match=r"another process is working in .*server"):
        Coordinator(coordinator.experiment, coordinator.folder)
    down = jax.device_get(coordinator.experiment.algorithm.broadcast(jax.random.key(0), coordinator.state))
    folder = post.places[0].folder / coordinator.run
    with files.locked(folder, "somebody"), pytest.raises(UserError, match="another process"):
        post.places[0].train(coordinator.run, 1, 0, down)


def test_a_weight_beyond_what_is_allowed_is_refused(model, everyone, tmp_path, caplog):
    coordinator, post = deployment(fedper(model), everyone, tmp_path, 1, {0: "heavy"}, minimum=1, weight=1000.0)
    with caplog.at_level(logging.WARNING, "fedbayes"):
        coordinator.step(post)
    assert any("weight" in line for line in caplog.messages)
    assert coordinator.counted[0] == 0


def test_other_networks_and_other_numbers_of_sites_are_other_experiments(model, clients, everyone, tmp_path):
    places = (tmp_path / str(number) for number in itertools.count())

    def fingerprint(network, parts):
        return deployment(fb.FedPer(network), parts, next(places))[0].experiment.fingerprint

    same = mlp((4,), Categorical(2), hidden=(8,))
    scaled = mlp((4,), Categorical(2), hidden=(8,), scale=2.0)
    assert fingerprint(model, everyone) == fingerprint(same, everyone)
    assert len({fingerprint(model, everyone), fingerprint(scaled, everyone), fingerprint(model, everyone[:3])}) == 3


@pytest.mark.parametrize("kind", [pytest.param("rows", marks=pytest.mark.slow), "silos"])
def test_a_fingerprint_does_not_depend_on_what_a_process_did_before(kind, model, everyone, tmp_path):
    """A server traces the manifest first, a site in a round does not, and JAX remembers what it traced."""

    def experiment():
        if kind == "rows":
            return deployment(fedper(model), everyone, tmp_path)[0].experiment

        def own_population():
            return population()

        def own_silo(mean, data):
            return silo(mean, data)

        data = dict(enumerate(partition(6, 6).values()))
        algorithm = fb.PVI(own_population, own_silo, steps=3).planned(ROUNDS, silos=2, rows=12)
        return Experiment(algorithm, data[0], SiteData, ROUNDS, 2)

    jax.clear_caches()
    one = experiment()
    wire.check(wire.manifest(one.algorithm, one.example))
    first = one.fingerprint
    jax.clear_caches()
    assert experiment().fingerprint == first


COPY = """
import cloudpickle
from federation.app import client
from federation.experiment import experiment

before = experiment.fingerprint
cloudpickle.loads(cloudpickle.dumps(client))
copy = cloudpickle.loads(cloudpickle.dumps(experiment))
del copy.__dict__["fingerprint"]
assert copy.fingerprint == before
"""


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs fedbayes[flower]")
def test_an_app_that_was_used_can_be_copied_to_rays_processes(tmp_path):
    """As Flower's simulation does, outside the tests' checks of types, which cannot be copied."""
    write_project(tmp_path / "project", "fedper", 2, ROUNDS)
    subprocess.run([sys.executable, "-c", COPY], cwd=tmp_path / "project", check=True, timeout=300)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_new_project_is_an_experiment_of_any_method(name, tmp_path):
    for path in write_project(tmp_path / "project", name, 4, 7):
        assert path.exists()
    experiment = python_file(tmp_path / "project/federation/experiment.py", ["experiment"], "a project").experiment
    algorithm = experiment.algorithm
    assert type(algorithm) is find(name)
    expected = {"rounds": 7, "clients": 4, "silos": 4, "rows": 1347 if experiment.networked else 80}
    for field in dataclasses.fields(algorithm):
        needed_by = field.metadata.get("needed_by")
        if field.metadata.get("fact") in expected and (needed_by is None or getattr(algorithm, needed_by)):
            assert getattr(algorithm, field.name) == expected[field.metadata["fact"]]
    assert experiment.load({"number": 1}).train is not None


def test_a_folder_of_another_experiment_is_refused(model, everyone, tmp_path):
    coordinator, post = deployment(fedper(model), everyone, tmp_path, ROUNDS)
    coordinator.step(post)
    coordinator.kept.close()
    with pytest.raises(UserError, match="another experiment"):
        deployment(fb.FedPer(model, train=Training(lr=0.5)), everyone, tmp_path, ROUNDS)


def test_too_few_answers_keep_the_round_before(model, everyone, tmp_path):
    coordinator, post = deployment(fedper(model), everyone, tmp_path, ROUNDS, {0: "nan"}, patience=0.1)
    before = coordinator.state
    with pytest.raises(UserError, match="are needed"):
        coordinator.step(post)
    assert_same(coordinator.state, before)
    post.faults = {0: "away"}
    with pytest.raises(UserError, match="can be reached"):
        coordinator.step(post)
    post.faults = {}
    coordinator.step(post)
    assert coordinator.round == 1


def test_no_message_holds_a_local_state_or_a_row(model, everyone, tmp_path):
    coordinator, post = deployment(fedper(model), everyone, tmp_path, ROUNDS)
    coordinator.finish(post)
    sent = b"\0".join(array.tobytes() for message in post.seen for array in message.values())
    for site in post.places.values():
        _, local = site.personal()
        private = [*jax.tree.leaves(local), *site.data.train.x, *site.data.test.x]
        for leaf in private:
            if np.asarray(leaf).any() and leaf.nbytes > 1:  # a flag is in any message by chance
                assert np.ascontiguousarray(leaf).tobytes() not in sent


def test_a_site_personalises_from_what_it_keeps(model, clients, everyone, tmp_path):
    algorithm = fedper(model)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS)
    coordinator.finish(post)
    down, local = post.places[2].personal()
    simulation = simulated(algorithm, clients)
    x = everyone[2].test.x
    expected = algorithm.predict(
        jax.random.key(0), simulation.down(), jax.tree.map(lambda leaf: leaf[0], simulation.local.get(np.array([2]))), x
    )
    assert_close(algorithm.predict(jax.random.key(0), down, local, x), expected, 1e-5)
    with pytest.raises(UserError, match="no finished run"):
        Site(coordinator.experiment, 2, tmp_path / "nowhere", everyone[2]).personal()


@pytest.mark.slow
def test_result_is_written(model, everyone, tmp_path):
    coordinator, post = deployment(fedper(model), everyone, tmp_path, 1)
    result = coordinator.finish(post)
    assert files.read_json(coordinator.folder / "result.json") == result
    assert result["sites"] == list(range(len(everyone)))
    assert wire.metadata((coordinator.folder / "checkpoint.safetensors").read_bytes())["round"] == 1


@pytest.mark.slow
def test_cohorts_are_the_simulators(model, clients, everyone, tmp_path):
    algorithm = fedper(model)
    coordinator, post = deployment(algorithm, everyone, tmp_path, ROUNDS, cohort=2)
    coordinator.finish(post)
    simulation = Simulation(algorithm, clients, seed=5, cohort=2)
    for _ in range(ROUNDS):
        simulation.step()
    assert_near(coordinator.state, simulation.state)


def test_bad_settings_are_one_sentence(model, everyone, tmp_path):
    for options, word in (({"cohort": 99}, "cohort is 99"), ({"minimum": 0}, "minimum is 0"), ({"patience": 0.0}, "patience")):
        with pytest.raises(UserError, match=word):
            deployment(fedper(model), everyone, tmp_path, **options)
