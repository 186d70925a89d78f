"""Advice follows from measurements: the rule on hand-made ones, and the command on files of one's own."""

import dataclasses
import importlib
import re
import shlex
import types

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from table import TABLE

import fedbayes as fb
from fedbayes import cli, wire
from fedbayes.algorithms import names
from fedbayes.cli.arguments import parse
from fedbayes.cli.compare import Options, study_of
from fedbayes.data.profile import Profile, profile
from fedbayes.study import advise
from fedbayes.study.advise import Gain, Measured

CLASSES = Profile("classes", 20, 60.0, 10, 3.0, 0.7)


def measured(title, of, methods, unlabelled=None):
    return Measured(title, of, -1.0, {"5": -0.9, "20": -0.8, "all": -0.7}, methods, unlabelled or {})


def gains(five, all_rows, seeds=5):
    return {"5": Gain(five, 0.01, seeds), "all": Gain(all_rows, 0.01, seeds)}


FEW = measured("few", CLASSES, {"fedpop": gains(0.10, -0.3), "fedper": gains(0.05, 0.04), "bpfed": gains(0.02, 0.01)})
MANY = measured("many", dataclasses.replace(CLASSES, clients=2000), {"fedhb-niw": gains(0.2, 0.2)})
NUMBERS = measured("numbers", Profile("numbers", 20, 60.0, None, None, 0.7), {"ditto": gains(0.5, 0.5)})
KNOWN = {one.title: one for one in (FEW, MANY, NUMBERS)}


def methods(advice):
    return [one.method for one in advice.candidates]


def test_the_best_two_on_the_nearest_set_follow_the_baseline():
    found = advise.advise(CLASSES, KNOWN, rows=5)
    assert methods(found) == ["fedavg", "fedpop", "fedper"]
    assert found.nearest == [(0.0, FEW)]
    assert not found.remarks
    assert (
        "+0.100 ± 0.010 nats a row (5 seeds) against fine-tuned FedAvg with 5 rows on few, ahead" in found.candidates[1].reason
    )


def test_rows_of_the_median_client_choose_the_measurement():
    """FedPop was behind with all rows, and its place goes to the next."""
    found = advise.advise(CLASSES, KNOWN)
    assert found.rows == "all"
    assert methods(found) == ["fedavg", "fedper", "bpfed"]
    assert found.remarks == ["no Bayesian method was clearly ahead of fine-tuned FedAvg there"]


def test_two_sets_that_are_close_count_alike():
    near = measured("near", dataclasses.replace(CLASSES, clients=40), {"fedpop": gains(-0.06, 0.0), "fedper": gains(0.05, 0.0)})
    found = advise.advise(CLASSES, {"few": FEW, "near": near}, rows=5)
    assert [one.title for _, one in found.nearest] == ["few", "near"]
    assert methods(found) == ["fedavg", "fedper", "fedpop"]
    assert "+0.020 ± 0.007" in found.candidates[2].reason


def test_advice_says_when_no_set_is_close():
    far = dataclasses.replace(CLASSES, clients=30_000)
    found = advise.advise(far, KNOWN, rows=5)
    assert methods(found) == ["fedavg", "fedhb-niw"]
    assert found.remarks == ["no measured set is close: the nearest, many, is at distance 1.2, so trust your own comparison"]
    other = advise.advise(CLASSES, {"numbers": NUMBERS}, rows=5)
    assert other.remarks[0].startswith("no measured set has classes as targets; numbers is only the nearest in size")
    nothing = advise.advise(CLASSES, {})
    assert methods(nothing) == ["fedavg"]
    assert nothing.remarks[0] == "no method was measured on newcomers with all rows"


def test_where_all_were_behind_the_best_bayesian_method_is_compared_and_it_is_said():
    behind = measured("behind", CLASSES, {"fedper": gains(-0.1, 0), "fedpop": gains(-0.2, 0), "bpfed": gains(-0.3, 0)})
    found = advise.advise(CLASSES, {"behind": behind}, rows=5)
    assert methods(found) == ["fedavg", "fedpop"]
    assert found.candidates[1].reason.endswith("behind")
    assert found.remarks == ["no Bayesian method was clearly ahead of fine-tuned FedAvg there"]


def test_two_seeds_are_too_few_to_call_a_method_ahead():
    early = measured("early", CLASSES, {"fedpop": gains(0.1, 0.1, seeds=2)})
    found = advise.advise(CLASSES, {"early": early}, rows=5)
    assert "too few seeds to tell" in found.candidates[1].reason
    assert found.remarks == ["no Bayesian method was clearly ahead of fine-tuned FedAvg there; some have too few seeds to tell"]


def test_without_labels_gains_are_over_the_shared_network():
    known = {"few": dataclasses.replace(FEW, unlabelled={"fedvi": gains(0.03, 0.06)})}
    found = advise.advise(CLASSES, known, unlabelled=True)
    assert methods(found) == ["fedavg", "fedvi"]
    assert "+0.060 ± 0.010 nats a row (5 seeds) against FedAvg's shared network with all rows" in found.candidates[1].reason
    unknown = advise.advise(CLASSES, {"few": FEW}, unlabelled=True)
    assert methods(unknown) == ["fedavg", "fedvi"]
    assert "not measured so yet" in unknown.candidates[1].reason


def test_methods_that_read_no_labels_are_those_named(clients):
    model = fb.models.mlp(clients.shape, fb.models.Categorical(2), hidden=(4,))
    example = clients.example

    def planned(name):
        return TABLE[name](model).planned(2, **clients.facts)

    found = [name for name in names("clients") if not wire.adapt_reads_labels(planned(name), example)]
    assert tuple(found) == advise.UNLABELLED
    assert set(advise.BAYESIAN) <= set(names("clients"))


def test_the_packaged_measurements_are_whole():
    known = advise.read()
    assert {one.profile.task for one in known.values()} == {"classes", "numbers"}
    for one in known.values():
        assert one.methods
        assert one.profile.clients > 1
        for found in one.methods.values():
            assert set(found) <= set(advise.COLUMNS)
            assert all(gain.seeds >= 1 and (gain.error is None) == (gain.seeds == 1) for gain in found.values())


def test_measurements_are_differences_of_the_same_seed(monkeypatch):
    """From the lines of the benchmark; a seed that FedAvg or the method lacks has no part."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    evidence = importlib.import_module("newcomers_evidence")

    def line(score, shared=-1.0):
        modes = {"global": shared, "adapted:5": score, "adapted:20": score, "adapted": score}
        return {"unseen": {mode: {"log_score": value} for mode, value in modes.items()}}

    rows = {("digits", "fedavg", seed): line(-0.5 - seed) for seed in (0, 1, 2)}
    rows |= {("digits", "fedvi", 0): line(-0.4), ("digits", "fedvi", 1): line(-1.2), ("digits", "fedvi", 7): line(9.0)}
    rows |= {("other", "fedvi", 0): line(9.0), ("digits", "fedper", 2): line(-2.0)}
    digits = types.SimpleNamespace(title="digits", load=lambda seed: fb.data.load("digits", clients=7, seed=seed))
    found = evidence.measured("digits", digits, rows, None)
    assert found.profile.clients == 7
    assert (found.shared, found.tuned["5"]) == (-1.0, -1.5)
    assert found.methods["fedvi"]["20"] == Gain(0.2, 0.1, 2)
    assert found.methods["fedper"]["all"] == Gain(0.5, None, 1)
    assert found.unlabelled["fedvi"]["all"] == Gain(0.2, 0.4, 2)
    assert set(found.unlabelled) == {"fedvi"}
    assert evidence.measured("other", digits, rows, None) is None  # without FedAvg there is no difference
    missing = types.SimpleNamespace(title="digits", load=lambda seed: fb.data.load("nowhere.csv", seed=seed))
    assert evidence.measured("digits", missing, rows, found).profile == found.profile
    with pytest.raises(fb.UserError, match="its data cannot be read"):
        evidence.measured("digits", missing, rows, None)


def test_damaged_measurements_are_one_sentence(tmp_path):
    path = tmp_path / "evidence.json"
    path.write_text('{"digits": {"title": "digits"}}')
    with pytest.raises(fb.UserError, match="cannot be read as measurements"):
        advise.read(path)


def test_profile_of_clients_with_few_labels_and_of_clients_alike():
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(30), 20)
    alike = profile(fb.data.Clients.build(np.ones((600, 1)), random.integers(0, 10, 600), owner))
    apart = profile(fb.data.Clients.build(np.ones((600, 1)), (owner + random.integers(0, 2, 600)) % 10, owner))
    assert alike.skew < 0.05  # though a client of 20 rows has few of each label
    assert apart.labels == 2
    assert 0.7 < apart.skew < 0.95
    noise = random.normal(size=600)
    assert profile(fb.data.Clients.build(np.ones((600, 1)), noise, owner)).skew < 0.05
    assert profile(fb.data.Clients.build(np.ones((600, 1)), noise + 3 * random.normal(size=30)[owner], owner)).skew > 0.7


# The command


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    random = np.random.default_rng(0)
    site = np.repeat(np.arange(10), 30)
    frame = pd.DataFrame({"site": [f"s{i}" for i in site], "age": random.normal(size=300), "note": random.normal(size=300)})
    frame["ill"] = np.where(frame["age"] + 0.2 * site > 1, "yes", "no")
    frame["pressure"] = 90 + frame["age"] + random.normal(size=300)
    path = tmp_path_factory.mktemp("csv") / "my patients.csv"
    frame.to_csv(path, index=False)
    return path


def command_of(out):
    return shlex.split(out.strip().splitlines()[-1])


def test_advice_on_a_csv_ends_with_a_command_that_compare_reads(capsys, csv):
    given = ["--data", csv, "--client-column", "site", "--target", "ill", "--ignore", "pressure", "note"]
    code, out, err = run(capsys, "advise", *given)
    assert code == 0, err
    assert "my patients: 2 classes, 10 clients, median 22 training rows and 2 labels a client" in out
    command = command_of(out)
    assert command[:3] == ["fedbayes", "compare", "fedavg"]
    study = study_of(parse(Options, command[2:], "fedbayes compare", ""))
    (data,) = study.data.values()
    assert (data.data, data.ignore, data.hold_out) == (str(csv), ("pressure", "note"), 2)
    assert 2 <= len(study.methods) <= 3
    assert data.load().unseen.sum() == 2


def test_numbers_unlabelled_and_newcomers_of_few_rows(capsys, csv):
    given = [csv, "--client-column", "site", "--target", "pressure", "--ignore", "ill", "--hold-out", 3]
    code, out, err = run(capsys, "advise", *given, "--newcomer-rows", 5)
    assert code == 0, err
    assert "numbers, 10 clients" in out
    assert "newcomers with labels, measured with 5 rows" in out
    assert command_of(out)[-2:] == ["--hold-out", "3"]
    code, out, _ = run(capsys, "advise", *given, "--unlabelled")
    assert code == 0
    assert command_of(out)[:4] == ["fedbayes", "compare", "fedavg", "fedvi"]
    assert "compare fedvi in the adapted mode with fedavg in the global mode" in out


def test_what_is_wrong_with_the_data_is_one_sentence(capsys, csv, tmp_path):
    given = ["--client-column", "site", "--target", "ill"]
    code, _, err = run(capsys, "advise", "--data", csv, "--client-column", "sites", "--target", "ill")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no column 'sites': did you mean site?" in err
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 and then nothing")
    code, _, err = run(capsys, "advise", damaged, *given)
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot be read" in err
    code, _, err = run(capsys, "advise", csv, *given, "--newcomer-rows", 0)
    assert code == 2
    assert "newcomers have 0 rows, but advice is for newcomers with one row or more" in err
    one = pd.read_csv(csv)
    one[one["site"] == "s0"].to_csv(tmp_path / "one.csv", index=False)
    code, _, err = run(capsys, "advise", tmp_path / "one.csv", *given)
    assert code == 2
    assert "the data has 1 client, but a federation needs two or more" in err


def test_two_clients_are_compared_without_newcomers(capsys, csv, tmp_path):
    two = pd.read_csv(csv)
    two[two["site"].isin(["s4", "s5"])].to_csv(tmp_path / "two.csv", index=False)
    code, out, _ = run(capsys, "advise", tmp_path / "two.csv", "--client-column", "site", "--target", "ill")
    assert code == 0
    assert "none of 2 clients can be held out" in out
    assert "--hold-out" not in out


MODEL = """
import numpy as np, numpyro, numpyro.distributions as dist

def population():
    {theta}
    return numpyro.sample("w", dist.Normal(0, 1).expand([{size}]).to_event(1))

def silo(w, data):
    numpyro.sample("y", dist.Normal(w[0], 1), obs=data["y"])

silos = {{"a": {{"y": np.ones(3, np.float32)}}, "b": {{"y": np.zeros(3, np.float32)}}}}
{algorithm}
"""


@pytest.mark.parametrize(
    ("size", "theta", "algorithm", "expected"),
    [
        (3, "", "", ["ep", "pvi"]),
        (200, "", "", ["sfvi", "sfvi-avg"]),
        (3, 'numpyro.param("scale", 1.0)', "", ["sfvi", "sfvi-avg"]),
        (3, "", "import fedbayes\nalgorithm = fedbayes.SFVI(population, silo)", ["ep", "pvi", "sfvi"]),
    ],
)
def test_a_model_file_gets_the_method_that_suits_it(capsys, tmp_path, size, theta, algorithm, expected):
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(size=size, theta=theta, algorithm=algorithm))
    code, out, err = run(capsys, "advise", path)
    assert code == 0, err
    assert f"model.py: {size} global latents, 2 silos" in out
    assert re.findall(r"fedbayes fit \S+ --algorithm (\S+)", out) == expected
    code, _, err = run(capsys, "advise", path, "--unlabelled")
    assert code == 2
    assert "advise takes no options for a model file" in err


def test_the_page_shows_what_the_command_prints(capsys):
    page = (ROOT / "docs" / "choose-a-method.md").read_text("utf-8")
    shown = re.search(r"<!-- example -->\n```text\n(.*?)```\n<!-- end example -->", page, re.DOTALL)[1]
    given = "advise --data digits --partition dirichlet:0.3 --clients 30"
    assert f"$ fedbayes {given}\n" in page
    code, out, _ = run(capsys, *given.split())
    assert code == 0
    assert out == shown
