"""The command line as a user meets it: results, help, and one clear sentence for what is wrong."""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT

from fedbayes import cli
from fedbayes.algorithms import names

QUICK = ["--rounds", "2", "--model", "mlp:4"]


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """Five hospitals with a blood pressure (a number), a diagnosis (text) and a count of visits."""
    generator = np.random.default_rng(0)
    n = 200
    hospital = generator.integers(0, 5, n)
    age = generator.uniform(20, 80, n)
    sex = generator.choice(["f", "m"], n)
    pressure = 90 + 0.5 * age + 3 * hospital + generator.normal(0, 4, n)
    ill = np.where(age + 5 * (sex == "m") + generator.normal(0, 5, n) > 52, "yes", "no")
    visits = generator.poisson(np.exp(0.02 * age))
    table = {
        "hospital": [f"h{i}" for i in hospital],
        "age": age,
        "sex": sex,
        "pressure": pressure,
        "ill": ill,
        "visits": visits,
    }
    path = tmp_path_factory.mktemp("csv") / "patients.csv"
    pd.DataFrame(table).to_csv(path, index=False)
    return path


def test_help_and_version_do_not_import_jax():
    code = "import sys; from fedbayes import cli; cli.main(['--help']); cli.main(['--version']); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0
    assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(capsys, command):
    try:
        code, out, _ = run(capsys, command, "--help")
    except SystemExit as stop:  # tyro leaves by itself
        code, out = stop.code, capsys.readouterr().out
    assert code == 0
    assert "usage: fedbayes" in out


def test_run_help_has_the_algorithm_s_fields_and_defaults(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "run", "fedprox", "--help")
    out = capsys.readouterr().out
    assert re.search(r"--mu FLOAT\s+Strength μ of the proximal term. \(default: 0.01\)", out)
    assert "--train.lr" in out


def test_run_prints_a_table_and_leaves_a_folder(capsys, tmp_path):
    code, out, _ = run(capsys, "run", "fedper", "--hold-out", 4, "--cohort", 5, "--out", tmp_path / "run", *QUICK)
    assert code == 0
    for word in ("fedper", "personal", "adapted", "participating", "unseen", "accuracy %", "ECE %", "run folder"):
        assert word in out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["network"] == "mlp:4"
    code, again, _ = run(capsys, "run", "fedper", "--hold-out", 4, "--cohort", 5, "--out", tmp_path / "run", "--resume", *QUICK)
    assert code == 0
    assert again == out


@pytest.mark.parametrize("algorithm", ["fedper", pytest.param("fedavg", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("target", "options", "figure"),
    [
        ("ill", ["--ignore", "pressure", "visits"], "accuracy"),
        ("pressure", ["--ignore", "ill", "visits"], "rmse"),
        ("visits", ["--ignore", "ill", "pressure", "--task", "counts", "--likelihood", "poisson"], "rmse"),
    ],
)
def test_a_csv_of_one_s_own(capsys, csv, tmp_path, target, options, figure, algorithm):
    """Text, numbers and counts as targets; each must beat an answer that ignores the features."""
    arguments = ["--data", csv, "--client-column", "hospital", "--target", target, "--hold-out", 1, *options]
    code, out, err = run(capsys, "run", algorithm, *arguments, "--rounds", 30, "--model", "mlp:8", "--train.batch", 10)
    assert code == 0, err
    assert "h0" not in out
    (path,) = tmp_path.glob("runs/*/result.json")
    figures = json.loads(path.read_text())["metrics"]["personal"]["participating"]
    frame = pd.read_csv(csv)
    if figure == "accuracy":
        assert figures["accuracy"]["rows"] > frame[target].value_counts(normalize=True).max() + 0.1
    else:
        assert figures["rmse"]["rows"] < 0.9 * frame[target].std()


@pytest.mark.slow
def test_compare_prints_mean_and_spread_and_writes_json(capsys, tmp_path):
    arguments = ["fedavg", "fedprox", "--seeds", 2, "--json", tmp_path / "out.json", "--out", tmp_path / "runs"]
    settings = ["--set", "train.lr=0.05", "--set", "fedprox.mu=0.5", "--hold-out", 4]
    code, out, _ = run(capsys, "compare", *arguments, *settings, *QUICK)
    assert code == 0
    assert "mean ± standard deviation over 2 seeds" in out
    assert re.search(r"\d\d\.\d ± \d+\.\d", out)
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [run["seed"] for run in results["fedprox"]] == [0, 1]
    assert results["fedprox"][0]["options"]["mu"] == 0.5
    assert {run["options"]["train"]["lr"] for runs in results.values() for run in runs} == {0.05}
    code, again, _ = run(capsys, "compare", *arguments, *settings, *QUICK)
    assert again == out


def test_list_names_everything(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert all(name in out for name in ("fedavg", "fedper", "mobilenet", "digits", "hub:NAME"))


def test_wire_prints_what_is_sent(capsys):
    code, out, _ = run(capsys, "wire", "fedper", "--model", "mlp:4", "--no-population")
    assert code == 0
    assert re.search(r"shared/body/dense0/kernel │ \[64, 4\] │ float32 │ mean\s+│ .*local/personal", out)
    assert "head/kernel" not in out.split("from each client")[1].split("depends on")[0]
    code, plain, _ = run(capsys, "wire", "fedper", "--model", "mlp:4", "--plain")
    assert "up\tpopulation/first/head/kernel\tfloat32[4, 10]\tsum\t" in plain
    assert "up\tweight\tfloat32[]\tsum\tdata/mask\n" in plain


def test_describe_prints_and_draws(capsys, tmp_path):
    code, out, _ = run(capsys, "data", "describe", "digits", "--plot", tmp_path / "labels.svg")
    assert code == 0
    assert "20 clients" in out
    assert (tmp_path / "labels.svg").read_text().startswith("<?xml")


def table(tmp_path, **columns):
    frame = {"client": list("aabb"), "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 0, 1], **columns}
    path = tmp_path / "table.csv"
    pd.DataFrame(frame).to_csv(path, index=False)
    return ["--data", path, "--client-column", "client", "--target", "y"]


def arrays(tmp_path, **changes):
    content = {"x": np.ones((4, 2), np.float32), "y": np.array([0, 1, 0, 1]), "client": np.array([0, 0, 1, 1]), **changes}
    path = tmp_path / "arrays.npz"
    np.savez(path, **content)
    return ["--data", path]


BAD = {
    "unknown command": (lambda t: ["rum"], "there is no command 'rum'; did you mean run"),
    "unknown algorithm": (lambda t: ["run", "fedpeer"], r"there is no algorithm 'fedpeer'; did you mean fedper"),
    "no algorithm": (lambda t: ["run", "--rounds", "3"], "run needs an algorithm before the options"),
    "unknown network": (lambda t: ["run", "fedavg", "--model", "mpl"], "no network"),
    "sizes for a cnn": (lambda t: ["run", "fedavg", "--model", "cnn:3"], "sizes are for mlp"),
    "a cnn on columns": (lambda t: ["run", "fedavg", "--model", "cnn", *table(t)], "cnn"),
    "missing column": (
        lambda t: ["run", "fedavg", "--data", table(t)[1], "--client-column", "clinet", "--target", "y"],
        "clinet.*client",
    ),
    "missing target": (
        lambda t: ["run", "fedavg", "--data", table(t)[1], "--client-column", "client", "--target", "z"],
        "'z'",
    ),
    "a likelihood of numbers for labels": (
        lambda t: ["run", "fedavg", *table(t), "--likelihood", "poisson"],
        "the target is labels",
    ),
    "no such file": (lambda t: ["run", "fedavg", "--data", t / "none.csv"], "there is no file or folder"),
    "labels not 0 to k-1": (lambda t: ["run", "fedavg", *arrays(t, y=np.array([1, 7, 1, 7]))], "label"),
    "nan in features": (lambda t: ["run", "fedavg", *arrays(t, x=np.full((4, 2), np.nan))], "NaN|not finite|missing"),
    "nan in a csv": (lambda t: ["run", "fedavg", *table(t, x=[1.0, None, 3.0, 4.0])], "missing"),
    "a client with no training rows": (
        lambda t: ["run", "fedavg", *arrays(t, is_test=np.array([0, 0, 1, 1], bool))],
        "client '1'",
    ),
    "all rows for testing": (lambda t: ["run", "fedavg", *arrays(t), "--test", "1"], "test is 1|between 0 and 1|test"),
    "negative seed": (lambda t: ["run", "fedavg", "--seed", "-1"], "seed is -1, but a seed is not negative"),
    "large seed": (lambda t: ["run", "fedavg", "--seed", 10**30], f"seed is {10**30}, but a seed is not negative and below"),
    "large data seed": (lambda t: ["run", "fedavg", "--data-seed", 10**30], f"data-seed is {10**30}, but a seed is not"),
    "client to hold out": (lambda t: ["run", "fedavg", *table(t), "--hold-out", "a", "c"], "has no client 'c'"),
    "negative data seed": (lambda t: ["run", "fedavg", "--data-seed", "-1"], "data-seed is -1"),
    "cohort of 2.7": (lambda t: ["run", "fedavg", "--cohort", "2.7"], "the cohort is 2.7, but it is a whole number"),
    "cohort of nan": (lambda t: ["run", "fedavg", "--cohort", "nan"], "the cohort is nan"),
    "no such head": (lambda t: ["run", "fedbabu", "--head", "haed"], "no parameter lies under 'haed'"),
    "no such part": (lambda t: ["compare", "fedbabu", "--set", "part=heads"], "part is 'heads'"),
    "rounds of a word": (lambda t: ["compare", "fedavg", "--set", "train.rounds=foo"], "train.rounds"),
    "decay at a word": (lambda t: ["compare", "fedavg", "--set", 'train.decay_at=["a"]'], "decay_at"),
    "a partition of synthetic": (
        lambda t: ["run", "fedavg", "--data", "synthetic", "--partition", "iid"],
        "partition cannot be",
    ),
    "cohort too large": (
        lambda t: ["run", "fedavg", "--cohort", "99", *QUICK],
        "the cohort is 99 clients a round, but only 20 take part",
    ),
    "all held out": (lambda t: ["run", "fedavg", "--hold-out", "20"], "hold"),
    "negative rounds": (lambda t: ["run", "fedavg", "--rounds", "-1"], "rounds is -1"),
    "batch of none": (lambda t: ["run", "fedavg", "--train.batch", "0"], "batch is 0, but it is at least 1|batch"),
    "out is a file": (lambda t: ["run", "fedavg", *QUICK, "--out", table(t)[1]], "cannot write to"),
    "out is read-only": (lambda t: ["run", "fedavg", *QUICK, "--out", "/proc/fedbayes"], "cannot write to /proc/fedbayes"),
    "json in no folder": (lambda t: ["compare", "fedavg", "--json", t / "no" / "out.json"], "there is no folder"),
    "no seeds": (lambda t: ["compare", "fedavg", "--seeds", "0"], "seeds is 0"),
    "unknown setting": (lambda t: ["compare", "fedavg", "--set", "train.rate=1"], "Training has no 'rate'; it has epochs"),
    "setting of a group": (lambda t: ["compare", "fedavg", "--set", "train=1"], "must say which part of train"),
    "setting of a wrong type": (lambda t: ["compare", "fedavg", "--set", "train.lr=big"], "expected a float"),
    "setting without a value": (lambda t: ["compare", "fedavg", "--set", "train.lr"], "write path=value"),
    "unknown partition": (lambda t: ["run", "fedavg", "--partition", "shard:3"], "shard"),
    "data without a command": (lambda t: ["data", "draw"], "data has no command 'draw'"),
    "quickstart with options": (lambda t: ["quickstart", "--rounds", "3"], "quickstart takes no options"),
    "diverging": (
        lambda t: ["run", "fedavg", *QUICK, "--train.lr", "1e30"],
        r"round \d diverged on \d+ of 20 clients .* try a smaller step size.* is kept in",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence_and_exit_code_two(capsys, tmp_path, case):
    arguments, message = BAD[case]
    code, _, err = run(capsys, *arguments(tmp_path))
    assert code == 2
    assert re.search(message, err), err
    assert err.startswith("fedbayes: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("**/result.json"))
    assert case == "diverging" or not list(tmp_path.glob("**/config.json"))


def test_no_test_rows_is_still_a_run(capsys, tmp_path):
    code, out, _ = run(capsys, "run", "fedavg", *QUICK, "--test", "0", "--out", tmp_path / "run")
    assert code == 0
    assert "no test rows" in out


@pytest.mark.parametrize("algorithm", names("clients"))
def test_a_wrong_option_is_exit_code_two_and_named(capsys, algorithm):
    code, _, err = run(capsys, "run", algorithm, "--train.lrr", "3")
    assert code == 2
    assert err.startswith("fedbayes: there is no option --train.lrr; did you mean --train.lr? fedbayes run")
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("run fedper", "--learning-rate", "--train.lr or --server-step.lr or --tune.lr"),
        ("run fedper", "--lr=0.1", "--train.lr or --server-step.lr or --tune.lr"),
        ("run fedper", "--tune.learning_rate", "--tune.lr"),
        ("run fedavg", "--epochs", "--train.epochs or --tune.epochs"),
        ("run fedprox", "--train.batch-size", "--train.batch"),
        ("run fedavg", "--holdout", "--hold-out"),
        ("run fedavg", "--train.round", "--train.rounds"),
        ("compare fedavg", "--learning-rate", "--set train.lr=VALUE"),
        ("compare fedavg", "--seed", "--seeds"),
    ],
)
def test_a_guessed_option_gets_a_hint(capsys, command, option, hint):
    code, _, err = run(capsys, *command.split(), option, "3")
    assert code == 2
    name = option.partition("=")[0].replace("_", "-")
    assert re.match(rf"fedbayes: there is no option {name}; did you mean {hint}\? fedbayes {command.split()[0]}", err)


HOSTILE = ("[/red]", "\x1b[31mred", "=cmd", "[bold]b", ":smile:")


def test_names_are_harmless_in_terminal_and_csv(capsys, tmp_path, monkeypatch):
    """Markup, escape sequences and formulas in the names of clients and classes are text."""
    generator = np.random.default_rng(0)
    client, x = np.repeat(np.arange(5), 30), generator.normal(size=(150, 2)).astype(np.float32)
    y = np.digitize(x[:, 0], [-0.8, -0.2, 0.2, 0.8])
    np.savez(tmp_path / "rows.npz", x=x, y=y, client=np.array(HOSTILE)[client], classes=np.array(HOSTILE))
    given = ["--data", tmp_path / "rows.npz"]
    code, described, _ = run(capsys, "data", "describe", tmp_path / "rows.npz")
    assert code == 0
    run_folder = tmp_path / "run"
    options = ["--rounds", 1, "--model", "mlp:3", "--no-bias", "--hold-out", "[/red]", HOSTILE[1], "--out", run_folder]
    assert run(capsys, "run", "fedvi", *given, *options)[0] == 0
    code, certified, err = run(capsys, "certify", run_folder, "--draws", 2)
    assert code == 0, err
    for shown, expected in ((described, HOSTILE), (certified, HOSTILE[:2])):
        assert "\x1b" not in shown
        assert all(name.replace("\x1b", "") in shown for name in expected)
    code, _, err = run(capsys, "certify", run_folder, "--client", "\x1b[31m[/red]")
    assert code == 2
    assert "\x1b" not in err
    assert run(capsys, "personalise", run_folder, "--client", "=cmd", "--out", tmp_path / "me.safetensors")[0] == 0
    assert run(capsys, "predict", tmp_path / "me.safetensors", *given, "--out", tmp_path / "out.csv")[0] == 0
    header, first = (tmp_path / "out.csv").read_text().splitlines()[:2]
    assert header == "[/red],[31mred,'=cmd,[bold]b,:smile:,entropy,mutual_information"
    assert all(np.isfinite(float(number)) for number in first.split(","))


def test_a_damaged_file_is_one_sentence(capsys, tmp_path):
    path = tmp_path / "cut.npz"
    path.write_bytes(b"PK\x03\x04 not a zip")
    code, _, err = run(capsys, "run", "fedavg", "--data", path)
    assert code == 2
    assert "cut.npz" in err
    assert len(err.strip().splitlines()) == 1
