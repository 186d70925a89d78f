"""Pages about runs: what they show, what they do with files that are missing or damaged, and that they need nothing else."""

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from markupsafe import Markup, escape
from table import TABLE

from fedbayes import cli, files, wire
from fedbayes.data import Clients
from fedbayes.data.describe import Facts
from fedbayes.evaluation.score import SHAPES, Score
from fedbayes.models import Categorical, Normal, mlp
from fedbayes.report import blocks, compared, page, predictions, records, sections, structured
from fedbayes.report.sections import traffic
from fedbayes.results.folder import about
from fedbayes.results.simulate import simulate
from fedbayes.trees import quietly

HOSTILE = ['<script>alert("1")</script>', '"><img src=x onerror=alert(2)>', "$\\frac{", "</svg><b>", "five & six", "ünï — 6"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six clients with names that would break a careless page, two of them unseen."""
    generator = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), [9, 30, 14, 22, 26, 17])
    x = generator.normal(size=(len(owner), 4)).astype(np.float32)
    y = (x @ np.array([2.0, -1.0, 0.5, 1.0]) > 0).astype(np.int32)
    names = np.array(HOSTILE)[owner]
    clients = Clients.build(x, y, names, test=0.3, name="six<i>", classes=["no</text><u>", "yes $_"]).hold_out(2, seed=5)
    folder = tmp_path_factory.mktemp("network") / "run"
    model = mlp((4,), Categorical(2), hidden=(8,))
    fit = simulate(TABLE["fedper"](model), clients, rounds=4, cohort=3, dropout=0.4, evaluate_every=2, folder=folder)
    files.write_json(folder / "command.json", {"run": ["fedper", "--data", "my data.csv", "--out=a", "--force"]})
    return folder, fit


@pytest.fixture(scope="module")
def text(run):
    assert page.report([run[0]]) == run[0] / "report.html"
    return (run[0] / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    """The folder of a fit over silos, as `fedbayes fit` leaves it, written by hand: a fit takes seconds to compile."""
    folder = tmp_path_factory.mktemp("silos") / "fit"
    folder.mkdir()
    data = {"silos": {"<b>first": 8, "second": 6}, "fingerprint": "0"}
    config = {
        "algorithm": "SFVI",
        "options": {"lr": 0.05},
        "rounds": 100,
        "cohort": None,
        "seed": 0,
        "data": data,
        "file": "mean.py",
    }
    draws = np.random.default_rng(0).normal([1.0, -2.0], [0.5, 1.5], (1, 500, 2))
    figures = {
        f"mean[{i}]": {"mean": mean, "sd": sd, "5%": mean - sd, "95%": mean + sd}
        for i, mean, sd in ((0, 1.0, 0.5), (1, -2.0, 1.5))
    }
    result = {**config, "posterior": figures, "theta": {"scale": 3.25}, "bound": -12.5, "khat": 0.3, "ess": 0.9}
    quietly("arviz").from_dict({"mean": draws}).to_netcdf(str(folder / "posterior.nc"), engine="h5netcdf")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"round": i, "bound": -12.5 - 9 / i}) + "\n" for i in range(1, 101))
    )
    leaf = wire.Leaf("up", "gradient", (5,), "float32", "sum", ("data/y",), ())
    (folder / "about.json").write_text(json.dumps(about([(1, [leaf]), (1, [leaf])])))
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run[0], tmp_path / "copy"))


class Parser(html.parser.HTMLParser):
    """Tags that are opened and closed, ids, and what a browser would load."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.loaded, self.pictures, self.tags = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.loaded += [found[name] for name in ("src", "href", "xlink:href", "srcset", "data") if name in found]
        if tag == "svg":
            self.pictures.append(found)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_has_every_part_and_the_run_s_figures(run, text):
    _, fit = run
    parts = (
        "What was run",
        "Results",
        "Learning curves",
        "Clients",
        "Calibration",
        "Uncertainty",
        "Is the uncertainty alive?",
        "Labels",
        "What was sent",
        "Time",
    )
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert tuple(headings) == parts
    for mode, groups in fit.result["metrics"].items():
        for group, figures in groups.items():
            accuracy = f"{100 * figures['accuracy']['rows']:.1f}"
            log_score = f"{figures['log_score']['rows']:.3f}"
            numbers = f'<td class="number">{accuracy}</td><td class="number">{log_score}</td>'
            assert f'<th scope="row">{mode}</th><td>{group}</td>{numbers}' in text
    assert "fedbayes run fedper --data &#39;my data.csv&#39; --out run-again" in text
    scores = fit.evaluation.scores["personal"]
    seen = np.flatnonzero(~fit.simulation.data.unseen)
    worst = seen[np.argmax((scores.error / scores.rows)[seen])]
    table = text[text.index("Worst tenth by accuracy %: 1 client of 4 participating (personal)") :]
    assert re.search(r'<tr><th scope="row">(.*?)</th>', table)[1] == escape(fit.simulation.data.names[worst])


def test_names_from_files_are_text(text):
    parser = Parser(text)
    assert not parser.open
    assert not {"script", "img", "b", "i", "u"} & set(parser.tags)
    assert "&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;" in text
    assert "$\\frac{" in text


def test_the_page_is_whole_by_itself(text):
    parser = Parser(text)
    assert all(link.startswith(("#", "data:")) for link in parser.loaded), parser.loaded
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert len(parser.ids) == len(set(parser.ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert references <= set(parser.ids)
    assert len(parser.pictures) > 10
    assert all(picture["role"] == "img" and len(picture["aria-label"]) > 20 for picture in parser.pictures)
    assert len(text.encode()) < 2_000_000
    assert not re.search(r"#0{6}|DejaVu Sans',", text.split("</style>", 1)[1]), "pictures have the page's colours and font"


def test_the_same_run_gives_the_same_bytes(run):
    def parts():
        record = records.load(run[0])
        record.scores = {"global": record.scores["global"]}
        record.result["metrics"] = {"global": record.result["metrics"]["global"]}
        return blocks.page("", "", [predictions.calibration(record), sections.labels(record)], "")

    assert parts() == parts()


def test_what_was_sent_is_counted(run):
    folder, fit = run
    record = records.load(folder)
    leaves = wire.manifest(fit.simulation.algorithm, fit.simulation.data.example)
    each = {message: sum(leaf.bytes for leaf in leaves if leaf.message == message) for message in ("down", "up")}
    answers = [len(fit.simulation.chosen(round)) for round in range(1, 5)]
    assert sum(answers) < 12, "somebody dropped out"
    assert traffic(record)[:2] == (12 * each["down"], sum(answers) * each["up"])


def test_times_are_apart_from_what_is_compared(run):
    folder, fit = run
    assert not any("seconds" in entry for entry in fit.history)
    parts = [entry["part"] for entry in records.load(folder).timing]
    assert parts.count("training") == 4
    assert parts.count("evaluation") == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_has_nothing_to_complain_of(run, text, tmp_path):
    """The page's own policy forbids every request, and what it forbids would be a message on the console."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    bad = tmp_path / "bad.html"
    bad.write_text(text.replace("</main>", '<img src="https://example.org/x.png" alt=""></main>'))
    said = {}
    for name, path in {"good": run[0] / "report.html", "bad": bad}.items():
        command = [CHROMIUM, *options, "--dump-dom", path.absolute().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "What was run</h2>" in done.stdout
        said[name] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said["good"]
    assert "Content Security Policy" in "".join(said["bad"]), "the test would see a request"


# Files that are missing or damaged


def only_text(monkeypatch):
    """Pages without pictures, which take most of the time."""

    def draw(make, *given, caption, wide=False, **options):
        return blocks.Picture(Markup("<svg></svg>"), caption, wide)

    for module in (compared, structured, predictions, sections):
        monkeypatch.setattr(module, "draw", draw)


DAMAGE = {
    "metrics.jsonl": (
        lambda path: path.write_bytes(path.read_bytes()[:-40] + b"\n\xff\xfe{\n3\n"),
        "3 of 8 lines of .*metrics.jsonl",
    ),
    "scores.safetensors": (
        lambda path: path.write_bytes(path.read_bytes()[:99]),
        "no figures of single clients: .*cannot be read",
    ),
    "result.json": (lambda path: path.write_text("{}"), "result.json holds no result; it is damaged"),
    "about.json": (lambda path: path.write_text('{"messages": [{"clients": 1, "leaves": [{}]}]}'), "about.json cannot be read"),
    "timing.jsonl": (lambda path: path.write_text("{\n"), "1 of 1 lines of .*timing.jsonl cannot be read"),
    "command.json": (lambda path: path.write_text("{"), "command.json cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_costs_its_part_and_gets_a_sentence(copy, monkeypatch, name):
    only_text(monkeypatch)
    damage, message = DAMAGE[name]
    damage(copy / name)
    found = page.report([copy]).read_text("utf-8")
    assert re.search(message, found)
    assert "<h2" in found
    assert ("Worst tenth" in found) == (name not in ("scores.safetensors", "result.json"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "scores.safetensors", "about.json", "timing.jsonl", "command.json"])
def test_a_run_without_a_file_still_has_a_page(copy, monkeypatch, name):
    only_text(monkeypatch)
    (copy / name).unlink()
    said = {
        "metrics.jsonl": "metrics.jsonl has no rounds",
        "scores.safetensors": "Reliability diagrams are drawn from the scores",
        "about.json": "does not say who has which labels",
        "timing.jsonl": "keeps no times",
        "command.json": "keeps no command",
    }
    assert said[name] in page.report([copy]).read_text("utf-8")


def test_an_unfinished_run_is_said_to_be_one(copy, monkeypatch):
    only_text(monkeypatch)
    for name in ("result.json", "scores.safetensors"):
        (copy / name).unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join(lines[:4]) + "\n")  # round 3, after the evaluation of round 2
    found = page.report([copy]).read_text("utf-8")
    assert "This run is unfinished: round 3 of 4." in found
    assert "after round 2" in found


BAD = {
    "no folder": (lambda t: ["none"], "there is no folder none; give the folder of a run"),
    "a file": (lambda t: [(t / "file").write_text("") or "file"], "there is no folder file"),
    "an empty folder": (lambda t: [(t / "empty").mkdir() or "empty"], "empty holds no run"),
    "another config": (lambda t: [(t / "config.json").write_text('{"a": 1}') and "."], "holds no run"),
    "a damaged config": (lambda t: [(t / "config.json").write_text("{") and "."], "config.json cannot be read"),
    "nothing": (lambda t: [], "report needs the folder of a run"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_run_is_one_sentence(capsys, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    assert cli.main(["report", *arguments(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.glob("*.html"))


def test_where_the_page_goes(capsys, copy, tmp_path, monkeypatch):
    only_text(monkeypatch)
    assert cli.main(["report", str(copy), "--out", str(tmp_path / "mine.html")]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'mine.html'}\n"
    assert (tmp_path / "mine.html").exists()
    for out, message in (("mine.pdf", "a page ends in .html"), ("none/mine.html", "No such file or directory")):
        assert cli.main(["report", str(copy), "--out", str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err


# Several runs


def another(folder, to, seed, accuracy, **changes):
    """A copy of a run with another seed, another accuracy, and other settings."""
    shutil.copytree(folder, to)
    for name in ("config.json", "result.json"):
        content = files.read_json(to / name) | {"seed": seed} | changes
        if "metrics" in content:
            content["metrics"]["personal"]["participating"]["accuracy"]["rows"] = accuracy
        files.write_json(to / name, content)
    return to


@pytest.fixture
def folders(run, tmp_path):
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        another(run[0], tmp_path / "all" / f"one-{seed}", seed, accuracy)
        another(run[0], tmp_path / "all" / f"two-{seed}", seed, accuracy, dropout=0.2)
    return tmp_path / "all"


def test_seeds_are_pooled_and_options_are_not(folders, tmp_path, monkeypatch):
    """t with 2 degrees of freedom is 4.303 at 97.5 %: 0.6 ± 4.303 · 0.1 / √3."""
    monkeypatch.chdir(tmp_path)
    only_text(monkeypatch)
    found = page.report([folders, folders / "one-0"])
    assert found == Path("report.html")
    text = found.read_text("utf-8")
    start = r'<th scope="row">FedPer \(dropout {}\)</th><td>personal</td><td class="number">3</td>'
    row = start + r'<td class="number">60.0 \[35.2, 84.8\]</td>'
    assert len(re.findall(row.format("0.4"), text)) == len(re.findall(row.format("0.2"), text)) == 1
    assert "6 runs compared" in text
    assert "different data sets" not in text


def test_differences_are_paired_by_seed_and_client(run, folders, monkeypatch):
    """Half of each client's rows more are right: 50 points, of which every seed and client is sure."""
    only_text(monkeypatch)
    for folder in folders.iterdir():
        scores = records.load(folder).scores
        share = 0.0 if folder.name.startswith("two") else 0.5
        wrong = {mode: score._replace(error=(share * score.rows).astype(np.float32)) for mode, score in scores.items()}
        files.save(folder / "scores.safetensors", wrong)
    text = page.report([folders], folders / "out.html").read_text("utf-8")
    assert "Difference from FedPer (dropout 0.4), in pairs: over all test rows; 95 % interval for other seeds" in text
    row = r'<th scope="row">FedPer \(dropout 0.2\)</th><td>personal</td><td>participating</td>'
    assert len(re.findall(row + r'<td class="number"><b>\+50.0 \[\+50.0, \+50.0\]</b></td>', text)) == 1


def test_other_data_is_apart(run, folders, monkeypatch):
    """Of the same name and sizes, but another partition at the same seed."""
    only_text(monkeypatch)
    data = json.loads((run[0] / "config.json").read_text())["data"]
    another(run[0], folders / "three-0", 0, 0.9, data={**data, "fingerprint": "other"})
    sets = compared.data_sets([records.load(folder) for folder in records.find([folders])])
    assert [len(members) for _, members, _ in sets] == [6, 1]
    text = page.report([folders], folders / "out.html").read_text("utf-8")
    assert "2 different data sets, so each has its own part and no table mixes them" in text
    assert len(re.findall(r"<h2[^>]*>Results on six", text)) == 2


def test_a_partition_for_each_seed_is_one_comparison(run, tmp_path):
    data = json.loads((run[0] / "config.json").read_text())["data"]
    for seed in range(3):
        varied = {"data": {**data, "fingerprint": str(seed)}, "model": str(seed)}
        another(run[0], tmp_path / f"run-{seed}", seed, 0.5, **varied)
    ((_, members, varied),) = compared.data_sets([records.load(folder) for folder in records.find([tmp_path])])
    assert varied
    assert len(compared.methods(members, varied)) == 1


def test_an_unfinished_run_does_not_count(folders, monkeypatch):
    only_text(monkeypatch)
    (folders / "one-2" / "result.json").unlink()
    text = page.report([folders], folders / "out.html").read_text("utf-8")
    assert "one-2: This run is unfinished: round 4 of 4" in text
    assert '<td>personal</td><td class="number">2</td><td class="number">55.0 [0.0, 100.0]</td>' in text
    assert "Methods differ in their number of seeds" in text


# Models over silos


def test_the_page_of_a_structured_fit(silos, tmp_path):
    text = page.report([silos], tmp_path / "fit.html").read_text("utf-8")
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == ["What was run", "Posterior", "Bound", "Silos", "What was sent", "Time"]
    cells = ["1.000", "0.500", "0.500", "1.500"]
    assert '<th scope="row">mean[0]</th>' + "".join(f'<td class="number">{cell}</td>' for cell in cells) in text
    low, high = re.search(r">mean\[0\]</th>.*?([\d.]+)</td><td class=\"number\">([\d.]+)</td></tr>", text).groups()
    assert float(high) - float(low) == pytest.approx(2 * 1.645 * 0.5, rel=0.1), "a normal's densest nine tenths"
    assert "effective share 90 %" in text
    assert "&lt;b&gt;first" in text
    parser = Parser(text)
    assert not parser.open
    assert [picture["aria-label"].split(":")[0] for picture in parser.pictures] == [
        "Marginal of mean[0]",
        "Marginal of mean[1]",
        "The bound on log p(y) over rounds",
    ]
    assert traffic(records.load(silos))[1] == 100 * 2 * 5 * 4


@pytest.mark.slow
def test_a_fit_leaves_what_its_page_needs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", str(ROOT / "examples" / "eight_schools.py"), "--rounds", "60", "--out", "fit"]) == 0
    assert cli.main(["report", "fit"]) == 0
    assert capsys.readouterr().out.endswith("page: fit/report.html\n")
    record = records.load(Path("fit"))
    assert not record.notes
    assert record.messages
    assert {entry["part"] for entry in record.timing} == {"training", "checkpoints", "posterior"}
    assert record.command.endswith("eight_schools.py --rounds 60 --out fit-again")


def test_a_structured_fit_beside_a_network(silos, run, tmp_path, monkeypatch):
    only_text(monkeypatch)
    text = page.report([run[0], silos], tmp_path / "both.html").read_text("utf-8")
    assert "Models over silos and networks over clients have no figure in common; each has its own part." in text
    assert "Posteriors side by side on mean" in text


def test_a_damaged_posterior_costs_the_marginals(silos, tmp_path, monkeypatch):
    only_text(monkeypatch)
    folder = Path(shutil.copytree(silos, tmp_path / "copy"))
    (folder / "posterior.nc").write_bytes(b"no netCDF")
    text = page.report([folder]).read_text("utf-8")
    assert re.search("The page has no marginals: .*posterior.nc cannot be read", text)
    assert "mean[0]" in text


def test_a_damaged_result_of_a_fit_is_no_result(silos, tmp_path, monkeypatch):
    only_text(monkeypatch)
    folder = Path(shutil.copytree(silos, tmp_path / "copy"))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "posterior": {"mean[0]": {"mean": "x"}}}))
    assert "result.json holds no result; it is damaged" in page.report([folder]).read_text("utf-8")


# Many clients


def test_many_clients_make_no_large_page(run):
    generator, count = np.random.default_rng(0), 600
    rows = generator.integers(5, 50, count).astype(np.float32)
    error = np.floor(rows * generator.uniform(size=count)).astype(np.float32)
    score = Score(*(np.ones((count, *shape), np.float32) for shape in SHAPES))._replace(rows=rows, error=error)
    labels = generator.poisson(0.3, (count, 62)) + np.eye(62, dtype=int)[np.arange(count) % 62]
    sizes = labels.sum(axis=1).tolist()
    unseen = (np.arange(count) % 5 == 0).tolist()
    classes = [str(name) for name in range(62)]
    facts = Facts("many", [f"client {i}" for i in range(count)], unseen, sizes, [0] * count, classes, labels.tolist(), None)
    record = dataclasses.replace(
        records.load(run[0]), data=facts, scores=dict.fromkeys(("global", "personal", "adapted"), score)
    )
    text = page.single(record)
    assert len(text.encode()) < 1_000_000
    assert "Worst tenth by accuracy %: 48 clients of 480 participating, the first 30 (personal)" in text


@pytest.mark.slow
def test_numbers_as_targets(tmp_path):
    """Levels of predictive quantiles instead of reliability diagrams, quantiles of targets instead of labels."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(60, 2)).astype(np.float32)
    y = (x[:, 0] + generator.normal(size=60)).astype(np.float32)
    clients = Clients.build(x, y, np.repeat(np.arange(3), 20), test=0.3)
    algorithm = TABLE["fedavg"](mlp((2,), Normal(), hidden=(4,)))
    simulate(algorithm, clients, rounds=1, folder=tmp_path / "run", modes=("global",))
    text = page.report([tmp_path / "run"]).read_text("utf-8")
    assert "RMSE" in text
    assert "Who has which targets" in text
    assert "mean gap between levels and shares" in text
    shutil.copytree(tmp_path / "run", tmp_path / "begun")
    (tmp_path / "begun" / "result.json").unlink()
    simulate(algorithm, clients, rounds=1, folder=tmp_path / "other", modes=("global",), seed=1)
    runs = [tmp_path / name for name in ("begun", "run", "other")]
    text = page.report(runs, tmp_path / "several.html").read_text("utf-8")
    assert "RMSE" in text
