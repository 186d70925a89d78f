"""Personal models to take away: the same bits in another process, on another day; and a sentence for each bad file."""

import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
from conftest import ROOT, assert_same
from scipy import stats
from table import TABLE, methods

import fedbayes as fb
from fedbayes import cli, wire
from fedbayes.data.layout import Column, Layout
from fedbayes.data.stream import RowReader
from fedbayes.models import Categorical, Normal, Poisson, from_equinox, mlp
from fedbayes.models.predictive import quantile
from fedbayes.results import posterior
from fedbayes.results.posterior import Posterior

GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def command(capfd, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def fit_of(algorithm, data):
    """What is there before the first round: enough to adapt and to predict."""
    simulation = fb.Simulation(algorithm.planned(2, **data.facts), data)
    result = {"algorithm": type(algorithm).__name__, "data": {"name": data.name}, "model": None, "fedbayes": fb.__version__}
    return fb.Fit.of(simulation, None, result, [])


def table():
    """Patients with numbers, text, truth values and a gap-free target."""
    generator = np.random.default_rng(0)
    n = 120
    age, hospital = generator.uniform(20, 80, n), generator.integers(0, 4, n)
    frame = {
        "hospital": [f"h{i}" for i in hospital],
        "age": age,
        "sex": generator.choice(["f", "m"], n),
        "smoker": generator.random(n) < 0.3,
        "pressure": 90 + 0.5 * age + 3 * hospital + generator.normal(0, 4, n),
        "ill": np.where(age + generator.normal(0, 5, n) > 50, "yes", "no"),
    }
    return pd.DataFrame(frame)


def run(home, name, *options):
    given = ["--data", home / "patients.csv", "--client-column", "hospital", "--rounds", 1, "--model", "mlp:4", "--hold-out", 1]
    assert cli.main(list(map(str, ["run", name, *given, *options, "--out", home / name]))) == 0


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with patients.csv, the folder of a run over them, and one person's rows."""
    home = tmp_path_factory.mktemp("home")
    table().to_csv(home / "patients.csv", index=False)
    table()[:30].drop(columns="hospital").to_csv(home / "me.csv", index=False)
    run(home, "fedper", "--target", "ill", "--tune.lr", 0.1)
    options = ["--data", home / "me.csv", "--out", home / "me.safetensors"]
    assert cli.main(list(map(str, ["personalise", home / "fedper", *options]))) == 0
    return home


@pytest.fixture(scope="module")
def mine(home):
    return Posterior.load(home / "me.safetensors")


# A file says all that is needed


@functools.partial(jax.jit, static_argnums=0)
def adapted(algorithm, key, data):
    """As `Fit.adapt` before the first round, in one program, which is quick to compile."""
    down, local = algorithm.broadcast(key, algorithm.init_server(key)), algorithm.init_local(key, data)
    return down, algorithm.adapt(key, down, local, data)


# Their states and options are of all kinds; the others take longer to compile than is worth waiting for each time.
@methods("clients", often=("fedavg", "fedbe", "fedvi"))
def test_every_algorithm_comes_back_as_it_was(clients, model, name):
    comes_back(TABLE[name](model), clients, name)


def test_a_tempered_algorithm_comes_back_as_it_was(clients, model):
    comes_back(fb.Tempered(TABLE["fedper"](model)), clients, "tempered")


def comes_back(algorithm, clients, name):
    algorithm = algorithm.planned(2, **clients.facts)
    x, y = clients.rows(str(clients.names[0]))
    key, data = jax.random.key(0), fb.Data(x, y, np.ones(len(x), bool))
    person = Posterior(algorithm, *adapted(algorithm, key, data), key, posterior.RowSpec.of(clients), {"for": "me"})
    person.save("me.safetensors")
    again = Posterior.load("me.safetensors")
    assert repr(again) == repr(person)
    assert_same((again.down, again.local), (person.down, person.local))
    changed = {"unlabelled": None} if name == "fedbe" else {}
    inner = again.algorithm.algorithm if name == "tempered" else again.algorithm
    original = person.algorithm.algorithm if name == "tempered" else person.algorithm
    assert dataclasses.replace(inner, model=original.model) == dataclasses.replace(original, **changed)
    assert_same(again.draws(x[:3]), person.draws(x[:3]))
    if name == "knn-per":  # it remembers features of its rows, as the page says
        assert safetensors.numpy.load_file("me.safetensors")["local/datastore/features"].shape == (32, 8)
    if name == "fedbe":  # the server's rows stay with the server
        assert ROW not in Path("me.safetensors").read_bytes()


ROW = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)[0].tobytes()


def test_a_file_holds_the_broadcast_and_the_local_state_alone(clients, model):
    fit = fit_of(TABLE["fedper"](model), clients)
    fit.posterior_of("1").save("me.safetensors")
    arrays = safetensors.numpy.load_file("me.safetensors")
    assert {name.split("/")[0] for name in arrays} == {"down", "local", "check"}
    content = Path("me.safetensors").read_bytes()
    assert not any(row.tobytes() in content for row in clients.x)


@pytest.mark.parametrize("name", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "mobilenet"))])
def test_networks_are_made_again(name):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 255, (24, 8, 8)).astype(np.uint8)
    data = fb.Clients.build(x, np.arange(24) % 3, np.arange(24) // 8).standardised()
    options = {"mobilenet": {"width": 0.25, "blocks": ((8, 1), (8, 2))}, "cnn": {"channels": (2, 3), "hidden": (4,)}}.get(
        name, {}
    )
    shared = fit_of(fb.FedAvg(fb.network(name, data, **options)), data).posterior_of()
    shared.save("shared.safetensors")
    assert_same(Posterior.load("shared.safetensors").draws(x), shared.draws(x))


@pytest.mark.parametrize("likelihood", [None, *(pytest.param(one, marks=pytest.mark.slow) for one in (Normal(2.0), Poisson()))])
def test_numbers_keep_their_units(likelihood):
    data = fb.data.synthetic(clients=3, rows=8, features=2, classes=None)
    data = dataclasses.replace(data, y=np.round(np.abs(data.y) * 40 + 100)).standardised()
    shared = fit_of(fb.FedAvg(fb.network("mlp", data, likelihood, hidden=(3,), activation=jnp.tanh)), data).posterior_of()
    shared.save("shared.safetensors")
    again = Posterior.load("shared.safetensors")
    assert_same(again.predict(data.x), shared.predict(data.x))
    assert abs(float(again.predict(data.x)[:, 0].mean()) - data.y.mean()) < 60
    found = again.table(data.x)
    assert list(found) == again.columns
    assert (found["5%"] < found["mean"]).all()
    assert (found["mean"] < found["95%"]).all()
    np.testing.assert_allclose(
        found["aleatoric_variance"] + found["epistemic_variance"], found["standard_deviation"] ** 2, rtol=1e-4
    )


def test_quantiles_are_those_of_the_mixture():
    generator = np.random.default_rng(0)
    draws = generator.normal(size=(7, 5, 2)).astype(np.float32)
    draws[..., 0] *= 30
    for level in (0.05, 0.5, 0.95):
        at = np.asarray(quantile(Normal(None), jnp.asarray(draws), level))
        np.testing.assert_allclose(stats.norm.cdf(at, draws[..., 0], np.exp(draws[..., 1])).mean(0), level, atol=1e-4)
        rate = np.exp(draws[..., 1:] * 2)
        least = np.asarray(quantile(Poisson(), jnp.log(rate), level))
        assert (stats.poisson.cdf(least, rate[..., 0]).mean(0) >= level).all()
        assert (stats.poisson.cdf(least - 1, rate[..., 0]).mean(0) < level).all()


# Networks and algorithms of one's own


def own(activation):
    """A network that no file can describe."""
    return from_equinox(lambda key: equinox.nn.MLP(4, 2, 5, 1, activation, key=key), Categorical(2), shape=(4,))


def test_a_network_of_one_s_own_is_given_again(clients):
    person = fit_of(fb.FedPer(own(jax.nn.relu), personal=("layers/1",)), clients).posterior_of("1")
    person.save("me.safetensors")
    with pytest.raises(
        fb.UserError, match=r"me.safetensors: it needs the network 'equinox', .* Posterior.load\(path, model=…\)"
    ):
        Posterior.load("me.safetensors")
    assert_same(Posterior.load("me.safetensors", model=own(jax.nn.relu)).draws(clients.x), person.draws(clients.x))
    with pytest.raises(fb.UserError, match="the model that was given is not the one that it was made with"):
        Posterior.load("me.safetensors", model=own(jax.nn.tanh))
    with pytest.raises(fb.UserError, match="the model that was given is not the one that it was made with"):
        Posterior.load("me.safetensors", model=mlp((4,), Categorical(2)))


def test_an_activation_of_one_s_own_makes_the_network_one_s_own(clients, model):
    fit_of(fb.FedAvg(mlp((4,), Categorical(2), hidden=(3,), activation=lambda x: x**2)), clients).posterior_of().save(
        "me.safetensors"
    )
    with pytest.raises(fb.UserError, match="it needs the network 'mlp'"):
        Posterior.load("me.safetensors")
    fit_of(fb.FedAvg(model), clients).posterior_of().save("me.safetensors")
    with pytest.raises(fb.UserError, match="its network is in the file; leave model out"):
        Posterior.load("me.safetensors", model=model)


@dataclasses.dataclass(frozen=True)
class Mine(fb.FedAvg):
    """An algorithm that no registry knows."""


def test_an_algorithm_of_one_s_own_is_given_again(clients, model):
    person = fit_of(Mine(model), clients).posterior_of()
    person.save("me.safetensors")
    with pytest.raises(fb.UserError, match=r"its algorithm Mine is somebody's own code .* algorithm=…"):
        Posterior.load("me.safetensors")
    assert_same(Posterior.load("me.safetensors", algorithm=Mine(model)).draws(clients.x), person.draws(clients.x))


def test_a_network_whose_functions_were_replaced_is_not_saved_as_another(clients, model):
    changed = dataclasses.replace(model, apply=lambda params, x: 2 * model.apply(params, x))
    with pytest.raises(fb.UserError, match="predicts other numbers"):
        fit_of(fb.FedAvg(changed), clients).posterior_of().save("me.safetensors")
    assert not list(Path.cwd().iterdir())


# Files that are not what they should be


def test_whatever_byte_is_changed_the_file_is_refused(clients, model):
    fit_of(fb.FedPer(model), clients).posterior_of("1").save("me.safetensors")
    content = Path("me.safetensors").read_bytes()
    generator = np.random.default_rng(0)
    for place in [0, 3, 8, 9, len(content) - 1, *generator.integers(0, len(content), 150)]:
        Path("bad.safetensors").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(fb.UserError, match=r"bad\.safetensors"):
            Posterior.load("bad.safetensors")
    for length in (0, 1, 7, 8, 100, len(content) - 1):
        Path("bad.safetensors").write_bytes(content[:length])
        with pytest.raises(fb.UserError, match=r"bad.safetensors is no safetensors file, or it is cut off or damaged"):
            Posterior.load("bad.safetensors")
    Path("bad.safetensors").write_bytes(content + b"0")
    with pytest.raises(fb.UserError, match="damaged"):
        Posterior.load("bad.safetensors")


def rewritten(path, change):
    """A file whose JSON was changed by somebody who knows how its checksum is made."""
    from fedbayes.files import digest

    content = Path(path).read_bytes()
    arrays, about = safetensors.numpy.load(content), wire.metadata(content)
    del about["sha256"]
    change(about)
    Path("bad.safetensors").write_bytes(wire.pack(arrays, {**about, "sha256": digest(about, arrays)}))


OTHER = "this version predicts other numbers than fedbayes"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: a.update(schema=2), r"schema 2 \(of fedbayes \S+\), but this version reads schema 1; update fedbayes"),
        (lambda a: a.update(schema=0), r"schema 0 .*; make it again with fedbayes personalise"),
        (lambda a: a.update(kind="another"), "is not a personal model"),
        (lambda a: a.pop("rows"), r"lacks a part or holds a wrong one \(KeyError\('rows'\)\)"),
        (lambda a: a["algorithm"]["fields"]["model"]["arguments"].pop("scale"), "does not say how features are scaled"),
        (lambda a: a["algorithm"].update({"class": "fedsomething"}), "there is no algorithm 'fedsomething'"),
        (lambda a: a["algorithm"]["fields"].update(colour=1), "fedper has no option colour in this version"),
        (lambda a: a["algorithm"]["fields"]["model"].update(network="rnn"), "there is no network 'rnn' in this version"),
        (lambda a: a["down"].update(named=["os", "system"]), "there is no os.system in this version"),
        (lambda a: a["down"].update(named=["fedbayes.cli", "main"]), "there is no fedbayes.cli.main in this version"),
        (lambda a: a["algorithm"]["fields"]["model"]["arguments"].update(init="lecun", activation={"function": "tanh"}), OTHER),
    ],
)
def test_each_wrong_part_has_its_sentence(home, change, sentence):
    rewritten(home / "me.safetensors", change)
    with pytest.raises(fb.UserError, match=rf"^bad.safetensors.*{sentence}"):
        Posterior.load("bad.safetensors")


def test_other_files_are_refused(capfd, home):
    safetensors.numpy.save_file({"x": np.ones(2)}, "other.safetensors")
    others = ["other.safetensors", home / "fedper" / "checkpoint.safetensors", home / "patients.csv", "nothing.safetensors"]
    sentences = ["is not a personal model", "is not a personal model", "is no safetensors file", "cannot be read (No such file"]
    for path, sentence in zip(others, sentences, strict=True):
        code, out, err = command(capfd, "predict", path, "--data", home / "me.csv")
        assert (code, out) == (2, "")
        assert sentence in err
        assert len(err.splitlines()) == 1


# Python


def test_a_table_has_names(mine):
    frame = table()[30:35]
    found = mine.table(frame)
    assert list(found.columns) == ["no", "yes", "entropy", "mutual_information"]
    assert list(found.index) == list(frame.index)
    np.testing.assert_allclose(found[["no", "yes"]], mine.predict(frame), atol=2e-6)


def test_adapt_takes_names_of_classes_and_says_what_is_wrong():
    data = fb.data.synthetic(clients=3, rows=8, features=2, classes=3)
    data = dataclasses.replace(data, classes=("well", "ill", "gone"))
    fit = fit_of(fb.FedPer(fb.network("mlp", data, hidden=(3,))), data)
    x, y = data.rows("0")
    named = fit.adapt(x, [data.classes[label] for label in y])
    assert_same(named.predict(x), fit.adapt(x, y).predict(x))
    gap = x.copy()
    gap[1, 0] = np.nan
    for bad, labels, sentence in [
        (gap, y, r"x: feature 0 has no value in row 1 \(from 0\)"),
        (x[:0], y[:0], r"x has no rows; expected at least one of shape \(2,\)"),
        (x[0], y[:1], r"x is one row of shape \(2,\); expected several, so give x\[None\]"),
        (x, np.where(np.arange(len(y)) == 2, 3, y), "y has 3 in row 2; expected a label from 0 to 2, or the name of a class"),
        (x, np.where(np.arange(len(y)) == 2, np.nan, y), "y has nan in row 2; expected a label from 0 to 2"),
        (x, ["il"] * len(x), "y has 'il' in row 0, which is none of the classes; did you mean ill"),
        (x, y[:-1], r"y has shape \(5,\); expected a label for each of the 6 rows of x"),
    ]:
        with pytest.raises(fb.UserError, match=f"^{sentence}"):
            fit.adapt(bad, labels)
    with pytest.raises(fb.UserError, match=r"x is one row of shape \(2,\)"):
        named.predict(x[0])


# Another process, another day


def test_a_new_process_gives_the_same_bits(home, mine):
    """Four commands of a user: the run and the personal model are the fixture's, the prediction is in a process of its own."""
    frame = table()[30:50]
    frame[["ill", "pressure", "sex", "age", "smoker"]].assign(town="Ulm").to_csv("new.csv", index=False)
    done = subprocess.run(
        [sys.executable, "-m", "fedbayes.cli", "predict", home / "me.safetensors", "--data", "new.csv"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    accuracy = (np.asarray(mine.predict(frame)).argmax(1) == (frame["ill"] == "yes").to_numpy()).mean()
    said = f"ignored: town\n20 rows predicted\nthe file's 20 labels were not used; accuracy {100 * accuracy:.1f} %\n"
    assert done.stderr == said
    Path("out.csv").write_text(done.stdout)
    found = pd.read_csv("out.csv", dtype=np.float32)
    assert list(found) == ["no", "yes", "entropy", "mutual_information"]
    rows = RowReader(Path("new.csv"), mine.rows.layout, mine.rows.shape, mine.rows.classes)
    (block,) = rows
    np.testing.assert_array_equal(found.to_numpy(), mine.table(block.x))
    sure = mine.uncertainty(frame)
    expected = np.column_stack([mine.predict(frame), sure.total, sure.epistemic])
    np.testing.assert_allclose(found.to_numpy(), expected, atol=2e-6)


def machine():
    """What decides the last bits: the processor's abilities, the compiler and its options."""
    info = Path("/proc/cpuinfo")
    flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "") if info.exists() else ""
    words = (platform.machine(), flags, jax.lib.__version__, os.environ["XLA_FLAGS"])
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def golden_rows():
    return table()[["age", "sex", "smoker", "pressure"]][50:60]


def test_a_file_of_another_day_gives_what_it_gave_then():
    """Made by `write_golden` with schema 1. To the bit on a machine of the same kind; else to 1e-6, as processors round."""
    then = json.loads((GOLDEN / "posterior.json").read_text())
    person = Posterior.load(GOLDEN / "posterior.safetensors")
    assert (GOLDEN / "posterior.safetensors").stat().st_size < 50_000
    assert repr(person) == then["repr"]
    assert (person.uncertainty(golden_rows()).epistemic > 0).all()
    now = np.asarray(person.predict(golden_rows()))
    kept = np.array(then["probabilities"], np.float32)
    if then["machine"] == machine():
        np.testing.assert_array_equal(now, kept)
    np.testing.assert_allclose(now, kept, atol=1e-6)


def write_golden(run, rows):
    """How the golden file was made; a new schema gets a new one beside it."""
    from fedbayes.cli.personalise import of_rows
    from fedbayes.cli.run import reloaded

    person = of_rows(reloaded(run), rows)
    person.save(GOLDEN / "posterior.safetensors")
    found = {"machine": machine(), "repr": repr(person), "probabilities": np.asarray(person.predict(golden_rows())).tolist()}
    (GOLDEN / "posterior.json").write_text(json.dumps(found, indent=1) + "\n")


# The commands


@pytest.mark.slow
def test_personalise_for_a_client_and_for_everybody(capfd, home):
    folder = home / "fedper"
    code, out, _ = command(capfd, "personalise", folder, "--out", "all.safetensors")
    assert code == 0
    assert "for everybody; age, sex, smoker, pressure to ill: no, yes; 1 rounds on patients" in re.sub(r"\s+", " ", out)
    from fedbayes.cli.run import reloaded

    fit, frame = reloaded(folder), table()[:5]
    data = fit.simulation.data
    held, trained = str(data.names[data.unseen][0]), str(data.names[~data.unseen][0])
    code, _, err = command(capfd, "personalise", folder, "--client", held, "--out", "x")
    assert f"client {held!r} was held out and never trained, so it has kept nothing; use --adapted" in err
    assert command(capfd, "personalise", folder, "--client", held, "--adapted", "--out", held)[0] == 0
    assert command(capfd, "personalise", folder, "--client", trained, "--out", trained)[0] == 0
    for path, options in (("all.safetensors", {}), (held, {"client": held, "adapted": True}), (trained, {"client": trained})):
        x = fit.simulation.data.layout.encode(frame, "x")
        assert_same(Posterior.load(path).predict(frame), fit.predict(x, **options))


@pytest.mark.slow
def test_rows_without_labels_and_a_numeric_target(capfd, home):
    run(home, "fedvi", "--target", "pressure", "--ignore", "ill", "--constructor", 8)
    capfd.readouterr()
    table()[:20][["sex", "age", "smoker"]].to_csv("bare.csv", index=False)
    table()[20:40].to_parquet("new.parquet")
    code, out, _ = command(capfd, "personalise", home / "fedvi", "--data", "bare.csv", "--out", "me.safetensors")
    assert code == 0
    assert "FedVI with mlp, for 20 rows; age, sex, smoker to pressure: a number" in re.sub(r"\s+", " ", out)
    code, out, err = command(capfd, "predict", "me.safetensors", "--data", "new.parquet", "--out", "out.csv")
    assert (code, out) == (0, "")
    person, found = Posterior.load("me.safetensors"), pd.read_csv("out.csv")
    rmse = np.sqrt(((found["mean"] - table()["pressure"][20:40].to_numpy()) ** 2).mean())
    assert err == f"20 rows predicted: out.csv\nthe file's 20 values were not used; RMSE {rmse:.4g}\n"
    np.testing.assert_allclose(found[["mean", "standard_deviation"]], person.predict(table()[20:40]), rtol=1e-5)
    # A method that looks at labels is not content.
    code, _, err = command(capfd, "personalise", home / "fedper", "--data", "new.parquet", "--out", "x.safetensors")
    assert code == 0
    table()[:20].drop(columns="ill").to_csv("bare.csv", index=False)
    code, _, err = command(capfd, "personalise", home / "fedper", "--data", "bare.csv", "--out", "y.safetensors")
    assert "FedPer adapts to rows with labels, but bare.csv has no column 'ill'; add it, or train a method" in err
    assert not Path("y.safetensors").exists()


def spoilt(**columns):
    frame = table()[:6].drop(columns="hospital").astype(object)
    for name, value in columns.items():
        frame.loc[4, name] = value
    return frame


BAD = {
    "missing column": (
        spoilt().drop(columns="age"),
        "bad.csv has no column 'age', which the model needs: there is sex, smoker",
    ),
    "misspelt column": (
        spoilt().rename(columns={"age": "Age"}),
        "bad.csv has no column 'age', which the model needs: did you mean Age?",
    ),
    "unknown category": (
        spoilt(sex="x"),
        "column 'sex' has 'x' in row 4 (from 0), which the training data did not have: there is f, m",
    ),
    "text among numbers": (spoilt(age="old"), "column 'age' has 'old' in row 4 (from 0); expected a number"),
    "text among truths": (spoilt(smoker="often"), "column 'smoker' has 'often' in row 4 (from 0); expected true or false"),
    "a gap": (spoilt(pressure=None), "column 'pressure' has no value in row 4 (from 0); complete it or leave the row out"),
    "a missing category": (spoilt(sex=None), "column 'sex' has no value in row 4 (from 0)"),
    "infinity": (spoilt(age="inf"), "column 'age' has an infinite value in row 4 (from 0)"),
    "header only": (spoilt()[:0], "bad.csv has no rows"),
    "empty": ("", "bad.csv is empty"),
    "blank": ("\n\n", "bad.csv is empty; expected the names of the columns and rows"),
    "ragged": ("sex,age,smoker,pressure\nf,1,True,2\nf,1,True,2,3,4\n", "bad.csv cannot be read (Error tokenizing data"),
}


@pytest.mark.parametrize(("what", "case"), [*(("predict", case) for case in BAD), ("personalise", "unknown category")])
def test_bad_rows_have_a_sentence_and_leave_nothing(capfd, home, case, what):
    content, sentence = BAD[case]
    Path("bad.csv").write_text(content if isinstance(content, str) else content.to_csv(index=False))
    if what == "predict":
        code, _, err = command(capfd, "predict", home / "me.safetensors", "--data", "bad.csv", "--out", "out")
    else:
        code, _, err = command(capfd, "personalise", home / "fedper", "--data", "bad.csv", "--out", "out")
    assert code == 2
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in Path.cwd().iterdir()] == ["bad.csv"]


def test_other_classes(capfd, home):
    spoilt(ill="maybe").to_csv("bad.csv", index=False)
    code, _, err = command(capfd, "personalise", home / "fedper", "--data", "bad.csv", "--out", "out")
    assert code == 2
    assert "column 'ill' has 'maybe' in row 4 (from 0), which is none of the classes; the classes are no, yes" in err
    code, _, err = command(capfd, "predict", home / "me.safetensors", "--data", "bad.csv", "--out", "out")
    assert code == 0
    assert "1 of the labels are none of the model's classes and count as wrong; column 'ill' has 'maybe' in row 4" in err
    spoilt(ill=None).to_csv("bad.csv", index=False)
    code, _, err = command(capfd, "personalise", home / "fedper", "--data", "bad.csv", "--out", "out")
    assert "column 'ill' has no label in row 4 (from 0)" in err
    code, _, err = command(capfd, "predict", home / "me.safetensors", "--data", "bad.csv", "--out", "out")
    assert "the file's 5 labels were not used" in err


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": np.ones((3, 4))}, "x is float64 in rows of shape (4,); expected numbers in rows of shape (5,)"),
        ({"x": np.array([["a"] * 5])}, "x is <U1 in rows of shape (5,); expected numbers"),
        ({"z": np.ones((3, 5))}, "has no array 'x'"),
        ({"x": np.ones((0, 5))}, "has no rows"),
        ({"x": np.array([[1, 2, 3, np.nan, 5.0]])}, "column 'smoker' has no value in row 0 (from 0)"),
        ({"x": np.ones((3, 5)), "ill": np.ones(2)}, "ill does not have one value for each row of x"),
        ({"x": np.asfortranarray(np.ones((3, 5)))}, "x does not lie row after row"),
        ({"x": np.array([None, 1])}, "holds Python objects, which are not read"),
    ],
)
def test_bad_arrays_have_a_sentence(capfd, home, arrays, sentence):
    np.savez("bad.npz", **arrays)
    for out in ([], ["--out", "out.csv"]):
        code, _, err = command(capfd, "predict", home / "me.safetensors", "--data", "bad.npz", *out)
        assert code == 2
        assert sentence in err
        assert len(err.splitlines()) == 1
    assert not Path("out.csv").exists()


def test_a_cut_off_npz_and_unknown_kinds(capfd, home):
    np.savez("bad.npz", x=np.ones((300, 5)))
    Path("bad.npz").write_bytes(Path("bad.npz").read_bytes()[:4000])
    Path("rows.xlsx").write_text("rows")
    Path("bad.parquet").write_text("rows")
    for path, sentence in (
        ("bad.npz", "bad.npz cannot be read"),
        ("bad.parquet", "bad.parquet cannot be read"),
        ("rows.xlsx", "unknown kind; expected a .csv, .tsv, .parquet or .npz file"),
        ("none.csv", "there is no file none.csv"),
    ):
        code, _, err = command(capfd, "predict", home / "me.safetensors", "--data", path)
        assert code == 2
        assert sentence in err


def test_options_that_do_not_fit(capfd, home):
    me = home / "me.csv"
    for options, sentence in (
        (["--data", me, "--client", "h0", "--out", "x"], "data and client were both given"),
        (["--adapted", "--out", "x"], "adapted is for a client of the run"),
        (["--client", "h9", "--out", "x"], "patients has no client 'h9'"),
        (["--out", "no/x"], "there is no folder no to write x to"),
        (["--data", me, "--out", me], "which is the data; choose another file"),
    ):
        code, _, err = command(capfd, "personalise", home / "fedper", *options)
        assert code == 2
        assert sentence in err
    code, _, err = command(capfd, "predict", home / "me.safetensors", "--data", me, "--out", me)
    assert "which is read here; choose another file" in err
    code, _, err = command(capfd, "personalise", home, "--out", "x")
    assert "holds no finished run" in err


def test_arrays_without_names_need_arrays(capfd, clients, model):
    fit_of(fb.FedAvg(model), clients).posterior_of().save("me.safetensors")
    table().to_csv("rows.csv", index=False)
    code, _, err = command(capfd, "predict", "me.safetensors", "--data", "rows.csv")
    assert "the model's rows are arrays of shape (4,) without column names; give them as x in an .npz file" in err
    np.savez_compressed("rows.npz", x=clients.x)
    code, out, _ = command(capfd, "predict", "me.safetensors", "--data", "rows.npz")
    assert code == 0
    assert len(out.splitlines()) == 1 + len(clients.x)


# Reading


def test_all_formats_give_the_same_rows():
    frame = table()
    clients_file = Path("patients.csv")
    frame.to_csv(clients_file, index=False)
    data = fb.data.load("patients.csv", client_column="hospital", target="ill", test=0.0)
    frame.to_parquet("rows.parquet")
    frame.to_csv("rows.tsv", sep="\t", index=False)
    frame.to_csv("rows.csv.gz", index=False)
    whole = data.layout.encode(frame, "x")
    np.savez("rows.npz", x=whole, ill=frame["ill"].to_numpy(dtype=str))
    for name in ("patients.csv", "rows.parquet", "rows.tsv", "rows.csv.gz", "rows.npz"):
        rows = RowReader(Path(name), data.layout, data.shape, data.classes, block=7)
        assert (rows.ignored, rows.labelled) == ([], True)
        assert rows.about() == (None if name.endswith(".gz") else pytest.approx(120, abs=1))
        blocks = list(rows)
        assert max(len(block.x) for block in blocks) == 7
        assert [block.start for block in blocks] == list(range(0, 120, 7))
        np.testing.assert_array_equal(np.concatenate([block.x for block in blocks]), whole)
        np.testing.assert_array_equal(rows.labels(), (frame["ill"] == "yes").to_numpy())
    order = np.argsort(frame["hospital"], kind="stable")  # which the clients' rows have
    np.testing.assert_array_equal(data.x, whole[order])


def test_what_takes_the_place_of_a_gap_travels():
    frame = table()
    frame.loc[3, "age"] = None
    frame.loc[5, "sex"] = None
    frame.to_csv("patients.csv", index=False)
    data = fb.data.load("patients.csv", client_column="hospital", target="ill", missing="mean", test=0.0)
    fit_of(fb.FedAvg(fb.network("linear", data)), data).posterior_of().save("all.safetensors")
    layout = Posterior.load("all.safetensors").rows.layout
    found = layout.encode(frame[3:6], "x")
    assert found[0, 0] == pytest.approx(frame["age"].mean(), rel=1e-5)
    assert found[2, 1:3].sum() == pytest.approx(1)
    data.save("prepared")
    assert fb.Clients.load("prepared").layout == data.layout == layout


@pytest.mark.parametrize("values", [["1", "2"], ["01", "1a"], [True, False], [3, 5], ["no", "yes"], [1.0, 2.0]])
def test_labels_are_read_as_they_were_when_the_model_was_trained(values):
    """Also where a block of a text file holds only what looks like numbers."""
    y = np.array(values * 8)
    pd.DataFrame({"a": np.arange(16.0), "c": np.arange(16) % 2, "y": y}).to_csv("rows.csv", index=False)
    data = fb.data.load("rows.csv", client_column="c", target="y", task="classification", test=0.0)
    rows = RowReader(Path("rows.csv"), data.layout, data.shape, data.classes, block=1)
    np.testing.assert_array_equal(rows.labels(), np.searchsorted(np.unique(y), y))


def test_labels_of_arrays_are_places_or_names():
    np.savez("rows.npz", x=np.ones((3, 2), np.uint8), y=np.array([1, 0, 1]))
    assert RowReader(Path("rows.npz"), Layout(), (2,), ("bag", "coat")).labels().tolist() == [1, 0, 1]
    assert RowReader(Path("rows.npz"), Layout(), (2,), ("0", "1")).labels().tolist() == [1, 0, 1]
    np.savez("rows.npz", x=np.ones((2, 2)), y=np.array(["coat", "bag"]))
    assert RowReader(Path("rows.npz"), Layout(), (2,), ("bag", "coat")).labels().tolist() == [1, 0]
    np.savez("rows.npz", x=np.ones((2, 2)), y=np.array([0, 2]))
    with pytest.raises(fb.UserError, match=r"column 'y' has '2' in row 1 \(from 0\), which is none of the classes"):
        RowReader(Path("rows.npz"), Layout(), (2,), ("bag", "coat")).labels()


def test_numbers_as_categories():
    layout = Layout((Column("cp", "category", (1, 2, 4)),))
    pd.DataFrame({"cp": [4, 1]}).to_csv("rows.csv", index=False)
    (block,) = RowReader(Path("rows.csv"), layout, (3,), None)
    assert block.x.tolist() == [[0, 0, 1], [1, 0, 0]]
    with pytest.raises(fb.UserError, match="'cp' has '3' in row 1"):
        layout.encode(pd.DataFrame({"cp": [1, 3]}), "x")


def test_blocks_do_not_change_what_is_predicted(home, mine, monkeypatch):
    frame = pd.concat([table()] * 20)
    whole = mine.table(frame)
    monkeypatch.setattr("fedbayes.results.posterior.BLOCK", 64)
    np.testing.assert_allclose(mine.table(frame), whole, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process its peak")
def test_memory_does_not_grow_with_the_file(home):
    """About 250 MB of rows against 1 MB."""
    lines = table()[["age", "sex", "smoker", "pressure"]].to_csv(index=False, header=False)
    # Not getrusage, which on Linux also knows the peak of the process that started this one.
    code = (
        "import re, sys; from fedbayes import cli; assert cli.main(sys.argv[1:]) == 0; "
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    peaks = {}
    for size in (1, 250):
        with open("rows.csv", "w") as file:
            file.write("age,sex,smoker,pressure\n")
            for _ in range(size * 2**20 // len(lines)):
                file.write(lines)
        done = subprocess.run(
            [sys.executable, "-c", code, "predict", home / "me.safetensors", "--data", "rows.csv", "--out", "out.csv"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        peaks[size] = int(done.stdout) / 1024
    assert peaks[250] < peaks[1] + 60, peaks
