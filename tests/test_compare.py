"""Studies: intervals that cover, files that are read or refused, runs side by side, killed and resumed, and searches."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import msgspec
import numpy as np
import pytest
from conftest import ROOT
from rich.console import Console

from fedbayes import cli
from fedbayes.cli.arguments import parse as parse_options
from fedbayes.cli.compare import Options, choices, study_of
from fedbayes.cli.run import Options as RunCommand
from fedbayes.cli.run import reloaded
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import Evaluation
from fedbayes.evaluation.differences import UNITS, contributions, differences, intervals, winners
from fedbayes.evaluation.score import SHAPES, Score, metrics, summary
from fedbayes.files import read_json
from fedbayes.report import compared
from fedbayes.report.records import load as load_record
from fedbayes.sheets import Cell, Sheet, latex, markdown, rich
from fedbayes.study.crew import Crew, Done, Task, Worker, alone, as_run
from fedbayes.study.options import DataOptions, RunOptions, default, override
from fedbayes.study.run import choose, read_run
from fedbayes.study.study import Job, parse, read

# Statistics


def coverage(draw, targets, repetitions=500):
    """How often, in percent, each unit's interval holds what it is for."""
    hits = dict.fromkeys(UNITS, 0)
    for _ in range(repetitions):
        table, seed, client = draw()
        found = intervals(table)
        for unit in UNITS:
            low, high = found[unit]
            hits[unit] += low <= targets(unit, seed, client) <= high
    return {unit: 100 * hit / repetitions for unit, hit in hits.items()}


@pytest.mark.parametrize(
    ("S", "C", "deviations"),
    [(5, 30, (1.0, 1.0, 1.0)), (3, 20, (0.2, 2.0, 1.0)), (5, 20, (2.0, 0.5, 1.0)), (10, 20, (1.0, 1.0, 1.0))],
)
def test_intervals_cover_a_known_difference(S, C, deviations):
    """For other seeds the clients' own effects are part of the truth, for other clients the seeds', for both neither."""
    generator = np.random.default_rng(1)
    of_seed, of_client, of_rest = deviations
    truth = 0.5

    def draw():
        seed, client = generator.normal(0, of_seed, S), generator.normal(0, of_client, C)
        rest = generator.normal(0, of_rest, (S, C))
        return truth + seed[:, None] + client[None, :] + rest, seed, client

    def target(unit, seed, client):
        return truth + {"seeds": client.mean(), "clients": seed.mean(), "both": 0.0}[unit]

    for unit, percent in coverage(draw, target).items():
        assert abs(percent - 95) <= 2, (unit, percent)


def test_figures_over_rows_have_intervals_that_cover():
    """Accuracy over all rows is a ratio of sums over clients of different sizes: the jackknife's values stand for it."""
    generator = np.random.default_rng(2)
    S, C = 4, 60
    gain = 0.05
    hits = dict.fromkeys(("clients", "both"), 0)
    for _ in range(500):
        rows = generator.integers(10, 80, C).astype(float)
        chance = generator.uniform(0.5, 0.9, C)
        of_seed = generator.normal(0, 0.01, S)
        tables = []
        for better in (gain, 0.0):
            seeds = []
            for seed in range(S):
                error = rows - generator.binomial(rows.astype(int), chance + better * (1 + of_seed[seed]))
                seeds.append(contributions(scores(rows, error), False, "rows")["accuracy"])
            tables.append(np.stack(seeds))
        found = intervals(tables[0] - tables[1])
        for unit in hits:
            low, high = found[unit]
            hits[unit] += low <= gain <= high
    assert 93 <= hits["clients"] / 5 <= 97
    assert hits["both"] / 5 >= 93  # nothing but what is left varies, where this one is on the safe side


def scores(rows, error):
    """Scores of clients with so many rows and errors; the rest is plausible."""
    count = len(rows)
    values = [np.asarray(rows, float), np.asarray(error, float)]
    values += [-0.5 * values[0], 0.3 * values[0], 0.2 * values[0], 0.1 * values[0]]
    bins = np.zeros((count, *SHAPES[-1]))
    bins[:, 10] = values[0]
    confidence, hits = bins * 0.7, np.zeros_like(bins)
    hits[:, 10] = values[0] - values[1]
    return Score(*values, bins, confidence, hits)


def test_contributions_have_the_figure_as_their_mean():
    generator = np.random.default_rng(0)
    rows = generator.integers(5, 30, 8)
    given = scores(rows, generator.binomial(rows, 0.3))
    for form in ("rows", "clients"):
        found, known = contributions(given, False, form), summary(given, False)
        for name in known:
            assert found[name].shape == (8,)
            assert found[name].mean() == pytest.approx(known[name][form], abs=1e-12)
    pooled = metrics(Score(*(value.sum(axis=0) for value in given)), False)["accuracy"]
    linear = contributions(given, False, "rows")["accuracy"]
    # A ratio's influence: C n_c / n (a_c - a) + a, up to terms of the second order
    expected = pooled + 8 * rows / rows.sum() * (1 - np.asarray(given.error) / rows - pooled)
    np.testing.assert_allclose(linear, expected, atol=0.06)


def evaluation(error, unseen=(False, False, False, True)):
    rows = np.array([20.0, 30.0, 25.0, 20.0])
    return Evaluation(3, {"global": scores(rows, np.asarray(error, float))}, np.array(unseen), False)


def test_differences_are_paired_and_signed():
    base = {seed: evaluation([5, 6, 5, 9]) for seed in (0, 1)}
    good = {seed: evaluation([2 - seed % 2, 3, 2, 9]) for seed in (0, 1, 7)}  # seed 7 has no partner
    found = {(one.group, one.figure, one.form): one for one in differences("good", good, "base", base)}
    gain = found["participating", "accuracy", "rows"]
    assert gain.estimate == pytest.approx((8 / 75 + 1 / 150 + 1 / 75), abs=0.02)
    assert gain.interval().excludes_zero
    same = found["unseen", "accuracy", "rows"]
    assert same.estimate == 0
    assert same.intervals["clients"] is None  # one unseen client says nothing about others
    assert same.interval() == (0.0, 0.0)
    assert not same.interval().excludes_zero
    apart = {(one.group, one.figure, one.form): one for one in differences("good", good, "base", base, crossed=False)}
    assert apart["participating", "accuracy", "rows"].intervals["clients"] is None
    assert apart["participating", "accuracy", "rows"].intervals["seeds"] == pytest.approx(gain.intervals["seeds"])
    blind = {0: base[0], 1: Evaluation(3, {"personal": base[1].scores["global"]}, base[1].unseen, False)}
    assert differences("good", good, "base", blind) == []  # no mode that all of the seeds have
    single = differences("good", {0: good[0]}, "base", {0: base[0]})
    assert single[0].intervals["seeds"] is None
    assert single[0].interval() == single[0].intervals["clients"]


def test_only_a_sure_best_wins():
    runs = {
        "base": {seed: evaluation([5, 6, 5, 9]) for seed in (0, 1)},
        "good": {seed: evaluation([2, 3, 2, 9 - seed]) for seed in (0, 1)},
    }
    won = winners(runs, crossed=True)
    assert ("good", "global", "participating", "accuracy") in won
    assert not [name for name in won if name[1:] == ("global", "unseen", "accuracy")]
    assert not [name for name in won if name[3] == "entropy"]  # of which neither more nor less is better
    runs["also"] = runs["good"]
    assert not [name for name in winners(runs, crossed=True) if name[3] == "accuracy"]


# The file

STUDY = """
rounds = 3
cohort = 5
seeds = [0, 4]
model = "mlp:4"
baseline = "plain"

[data.labels]
data = "digits"
partition = "labels:3"
clients = 8
hold_out = 2

[data.digits]
clients = 6

[set]
train.batch = 20

[methods.plain]
algorithm = "fedavg"

[methods.fedprox]
mu = 0.5
train = { lr = 0.05, decay_at = [0.5] }
"""


def test_a_file_is_read(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    study = read(path)
    assert study.data["labels"] == DataOptions("digits", "labels:3", 8, hold_out=2)
    assert study.data["digits"] == DataOptions("digits", clients=6)
    assert study.run == RunOptions(3, 5)
    jobs = study.jobs()
    assert [job.place for job in jobs][:3] == ["labels/plain-0", "labels/plain-4", "labels/fedprox-0"]
    assert len(jobs) == 8
    prox = override(default("fedprox", study.model), jobs[2].settings)
    assert (prox.mu, prox.train.lr, prox.train.decay_at, prox.train.batch) == (0.5, 0.05, (0.5,), 20)
    assert prox.model.name == "mlp:4"
    assert msgspec.json.decode(msgspec.json.encode(jobs[2]), type=Job) == jobs[2]


def test_one_data_set_needs_no_name():
    study = parse({"data": {"data": "data/own.csv", "client_column": "a", "ignore": ["x"]}, "methods": {"fedavg": {}}})
    assert study.data == {"own": DataOptions("data/own.csv", client_column="a", ignore=("x",))}
    assert [job.place for job in study.jobs()] == ["fedavg-0", "fedavg-1", "fedavg-2"]


BAD = {
    "near key": ("rounds = 3", "round = 3", "there is no key 'round'; did you mean rounds.* there is baseline, choose, cohort"),
    "far key": ("rounds = 3", "xyzzy = 3", "there is no key 'xyzzy'; there is baseline"),
    "key of data": ("hold_out", "holdout", "there is no key 'data.labels.holdout'; did you mean hold_out"),
    "kind of data": ("hold_out = 2", "hold_out = 2.5", "data.labels.hold_out is 2.5, but it is a whole number"),
    "choice of data": ("hold_out = 2", "task = 'x'", "data.labels.task is 'x', but it is one of classification, regression"),
    "kind of rounds": ("rounds = 3", "rounds = '3'", "rounds is '3', but it is a whole number"),
    "no rounds": ("rounds = 3", "rounds = 0", "rounds is 0, but a run has at least one"),
    "seeds": ("[0, 4]", "'a'", "seeds is 'a', but it is a whole number or a list, each a whole number"),
    "seed too large": ("[0, 4]", f"[0, {10**30}]", f"seed is {10**30}, but a seed is not negative and below 2.63"),
    "too many seeds": ("[0, 4]", str(10**30), f"seeds is {10**30}, but it is how many: 1 to 9999"),
    "true": ("rounds = 3", "rounds = true", "rounds is True, but it is a whole number"),
    "list": ("hold_out = 2", "ignore = ['a', 2]", r"data.labels.ignore is \['a', 2\], but it is a list, each text"),
    "tables": ("[methods.plain]\nalgorithm =", "[methods]\nplain =", "methods is .*, but it is a table of tables"),
    "twice": ("[0, 4]", "[1, 1]", r"seeds is \[1, 1\]"),
    "algorithm": ('"fedavg"', '"fedavgg"', "there is no algorithm 'fedavgg'; did you mean fedavg"),
    "field": ("mu = 0.5", "nu = 0.5", "FedProx has no 'nu'; it has"),
    "field of all": ("train.batch", "train.bach", "Training has no 'bach'; it has"),
    "kind of field": ("mu = 0.5", "mu = 'big'", "expected a float"),
    "baseline": ('baseline = "plain"', 'baseline = "plan"', "baseline is 'plan', which there is not; did you mean plain"),
    "toml": ("rounds = 3", "rounds =", "cannot be read as TOML"),
    "name": ("[methods.plain]", '[methods."a/b"]', "methods has 'a/b', but it names a folder"),
    "no table": ("[data.digits]\nclients = 6", "[search]\nfigure = 'log_score'", "the search has nothing to try"),
    "search of no field": ("mu = 0.5", "[search.grid]\nmu = [1, 2]", "cannot try mu=1 for plain: .*FedAvg has no 'mu'"),
    "unequal": (
        "mu = 0.5",
        "grid.mu = [1.0]\n[search.grid]\ntrain.lr = [0.1, 0.2]",
        r"different numbers of tries \(plain 2, fedprox 1\)",
    ),
    "figure": ("mu = 0.5", "[search]\nfigure = 'entropy'\ngrid.train.lr = [1.0]", "search.figure is 'entropy'"),
    "its seed": ("mu = 0.5", "[search]\nseed = 4\ngrid.train.lr = [1.0]", "search.seed is 4, but it must be none"),
    "share": ("mu = 0.5", "[search]\nshare = 1.0\ngrid.train.lr = [1.0]", "search.share is 1.0"),
    "grid": ("mu = 0.5", "[search.grid]\ntrain.lr = 3.0", "search.grid.train.lr is 3.0, but it is a list"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_file_gets_one_sentence(tmp_path, capsys, case):
    before, after, message = BAD[case]
    path = tmp_path / "study.toml"
    text = STUDY.replace("train = { lr = 0.05, decay_at = [0.5] }\n", "") if "grid" in after else STUDY
    assert before in text
    path.write_text(text.replace(before, after))
    assert cli.main(["compare", str(path), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert len(err.strip().splitlines()) == 1
    assert "study.toml" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.toml"], "there is no file none.toml"),
        (["study.toml", "--rounds", "4"], "says what is run, but an option of settings was given besides"),
        (["study.toml", "fedavg"], "says what is run, but fedavg was given besides"),
        (["fedavg", "--search", "train.lr"], "write path=value,value"),
        (["fedavg", "--baseline", "fedprox"], "baseline is 'fedprox', which there is not"),
        (["fedavg", "--processes", "0"], "processes is 0"),
        (["fedavg", "--track", "tensorboard"], "track is 'tensorboard', but it is tensorboard:DIR"),
        (["fedavg", "--latex", "no/where.tex"], "there is no folder no"),
    ],
)
def test_wrong_options_get_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    assert cli.main(["compare", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_tables_are_escaped():
    row = [Cell("a_b"), Cell(""), Cell("&"), Cell("-1 [0]", True)]
    sheet = Sheet("a_b: 5 %", "x | y", ["method", "mode", "clients", "n"], [[row]])
    assert r"a\_b &  & \& & \textbf{$-$1 {[}0]} \\" in latex(sheet)
    assert r"\caption{a\_b: 5 \%. X | y.}" in latex(sheet)
    assert r"| a\_b |  | & | **-1 \[0\]** |" in markdown(sheet)
    assert r"x \| y" in markdown(sheet)


@pytest.mark.parametrize("form", ["60.0 ± 14.1", "+10.250 [-10.123, +11.000]", "0.5"])
def test_names_stay_apart_in_80_columns(form):
    methods = ["fedavg-with-a-long-name-one", "fedavg-with-a-long-name-two"]
    lines = [(mode, group) for mode in ("global", "personal", "adapted") for group in ("participating", "unseen")]
    sections = [[[Cell(method), Cell(mode), Cell(group), *[Cell(form)] * 4] for mode, group in lines] for method in methods]
    headings = ["method", "mode", "clients", "RMSE", "log score", "calibration error", "worst tenth"]
    terminal = Console(width=80, record=True, file=io.StringIO())
    terminal.print(rich(Sheet("title", "caption", headings, sections), 80))
    text = terminal.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(word in text for line in lines for word in line)
    folded = re.sub(r"\s", "", "".join(line[:28].split(" ")[1] for line in text.splitlines()[4:] if line[1:2] != " "))
    assert all(method in folded for method in methods)
    wide = Console(width=200, record=True, file=io.StringIO())
    wide.print(rich(Sheet("title", "caption", headings, sections), 200))
    text = wide.export_text()
    assert f"{methods[0]}  personal  unseen " in text
    assert form in text


# Runs

SMALL = """
rounds = 12
cohort = 3
seeds = 2
model = "linear"

[data.six]
data = "{data}"
hold_out = 2
test = 0.3

[methods.fedavg]
train.batch = 5

[methods.prox]
algorithm = "fedprox"
mu = 0.1
train.batch = 5

[methods.wrong]
algorithm = "fedbabu"
head = ["haed"]
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(240, 3)).astype(np.float32)
    y = (x[:, 0] + 0.3 * generator.normal(size=240) > 0).astype(np.int64)
    np.savez(folder / "rows.npz", x=x, y=y, client=np.arange(240) // 40)
    path = folder / "study.toml"
    path.write_text(SMALL.format(data=folder / "rows.npz"))
    return path


def command(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "fedbayes.cli", "compare", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def whole(small):
    """The study, run after run in this process; one of its methods fails once it sees the data."""
    out = small.parent / "whole"
    files = [f"--{form}={out.with_suffix('.' + form)}" for form in ("json", "markdown", "latex")]
    assert cli.main(["compare", str(small), f"--out={out}", "--processes=1", *files]) == 2
    return out


def content(path):
    found = read_json(path)
    return {name: value for name, value in found.items() if name != "command"}


def same_runs(one, other):
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    return [path for path in files if (one / path).read_bytes() != (other / path).read_bytes()] == []


def test_a_study_leaves_runs_and_figures(whole):
    found = content(whole.with_suffix(".json"))
    assert set(found["results"]) == {"fedavg", "prox"}
    assert [run["seed"] for run in found["results"]["prox"]] == [0, 1]
    (one,) = [
        each
        for each in found["differences"]
        if (each["mode"], each["group"], each["figure"], each["form"]) == ("global", "unseen", "log_score", "clients")
    ]
    means = {
        name: np.mean([run["metrics"]["global"]["unseen"]["log_score"]["clients"] for run in runs])
        for name, runs in found["results"].items()
    }
    assert (one["data"], one["method"], one["baseline"]) == ("six", "prox", "fedavg")
    assert one["estimate"] == pytest.approx(means["prox"] - means["fedavg"], abs=1e-6)
    for unit in UNITS:
        low, high = one["intervals"][unit]
        assert low <= one["estimate"] <= high
    for form, words in (("markdown", "| prox | global | participating |"), ("latex", r"prox & global & participating &")):
        page = whole.with_suffix(f".{form}").read_text()
        assert page.count(words) == 2
        assert "difference from fedavg" in page
        assert "excludes zero" in page


def test_a_failed_run_does_not_stop_the_others(small, whole, capsys):
    """Also the second time, when what is finished is read."""
    found = content(whole.with_suffix(".json"))
    assert set(found["failures"]) == {"wrong-0", "wrong-1"}
    assert cli.main(["compare", str(small), f"--out={whole}", "--processes=1"]) == 2
    captured = capsys.readouterr()
    assert "2 of 6 runs failed and are not in the tables: wrong-0: no parameter lies under 'haed'" in captured.err
    assert re.search(r"missing:\s+wrong\s+seed\s+0,\s+wrong\s+seed\s+1", captured.out)


def test_a_run_of_a_study_is_a_run(whole):
    """Commands that read a run's folder build it again from its command.json."""
    fit = reloaded(whole / "prox-1")
    assert fit.result["options"]["mu"] == 0.1
    assert fit.result == read_json(whole / "prox-1" / "result.json")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", ["train.decay_at=[0.5, 0.75]", "train.lr=1e-05", "model=mlp:8"]),
        ("ifca", ["fine_tune=true", "K=3"]),
        ("fedbabu", ["head=[]", 'part="head"']),
    ],
)
def test_a_job_as_arguments_gives_the_same_algorithm(name, settings):
    algorithm = override(default(name, "mlp:4"), settings)
    data, run = DataOptions("digits", "iid", 5, ignore=("a", "b"), standardise=False), RunOptions(7, 0.5, loop=True)
    job = Job("p", "d", name, 3, name, tuple(settings), "mlp:4", data, run)
    options = parse_options(RunCommand, as_run(job, algorithm)[1:], "run", "", default(name))
    assert (options.data, options.settings, options.seed) == (data, run, 3)
    assert options.algorithm.model.name == algorithm.model.name
    assert dataclasses.replace(options.algorithm, model=algorithm.model) == algorithm


def until_a_run_is_finished(process, folder):
    end = time.monotonic() + 400
    while not list(folder.glob("*/result.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_and_resumed_in_two_processes_is_the_same(small, whole, tmp_path, how):
    """Its workers end with it, in the middle of their runs, and the same command goes on from there."""
    arguments = (small, "--out", tmp_path / "runs", "--processes", 2, "--json", tmp_path / "out.json")
    first = command(*arguments)
    until_a_run_is_finished(first, tmp_path / "runs")
    os.kill(first.pid, how)
    _, err = first.communicate(timeout=120)
    assert first.returncode == (-how if how == signal.SIGKILL else 130), err
    assert how == signal.SIGKILL or "the same command goes on with them" in err
    assert len(list(tmp_path.glob("runs/*/result.json"))) < 4
    second = command(*arguments)
    out, err = second.communicate(timeout=400)
    assert second.returncode == 2
    assert "2 of 6 runs failed" in err
    assert "difference from fedavg" in out
    assert content(tmp_path / "out.json") == content(whole.with_suffix(".json"))
    assert same_runs(tmp_path / "runs", whole)


def test_runs_on_other_rows_are_refused(small, whole, tmp_path, capsys):
    path = tmp_path / "study.toml"
    path.write_text(small.read_text().replace("test = 0.3", "test = 0.4"))
    assert cli.main(["compare", str(path), f"--out={whole}", "--processes=1"]) == 2
    assert "is a run with another data" in capsys.readouterr().err


def test_a_folder_is_worked_in_once(tmp_path):
    with alone(tmp_path), pytest.raises(UserError, match="another process is working in"), alone(tmp_path, wait=0):
        pass
    with alone(tmp_path, wait=0):
        pass


def test_a_worker_that_dies_is_a_failed_run(small):
    worker = Worker(1)
    os.kill(worker.process.pid, signal.SIGKILL)
    job = read(small).jobs()[0]
    done = worker.perform(Task(job, str(small.parent / "never")), lambda round: None)
    worker.close()
    assert "ended with code -9: it was killed" in done.failure


def test_a_killed_worker_costs_its_own_run_alone(small, tmp_path):
    jobs = read(small).jobs()[:2]

    def progress(job, round):
        if job == jobs[0] and round == 1:
            for worker in crew.workers:
                os.kill(worker.process.pid, signal.SIGKILL)

    crew = Crew([Task(job, str(tmp_path)) for job in jobs], 1, progress)
    first, second = crew.run()
    assert "ended with code -9: it was killed" in first.failure
    assert second.failure is None
    assert (tmp_path / jobs[1].place / "result.json").exists()
    assert all(worker.process.poll() is not None for worker in crew.workers)


# Schema 1


def test_a_run_of_schema_1_is_read(tmp_path, capsys):
    """A folder that was written when evaluation modes were stances: the page, the study and its scores."""
    folder = tmp_path / "run-v1"
    shutil.copytree(ROOT / "tests" / "golden" / "run-v1", folder)
    written = json.loads((folder / "result.json").read_text())
    assert written["schema"] == 1
    assert "modes" not in written
    unseen = json.loads((folder / "about.json").read_text())["data"]["unseen"]
    result, evaluation = read_run(folder, Done(unseen))
    assert result["schema"] == 1
    assert "stances" not in result
    assert list(evaluation.scores) == result["modes"] == written["stances"]
    assert evaluation.summary()["personal"]["unseen"]["accuracy"] == pytest.approx(
        written["metrics"]["personal"]["unseen"]["accuracy"]
    )
    record = load_record(folder)
    assert record.notes == []
    assert set(record.scores) == set(written["stances"])
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "personal" in page
    assert f"{100 * written['metrics']['global']['participating']['accuracy']['rows']:.1f}" in page


def test_a_study_with_a_stance_is_read():
    given = {"data": {"digits": {}}, "methods": {"fedavg": {}}, "search": {"stance": "global", "grid": {"train.lr": [0.1]}}}
    assert parse(given).search.mode == "global"


# The search


SEARCH = """
[search]
figure = "{figure}"
mode = "{mode}"
grid.train.lr = [1e-6, 0.3, 3e38]

[methods.prox.grid]
mu = [0.1, 1.0, 10.0]
"""


def tried(folder, place, figures):
    (folder / place).mkdir(parents=True)
    metrics = {mode: {"participating": {"log_score": {"rows": value}}} for mode, value in figures.items()}
    (folder / place / "result.json").write_text(json.dumps({"metrics": metrics}))


@pytest.mark.parametrize(("mode", "chosen"), [("best", 0), ("global", 1)])
def test_the_best_try_that_ended_is_chosen(tmp_path, mode, chosen):
    table = {"methods": {"fedavg": {}}, "data": {"digits": {}}, "search": {"mode": mode, "grid": {"mu": [1, 2, 3]}}}
    table["methods"]["fedprox"] = table["methods"].pop("fedavg")
    study = parse(table)
    tried(tmp_path, "search/fedprox-0", {"global": -3.0, "adapted": -0.5})
    tried(tmp_path, "search/fedprox-1", {"global": -1.0, "adapted": -0.6})
    ends = [Done([]), Done([]), Done(failure="it diverged")]
    ((key, choice),) = choose(study, study.search_jobs(), ends, tmp_path).items()
    assert key == ("digits", "fedprox")
    assert choice.settings == (f"mu={chosen + 1}",)
    assert [one.score for one in choice.tries] == ([-0.5, -0.6, None] if mode == "best" else [-3.0, -1.0, None])
    assert choice.tries[2].failure == "it diverged"
    (job,) = study.jobs({key: choice.settings})[:1]
    assert job.settings == choice.settings
    assert job.validation is None
    ((_, none),) = choose(study, study.search_jobs(), ends[2:] * 3, tmp_path).items()
    assert none.settings is None


@pytest.mark.slow
def test_a_search_never_sees_the_test_rows(small, tmp_path, capsys):
    """With all test labels turned around, the tries and the choice are the same to the bit; the final figures are not."""
    rows = dict(np.load(small.parent / "rows.npz"))
    data = read(small).data["six"].load()
    kept = {row.tobytes() for name in data.names for row in data.rows(str(name))[0]}
    text = small.read_text()
    text = text[: text.index("[methods.wrong]")] + SEARCH.format(figure="accuracy", mode="global")
    found = {}
    for name in ("true", "false"):
        if name == "false":
            rows["y"] = np.array([y if x.tobytes() in kept else 1 - y for x, y in zip(rows["x"], rows["y"], strict=True)])
        np.savez(tmp_path / f"{name}.npz", **rows)
        path = tmp_path / f"{name}.toml"
        path.write_text(text.replace(str(small.parent / "rows.npz"), str(tmp_path / f"{name}.npz")))
        given = [f"--out={tmp_path / name}", "--processes=1", f"--json={tmp_path / name}.json"]
        assert cli.main(["compare", str(path), *given]) == 0
        found[name] = content(tmp_path / f"{name}.json")
    search = found["true"]["search"]
    assert json.loads(json.dumps(found["false"]["search"]).replace("/false/", "/true/")) == search  # a sentence has its folder
    assert found["false"]["results"] != found["true"]["results"]
    assert search["fedavg"]["chosen"] == ["train.lr=0.3"]
    assert [one["settings"] for one in search["fedavg"]["tries"]] == [["train.lr=1e-06"], ["train.lr=0.3"], ["train.lr=3e+38"]]
    assert "diverged" in search["fedavg"]["tries"][2]["failure"]
    assert len(search["prox"]["tries"]) == 3
    assert {run["options"]["train"]["lr"] for run in found["true"]["results"]["fedavg"]} == {0.3}
    one = json.loads((tmp_path / "true" / "search" / "fedavg-1" / "result.json").read_text())
    final = found["true"]["results"]["fedavg"][0]
    assert one["seed"] not in (0, 1)
    assert one["validation"] == 0.2
    assert "validation" not in final
    assert one["data"]["rows"] == data.train_counts.sum() < final["data"]["rows"]
    assert "fedavg: train.lr=0.3 of 3 tries, 1 failed (accuracy" in capsys.readouterr().out.replace("\n", " ")


def test_settings_of_a_search_on_the_command_line():
    study = study_of(Options(("fedavg", "fedprox"), search=("train.lr=0.01,0.1", "train.epochs=1,2")))
    assert len(study.search_jobs()) == 8
    assert study.search_jobs()[3].settings == ("train.lr=0.1", "train.epochs=2")


def test_the_federation_s_choice_stands_below_the_tables_and_on_the_page():
    def result(lr, gain):
        one = {"settings": {"tune.lr": lr}, "gain": gain, "error": 0.1, "rows": 40}
        return {"choice": {"up to 10 rows": {**one, "gain": 0.0}, "more rows": one}}

    runs = {0: result(0.01, 0.2), 1: result(0.1, 0.4)}
    (sheet,) = choices("digits", {"fedavg": runs, "knn-per": {0: {}, 1: {}}})
    (section,) = sheet.sections
    assert [[cell.text for cell in row] for row in section] == [
        ["fedavg", "up to 10 rows", "do not adapt", "0.000 ± 0.000"],
        ["fedavg", "more rows", "tune.lr 0.01 (seed 0); tune.lr 0.1 (seed 1)", "0.300 ± 0.141"],
    ]
    records = [types.SimpleNamespace(config={"seed": seed}, result=one) for seed, one in runs.items()]
    (table,) = compared._chosen([compared.Method("FedAvg", records)])
    assert table.rows[1] == ["FedAvg", "more rows", "tune.lr 0.01 (seed 0); tune.lr 0.1 (seed 1)", "0.300 ± 0.141"]
    assert choices("digits", {"knn-per": {0: {}}}) == compared._chosen([]) == []
