"""Differences between methods that were run on the same clients with the same seeds, and intervals for them.

Seeds s and clients c are crossed: each pair has one difference d_sc = μ + a_s + b_c + e_sc, with a for the seed, b for the
client and e for what is left. Mean squares of the two-way table, without replication, estimate
E[MS_a] = C σ_a² + σ_e², E[MS_b] = S σ_b² + σ_e², E[MS_e] = σ_e², and the variance of the mean is, for

    seeds     MS_a / SC                   other seeds, these clients: a and e are drawn anew, b stays
    clients   MS_b / SC                   other clients, these trained models: b and e are drawn anew, a stays
    both      (MS_a + MS_b − MS_e) / SC   other seeds and other clients

with S − 1, C − 1 and Satterthwaite's degrees of freedom. A component that comes out negative is taken as 0, and the interval
for both is never narrower than one of the others: with two or three seeds Satterthwaite's are too many.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from fedbayes.evaluation.assess import Evaluation
from fedbayes.evaluation.score import HIGHER_IS_BETTER, SHOWN, Score, metrics
from fedbayes.evaluation.tables import TITLES, scale_of
from fedbayes.sheets import Cell, Sheet

UNITS = ("seeds", "clients", "both")
FORMS = ("rows", "clients")
"""Figures over all rows, where a client counts by its rows, and means over clients, where each counts the same."""
LEVEL = 0.95


class Interval(NamedTuple):
    """Where a difference lies, at 95 %."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the difference is known."""
        return self.low > 0 or self.high < 0


class Difference(NamedTuple):
    """A figure of a method less that of the baseline, in one mode, over one group of clients."""

    method: str
    baseline: str
    mode: str
    group: str
    figure: str
    form: str
    estimate: float
    intervals: dict[str, Interval | None]
    """By what varies: seeds, clients, both; None where there are too few of them, or clients that differ from seed to seed."""

    def interval(self, unit: str = "both") -> Interval | None:
        """That of a unit; for `both`, where there is none, that of seeds, else that of clients."""
        return next((found for name in _order(unit) if (found := self.intervals[name]) is not None), None)


def _order(unit: str) -> tuple[str, ...]:
    return (unit,) if unit != "both" else ("both", "seeds", "clients")


def intervals(differences: np.ndarray, crossed: bool = True, level: float = LEVEL) -> dict[str, Interval | None]:
    """Intervals of the mean of a table of differences, a row for each seed and a column for each client.

    Not `crossed`: the columns of one row are other clients than those of the next, so that only seeds can be units.

    >>> table = np.array([[1.0, 2.0, 3.0], [1.2, 2.2, 3.2]])  # seeds differ by 0.2, clients by 1
    >>> {unit: [round(bound, 2) for bound in found] for unit, found in intervals(table).items()}
    {'seeds': [0.83, 3.37], 'clients': [-0.38, 4.58], 'both': [-0.38, 4.58]}
    """
    S, C = differences.shape
    mean = differences.mean()
    seed, client = differences.mean(axis=1) - mean, differences.mean(axis=0) - mean
    rest = differences - mean - seed[:, None] - client[None, :]
    squares: dict[str, tuple[float, float]] = {}  # variance of the mean, degrees of freedom
    ms_seed = C * float(seed @ seed) / (S - 1) if S > 1 else 0.0
    ms_client = S * float(client @ client) / (C - 1) if C > 1 else 0.0
    if S > 1:
        squares["seeds"] = (ms_seed, S - 1)
    if C > 1 and crossed:
        squares["clients"] = (ms_client, C - 1)
    if S > 1 and C > 1 and crossed:
        ms_rest = float((rest**2).sum()) / ((S - 1) * (C - 1))
        a, b = max(ms_seed, ms_rest), max(ms_client, ms_rest)
        parts = a**2 / (S - 1) + b**2 / (C - 1) + ms_rest**2 / ((S - 1) * (C - 1))
        squares["both"] = (a + b - ms_rest, (a + b - ms_rest) ** 2 / parts if parts > 0 else 1.0)
    half = {
        unit: float(stdtrit(freedom, 0.5 + level / 2)) * float(np.sqrt(square / (S * C)))
        for unit, (square, freedom) in squares.items()
    }
    if "both" in half:
        half["both"] = max(half.values())
    return {unit: Interval(float(mean - half[unit]), float(mean + half[unit])) if unit in half else None for unit in UNITS}


def contributions(scores: Score, numeric: bool, form: str) -> dict[str, np.ndarray]:
    """Of each figure, one value for each client whose mean is the figure.

    For the mean over clients these are the clients' own figures. A figure over all rows is no mean, since ECE and RMSE do
    not add up and clients have different numbers of rows: its values are the jackknife's, C θ − (C − 1) θ_without_c, moved
    so that their mean is θ.
    """
    values = Score(*(np.asarray(value, np.float64) for value in scores))
    if form == "clients":
        return metrics(values, numeric)
    total = Score(*(value.sum(axis=0) for value in values))
    whole, count = metrics(total, numeric), len(values.rows)
    if count == 1:
        return {name: value[None] for name, value in whole.items()}
    without = metrics(Score(*(all_ - one for all_, one in zip(total, values, strict=True))), numeric)
    found = {}
    for name, value in whole.items():
        pseudo = count * value - (count - 1) * without[name]
        found[name] = pseudo - pseudo.mean() + value
    return found


def differences(
    method: str, runs: Mapping[int, Evaluation], baseline: str, others: Mapping[int, Evaluation], crossed: bool = True
) -> list[Difference]:
    """Every figure of a method's runs less the baseline's, paired by seed and, where they are `crossed`, by client."""
    seeds = [seed for seed in runs if seed in others]
    if not seeds:
        return []
    found = []
    both = [run[seed].scores for run in (runs, others) for seed in seeds]
    for mode in (name for name in both[0] if all(name in scores for scores in both)):
        for group in ("participating", "unseen"):
            for form in FORMS:
                ours, theirs = ([_of(run[seed], mode, group, form) for seed in seeds] for run in (runs, others))
                if not all((*ours, *theirs)):  # one of them has no such mode for these clients
                    continue
                for figure in ours[0]:
                    pairs = [one[figure] - other[figure] for one, other in zip(ours, theirs, strict=True)]
                    # Where each seed has its own clients, their mean is all that seeds have in common.
                    table = np.stack(pairs) if crossed else np.array([[pair.mean()] for pair in pairs])
                    if table.size:
                        names = (method, baseline, mode, group, figure, form)
                        found.append(Difference(*names, float(table.mean()), intervals(table, crossed)))
    return found


def _of(evaluation: Evaluation, mode: str, group: str, form: str) -> dict[str, np.ndarray]:
    scores = evaluation.scores[mode]
    members = (evaluation.unseen == (group == "unseen")) & (np.asarray(scores.rows) > 0)
    if not members.any():
        return {}
    return contributions(Score(*(np.asarray(value)[members] for value in scores)), evaluation.numeric, form)


LOWER_IS_BETTER = {"brier", "ece", "mce", "rmse", "crps", "calibration_error"}


def best(figure: str, values: Mapping[str, float]) -> str | None:
    """The method whose figure is best; None for a figure of which neither more nor less is better.

    >>> best("ece", {"a": 0.1, "b": 0.2}), best("accuracy", {"a": 0.1, "b": 0.2}), best("entropy", {"a": 1.0})
    ('a', 'b', None)
    """
    if figure in HIGHER_IS_BETTER:
        return max(values, key=lambda name: values[name])
    return min(values, key=lambda name: values[name]) if figure in LOWER_IS_BETTER else None


def winners(runs: Mapping[str, Mapping[int, Evaluation]], crossed: bool, unit: str = "both") -> set[tuple[str, str, str, str]]:
    """Method, mode, group and figure (over rows) where the best differs from every other by an interval without zero."""
    means: dict[tuple[str, str, str], dict[str, float]] = {}
    for method, seeds in runs.items():
        for evaluation in seeds.values():
            for mode, groups in evaluation.summary().items():
                for group, figures in groups.items():
                    for figure, forms in figures.items():
                        place = means.setdefault((mode, group, figure), {})
                        place[method] = place.get(method, 0.0) + forms["rows"] / len(seeds)
    pairs = {}
    for one, other in itertools.permutations(runs, 2):
        for each in differences(one, runs[one], other, runs[other], crossed):
            if each.form == "rows":
                pairs[one, other, each.mode, each.group, each.figure] = each.interval(unit)
    found = set()
    for (mode, group, figure), values in means.items():
        name = best(figure, values)
        others: Sequence[str] = [other for other in values if other != name]
        sure = [pairs.get((name or "", other, mode, group, figure)) for other in others]
        if name is not None and others and all(interval is not None and interval.excludes_zero for interval in sure):
            found.add((name, mode, group, figure))
    return found


SAID = {
    "seeds": "95 % interval for other seeds on the same clients",
    "clients": "95 % interval for other clients with these trained models",
    "both": "95 % interval for other seeds and other clients",
}


def difference_sheet(found: Sequence[Difference], unit: str, numeric: bool) -> Sheet:
    """One line for each method, mode and group: figures over rows less the baseline's, with an interval of the unit."""
    shown = SHOWN[numeric]
    each = {(one.method, one.mode, one.group, one.figure): one for one in found if one.form == "rows"}
    sections: list[list[list[Cell]]] = []
    for method in dict.fromkeys(one.method for one in found):
        rows: list[list[Cell]] = []
        for mode, group in dict.fromkeys((one.mode, one.group) for one in found if one.method == method):
            cells = [Cell("" if rows else method), Cell(mode), Cell(group)]
            for name in shown:
                one = each[method, mode, group, name]
                interval = one.interval(unit)
                cells.append(Cell(difference_cell(one, unit), interval is not None and interval.excludes_zero))
            rows.append(cells)
        sections.append(rows)
    used = next((name for name in _order(unit) if any(one.intervals[name] is not None for one in found)), None)
    said = f"{SAID[used]}; bold where it excludes zero" if used else f"there are too few {unit} for an interval"
    headings = ["method", "mode", "clients", *(TITLES[name] for name in shown)]
    baseline = next(iter(found)).baseline
    return Sheet(f"difference from {baseline}", f"over all test rows; {said}", headings, sections)


def difference_cell(one: Difference, unit: str) -> str:
    """A difference with its interval, with signs.

    >>> both = {"seeds": None, "clients": None, "both": Interval(-0.01, 0.03)}
    >>> difference_cell(Difference("b", "a", "global", "unseen", "accuracy", "rows", 0.01, both), "both")
    '+1.0 [-1.0, +3.0]'
    """
    factor, digits = scale_of(one.figure)
    text, interval = f"{factor * one.estimate:+.{digits}f}", one.interval(unit)
    return text if interval is None else f"{text} [{factor * interval.low:+.{digits}f}, {factor * interval.high:+.{digits}f}]"
