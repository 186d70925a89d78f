"""Every page is true: its Python and its commands run, its tables name what there is, and the site builds without a warning."""

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbayes as fb
from fedbayes import wire
from fedbayes.cli import COMMANDS, main
from fedbayes.cli import advise as advise_command
from fedbayes.cli import fit as fit_command
from fedbayes.cli.run import Options
from fedbayes.evaluation.assess import assess
from fedbayes.models import Normal, mlp
from fedbayes.study.options import DataOptions, RunOptions
from fedbayes.trees import other_peoples_code

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = "# not run"
"""The first line of a Python block that is only to be read."""


def text(page):
    return (ROOT / page).read_text("utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where NamedTuples with postponed annotations look up their names
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


GALLERY = [f"docs/gallery/{name}.md" for name in ("writers", "non-iid", "small-data", "hospitals", "to-flower")]


# your-data.md is run by test_data_sources.py.
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/cli.md",
        "docs/contract.md",
        "docs/evaluation.md",
        "docs/hierarchical-bayes.md",
        pytest.param("docs/new-clients.md", marks=pytest.mark.slow),
        pytest.param("docs/uncertainty.md", marks=pytest.mark.slow),
        "docs/deploy.md",
        pytest.param("docs/compare.md", marks=pytest.mark.slow),
        pytest.param("docs/take-away.md", marks=pytest.mark.slow),
    ],
)
def test_python_runs(page):
    found = [block for block in blocks(page, "python") if not block.startswith(NOT_RUN)]
    assert found
    names = {"__name__": "page"}
    for block in found:
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
@pytest.mark.parametrize("page", GALLERY)
def test_the_gallery_runs_and_makes_its_pictures(page, capsys):
    """With JAX as a reader has it; what a page says was printed is what its code prints, but for its last digits."""
    names = {"__name__": "page"}
    with other_peoples_code():
        for block in blocks(page, "python"):
            exec(compile(block, page, "exec"), names)
    pictures = re.findall(r"\]\(\.\./images/(gallery-[\w-]+\.png)\)", text(page))
    assert 1 <= len(pictures) <= 2
    for picture in pictures:
        assert Path(picture).stat().st_size > 5000
        assert (ROOT / "docs" / "images" / picture).stat().st_size < 60_000
    printed = capsys.readouterr().out
    for shown in blocks(page, "text"):
        for line in shown.splitlines():
            alike(line, printed)


def alike(line, printed):
    """A printed line has the same words in the same order, and its numbers are near: other processors round differently."""
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    pattern = f"({number})".join(re.escape(word) for word in re.split(number, line))
    told = [float(value) for value in re.findall(number, line)]
    found = [[float(value) for value in match.groups()] for match in re.finditer(pattern, printed)]
    assert any(values == pytest.approx(told, rel=0.3, abs=0.08) for values in found), line


@pytest.mark.slow
# ArviZ calls Matplotlib in a way that Matplotlib will drop.
@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
def test_the_guide_to_structured_models_runs_and_makes_its_pictures(capsys):
    """With JAX as a reader has it: NUTS itself does not run with strict promotion. Also what it says of a run's folder."""
    page, names = "docs/structured-models.md", {"__name__": "page"}
    with other_peoples_code():
        for block in blocks(page, "python"):
            if not block.startswith(NOT_RUN):
                exec(compile(block, page, "exec"), names)
    pictures = re.findall(r"\]\(images/([\w-]+\.png)\)", text(page))
    assert pictures
    for picture in pictures:
        assert Path(picture).stat().st_size > 5000
        assert (ROOT / "docs" / "images" / picture).stat().st_size < 80_000
    printed = capsys.readouterr().out
    for sentence in ("faces in silo is discrete, but a latent must be continuous", "('change/precision', (4, 4), 'sum')"):
        assert sentence in printed
        assert sentence in text(page)
    # The figures that the page prints and the claims beside them
    found, shown = names["fit"].result, blocks(page, "text")[0]
    for name, figures in found["posterior"].items():
        mean, sd = map(float, re.search(rf"^{re.escape(name)} +(\S+) +(\S+)", shown, re.MULTILINE).groups())
        assert figures["mean"] == pytest.approx(mean, abs=0.1 * sd)
        assert figures["sd"] == pytest.approx(sd, rel=0.1)
    assert found["ess"] > 0.9 > 0.8 > names["plain"].result["ess"]
    assert names["plain"].draws(4000, corrected=False)["spread"].std() < 0.75 * names["nuts"]["spread"].std()
    assert found["posterior"]["spread"]["sd"] == pytest.approx(float(names["nuts"]["spread"].std()), rel=0.15)
    # The folder of the run
    section = text(page)[text(page).index("### result.json") : text(page).index("## Forms of data")]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) - {"file", "correct"} == set(found)
    for file in ("config.json", "metrics.jsonl", "result.json", "posterior.nc", "posterior.png", "bound.png"):
        assert f"`{file}`" in text(page)
        assert Path("runs/clinics", file).exists()


def test_no_page_is_forgotten():
    """Whoever adds a page with Python in it adds it to a test too."""
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if "```python" in path.read_text("utf-8")}
    tested = {
        "docs/cli.md",
        "docs/contract.md",
        "docs/evaluation.md",
        "docs/add-an-algorithm.md",
        "docs/your-data.md",
        "docs/structured-models.md",
        "docs/hierarchical-bayes.md",
        "docs/new-clients.md",
        "docs/uncertainty.md",
        "docs/deploy.md",
        "docs/compare.md",
        "docs/take-away.md",
        *GALLERY,
    }
    assert pages <= tested


def patients():
    """A table as the pages have it: a client column, a target, features."""
    generator = np.random.default_rng(0)
    lines = ["hospital,age,sex,ill"]
    for hospital in ("north", "east", "south", "west"):
        for _ in range(20):
            age = generator.normal(60, 10)
            ill = int(age + generator.normal(0, 5) > 60)
            lines.append(f"{hospital},{age:.1f},{generator.choice(['f', 'm'])},{ill}")
    Path("patients.csv").write_text("\n".join(lines))


AFTER_A_RUN = ("report", "personalise", "predict")
"""Commands that need a run, which is not made here; the next test makes it."""


@pytest.mark.slow
def test_four_commands_from_a_table_to_predictions():
    """README's own, as they stand there."""
    patients()
    table = Path("patients.csv").read_text().splitlines()
    Path("me.csv").write_text("\n".join(line.split(",", 1)[1] for line in table[:12]))
    Path("new.csv").write_text("\n".join(line.split(",", 1)[1].rsplit(",", 1)[0] for line in (table[0], *table[60:])))
    block = next(block for block in blocks("README.md", "console") if "fedbayes predict" in block)
    lines = [line.removeprefix("$ fedbayes ") for line in block.splitlines()]
    assert [line.split()[0] for line in lines] == ["run", *AFTER_A_RUN]
    for line in lines:
        assert main(shlex.split(line)) == 0
    assert "<html" in Path("runs/ill/report.html").read_text()
    found = Path("predictions.csv").read_text().splitlines()
    assert found[0] == "0,1,entropy,mutual_information"
    assert len(found) == 1 + 80 - 59


class Training(Exception):
    """Instead of training: the command was read, the data is there and the algorithm is built."""


@pytest.mark.parametrize(
    "page", ["README.md", "docs/cli.md", "docs/choose-a-method.md", "docs/contract.md", "docs/structured-models.md"]
)
def test_commands_are_understood(page, monkeypatch):
    """Every command of a page, up to the training, which the tests of the command line run."""
    patients()
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("__pycache__"))

    def simulate(algorithm, data, rounds, **options):
        raise Training

    monkeypatch.setattr("fedbayes.cli.run.simulate", simulate)
    monkeypatch.setattr("fedbayes.study.crew.simulate", simulate)
    monkeypatch.setattr("fedbayes.study.crew.cores", lambda: 1)  # in this process
    monkeypatch.setattr("fedbayes.cli.fit.simulate", simulate)
    lines = [line for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ fedbayes ")]
    assert lines
    for line in lines:
        arguments = shlex.split(line.removeprefix("$ fedbayes "))
        if arguments[0] in ("run", "compare", "fit"):
            with pytest.raises(Training):
                main(arguments)
        elif arguments[0] not in AFTER_A_RUN:
            assert main(arguments) == 0, line


def test_pages_name_every_command_option_and_algorithm():
    page, data = text("docs/cli.md"), text("docs/your-data.md")
    for command in COMMANDS:
        assert f"fedbayes {command}" in page
    for options in (RunOptions, Options, advise_command.Options, fit_command.Options):
        for field in dataclasses.fields(options):
            assert field.name in ("data", "settings") or f"--{field.name.replace('_', '-')}`" in page, field.name
    for field in dataclasses.fields(DataOptions):
        option = f"--{field.name.replace('_', '-')}"
        assert option in page + data or field.name == "standardise", option
    guide = text("docs/structured-models.md")
    for field in dataclasses.fields(fb.Family):
        assert f"| `{field.name}` | {field.default} |" in guide


def test_what_follows_from_the_registry_is_current():
    tables = load(ROOT / "docs" / "tables.py")
    for path, content in tables.FILES.items():
        assert content() == text(path), f"{path} does not follow from the registry; write it with make tables"
    assert set(re.findall(r" as (\w+)$", tables.stub(), re.MULTILINE)) == set(fb.__all__)


@pytest.mark.parametrize("family", ["fedvi", "fedhb"])
def test_every_settings_file_of_a_benchmark_has_a_place_on_its_page(family):
    """Without one, the benchmark could not write its table after hours of training."""
    page, files = text(f"docs/results/{family}.md"), list((ROOT / "benchmarks").glob(f"{family}_*.toml"))
    assert files
    for file in files:
        assert f"<!-- {file.stem} -->" in page
        assert f"<!-- end {file.stem} -->" in page


def test_schema_of_the_result_is_the_documented_one(clients):
    page = text("docs/evaluation.md")
    model = fb.models.mlp(clients.shape, fb.models.Categorical(2), hidden=(4,))
    fit = fb.simulate(fb.FedAvg(model), clients, rounds=1, folder="run", modes=("global",), average_last=1)
    result = json.loads(Path("run/result.json").read_text())
    section = page[page.index("## result.json") :]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert set(documented) - {"network"} == set(result)
    assert re.search(rf"`schema` \| integer \| {result['schema']} \|", section)
    assert set(re.findall(r"`(\w+)`", next(line for line in section.splitlines() if line.startswith("| `data`")))) == {
        "data",
        *result["data"],
    }
    listed = re.findall(r"^\| `([\w./]+)` \|", page[page.index("## The folder") : page.index("## result.json")], re.MULTILINE)
    assert {name.rstrip("/") for name in listed} == {path.name for path in Path("run").iterdir()}
    for figure, forms in fit.result["metrics"]["global"]["participating"].items():
        assert f"| `{figure}` |" in page
        assert all(f"| `{form}` |" in page for form in forms)


# The algorithm of the guide

GUIDE = "docs/add-an-algorithm.md"


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
    path = tmp_path_factory.mktemp("skeleton") / "fedlinear_of_the_guide.py"
    path.write_text(blocks(GUIDE, "python")[0])
    return load(path)


@pytest.fixture
def followed(tmp_path):
    """A copy of the repository to which the guide's file, line and row were added, and the environment that runs it."""
    root = tmp_path / "copy"
    for folder in ("src", "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "images")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file in ("README.md", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, root / file)
    (root / "src/fedbayes/algorithms/fedlinear.py").write_text(blocks(GUIDE, "python")[0])
    line, row = blocks(GUIDE, "py")
    add(root / "src/fedbayes/algorithms/__init__.py", "REGISTRY = {\n", line)
    add(root / "tests/table.py", "TABLE = {\n", row)
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    return root, {**os.environ, "PYTHONPATH": str(root / "src"), "JAX_COMPILATION_CACHE_DIR": cache}


def add(path, start, line):
    """Put a line at the end of a dict."""
    before, after = path.read_text().split(start)
    inside, rest = after.split("\n}\n", 1)
    path.write_text(f"{before}{start}{inside}\n{line}}}\n{rest}")


USE = """
import shlex, sys
import fedbayes as fb
from fedbayes.cli import main
for line in sys.stdin.read().splitlines():
    assert main(shlex.split(line)) == 0, line
sys.path.append("my-federation")
from federation.experiment import experiment
assert isinstance(experiment.algorithm, fb.FedLinear)
print(fb.FedLinear.__module__, len(experiment.fingerprint))
"""


def test_the_guide_does_what_it_says(followed):
    """The name, the listing, wire, run, compare and the project of a method that was just added."""
    root, environment = followed
    generator, lines = np.random.default_rng(0), ["site,a,b,y"]
    for site in ("north", "east", "south", "west"):
        lines += [f"{site},{a:.3f},{b:.3f},{a - 2 * b + 0.3 * e:.3f}" for a, b, e in generator.normal(size=(20, 3))]
    (root / "readings.csv").write_text("\n".join(lines))
    commands = re.findall(r"^\$ fedbayes (.*)$", text(GUIDE), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["list", "wire", "run", "compare", "deploy"]
    done = subprocess.run(
        [sys.executable, "-c", USE], input="\n".join(commands), capture_output=True, text=True, cwd=root, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "linear regression with exact posteriors" in done.stdout
    assert done.stdout.splitlines()[-1] == "fedbayes.algorithms.fedlinear 32"
    result = json.loads((root / "runs/linear/result.json").read_text())
    assert result["metrics"]["personal"]["participating"]["rmse"]["rows"] < 0.5  # the noise is 0.3


@pytest.mark.slow
def test_the_guides_command_runs_all_common_tests_and_writes_what_follows(followed):
    root, environment = followed
    (command,) = re.findall(r"^\$ (make .*)$", text(GUIDE), re.MULTILINE)
    (root / ".venv").mkdir()
    (root / ".venv/.test").touch()  # installed already
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [*shlex.split(command), f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 15
    assert "from fedbayes.algorithms.fedlinear import FedLinear" in (root / "src/fedbayes/__init__.pyi").read_text()
    assert "| `fedlinear` |" in (root / "README.md").read_text()
    assert "::: fedbayes.algorithms.fedlinear" in (root / "docs/reference/algorithms.md").read_text()
    assert "change/precision" in (root / "tests/golden/fedlinear.txt").read_text()
    assert "fedlinear" in json.loads((root / "tests/golden/numbers.json").read_text())


@pytest.fixture(scope="module")
def regression():
    return fb.data.synthetic(clients=7, rows=12, features=2, classes=None).hold_out(2)


NOISE, TAU, PRIOR = 0.5, 0.7, 3.0


@pytest.fixture(scope="module")
def trained(skeleton, regression):
    """Two rounds of four clients, after which the server has heard of all five that take part."""
    network = mlp(regression.shape, Normal(), hidden=())
    algorithm = skeleton.FedLinear(network, sigma=NOISE, tau=TAU, prior=PRIOR, draws=20_000)
    simulation = fb.Simulation(algorithm, regression, cohort=4, seed=3)
    for _ in range(2):
        simulation.step()
    np.testing.assert_array_equal(simulation.local.trained(), ~regression.unseen)
    return simulation


def features(x):
    """The head's parameters in the order of a dict's names: bias, kernel."""
    return np.concatenate([np.ones((len(x), 1)), x], axis=1).astype(np.float64)


def rows_of(clients, index):
    start = clients.offsets[index]
    stop = start + clients.train_counts[index]
    return features(clients.x[start:stop]), clients.y[start:stop].astype(np.float64)


def exact(clients, members):
    """Mean and covariance of (w, w_1, …) given the training rows of `members`, from the joint Gaussian as a whole."""
    d = clients.shape[0] + 1
    N = len(members)
    precision, linear = np.zeros((d * (N + 1), d * (N + 1))), np.zeros(d * (N + 1))
    eye, shared = np.eye(d), slice(0, d)
    precision[shared, shared] = eye / PRIOR**2 + N * eye / TAU**2
    for place, index in enumerate(members, start=1):
        own = slice(place * d, (place + 1) * d)
        phi, y = rows_of(clients, index)
        precision[own, own] = eye / TAU**2 + phi.T @ phi / NOISE**2
        precision[own, shared] = precision[shared, own] = -eye / TAU**2
        linear[own] = phi.T @ y / NOISE**2
    covariance = np.linalg.inv(precision)
    return covariance @ linear, covariance


def test_guide_runs(skeleton, capsys, monkeypatch):
    monkeypatch.setattr(fb, "FedLinear", skeleton.FedLinear, raising=False)
    exec(blocks(GUIDE, "python")[1], {})
    assert "change/precision\tfloat32[4, 4]\tsum\tdata/mask,data/x,local/sent" in capsys.readouterr().out


def test_guide_has_the_exact_shared_posterior(trained, regression):
    mean, covariance = exact(regression, regression.participants)
    posterior = trained.state.posterior
    d = len(posterior.linear)
    np.testing.assert_allclose(np.linalg.inv(posterior.precision), covariance[:d, :d], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.linalg.solve(posterior.precision, posterior.linear), mean[:d], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["global", "personal", "adapted"])
def test_guide_draws_from_the_exact_personal_posterior(trained, regression, mode):
    known, unseen = list(regression.participants), int(np.flatnonzero(regression.unseen)[0])
    client = known[2] if mode == "personal" else unseen
    # A client that adapts has the answer that it would have had among the others.
    known = [*known, unseen] if mode == "adapted" else known
    d = regression.shape[0] + 1
    place = {"global": 0, "personal": 3, "adapted": len(known)}[mode] * d
    mean, covariance = exact(regression, known)
    mean, covariance = mean[place : place + d], covariance[place : place + d, place : place + d]
    if mode == "global":
        covariance = covariance + TAU**2 * np.eye(d)

    algorithm, down = trained.algorithm, trained.down()
    local = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), trained.local.get(np.array([client])))
    if mode == "adapted":
        data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), regression.train([client], length=13))
        local = algorithm.adapt(jax.random.key(1), down, local, data)
    x = np.array([[0.0, 0.0], [1.0, -0.5], [-2.0, 1.0]], np.float32)
    draws = np.asarray(algorithm.predict(jax.random.key(2), down, local, jnp.asarray(x)))
    assert draws.shape == (algorithm.draws, 3, 1)
    phi = features(x)
    variance = phi @ covariance @ phi.T
    error = np.sqrt(np.diag(variance) / algorithm.draws)
    assert (np.abs(draws[..., 0].mean(axis=0) - phi @ mean) < 5 * error).all()
    np.testing.assert_allclose(np.cov(draws[..., 0].T), variance, atol=0.06 * variance.max())


def test_guide_passes_the_wire_and_the_evaluation(trained, regression):
    leaves = wire.manifest(trained.algorithm, jax.tree.map(lambda leaf: leaf[0], regression.train([0], length=10)))
    wire.check(leaves)
    assert {leaf.reduction for leaf in leaves if leaf.message == "up"} == {"sum"}
    simulation = fb.Simulation(dataclasses.replace(trained.algorithm, draws=100), regression)
    simulation.step()
    figures = assess(simulation).summary()
    assert figures["adapted"]["unseen"]["log_score"]["rows"] > figures["global"]["unseen"]["log_score"]["rows"]
    assert figures["adapted"]["unseen"]["epistemic_variance"]["rows"] > 0


# Examples and the site


def test_own_data_example():
    fit = load(ROOT / "examples" / "own_data.py").main(rounds=5)
    assert len(fit.simulation.data.participants) == 10


def test_own_model_example():
    accuracies = load(ROOT / "examples" / "own_model.py").main(rounds=3)
    assert min(accuracies.values()) > 0.3  # a tenth by chance


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:  # the site is whole without a network
        assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', page.read_text("utf-8")), page.name
