"""Trackers: what was logged is read back, a resumed run logs no step twice, and a missing package is one sentence."""

import importlib.util
import json
import os
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
from conftest import Stop, stop_after

import fedbayes as fb
from fedbayes import cli
from fedbayes.errors import UserError
from fedbayes.results import trackers

pytestmark = pytest.mark.filterwarnings("default")  # of packages that are not ours

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None,
    reason="there is no tensorboardX: pip install 'fedbayes[tensorboard]'",
)
needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="there is no mlflow: pip install 'fedbayes[mlflow]'"
)
KINDS = [pytest.param("tensorboard", marks=needs_tensorboard), pytest.param("mlflow", marks=needs_mlflow)]


def train(clients, model, tracker, folder, *callbacks, **options):
    algorithm = fb.FedAvg(model)
    settings = {"rounds": 5, "cohort": 2, "evaluate_every": 2, "checkpoint_every": 2, "modes": ("global",), **options}
    return fb.simulate(algorithm, clients, folder=folder, callbacks=(tracker, *callbacks), **settings)


def read_tensorboard(folder):
    """Every scalar event of every run below a folder: (tag, step, value), and the names of texts."""
    from tensorboardX.proto.event_pb2 import Event

    scalars, texts = [], Counter()
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            length = int.from_bytes(content[place : place + 8], "little")
            event = Event.FromString(content[place + 12 : place + 12 + length])
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    scalars.append((value.tag, event.step, value.simple_value))
                else:
                    texts[value.tag.split("/")[0]] += 1
            place += 16 + length
    return scalars, texts


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("fedbayes").experiment_id])
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    scalars = [(tag, metric.step, metric.value) for tag, metrics in history.items() for metric in metrics]
    texts = Counter(path.path.removesuffix(".json") for path in client.list_artifacts(run.info.run_id))
    assert run.info.status == "FINISHED"
    assert float(run.data.params["options.train.lr"]) == fb.FedAvg(None).train.lr
    return scalars, texts


def read(kind, folder):
    return read_tensorboard(folder) if kind == "tensorboard" else read_mlflow(folder)


MODEL = """
import numpy as np
from hierarchy import partition, population, silo
silos = partition(5, 7)
"""


@needs_tensorboard
def test_a_fit_over_silos_is_tracked(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    given = [
        "fit",
        str(tmp_path / "model.py"),
        "--algorithm",
        "sfvi",
        "--rounds",
        "12",
        "--track",
        f"tensorboard:{tmp_path / 'logs'}",
    ]
    assert cli.main([*given, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    scalars, texts = read_tensorboard(tmp_path / "logs")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {step: value for tag, step, value in scalars if tag == "bound"}
    assert max(logged) == 12
    assert len(logged) == len({step for _, step, _ in scalars})
    assert np.mean(list(logged.values())) == pytest.approx(np.mean([line["bound"] for line in lines]), rel=1e-5)
    assert texts == {"config": 1, "result": 1}


@needs_tensorboard
def test_runs_that_start_in_the_same_second_do_not_write_over_each_other(tmp_path):
    for number in range(3):
        log = trackers.TensorBoard(str(tmp_path), "run")
        log.text(f"text{number}", {"number": number})
        log.close()
    assert set(read_tensorboard(tmp_path)[1]) == {"text0", "text1", "text2"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_logged_is_the_history(clients, model, tmp_path, kind):
    """Stopped after round 3, of which the checkpoint knows 2, and resumed: round 3 runs twice and is logged once."""
    make = getattr(trackers, kind)
    with pytest.raises(Stop):
        train(clients, model, make(tmp_path / "logs"), tmp_path / "run", stop_after(3))
    fit = train(clients, model, make(tmp_path / "logs"), tmp_path / "run", resume=True)
    scalars, texts = read(kind, tmp_path / "logs")
    assert set(texts) == {"config", "result"}
    assert set(texts.values()) == {1}
    expected = {}
    for entry in fit.history:
        if "evaluation" in entry:
            for group, figures in entry["evaluation"]["global"].items():
                expected |= {(f"global/{group}/{name}", entry["round"]): forms["rows"] for name, forms in figures.items()}
        else:
            expected |= {(name, entry["round"]): value for name, value in entry.items() if name != "round"}
    assert {("loss", 3), ("global/unseen/accuracy", 5)} <= set(expected)
    assert len(scalars) == len(expected)  # none twice
    for tag, step, value in scalars:
        assert value == pytest.approx(expected[tag, step], rel=1e-6)
    # A finished run is read, not logged again; another one has a place of its own.
    train(clients, model, make(tmp_path / "logs"), tmp_path / "run", resume=True)
    assert read(kind, tmp_path / "logs") == (scalars, texts)


@needs_tensorboard
def test_another_run_has_another_place(clients, model, tmp_path):
    for seed in (0, 1):
        train(clients, model, trackers.tensorboard(tmp_path), None, seed=seed)
    assert len(list(tmp_path.iterdir())) == 2
    assert all(path.name.startswith(f"fedavg-six-{seed}-") for seed, path in enumerate(sorted(tmp_path.iterdir())))


@needs_tensorboard
def test_a_cut_event_file_is_read_up_to_the_cut(clients, model, tmp_path):
    """As a killed process may leave it: what is whole counts as logged, what is not is logged again."""
    train(clients, model, trackers.tensorboard(tmp_path), None)
    (path,) = tmp_path.rglob("events.*")
    before = trackers._steps_in(path.parent)
    assert before["loss"] == 5
    path.write_bytes(path.read_bytes()[:-7])
    assert trackers._steps_in(path.parent) == before
    for cut in range(len(path.read_bytes()), 0, -50):
        path.write_bytes(path.read_bytes()[:cut])
        assert trackers._steps_in(path.parent).get("loss", 0) <= 5


@pytest.mark.slow
@needs_tensorboard
def test_run_and_compare_track(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--rounds", "1", "--model", "linear", "--clients", "4", "--track", "tensorboard:logs"]
    assert cli.main(["run", "fedavg", *small, "--out", "run"]) == 0
    assert [path.name[:-9] for path in (tmp_path / "logs").iterdir()] == ["fedavg-digits-0"]
    assert cli.main(["compare", "fedavg", "--seeds", "1", "--processes", "1", *small, "--out", "runs"]) == 0
    assert sorted(path.name[:-9] for path in (tmp_path / "logs").iterdir()) == ["fedavg-0", "fedavg-digits-0"]
    scalars, _ = read_tensorboard(tmp_path / "logs")
    figures = json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["adapted"]["participating"]
    logged = [value for tag, _, value in scalars if tag == "adapted/participating/accuracy"]
    assert logged == [pytest.approx(figures["accuracy"]["rows"])] * 2


@pytest.mark.parametrize(("kind", "package"), [("tensorboard", "tensorboardX"), ("mlflow", "mlflow")])
def test_a_missing_package_is_one_sentence(monkeypatch, capsys, tmp_path, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"tracking with {kind} needs its package; pip install 'fedbayes\[{kind}\]'"):
        getattr(trackers, kind)("logs")
    for command in ("run", "compare"):
        assert cli.main([command, "fedavg", "--track", f"{kind}:{tmp_path}", "--out", str(tmp_path / "run")]) == 2
        assert f"fedbayes[{kind}]" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()


@needs_tensorboard
def test_a_place_that_cannot_be_written_is_one_sentence(clients, model, tmp_path):
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot log to tensorboard:.*logs \(.*\); the run can be resumed"):
        train(clients, model, trackers.tensorboard(tmp_path / "logs"), None)


@needs_mlflow
def test_mlflow_does_not_phone_home():
    trackers.mlflow("logs")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.telemetry.utils import is_telemetry_disabled
    assert is_telemetry_disabled()


def test_a_callback_may_be_a_plain_function(clients, model):
    rounds = []
    train(clients, model, lambda simulation, done: rounds.append(done.round), None)
    assert rounds == [1, 2, 3, 4, 5]
