"""Run folders: what is written, killing and resuming, and folders that cannot be used."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import Stop, assert_same, stop_after
from table import TABLE

import fedbayes
from fedbayes import wire
from fedbayes.engine.round import Diverged
from fedbayes.errors import UserError
from fedbayes.models import Categorical, mlp
from fedbayes.primitives.training import Training
from fedbayes.results import folder as results_folder
from fedbayes.results.simulate import simulate

HERE = Path(__file__).parent


def fit(model, clients, folder, **options):
    settings = {"rounds": 4, "cohort": 3, "checkpoint_every": 2, **options}
    return simulate(TABLE["fedper"](model), clients, folder=folder, **settings)


@pytest.fixture(scope="module")
def finished(model, clients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, fit(model, clients, folder, evaluate_every=2)


def test_a_run_leaves_its_files(finished):
    folder, done = finished
    config, result = (json.loads((folder / name).read_text()) for name in ("config.json", "result.json"))
    assert config["algorithm"] == "FedPer"
    assert config["options"]["train"]["lr"] == 0.2
    assert result["schema"] == results_folder.SCHEMA
    assert result["metrics"] == done.evaluation.summary()
    assert set(result["metrics"]) == {"global", "personal", "adapted"}
    assert set(result["metrics"]["personal"]["unseen"]["accuracy"]) == {"rows", "clients", "spread", "worst_tenth"}
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in entries] == [1, 2, 2, 3, 4, 4]
    assert wire.metadata((folder / "checkpoint.safetensors").read_bytes())["round"] == 4
    assert not list(folder.glob("*.part"))


def test_a_finished_run_is_read_not_repeated(finished, model, clients):
    folder, done = finished
    before = (folder / "result.json").stat().st_mtime_ns
    again = fit(model, clients, folder, evaluate_every=2, resume=True)
    assert (folder / "result.json").stat().st_mtime_ns == before
    assert_same(again.evaluation.scores, done.evaluation.scores)
    assert again.history == done.history
    assert_same(again.simulation.state, done.simulation.state)


def test_a_finished_run_is_not_overwritten(finished, model, clients):
    with pytest.raises(UserError, match="holds a finished run; --force starts over, or choose another folder"):
        fit(model, clients, finished[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"another seed: 0 there, 1 here; resume"),
        ({"seed": 1, "dropout": 0.1}, r"another dropout: 0.0 there, 0.1 here \(and 1 more settings differ\); resume"),
        ({"rounds": 3}, r"another rounds: 4 there, 3 here"),
    ],
)
def test_another_config_is_refused(finished, model, clients, change, message):
    with pytest.raises(UserError, match=message):
        fit(model, clients, finished[0], evaluate_every=2, resume=True, **change)


def test_other_data_is_refused(finished, model, clients):
    with pytest.raises(UserError, match="another data"):
        fit(model, clients.hold_out(1, seed=9), finished[0], evaluate_every=2, resume=True)


def test_another_network_is_refused(finished, clients):
    """Of the same shapes: only its program differs."""
    for other in (mlp((4,), Categorical(2), hidden=(8,), init="lecun"), mlp((4,), Categorical(2), hidden=(8,), scale=2.0)):
        with pytest.raises(UserError, match="is a run with another model"):
            fit(other, clients, finished[0], evaluate_every=2, resume=True)


@pytest.fixture
def unfinished(model, clients, tmp_path):
    with pytest.raises(Stop):
        fit(model, clients, tmp_path / "run", callbacks=(stop_after(3),))
    return tmp_path / "run"


def test_an_unfinished_run_says_what_to_do(unfinished, model, clients):
    with pytest.raises(UserError, match="holds an unfinished run; --resume continues it, --force starts over"):
        fit(model, clients, unfinished)


def test_resuming_ends_where_an_uninterrupted_run_ends(unfinished, model, clients, tmp_path):
    resumed = fit(model, clients, unfinished, resume=True)
    straight = fit(model, clients, tmp_path / "straight")
    assert_same(resumed.simulation.state, straight.simulation.state)
    ids = np.arange(len(clients))
    assert_same(resumed.simulation.local.get(ids), straight.simulation.local.get(ids))
    assert resumed.history == straight.history
    assert (unfinished / "metrics.jsonl").read_text() == (tmp_path / "straight" / "metrics.jsonl").read_text()


def test_force_starts_over_and_leaves_other_files_alone(unfinished, model, clients):
    (unfinished / "notes.txt").write_text("mine")
    fit(model, clients, unfinished, force=True)
    assert (unfinished / "result.json").exists()
    assert (unfinished / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: len(content) // 2], "checkpoint.safetensors cannot be read"),
        (lambda content: b"", "checkpoint.safetensors cannot be read"),
        (
            lambda content: content[:-4] + b"\x00\x01\x02\x03",
            "does not match its checksum: it is damaged; --force",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(unfinished, model, clients, damage, message):
    path = unfinished / "checkpoint.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        fit(model, clients, unfinished, resume=True)


def test_a_full_disk_loses_nothing(unfinished, model, clients, monkeypatch):
    before = (unfinished / "checkpoint.safetensors").read_bytes()

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write to .*: No space left on device; what was written before is intact"):
            fit(model, clients, unfinished, resume=True)
    assert (unfinished / "checkpoint.safetensors").read_bytes() == before
    assert not list(unfinished.glob("*.part"))
    assert fit(model, clients, unfinished, resume=True).simulation.round == 4


def test_a_folder_that_cannot_be_made_is_refused(model, clients, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*: Not a directory"):
        fit(model, clients, tmp_path / "file" / "run")


def test_a_mistake_writes_nothing_and_removes_nothing(finished, model, clients, tmp_path):
    """What is wrong is found before a folder is made, and before --force removes a run."""
    with pytest.raises(UserError, match="the cohort is 99"):
        fit(model, clients, tmp_path / "run", cohort=99)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="the cohort is 99"):
        fit(model, clients, finished[0], cohort=99, force=True)
    assert (finished[0] / "result.json").exists()


def test_what_a_broken_force_left_is_not_taken_for_a_run(unfinished, model, clients, tmp_path):
    (unfinished / "config.json").unlink()
    again, straight = fit(model, clients, unfinished, seed=9), fit(model, clients, tmp_path / "straight", seed=9)
    assert_same(again.simulation.state, straight.simulation.state)
    assert again.history == straight.history


@pytest.mark.parametrize("file", ["states.bin", "rounds.bin"])
@pytest.mark.parametrize("damage", [lambda content: content[:5], lambda content: bytes(len(content)), lambda content: b""])
def test_damaged_states_of_clients_are_refused(unfinished, model, clients, file, damage):
    path = unfinished / "local" / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="--force starts the run over"):
        fit(model, clients, unfinished, resume=True)


def test_an_adaptation_that_diverges_is_no_result(model, clients, tmp_path):
    algorithm = dataclasses.replace(TABLE["fedavg"](model), tune=Training(lr=1e30, batch=8, epochs=3))
    with pytest.raises(Diverged, match=r"adapting diverged on 6 of 6 clients .* in `tune`"):
        simulate(algorithm, clients, rounds=2, folder=tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists()


def test_the_mean_of_the_last_rounds(model, clients):
    done = fit(model, clients, None, average_last=3, modes=("adapted",))
    recent = [entry["evaluation"] for entry in done.history if "evaluation" in entry]
    assert len(recent) == 3
    figures = [entry["adapted"]["unseen"]["log_score"]["rows"] for entry in recent]
    assert done.result["average"]["adapted"]["unseen"]["log_score"]["rows"] == pytest.approx(np.mean(figures))
    with pytest.raises(UserError, match="there is no mode 'globl'"):
        fit(model, clients, None, modes=("globl",))


def test_divergence_keeps_the_last_good_state(model, clients, tmp_path):
    algorithm = TABLE["fedavg"](model)
    diverging = type(algorithm)(model, train=Training(lr=1e30, batch=8, epochs=2))
    with pytest.raises(Diverged, match=r"round 1 diverged on .* \(the state after round 0 is kept in .*run\)"):
        simulate(diverging, clients, rounds=4, folder=tmp_path / "run")
    assert wire.metadata((tmp_path / "run" / "checkpoint.safetensors").read_bytes())["round"] == 0


def test_ctrl_c_ends_the_round_and_can_be_resumed(model, clients, tmp_path):
    def press(simulation, done):
        if done.round == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(model, clients, tmp_path / "run", checkpoint_every=100, callbacks=(press,))
    assert wire.metadata((tmp_path / "run" / "checkpoint.safetensors").read_bytes())["round"] == 1
    assert fit(model, clients, tmp_path / "run", checkpoint_every=100, resume=True).simulation.round == 4


KILLED = """
import os, signal, sys
import fedbayes as fb
from fedbayes.engine.local_state import States
kill_at = int(sys.argv[2])
writes = 0
real = os.pwrite
def pwrite(file, content, offset):
    global writes
    writes += 1
    if writes == kill_at:
        real(file, content[: len(content) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(file, content, offset)
if kill_at:
    os.pwrite = pwrite
clients = fb.data.load("digits", hold_out=5)
algorithm = fb.FedPer(fb.network("mlp", clients, hidden=(8,)))
fb.simulate(algorithm, clients, rounds=6, cohort=4, folder=sys.argv[1], resume=True, checkpoint_every=2)
"""


@pytest.mark.parametrize("kill_at", [29, *(pytest.param(number, marks=pytest.mark.slow) for number in (12, 13, 46))])
def test_kill_nine_in_the_middle_of_a_write_then_resume_gives_the_same_bits(tmp_path, kill_at, straight_run):
    """The process dies with half of a client's state (12, 29, 46) or of its tag (13) written, in rounds 2, 4 and 6."""

    def run(kill):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(kill)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert run(kill_at).returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "result.json").exists()
    resumed = run(0)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("checkpoint.safetensors", "metrics.jsonl", "scores.safetensors", "result.json"):
        assert (tmp_path / "run" / name).read_bytes() == (straight_run / name).read_bytes(), name


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), "0"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_a_fit_predicts_for_everyone_and_for_one(finished, clients):
    _, done = finished
    shared, own = done.draws(clients.x[:3]), done.draws(clients.x[:3], clients.names[clients.participants[0]])
    assert shared.shape == own.shape == (1, 3, 2)
    assert not np.allclose(shared, own)
    with pytest.raises(UserError, match="six has no client 'nobody'; there is 0, 1"):
        done.draws(clients.x[:3], "nobody")
    with pytest.raises(UserError, match="expected finite numbers, in rows of shape"):
        done.predict(clients.x[:3, :2])
    with pytest.raises(UserError, match="adapted needs a client"):
        done.draws(clients.x[:3], adapted=True)
    unseen = clients.names[clients.unseen][0]
    adapted = done.predict(clients.rows(unseen, "test")[0], unseen, adapted=True)
    np.testing.assert_allclose(adapted.sum(axis=1), 1, rtol=1e-5)
    assert repr(done) == "Fit(FedPer, 4 rounds on six)"
    assert len(str(done).splitlines()) == 2 + 6


def test_predictions_are_those_that_were_scored(finished, clients):
    """In each mode, the client's log score follows from what `predict` gives for its test rows."""
    _, done = finished
    name = str(clients.names[clients.participants[1]])
    x, y = clients.rows(name, "test")
    for mode, options in {"global": {}, "personal": {"client": name}, "adapted": {"client": name, "adapted": True}}.items():
        probabilities = np.asarray(done.predict(x, **options))
        found = done.evaluation.scores[mode].log_score[clients.index(name)]
        assert np.log(probabilities[np.arange(len(y)), y]).sum() == pytest.approx(float(found), rel=1e-4)
    assert fedbayes.__version__ == done.result["fedbayes"]


def test_no_rounds_are_refused(model, clients):
    with pytest.raises(UserError, match="rounds is 0, but a run has at least one"):
        simulate(TABLE["fedavg"](model), clients, rounds=0)
