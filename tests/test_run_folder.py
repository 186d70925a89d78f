"""A run folder is enough: no command or call here has anybody's training rows."""

import json
import shutil

import numpy as np
import pytest
from conftest import assert_same
from hierarchy import population, silo
from table import TABLE

import fedbayes as fb
from fedbayes.cli import main
from fedbayes.errors import UserError
from fedbayes.models import Categorical, mlp
from fedbayes.results.posterior import Posterior


def write_csv(path, hospitals, rows=24, seed=0):
    generator = np.random.default_rng(seed)
    lines = ["hospital,age,smoker,ill"]
    for hospital in hospitals:
        for _ in range(rows):
            age, smoker = generator.normal(60, 10), generator.choice(["yes", "no"])
            ill = "yes" if age + 10 * (smoker == "yes") + generator.normal(0, 5) > 65 else "no"
            lines.append(f"{hospital},{age:.2f},{smoker},{ill}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def gone(tmp_path_factory):
    """A run of FedVI and one of FedPer whose CSV is no longer there, and somebody's own rows."""
    home = tmp_path_factory.mktemp("gone")
    data = write_csv(home / "patients.csv", ["h0", "h1", "h2", "h3"])
    source = ["--data", str(data), "--client-column", "hospital", "--target", "ill", "--hold-out", "1", "--model", "mlp:8"]
    more = ["--rounds", "2", "--seed", "1"]
    assert main(["run", "fedper", *source, *more, "--out", str(home / "fedper")]) == 0
    vi = ["--no-bias", "--constructor", "8"]
    assert main(["run", "fedvi", *source, *more, *vi, "--out", str(home / "fedvi")]) == 0
    before = fb.data.load(str(data), client_column="hospital", target="ill", hold_out=1)
    data.unlink()
    write_csv(home / "me.csv", ["me"], seed=7)
    return home, before


def test_personalise_and_predict(gone, capsys):
    home, _ = gone
    for name, extra in (("fedper", ["--tune.lr", "0.01"]), ("fedvi", [])):
        out = home / f"{name}.safetensors"
        assert main(["personalise", str(home / name), "--data", str(home / "me.csv"), "--out", str(out), *extra]) == 0
        assert main(["predict", str(out), "--data", str(home / "me.csv"), "--out", str(home / "said.csv")]) == 0
        assert len((home / "said.csv").read_text().splitlines()) == 25
    assert Posterior.load(home / "fedper.safetensors").algorithm.tune.lr == 0.01
    trained = next(name for name in fb.open(home / "fedper").members.names if name != held_out(home))
    assert main(["personalise", str(home / "fedper"), "--client", trained, "--out", str(home / "own.safetensors")]) == 0
    assert main(["personalise", str(home / "fedper"), "--out", str(home / "everybody.safetensors")]) == 0


def held_out(home):
    members = fb.open(home / "fedper").members
    return members.names[int(np.flatnonzero(members.unseen)[0])]


def test_certify_from_a_file_and_report(gone, capsys):
    home, _ = gone
    given = ["--data", str(home / "me.csv"), "--draws", "20", "--json", str(home / "found.json")]
    assert main(["certify", str(home / "fedvi"), *given]) == 0
    (found,) = json.loads((home / "found.json").read_text())
    assert found["rows"] == 24
    assert 0 < found["gibbs"] < found["bound"] <= 1
    assert main(["report", str(home / "fedvi")]) == 0
    assert (home / "fedvi" / "report.html").stat().st_size > 10_000


def test_what_needs_rows_says_so(gone, capsys):
    home, _ = gone
    out = ["--out", str(home / "x.safetensors")]
    assert main(["personalise", str(home / "fedper"), "--client", held_out(home), *out]) == 2
    assert "was held out and never trained, so it has kept nothing; use --adapted" in capsys.readouterr().err
    assert main(["personalise", str(home / "fedper"), "--client", held_out(home), "--adapted", *out]) == 2
    assert "patients.csv" in capsys.readouterr().err
    fit = fb.open(home / "fedper")
    with pytest.raises(UserError, match="opened from its folder, without anybody's rows"):
        fit.posterior_of(held_out(home), adapted=True)
    with pytest.raises(UserError, match="holds no finished run"):
        fb.open(home)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedvi", "bpfed", "knn-per", "ensemble"])
def test_an_opened_fit_is_the_fit(name, model, clients, tmp_path):
    fit = fb.simulate(TABLE[name](model), clients, rounds=2, cohort=3, folder=tmp_path / "run")
    again = fb.open(tmp_path / "run")
    assert repr(again) == repr(fit)
    assert again.history == fit.history
    assert_same(again.evaluation.scores, fit.evaluation.scores)
    x, y = clients.rows("1")
    for client in (None, "1", "4"):
        assert_same(again.predict(x, client=client), fit.predict(x, client=client))
    assert_same(again.adapt(x, y).predict(x), fit.adapt(x, y).predict(x))


def test_a_read_only_folder_can_be_opened(model, clients, tmp_path):
    fb.simulate(TABLE["fedper"](model), clients, rounds=1, folder=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    fb.open(tmp_path / "run").predict(clients.rows("1")[0], client="1")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_network_of_one_s_own_is_given_again(clients, tmp_path):
    base = mlp((4,), Categorical(2), hidden=(8,))
    own = fb.models.Model(base.init, lambda params, x: base.apply(params, x), base.likelihood)
    fit = fb.simulate(fb.FedAvg(own), clients, rounds=1, folder=tmp_path / "run")
    with pytest.raises(UserError, match="somebody's own code"):
        fb.open(tmp_path / "run")
    x, _ = clients.rows("1")
    assert_same(fb.open(tmp_path / "run", model=own).predict(x), fit.predict(x))


def test_other_prediction_settings(model, clients):
    fit = fb.simulate(TABLE["bpfed"](model), clients, rounds=1, cohort=3)
    x, _ = clients.rows("1")
    assert fit.replace(draws=20).draws(x).shape[0] == 20
    assert fit.draws(x).shape[0] == 3
    assert fit.replace(draws=20).simulation.algorithm.draws == 20
    with pytest.raises(UserError, match="BPFed has no setting 'drawings'"):
        fit.replace(drawings=20)
    with pytest.raises(UserError, match="model cannot be changed after training"):
        fit.replace(model=mlp((4,), Categorical(2), hidden=(8, 8)))


def test_a_finished_run_can_be_extended(model, clients, tmp_path):
    options = {"cohort": 3, "evaluate_every": 0, "checkpoint_every": 2}
    algorithm = TABLE["fedper"](model)
    fb.simulate(algorithm, clients, rounds=2, folder=tmp_path / "run", **options)
    longer = fb.simulate(algorithm, clients, rounds=5, folder=tmp_path / "run", resume=True, **options)
    whole = fb.simulate(algorithm, clients, rounds=5, folder=tmp_path / "whole", **options)
    assert_same(longer.simulation.state, whole.simulation.state)
    for name in ("metrics.jsonl", "result.json", "config.json"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert fb.open(tmp_path / "run").result["rounds"] == 5


def test_a_run_that_cannot_be_extended_keeps_its_result(model, clients, tmp_path):
    algorithm, folder = TABLE["fedper"](model), tmp_path / "run"
    fb.simulate(algorithm, clients, rounds=2, folder=folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    path = folder / "checkpoint.safetensors"
    damaged = bytearray(before[path])
    damaged[-9] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="does not match its checksum"):
        fb.simulate(algorithm, clients, rounds=5, folder=folder, resume=True)
    with pytest.raises(UserError, match=r"another rounds: 2 there, 5 here \(and 1 more settings differ\); resume"):
        fb.simulate(algorithm, clients, rounds=5, seed=1, folder=folder, resume=True)
    path.write_bytes(before[path])
    assert {path: path.read_bytes() for path in before} == before
    assert fb.open(folder).result["rounds"] == 2


def test_a_run_whose_schedule_depends_on_its_length_is_not_extended(model, clients, tmp_path):
    train = fb.Training(lr=0.1, decay_at=(0.5,))
    fb.simulate(fb.FedAvg(model, train=train), clients, rounds=2, folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"another options.train.rounds: 2 there, 4 here .*so this run cannot be extended"):
        fb.simulate(fb.FedAvg(model, train=train), clients, rounds=4, folder=tmp_path / "run", resume=True)
    assert fb.open(tmp_path / "run").result["rounds"] == 2


def test_silos_open_with_their_model_and_then_with_their_data(tmp_path):
    silos = {name: {"y": np.random.default_rng(place).normal(1, 1, 5)} for place, name in enumerate("ab")}
    algorithm = fb.SFVI(population, silo)
    fit = fb.simulate(algorithm, silos, rounds=20, folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"give algorithm=fb.SFVI\(population, silo\)"):
        fb.open(tmp_path / "run")
    again = fb.open(tmp_path / "run", algorithm=algorithm)
    assert_same(again.draws(50), fit.draws(50))
    with pytest.raises(UserError, match=r"give silos=… to fb\.open"):
        again.local_posterior("a")
    whole = fb.open(tmp_path / "run", algorithm=algorithm, silos=silos)
    assert_same(whole.simulation.own("a"), fit.simulation.own("a"))


def test_without_the_shared_model_a_folder_says_so(model, clients, tmp_path):
    fb.simulate(TABLE["fedavg"](model), clients, rounds=1, folder=tmp_path / "run")
    shutil.move(tmp_path / "run" / "shared.safetensors", tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"has no shared\.safetensors"):
        fb.open(tmp_path / "run")
