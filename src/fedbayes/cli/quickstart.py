"""`fedbayes quickstart`: newcomers with few rows, a posterior over silos, a picture and a page, in two minutes.

README shows its output and its picture; `make readme` writes both anew.
"""

from __future__ import annotations

import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from fedbayes.cli.arguments import python_file
from fedbayes.cli.compare import bars
from fedbayes.cli.display import plain_table, progress_bar, show
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import MANY, Evaluation, few
from fedbayes.evaluation.differences import Difference, differences
from fedbayes.evaluation.score import Score, kept, metrics, pooled
from fedbayes.results.simulate import fit
from fedbayes.results.structured_fit import SiloFit
from fedbayes.results.structured_text import verdict
from fedbayes.study.options import DataOptions, RunOptions, arguments
from fedbayes.study.run import Outcome, run_study
from fedbayes.study.study import parse

OUT = Path("runs") / "quickstart"
WIDTH = 100
STUDY = parse(
    {
        "rounds": 60,
        "seeds": 1,
        "model": "mlp:64",
        "modes": ["global", "adapted:5", "adapted:20", "adapted"],
        "data": {"digits": {"partition": "labels:3", "clients": 40, "hold_out": 30, "test": 0.4}},
        "methods": {"fedavg": {}, "fedvi": {}, "fedhb-niw": {}},
    }
)
"""Every method at its defaults. Digits are easy, so few clients with few rows train: what FedAvg then shares has something to
gain from 5 rows, more from 20, and is right in less than nine of ten rows before. The task was chosen by FedAvg alone."""
TARGET = 0.9
"""The share of answers that are to be right where a method may abstain."""
ANSWERED = "answered %"
MORE = ("bpfed", "fedper", "fedpop", "fedhb-mixture", "bayes-admm")
"""Methods that two minutes are too short for."""
SCHOOLS = Path(__file__).parents[3] / "examples" / "eight_schools.py"
"""Where a clone has it; an installed package has no examples."""
NUTS = {"mu": (4.42, 3.35), "tau": (3.61, 3.26)}
"""Mean and standard deviation by NUTS on all schools together, from benchmarks/panel_judges.json."""


def main(arguments: Sequence[str]) -> None:
    """Train methods at their defaults, score newcomers with few rows, fit a mixed model over silos, write the page."""
    if arguments:
        if arguments[0] in ("-h", "--help"):
            print("usage: fedbayes quickstart\n\nTwo minutes of what there is; the runs and their page are in runs/quickstart.")
            return
        raise UserError(f"quickstart takes no options, but {arguments[0]!r} was given; see fedbayes compare --help")
    from fedbayes.report.page import report

    started = time.perf_counter()
    outcome = run_study(STUDY, OUT, None, bars, force=True)
    if outcome.failures:
        raise UserError("; ".join(f"{place} failed: {why}" for place, why in outcome.failures.items()))
    newcomers = Newcomers(outcome)
    show(f"{newcomers.about()}\n")
    show(newcomers.table(), "")
    show(f"{newcomers.findings()}\n")
    picture = newcomers.picture(OUT / "newcomers.png")
    if SCHOOLS.exists():
        show("Eight schools, each a silo with one estimate: a hierarchical model in NumPyro (examples/eight_schools.py).\n")
        found = eight_schools()
        show(beside_nuts(found))
        show(f"{wrapped(verdict(found.result))}\n")
    page = report([OUT / "fedavg-0", OUT], OUT / "report.html")  # differences are from the first
    show(f"picture: {picture}")
    show(f"page:    {page}")
    show(f"more methods and three seeds: {more()}")
    show(f"{time.perf_counter() - started:.0f} s; next: docs/your-data.md")


class Newcomers:
    """Scores of clients that never trained, by method and by their number of rows."""

    def __init__(self, outcome: Outcome) -> None:
        (results,), (evaluations,), (seed,) = outcome.results.values(), outcome.evaluations.values(), outcome.study.seeds
        (self.options,), self.run = outcome.study.data.values(), outcome.study.run
        self.evaluations: dict[str, Evaluation] = {name: runs[seed] for name, runs in evaluations.items()}
        self.titles = {name: runs[seed]["algorithm"] for name, runs in results.items()}
        self.base, *self.others = self.evaluations
        self.modes = [mode for mode in self.run.modes if mode.startswith("adapted")]

    def label(self, mode: str) -> str:
        """The number of rows of a newcomer."""
        return f"{few(mode)} rows" if few(mode) < MANY else "all their rows"

    def title(self, name: str) -> str:
        """A method with rows to adapt to."""
        return f"fine-tuned {self.titles[name]}" if name == self.base else self.titles[name]

    def score(self, name: str, mode: str) -> Score:
        """The score of all newcomers together."""
        evaluation = self.evaluations[name]
        return pooled(evaluation.scores[mode], evaluation.unseen)

    def figure(self, name: str, mode: str, metric: str) -> float:
        """A metric over all newcomers' test rows."""
        return float(metrics(self.score(name, mode), numeric=False)[metric])

    def about(self) -> str:
        """The task."""
        data = self.options.load()
        labels = len(set(data.rows(str(data.names[0]))[1].tolist()))
        clients, new, tested = len(data), int(data.unseen.sum()), int(data.test_counts[data.unseen].sum())
        return wrapped(
            f"Handwritten digits: {clients} clients, each with {labels} of the {len(data.classes or ())} labels and about "
            f"{np.median(data.train_counts):.0f} rows to learn from. {clients - new} of them trained together for "
            f"{self.run.rounds} rounds. The other {new} are newcomers, scored on {tested} test rows. All methods have the same "
            "network and their defaults, and the federation chose how far to adapt."
        )

    def table(self) -> Table:
        """A section for each number of rows that a newcomer has, the shared model first."""
        sections = [("none", [(f"shared {self.titles[self.base]}", self.score(self.base, "global"))])]
        for mode in self.modes:
            size = f"{few(mode)}" if few(mode) < MANY else "all"
            sections.append((size, [(self.title(name), self.score(name, mode)) for name in self.evaluations]))
        said = f"{ANSWERED}: rows that can be answered, the surest first, so that {100 * TARGET:.0f} % of the answers are right"
        headings = ["rows to adapt to", "method", "accuracy %", "log score", "ECE %", ANSWERED]
        table = plain_table(headings, [], words=2, caption=said, collapse_padding=True)
        for size, lines in sections:
            for place, (name, score) in enumerate(lines):
                table.add_row("" if place else size, name, *_cells(score), end_section=place == len(lines) - 1)
        return table

    def best(self, mode: str) -> str:
        """The method with the best log score, apart from the first."""
        return max(self.others, key=lambda name: self.figure(name, mode, "log_score"))

    def findings(self) -> str:
        """A sentence for each number of rows on who is ahead of the first method."""
        return "\n".join(wrapped(self.finding(mode)) for mode in self.modes)

    def finding(self, mode: str) -> str:
        """A sentence on the best method with so many rows: its lead over the first, with an interval over newcomers."""
        name = self.best(mode)
        ours, theirs = ({0: self.evaluations[one]} for one in (name, self.base))
        (gap,) = (one for one in differences(name, ours, self.base, theirs) if _wanted(one, mode))
        return f"With {self.label(mode)} {sentence(self.title(name), self.title(self.base), gap)}"

    def shown(self, mode: str) -> dict[str, Score]:
        """The shared model, the first method and the best of the others."""
        shared = {f"shared {self.titles[self.base]}": self.score(self.base, "global")}
        return shared | {self.title(name): self.score(name, mode) for name in (self.base, self.best(mode))}

    def picture(self, path: Path) -> Path:
        """Newcomers with the fewest rows: how sure, how right, and what abstaining gains."""
        from fedbayes.report.newcomers import newcomers
        from fedbayes.results.pictures import save_figure

        mode = self.modes[0]
        save_figure(newcomers(self.shown(mode), f"Newcomers with {self.label(mode)}", TARGET), path, dpi=110)
        return path


def wrapped(text: str) -> str:
    """Text in lines."""
    return textwrap.fill(text, WIDTH)


def _cells(score: Score) -> list[str]:
    found = {name: float(value) for name, value in metrics(score, numeric=False).items()}
    share = f"{100 * kept(score, TARGET):.0f}"
    return [f"{100 * found['accuracy']:.1f}", f"{found['log_score']:.3f}", f"{100 * found['ece']:.1f}", share]


def _wanted(one: Difference, mode: str) -> bool:
    return (one.mode, one.group, one.figure, one.form) == (mode, "unseen", "log_score", "rows")


def sentence(name: str, base: str, gap: Difference) -> str:
    """A difference in log score in words.

    >>> from fedbayes.evaluation.differences import Interval
    >>> def gap(low, high):
    ...     found = {"seeds": None, "both": None, "clients": Interval(low, high)}
    ...     return Difference("a", "b", "adapted:5", "unseen", "log_score", "rows", (low + high) / 2, found)
    >>> sentence("A", "B", gap(0.1, 0.2))
    'A is ahead of B by 0.150 nats a row (95 % interval over newcomers 0.100 to 0.200).'
    >>> sentence("A", "B", gap(-0.1, 0.2))
    'no method is surely ahead of B; the nearest is A, +0.050 nats a row (95 % interval over newcomers -0.100 to 0.200).'
    >>> sentence("A", "B", gap(-0.2, -0.1))
    'B is ahead; the nearest is A, -0.150 nats a row (95 % interval over newcomers -0.200 to -0.100).'
    """
    interval = gap.intervals["clients"]
    about = "" if interval is None else f" (95 % interval over newcomers {interval.low:.3f} to {interval.high:.3f})"
    if interval is not None and interval.low > 0:
        return f"{name} is ahead of {base} by {gap.estimate:.3f} nats a row{about}."
    behind = interval is not None and interval.high < 0
    first = f"{base} is ahead" if behind else f"no method is surely ahead of {base}"
    return f"{first}; the nearest is {name}, {gap.estimate:+.3f} nats a row{about}."


def more() -> str:
    """The command that compares more methods on the same clients."""
    (options,) = STUDY.data.values()
    given = [*arguments(options, DataOptions()), *arguments(STUDY.run, RunOptions()), "--model", STUDY.model]
    return shlex.join(["fedbayes", "compare", *STUDY.methods, *MORE, *given])


def eight_schools() -> SiloFit:
    """The example's model over its silos, by the default method."""
    model = python_file(SCHOOLS, ["population", "silo", "silos"], "the example")
    with progress_bar() as add:
        bar, folder = add("eight schools", None), OUT / "eight-schools"
        return fit(model.population, model.silo, model.silos(), folder=folder, force=True, callbacks=(bar,))


def beside_nuts(found: SiloFit) -> Table:
    """The posterior over silos beside that of pooled data."""
    posterior: Mapping[str, Mapping[str, float]] = found.result["posterior"]
    rows = []
    for name, together in NUTS.items():
        cells = [(posterior[name]["mean"], posterior[name]["sd"]), together]
        rows.append([name, *(f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in cells)])
    return plain_table(["", f"{len(found.simulation.names)} silos, {found.result['algorithm']}", "all together, NUTS"], rows)
