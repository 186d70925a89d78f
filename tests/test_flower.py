"""Real processes: a SuperLink with TLS, nodes with keys, runs; and what happens when one of them fails or is killed."""

import contextlib
import importlib.util
import json
import os
import signal
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT
from deployed import deployment
from hierarchy import partition

import fedbayes as fb
from fedbayes import wire
from fedbayes.cli.deploy import experiment_of
from fedbayes.deploy.experiment import site_rows
from fedbayes.deploy.processes import Federation, federation
from fedbayes.deploy.site import Site
from fedbayes.deploy.template import write_project
from fedbayes.deploy.tls import make_key
from fedbayes.engine import choose
from fedbayes.engine.choose import LEAST
from fedbayes.engine.clients import Simulation
from fedbayes.engine.silos import SiloSimulation
from fedbayes.results.verdict import VERDICTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs fedbayes[flower]"),
]
ROUNDS, SITES = 3, 2
WAIT = 600
"""Seconds that a run may take: each message is a new process, and a machine may be busy."""

NETWORKS = {
    "fedavg": "fb.FedAvg(model, train=TRAIN)",
    "fedper": "fb.FedPer(model, train=TRAIN)",
    "fedhb-niw": "fb.FedHBNIW.paper(model, sigma0=0.3, train=TRAIN)",
    "fedhb-mixture": "fb.FedHBMixture.paper(model, train=TRAIN)",
    "bpfed": "fb.BPFed(model, train=TRAIN)",
    "fedvi": "fb.FedVI(model, constructor=(8,), train=TRAIN, server_lr=1.0)",
}
STRUCTURED = {
    "sfvi-avg": "fb.SFVIAvg(population, silo, steps=3)",
    "pvi": "fb.PVI(population, silo, steps=3)",
    "ep": "fb.EP(population, silo, draws=40, most=80)",
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
    time.sleep(float(settings.get("slow", 0)))
    return site_rows(clients, str(settings["number"]))


experiment = Experiment(algorithm, example_rows((64,)), load, {rounds}, {sites}, seed=5, {options})
"""
OF_SILOS = """\
import fedbayes as fb
from fedbayes.deploy.experiment import Experiment, SiteData
from fedbayes.engine.silo_data import plan

silos = list(partition(6, 6).values())
algorithm = plan({algorithm}, dict(enumerate(silos)), {rounds})


def load(settings):
    return SiteData(silos[settings["number"]])


experiment = Experiment(algorithm, silos[0], load, {rounds}, {sites}, seed=5, {options})
"""


def project(folder, name, options="patience=300.0", rounds=ROUNDS, app=None):
    """A project whose experiment is a small one; `app` is put after the usual app.py."""
    write_project(folder, "fedavg", SITES, rounds)
    values = {"sites": SITES, "rounds": rounds, "options": options}
    if name in NETWORKS:
        text = EXPERIMENT.format(algorithm=NETWORKS[name], **values)
    else:
        text = (ROOT / "tests" / "hierarchy.py").read_text() + OF_SILOS.format(algorithm=STRUCTURED[name], **values)
    (folder / "federation" / "experiment.py").write_text(text)
    if app is not None:
        with open(folder / "federation" / "app.py", "a") as file:
            file.write(textwrap.dedent(app))
    return folder


def settings(folder, **more):
    return [{"number": number, "state": str(folder / "sites"), **more.get(f"site{number}", {})} for number in range(SITES)]


def rows():
    return fb.data.load("digits", partition="iid", clients=SITES)


def assert_simulators(folder, server):
    """The state in a server's folder is the simulator's after the rounds of the project in another."""
    experiment = experiment_of(folder)
    if experiment.networked:
        simulation = Simulation(experiment.algorithm, rows(), seed=5, clients="loop")
        for _ in range(experiment.rounds):
            simulation.step()
    else:
        # Chains are chaotic: they are the same where the program is, and a site's is that of one silo at a time.
        simulation = SiloSimulation(experiment.algorithm, partition(6, 6), seed=5, loop=experiment.algorithm.samples)
        for _ in simulation.advance(experiment.rounds):
            pass
    assert_state(server, simulation.state)


def assert_state(server, expected):
    content = (server / "checkpoint.safetensors").read_bytes()
    found = wire.unpack(content, jax.device_get(expected), "the checkpoint")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


def without(done, folder, tmp_path):
    """A run in one process in whose rounds site 1 is missing where it was not counted."""
    gone = {(1, entry["round"]): "lost" for entry in done if 1 not in entry["sites"]}
    parts = [site_rows(rows(), str(number)) for number in range(SITES)]
    algorithm = experiment_of(folder).algorithm
    coordinator, post = deployment(algorithm, parts, tmp_path / "without", len(done), gone, minimum=1)
    for _ in done:
        coordinator.step(post)
    return coordinator


def rounds_done(server):
    path = server / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition, seconds=WAIT):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.25)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A federation of two sites, for one run after the other."""
    folder = tmp_path_factory.mktemp("federation")
    with federation(project(folder / "project", "fedavg"), folder, settings(folder)) as started:
        yield started


@pytest.mark.parametrize("name", [*NETWORKS, *STRUCTURED])
def test_two_real_sites_give_the_simulators_state(name, running, tmp_path):
    running.run({"out": str(tmp_path / "server")}, wait=WAIT, project=project(tmp_path / "project", name))
    assert_simulators(tmp_path / "project", tmp_path / "server")
    assert [entry["sites"] for entry in rounds_done(tmp_path / "server")] == [[0, 1]] * ROUNDS
    if name in STRUCTURED:
        verdict = json.loads((tmp_path / "server" / "result.json").read_text())["verdict"]
        assert verdict["verdict"] in VERDICTS
        assert verdict["checks"]["ess"] > 0  # of the draws that the sites' evidence weighs


def test_two_real_sites_choose_settings_of_adapt_as_the_simulator(running, tmp_path, monkeypatch):
    """One site trains, the other scores candidates after round 8; both train and are scored with the choice after that.
    Two sites are too few for a choice by themselves, so that everybody here lets a single newcomer choose."""
    folder, server = project(tmp_path / "project", "fedavg", rounds=LEAST), tmp_path / "server"
    module = folder / "federation" / "experiment.py"
    module.write_text("from fedbayes.engine import choose\n\nchoose.ENOUGH = 1\n" + module.read_text())
    monkeypatch.setattr(choose, "ENOUGH", 1)
    running.run({"out": str(server)}, wait=2 * WAIT, project=folder)
    experiment = experiment_of(folder)
    fit = fb.simulate(experiment.algorithm, rows(), LEAST, seed=5, clients="loop")
    found = json.loads((server / "result.json").read_text())
    assert len({tuple(one["settings"].values()) for one in fit.result["choice"].values()}) > 1  # so that it can be wrong
    assert found["choice"].keys() == fit.result["choice"].keys()
    for label, one in fit.result["choice"].items():
        assert found["choice"][label]["settings"] == one["settings"]
        assert found["choice"][label]["rows"] == one["rows"]
        for name in ("gain", "error"):
            assert found["choice"][label][name] == pytest.approx(one[name], abs=1e-5)
    simulation = Simulation(experiment.algorithm, rows(), seed=5, clients="loop", plan=experiment.plan)
    for _ in range(LEAST):
        simulation.step()
    assert_state(server, simulation.state)
    until, newcomers = experiment.plan.until, experiment.plan.newcomers.tolist()
    trained = [sorted({0, 1} - set(newcomers))] * until + [[0, 1]] * (LEAST - until)
    done = rounds_done(server)
    assert [entry["sites"] for entry in done if "choice" not in entry] == trained
    assert [(entry["round"], entry["sites"]) for entry in done if "choice" in entry] == [(until, newcomers)]
    for mode, groups in fit.result["metrics"].items():
        told = found["metrics"][mode]["participating"]["log_score"]["rows"]
        assert told == pytest.approx(groups["participating"]["log_score"]["rows"], abs=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs fedbayes[simulation]")
@pytest.mark.parametrize("name", ["fedper", "sfvi-avg"])
def test_flowers_own_simulation_gives_the_simulators_state(name, tmp_path):
    folder, server = project(tmp_path / "project", name), tmp_path / "server"
    flower = Federation(folder, tmp_path, [])
    flower.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    config = f'out="{server}" state="{tmp_path / "sites"}"'
    size = f"num-supernodes={SITES} client-resources-num-cpus=1"
    try:
        flower.command(["flwr", "run", str(folder), "local", "--stream", "--federation-config", size, "-c", config], WAIT)
        assert_simulators(folder, server)
    finally:  # Flower leaves its server there for the next run
        told = (tmp_path / "flwr").as_posix().encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if b"FLWR_HOME=" + told in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGTERM)


CAPTURE = """
    import secrets
    from pathlib import Path

    from flwr.common.serde import recorddict_to_proto

    from fedbayes.deploy import flower

    made = flower.Message


    def kept(content, **given):
        (Path({folder!r}) / secrets.token_hex(8)).write_bytes(recorddict_to_proto(content).SerializeToString())
        return made(content, **given)


    flower.Message = kept
"""


def test_no_byte_of_a_row_or_a_local_state_is_in_any_message(running, tmp_path):
    """Every message of a run, both ways, as the bytes that go into TLS; what should be in them is found."""
    seen = tmp_path / "seen"
    seen.mkdir()
    folder = project(tmp_path / "project", "fedper", app=CAPTURE.format(folder=str(seen)))
    running.run({"out": str(tmp_path / "server")}, wait=WAIT, project=folder)
    messages = [path.read_bytes() for path in seen.iterdir()]
    assert len(messages) >= 2 * SITES * (ROUNDS + 2)  # greetings, rounds, scores
    sent, clients, experiment = b"\0".join(messages), rows(), experiment_of(folder)
    told = json.loads((tmp_path / "server" / "result.json").read_text())
    for number in range(SITES):
        site = Site(experiment, number, running.folder / "sites", site_rows(clients, str(number)))
        down, local = site.personal(told["run"])
        assert all(np.asarray(leaf).tobytes() in sent for leaf in jax.tree.leaves(down))
        x = np.concatenate([site.data.train.x, site.data.test.x])
        private = [*jax.tree.leaves(local), *x, *x.astype(np.uint8), *x.astype(np.float64)]
        for leaf in private:
            if np.asarray(leaf).any() and leaf.nbytes > 1:  # a flag is in any message by chance
                assert np.ascontiguousarray(leaf).tobytes() not in sent


FAULTS = ("nan", "shape", "extra", "norm", "late")
SPOIL = """
    import time

    import numpy as np

    from fedbayes.deploy import flower

    honest = flower._at_site


    def spoilt(experiment, message, context, what):
        facts, arrays = honest(experiment, message, context, what)
        faults = str(context.node_config.get("faults", "")).split(",") if what == "train" else []
        fault = faults[facts["round"] - 1] if facts["round"] <= len(faults) else ""
        if fault == "late":
            time.sleep(100)
        if fault == "extra":
            arrays = {**arrays, "secret": np.ones(3)}
        change = {"nan": lambda a: a * np.nan, "shape": lambda a: a[None], "norm": lambda a: a * 100}.get(fault)
        if change is not None:
            arrays = {name: np.asarray(change(a)) if name != "weight" else a for name, a in arrays.items()}
        return facts, arrays


    flower._at_site = spoilt
"""


def test_a_site_that_answers_badly_is_named_and_not_counted(tmp_path):
    """NaN, a wrong shape, a field too many, a hundredfold norm, an answer too late: as if the site had not been there."""
    folder = project(tmp_path / "project", "fedper", "patience=90.0, minimum=1, norm=50.0", rounds=len(FAULTS) + 1, app=SPOIL)
    sites = settings(tmp_path, site1={"faults": ",".join(FAULTS)})
    with federation(folder, tmp_path, sites) as running:
        running.run({"out": str(tmp_path / "server")}, wait=WAIT)
        log = (running.logs / "run.log").read_text()
    done = rounds_done(tmp_path / "server")
    assert [entry["sites"] for entry in done[:-1]] == [[0]] * len(FAULTS)
    for round, word in enumerate(("not finite", "is expected", "secret", "norm"), start=1):
        assert any(f"round {round}: the answer of site 1 is refused" in line and word in line for line in log.splitlines())
    assert "round 5: sites 1 are not counted" in log
    assert_state(tmp_path / "server", without(done, folder, tmp_path).state)


def test_a_site_that_is_killed_is_left_out_and_comes_back(tmp_path):
    """Site 1 dies in the middle of a round, which goes on without it; started again, it is counted again, and only once."""
    folder = project(tmp_path / "project", "fedper", "patience=120.0, minimum=1", rounds=8)
    server = tmp_path / "server"
    with federation(folder, tmp_path, settings(tmp_path, site1={"slow": 8})) as running:
        run = running.run({"out": str(server)})
        wait_until(lambda: len(rounds_done(server)) >= 1)
        running.kill("site1")
        wait_until(lambda: any(entry["sites"] == [0] for entry in rounds_done(server)))
        wait_until(lambda: restarted(running, 1) and run.poll() is not None)
    done = rounds_done(server)
    assert [entry["round"] for entry in done] == list(range(1, 9))
    assert all(0 in entry["sites"] for entry in done)
    counted = [1 in entry["sites"] for entry in done]
    assert counted[0]
    assert counted[counted.index(False) :].count(True)  # it came back
    assert_state(server, without(done, folder, tmp_path).state)


def restarted(running, number):
    """Start a site anew when it has ended, as a supervisor does: Flower refuses one for a minute after a crash."""
    if running.processes[f"site{number}"].poll() is not None:
        running.start_site(number)
        time.sleep(5)
    return True


def test_the_server_app_is_killed_and_the_same_run_goes_on(tmp_path):
    folder = project(tmp_path / "project", "fedper", rounds=4)
    server = tmp_path / "server"
    with federation(folder, tmp_path, settings(tmp_path)) as running:
        running.run({"out": str(server)})
        wait_until(lambda: len(rounds_done(server)) >= 2)
        running.kill("superexec")  # and with it the server app that it started
        running.kill("run")
        assert len(rounds_done(server)) < 4
        running.start_executor()
        running.run({"out": str(server)}, wait=WAIT)
    assert_simulators(folder, server)


def test_a_superlink_that_is_away_for_a_while_is_survived(tmp_path):
    folder = project(tmp_path / "project", "fedper", rounds=4)
    server = tmp_path / "server"
    with federation(folder, tmp_path, settings(tmp_path)) as running:
        running.run({"out": str(server)})
        wait_until(lambda: len(rounds_done(server)) >= 1)
        running.kill("superlink")
        time.sleep(15)
        running.start_link()
        wait_until(lambda: (server / "result.json").exists())
    assert [entry["sites"] for entry in rounds_done(server)] == [[0, 1]] * 4
    assert_simulators(folder, server)


def test_a_site_without_a_registered_key_is_refused(tmp_path):
    folder = project(tmp_path / "project", "fedper")
    with federation(folder, tmp_path, settings(tmp_path)) as running:
        make_key(tmp_path / "stranger")
        running.kill("site1")
        running.start_site(1, tmp_path / "stranger")
        running.processes["site1"].wait(120)
        assert running.processes["site1"].returncode != 0
