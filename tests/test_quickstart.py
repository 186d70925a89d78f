"""The quickstart: what it prints follows from its runs, README shows it, and what abstaining keeps is right."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from test_docs import Training, alike

from fedbayes.cli import main, quickstart
from fedbayes.evaluation.score import BINS, Score, answered, kept
from fedbayes.report.newcomers import newcomers
from fedbayes.report.page import report


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def scored(confidence, right):
    """The score of rows with these confidences and answers."""
    place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    rows, sums, hits = (np.bincount(place, part, BINS) for part in (np.ones(len(place)), confidence, right))
    return Score(float(len(right)), float((~right).sum()), 0.0, 0.0, 0.0, 0.0, rows, sums, hits)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_abstaining_keeps_as_many_rows_as_thresholds_allow(level):
    generator = np.random.default_rng(3)
    confidence = generator.uniform(0.1, 1.0, 4000)
    right = generator.random(4000) < confidence**0.7
    found, score = kept(scored(confidence, right), level), scored(confidence, right)
    accuracy = [right[confidence > edge / BINS].mean() for edge in range(BINS)]
    shares = [(confidence > edge / BINS).mean() for edge in range(BINS)]
    good = [share for share, reached in zip(shares, accuracy, strict=True) if reached >= level]
    best = max(good, default=0.0)
    next_larger = min((share for share in shares if share > best), default=1.0)
    assert best <= found <= next_larger
    if good and found < 1:  # between two thresholds, where the accuracy is the one asked for
        assert answered(score, np.array([found]))[0] == pytest.approx(level)
    np.testing.assert_allclose(answered(score, np.array(shares)), accuracy)


def test_abstaining_at_its_ends():
    confidence = np.linspace(0.05, 1, 50)
    assert kept(scored(confidence, np.ones(50, bool)), 0.9) == 1
    assert kept(scored(confidence, np.zeros(50, bool)), 0.9) == 0
    picture = newcomers({"right": scored(confidence, np.ones(50, bool)), "wrong": scored(confidence, np.zeros(50, bool))}, "")
    legend = picture.axes[1].get_legend().get_texts()
    assert [one.get_text() for one in legend] == ["right: 100 % answered", "wrong: 0 % answered"]


@pytest.fixture
def tiny(monkeypatch):
    """Two methods for two rounds, in this process, as in a package without examples."""
    methods = {name: quickstart.STUDY.methods[name] for name in ("fedavg", "fedhb-niw")}
    run = dataclasses.replace(quickstart.STUDY.run, rounds=2)
    monkeypatch.setattr(quickstart, "STUDY", dataclasses.replace(quickstart.STUDY, run=run, methods=methods, model="mlp:4"))
    monkeypatch.setattr(quickstart, "SCHOOLS", Path("none.py"))
    monkeypatch.setattr("fedbayes.study.crew.cores", lambda: 1)


def test_what_is_printed_follows_from_the_runs(tiny, capsys):
    assert main(["quickstart"]) == 0
    printed = capsys.readouterr().out
    folders = {name: Path("runs/quickstart", f"{name}-0") for name in ("fedavg", "fedhb-niw")}
    results = {name: json.loads((folder / "result.json").read_text()) for name, folder in folders.items()}
    rows = [("fedavg", "global", "none +shared FedAvg")]
    for mode, size in (("adapted:5", "5"), ("adapted:20", "20"), ("adapted", "all")):
        rows += [("fedavg", mode, f"{size} +fine-tuned FedAvg"), ("fedhb-niw", mode, "FedHBNIW")]
    lines = [line for line in printed.splitlines() if re.search(r"FedAvg +\d|FedHBNIW +\d", line)]
    for line, (name, mode, start) in zip(lines, rows, strict=True):
        found = results[name]["metrics"][mode]["unseen"]
        shown = f"{100 * found['accuracy']['rows']:.1f} +{found['log_score']['rows']:.3f} +{100 * found['ece']['rows']:.1f} "
        assert re.search(rf"{start} +{shown}", line), line
    for mode, size in (("adapted:5", "5 rows"), ("adapted:20", "20 rows"), ("adapted", "all their rows")):
        gap = np.subtract(*(results[name]["metrics"][mode]["unseen"]["log_score"]["rows"] for name in ("fedhb-niw", "fedavg")))
        (told,) = re.findall(rf"With {size}\s(.*?)\snats", printed, re.DOTALL)
        assert float(told.split()[-1]) == pytest.approx(gap, abs=6e-4)
    assert Path("runs/quickstart/newcomers.png").stat().st_size > 5000
    page = Path("runs/quickstart/report.html").read_text()
    assert page.count("Newcomers with 5 rows</text>") == 1
    assert "Newcomers with all their rows. Rows that can be answered" in page
    assert "adapted:5" in report([Path("runs/quickstart/fedavg-0")]).read_text()  # more modes than the usual ones


def test_the_command_for_more_methods_is_understood(monkeypatch):
    seen = []

    def simulate(algorithm, data, rounds, **options):
        seen.append((int(data.unseen.sum()), rounds, options["modes"]))
        raise Training

    monkeypatch.setattr("fedbayes.study.crew.simulate", simulate)
    monkeypatch.setattr("fedbayes.study.crew.cores", lambda: 1)
    with pytest.raises(Training):
        main(shlex.split(quickstart.more())[1:])
    (options,), run = quickstart.STUDY.data.values(), quickstart.STUDY.run
    assert seen == [(options.hold_out, run.rounds, run.modes)]
    assert not any(method.settings for method in quickstart.STUDY.methods.values())  # the same defaults for all


def readme():
    text = (ROOT / "README.md").read_text("utf-8")
    return text[text.index("<!-- quickstart: make readme -->") : text.index("<!-- end of quickstart -->")]


def test_readme_shows_this_quickstart():
    """Its study, its methods and its picture; the numbers are held against a run by a slow test."""
    shown = readme()
    (options,), run = quickstart.STUDY.data.values(), quickstart.STUDY.run
    assert f"{options.clients} clients" in shown
    assert f"The other {options.hold_out} are newcomers" in re.sub(r"\s+", " ", shown)
    assert f"for {run.rounds} rounds" in re.sub(r"\s+", " ", shown)
    assert quickstart.more() in shown
    assert len(re.findall(r"^.{20}\S.* \d+\.\d +-\d\.\d{3} +\d+\.\d +\d+$", shown, re.MULTILINE)) == 1 + 3 * len(
        quickstart.STUDY.methods
    )
    assert 5000 < (ROOT / "docs" / "images" / "quickstart.png").stat().st_size < 100_000


@pytest.mark.slow
def test_readme_has_the_numbers_of_a_run(capsys):
    """`make readme` writes them; which method is ahead may differ from processor to processor, so no sentence is."""
    assert main(["quickstart"]) == 0
    printed = capsys.readouterr().out
    numbers = [line for line in readme().splitlines() if re.search(r"\d\.\d+ ", line) and re.match(r" (\S| {10})", line)]
    assert len(numbers) == 1 + 3 * len(quickstart.STUDY.methods) + len(quickstart.NUTS)
    for line in numbers:
        alike(re.sub(r" +", " ", line).strip(), re.sub(r" +", " ", printed))
