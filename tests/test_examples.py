"""Every model file of examples/ runs from the command line, and what is wrong with a file is said in a sentence."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import fedbayes
from fedbayes import cli
from fedbayes.cli.fit import load

EXAMPLES = ROOT / "examples"
FILES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def population" in path.read_text())
FEW = {
    "six_cities": ["--rounds", "2", "--draws", "20", "--most", "20"],
    "prodlda": ["--rounds", "2"],
}


def fit(*arguments):
    return cli.main(["fit", *map(str, arguments)])


def test_all_model_files_are_here():
    needed = {"six_cities", "eight_schools", "hospitals", "heart_disease", "digits"}
    assert needed | {"multinomial", "hierarchical_bnn", "fedpop"} <= set(FILES)


def needs_data(name):
    if name == "heart_disease" and not (Path(os.environ.get("FEDBAYES_DATA", "")) / "heart_disease_uci").is_dir():
        pytest.skip("the folder of FEDBAYES_DATA has no heart_disease_uci")


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_model_file_runs(name, tmp_path, capsys):
    assert fit(EXAMPLES / f"{name}.py", *FEW[name], "--out", tmp_path / "run") == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["bound"] is None or np.isfinite(result["bound"])
    assert result["verdict"]["verdict"]
    assert name in capsys.readouterr().out


LONG = ("hospitals", "six_cities", "heart_disease")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in FILES])
def test_a_model_file_s_round_is_traced(name, capsys):
    """The model over its silos and a round of its algorithm, without compiling it."""
    needs_data(name)
    assert cli.main(["wire", str(EXAMPLES / f"{name}.py"), "--plain"]) == 0
    assert "\nup\t" in capsys.readouterr().out


@pytest.mark.slow
def test_digits_are_told_apart_by_silos_and_newcomers():
    model = load(EXAMPLES / "digits.py")
    found = model.scores(fedbayes.simulate(model.algorithm, model.silos(), 300))
    assert found["personal"]["participating"]["accuracy"]["rows"] > 0.95
    assert found["adapted"]["unseen"]["accuracy"]["rows"] > 0.95
    assert found["global"]["unseen"]["accuracy"]["rows"] > 0.8


def test_six_cities_is_the_published_table():
    """537 children, of whom 187 have a mother who smokes; 355 never wheezed, 18 always did."""
    silos = load(EXAMPLES / "six_cities.py").silos()
    assert [len(part["smoke"]) for part in silos.values()] == [300, 237]
    wheeze = np.concatenate([part["wheeze"] for part in silos.values()])
    smoke = np.concatenate([part["smoke"] for part in silos.values()])
    assert int(smoke.sum()) == 187
    assert [int((wheeze.sum(axis=1) == count).sum()) for count in (0, 4)] == [355, 18]


MODEL = """
import numpy as np, numpyro, numpyro.distributions as dist
def population():
    return numpyro.sample("mean", dist.Normal(0.0, 10.0))
def silo(mean, data):
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])
silos = {"a": {"y": np.ones(4)}, "b": {"y": np.zeros(4)}}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_wire_of_a_model_file(file, capsys):
    assert cli.main(["wire", str(file), "--algorithm", "pvi", "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[1] for line in lines if line.startswith("up")] == [
        "change/shift",
        "change/precision",
        "bound",
        "silos",
        *("evidence", "difference", "latents", "moved", "scaled", "silos"),  # the evidence round
    ]
    assert cli.main(["wire", str(file)]) == 0
    assert "Nothing of a silo's local state or rows is sent as it is." in capsys.readouterr().out


def test_resume_and_the_folder(file, tmp_path, capsys):
    assert fit(file, "--algorithm", "sfvi", "--rounds", "5", "--out", tmp_path / "run") == 0
    assert fit(file, "--algorithm", "sfvi", "--rounds", "5", "--out", tmp_path / "run") == 2
    assert "holds a finished run" in capsys.readouterr().err
    assert fit(file, "--algorithm", "sfvi", "--rounds", "5", "--out", tmp_path / "run", "--resume") == 0


BAD = {
    "there is no file nowhere.py": ["nowhere.py"],
    "has no population, silo, silos": [EXAMPLES / "own_data.py"],
    "is not a Python file; a model file ends in .py": [ROOT / "README.md"],
    "fit needs a model file before the options": ["--rounds", "3"],
    "there is no algorithm 'sfvj'; did you mean sfvi": ["FILE", "--algorithm", "sfvj"],
    "fedavg trains a network over clients": ["FILE", "--algorithm", "fedavg"],
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_files_get_one_sentence(sentence, file, capsys):
    assert fit(*(file if word == "FILE" else word for word in BAD[sentence])) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("raise RuntimeError('no')", "cannot be loaded: RuntimeError: no"),
        ("silos = [1, 2]", "gives list, but it must give a dict of names and their data"),
        ("algorithm = 'pvi'", "is 'pvi', but it must be one with its model, such as fedbayes.PVI(population, silo)"),
        ("def silos(): return 1 / 0", "fails: ZeroDivisionError: division by zero"),
        ("def population(data): pass", "population takes data, but it must not read data"),
        ("silos = {'a': {'x': np.ones(3)}}", "silo 'a': silo reads 'y', which its data and what population"),
    ],
)
def test_files_that_are_wrong_inside(change, sentence, file, capsys):
    file.write_text(MODEL + change + "\n")
    assert fit(file, "--rounds", "3") == 2
    assert sentence in capsys.readouterr().err


def test_a_network_s_command_sends_a_structured_method_where_it_belongs(capsys):
    assert cli.main(["run", "sfvi"]) == 2
    assert "sfvi fits a NumPyro model over silos, not a network; use fedbayes fit FILE" in capsys.readouterr().err
