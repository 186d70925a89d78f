"""What Python shows of objects, in words and in a notebook; what `fb.` lists; wrong calls that are told in a sentence."""

import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import fedbayes as fb
from fedbayes.models import Normal, mlp

NASTY = "<script>alert('a & b')</script>"


class Table(HTMLParser):
    """The cells of a table by row, and all other text; tags that are left open or closed twice fail."""

    def __init__(self, source):
        super().__init__()
        self.open, self.rows, self.words = [], [], ""
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open:
            self.rows[-1][-1] += data
        else:
            self.words += data


def shown(thing):
    return Table(thing._repr_html_())


@pytest.fixture(scope="module")
def fit(clients, model):
    return fb.simulate(fb.FedAvg(model), clients, rounds=1, modes=("global", "adapted"))


def test_fit_and_evaluation(fit):
    for thing, words in ((fit, "Fit(FedAvg, 1 rounds on six)"), (fit.evaluation, repr(fit.evaluation))):
        table = shown(thing)
        assert words in table.words
        assert table.rows[0] == ["mode", "clients", "accuracy %", "log score", "ECE %", "worst tenth"]
        assert [row[:2] for row in table.rows[1:]] == [
            [mode, group] for mode in ("global", "adapted") for group in ("participating", "unseen")
        ]
        accuracy = fit.result["metrics"]["adapted"]["unseen"]["accuracy"]["rows"]
        assert table.rows[-1][2] == f"{100 * accuracy:.1f}"
    assert repr(fit.evaluation) == "Evaluation(global, adapted of 6 clients, 2 of them unseen, after round 1)"
    assert str(fit.evaluation).count("\n") == 5
    assert str(fit).splitlines()[1:] == str(fit.evaluation).splitlines()[1:]


def test_a_numeric_target_has_its_own_figures():
    data = fb.data.synthetic(clients=3, rows=8, features=2, classes=None)
    simulation = fb.Simulation(fb.FedAvg(mlp(data.shape, Normal(1.0), hidden=())), data)
    evaluation = fb.assess(simulation, ("global",))
    table = shown(evaluation)
    assert table.rows[0][2:] == ["RMSE", "log score", "calibration error", "worst tenth"]
    assert float(table.rows[1][2]) == pytest.approx(evaluation.summary()["global"]["participating"]["rmse"]["rows"], abs=1e-3)
    assert shown(data).rows[0][3:] == ["mean", "deviation", "least", "most"]


def test_no_test_rows_are_said(clients, fit):
    scores = {"global": type(fit.evaluation.scores["global"])(*(0 * value for value in fit.evaluation.scores["global"]))}
    assert shown(fit.evaluation._replace(scores=scores)).rows[1:] == [["no test rows"]]


def test_clients_and_their_labels():
    y = np.array([0, 1, 1, 0, 1, 0])
    data = fb.Clients.build(np.ones((6, 3)), y, np.array([NASTY] * 4 + ["b"] * 2), classes=["<b>no", "yes"], name=NASTY)
    data = data.hold_out(1)
    table = shown(data)
    assert "script" not in data._repr_html_().replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")
    assert repr(data) in table.words
    assert "* unseen: never trains" in table.words
    assert table.rows[0] == ["client", "train", "test", "<b>no", "yes"]
    assert [row[1:] for row in table.rows[1:]] == [["3", "1", "2", "2"], ["1", "1", "1", "1"], ["4", "2", "3", "3"]]
    many = fb.Clients.build(np.ones((50, 1)), np.arange(50) % 2, np.arange(50) // 2)
    assert [row[0] for row in shown(many).rows[-3:]] == ["17", "… 7 more", "all"]


def test_silos():
    result = {
        "algorithm": "PVI",
        "rounds": 3,
        "posterior": {"<mean>": {"mean": 0.5, "sd": 0.25, "5%": 0.1, "95%": 0.9}},
        "theta": {"width": 2.0},
        "bound": -4.0,
        "khat": 0.2,
        "ess": 0.9,
    }
    one = fb.SiloFit(None, None, ("a", "b"), result, [])
    table = shown(one)
    assert "SiloFit(PVI, 3 rounds over 2 silos)" in table.words
    assert "effective share 90 %" in table.words
    assert table.rows == [
        ["", "mean", "sd", "5 %", "95 %"],
        ["<mean>", "0.500", "0.250", "0.100", "0.900"],
        ["width", "2.000", "—", "—", "—"],
    ]
    one.result = {**result, "posterior": {}, "theta": {}}
    assert shown(one).rows[1:] == [["too many numbers to list"]]


def test_names_are_listed_before_they_are_loaded():
    """In a fresh process: what Tab shows, and that listing it loads nothing."""
    code = "import sys, fedbayes as fb; print(*dir(fb)); assert 'jax' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(listed) == {*fb.__all__, "__version__"}
    assert {"data", "network", "FedPer", "Training", "simulate", "Clients", "Fit", "UserError"} <= set(listed)
    assert all(getattr(fb, name) is not None for name in listed)


def test_a_posterior_says_for_whom_it_is(fit, clients):
    table = shown(fit.posterior_of("3"))
    assert repr(fit.posterior_of("3")) in table.words
    facts = dict(table.rows)
    assert facts["for"] == "client 3"
    assert facts["training rows"] == str(clients.train_counts[3])
    assert facts["predicts"] == "0, 1"
    assert facts["data"] == "six"


WRONG = {
    "rounds is 0, but a run has at least one": lambda fit, a, c: fb.simulate(a, c, rounds=0),
    "rounds is 2.5, but it is a whole number": lambda fit, a, c: fb.simulate(a, c, rounds=2.5),
    "rounds is '5', but it is a whole number": lambda fit, a, c: fb.simulate(a, c, rounds="5"),
    "the cohort is 7 clients a round, but only 4 take part": lambda fit, a, c: fb.simulate(a, c, 1, cohort=7),
    "the cohort is 'all', but it is a whole number": lambda fit, a, c: fb.simulate(a, c, 1, cohort="all"),
    "seed is 'a', but a seed is a whole number": lambda fit, a, c: fb.simulate(a, c, 1, seed="a"),
    "clients is 'lop', but it is how they run": lambda fit, a, c: fb.simulate(a, c, 1, clients="lop"),
    "there is no mode 'globl'": lambda fit, a, c: fb.assess(fit.simulation, ("globl",)),
    "the modes are 'global', but they are a tuple": lambda fit, a, c: fb.simulate(a, c, 1, modes="global"),
    "data is list, but it is Clients": lambda fit, a, c: fb.simulate(a, [c], 1),
    "the algorithm is FedAvg, but it is one with its network": lambda fit, a, c: fb.simulate(fb.FedAvg, c, 1),
    "the algorithm is 'fedavg', but it is one with its network": lambda fit, a, c: fb.simulate("fedavg", c, 1),
    "the model is 'mlp', but it is a network for the data": lambda fit, a, c: fb.simulate(fb.FedPer("mlp"), c, 1),
    "cannot read rows of shape (2,)": lambda fit, a, c: fb.simulate(a, fb.data.synthetic(clients=3, rows=8, features=2), 1),
    "no parameter lies under 'nope'": lambda fit, a, c: fb.simulate(fb.FedPer(a.model, personal=("nope",)), c, 1),
    "they are a tuple of paths, such as ('head',)": lambda fit, a, c: fb.simulate(fb.FedPer(a.model, personal="head"), c, 1),
    "hidden is 64, but it is a tuple of widths": lambda fit, a, c: fb.network("mlp", c, hidden=64),
    "six has no client 'nobody'": lambda fit, a, c: fit.predict(np.ones((2, 4)), client="nobody"),
    "a name is text, such as '0'": lambda fit, a, c: fit.predict(np.ones((2, 4)), client=3),
    "there are no rows 'tests' of a client": lambda fit, a, c: c.rows("3", "tests"),
    "x is float64 of shape (2, 5); expected finite numbers": lambda fit, a, c: fit.predict(np.ones((2, 5))),
    "rows differ in length": lambda fit, a, c: fit.predict([[1, 2], [1]]),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_calls_are_told_in_a_sentence(sentence, fit, clients):
    with pytest.raises(fb.UserError) as problem:
        WRONG[sentence](fit, fit.simulation.algorithm, clients)
    assert sentence in str(problem.value)
    assert "\n" not in str(problem.value)
