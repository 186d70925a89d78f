"""Real processes: a SuperLink with TLS, nodes with keys, a run; and what happens when one of them is killed."""

import importlib.util
import json
import textwrap
import time

import jax
import numpy as np
import pytest

import fedbayes as fb
from fedbayes import wire
from fedbayes.commands.deploy import experiment_of
from fedbayes.deploy.certificates import make_key
from fedbayes.deploy.processes import federation
from fedbayes.deploy.template import write_project
from fedbayes.simulator import Simulation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("flower"),
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs fedbayes[flower]"),
]
ROUNDS, SITES = 3, 2

METHODS = {
    "fedavg": "fb.FedAvg(model, train=TRAIN)",
    "fedper": "fb.FedPer(model, train=TRAIN)",
    "fedhb-niw": "fb.FedHBNIW(model, sigma0=0.3, train=TRAIN)",
    "fedhb-mixture": "fb.FedHBMixture(model, train=TRAIN)",
    "bpfed": "fb.BPFed(model, train=TRAIN)",
    "fedvi": "fb.FedVI(model, constructor=(8,), train=TRAIN, server_lr=1.0)",
}
EXPERIMENT = """\
import time

import fedbayes as fb
from fedbayes.deploy.experiment import Experiment, example_rows, site_rows

TRAIN = fb.Training(epochs=1, batch=50, lr=0.05)
clients = fb.data.load("digits", partition="iid", clients={sites})
model = fb.network("mlp", clients, hidden=(8,))
algorithm = ({algorithm}).planned({rounds}, **clients.facts)


def load(settings):
    if "slow" in settings:
        time.sleep(float(settings["slow"]))
    return site_rows(clients, str(settings["number"]))


experiment = Experiment(algorithm, example_rows((64,)), load, {rounds}, {sites}, seed=5, {options})
"""


def project(folder, name, options="patience=240.0", rounds=ROUNDS):
    """A project whose experiment is a small one."""
    write_project(folder, "fedavg", SITES, rounds)
    text = EXPERIMENT.format(algorithm=METHODS[name], sites=SITES, rounds=rounds, options=options)
    (folder / "federation" / "experiment.py").write_text(textwrap.dedent(text))
    return folder


def settings(folder, **more):
    return [
        {"number": number, "state": str(folder / f"state{number}"), **more.get(f"site{number}", {})} for number in range(SITES)
    ]


def simulated(folder):
    """The simulator after the rounds of the project in a folder."""
    experiment = experiment_of(folder / "project")
    clients = fb.data.load("digits", partition="iid", clients=SITES)
    simulation = Simulation(experiment.algorithm, clients, seed=5, clients="loop")
    for _ in range(experiment.rounds):
        simulation.step()
    return simulation


def assert_simulators(folder):
    simulation = simulated(folder)
    for a, b in zip(jax.tree.leaves(state_in(folder, simulation.state)), jax.tree.leaves(simulation.state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


def state_in(folder, template):
    return wire.unpack((folder / "server" / "checkpoint.safetensors").read_bytes(), jax.device_get(template), "the checkpoint")


def rounds_done(folder):
    path = folder / "server" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition, seconds=240.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.25)


@pytest.mark.parametrize("name", METHODS)
def test_two_real_sites_give_the_simulators_state(name, tmp_path):
    with federation(project(tmp_path / "project", name), tmp_path, settings(tmp_path)) as running:
        running.run({"out": str(tmp_path / "server")}, wait=400)
    assert_simulators(tmp_path)
    assert [entry["sites"] for entry in rounds_done(tmp_path)] == [[0, 1]] * ROUNDS


def test_a_site_that_is_killed_is_left_out_and_comes_back(tmp_path):
    """Site 1 dies in the middle of a round, which goes on without it; started again, it is counted again."""
    folder = project(tmp_path / "project", "fedper", "patience=30.0, minimum=1", rounds=6)
    with federation(folder, tmp_path, settings(tmp_path, site1={"slow": 8})) as running:
        run = running.run({"out": str(tmp_path / "server")})
        wait_until(lambda: len(rounds_done(tmp_path)) >= 1)
        running.kill("site1")
        wait_until(lambda: any(entry["sites"] == [0] for entry in rounds_done(tmp_path)))
        wait_until(lambda: restarted(running, 1, tmp_path))
        run.wait(400)
    done = rounds_done(tmp_path)
    assert [entry["round"] for entry in done] == list(range(1, 7))
    assert all(0 in entry["sites"] for entry in done)
    assert any(entry["sites"] == [0] for entry in done)


def restarted(running, number, folder):
    """Start a site anew until Flower takes it back, as a supervisor does; true when the run is over or the site stays up."""
    if running.processes["run"].poll() is not None:
        return True
    process = running.processes[f"site{number}"]
    if process.poll() is not None:
        running.start_site(number)
        time.sleep(5)
    return running.processes[f"site{number}"].poll() is None


def test_the_server_app_is_killed_and_the_same_run_goes_on(tmp_path):
    folder = project(tmp_path / "project", "fedper", rounds=4)
    with federation(folder, tmp_path, settings(tmp_path)) as running:
        running.run({"out": str(tmp_path / "server")})
        wait_until(lambda: len(rounds_done(tmp_path)) >= 2)
        running.kill("superexec")  # and with it the server app that it started
        running.kill("run")
        running.start_executor()
        running.run({"out": str(tmp_path / "server")}, wait=400)
    assert_simulators(tmp_path)


def test_a_superlink_that_is_away_for_a_while_is_survived(tmp_path):
    folder = project(tmp_path / "project", "fedper", rounds=4)
    with federation(folder, tmp_path, settings(tmp_path)) as running:
        run = running.run({"out": str(tmp_path / "server")})
        wait_until(lambda: len(rounds_done(tmp_path)) >= 1)
        running.kill("superlink")
        time.sleep(15)
        running.start_link()
        wait_until(lambda: len(rounds_done(tmp_path)) == 4, 400)
        wait_until(lambda: (tmp_path / "server" / "result.json").exists(), 120)
        assert run is running.processes["run"]
    assert_simulators(tmp_path)


def test_a_site_without_a_registered_key_is_refused(tmp_path):
    folder = project(tmp_path / "project", "fedper")
    with federation(folder, tmp_path, settings(tmp_path)) as running:
        make_key(tmp_path / "stranger")
        running.kill("site1")
        running.start_site(1, tmp_path / "stranger")
        running.processes["site1"].wait(60)
        assert running.processes["site1"].returncode != 0
