"""Candidate methods for a data set, from measurements on data sets like it.

`evidence.json` beside this file has the measurements: `benchmarks/newcomers.py --report` writes it. The rule:

1. Sets with the same task (classes or numbers).
2. The nearest two whose distance is at most 1, else the nearest one, and a remark that it is not close. The distance is
   Euclidean; one unit is ten times as many clients, ten times as many rows, or a skew that differs by 0.5.
3. The two methods with the best mean gain in log score over fine-tuned FedAvg there, for newcomers with about as many rows,
   without those that lie more than two standard errors below it. A method is called ahead, level or behind by two standard
   errors over three seeds or more.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fedbayes.algorithms import names
from fedbayes.data.profile import Profile
from fedbayes.errors import UserError

EVIDENCE = Path(__file__).with_name("evidence.json")
BASELINE = "fedavg"
BAYESIAN = ("fedhb-niw", "fedhb-mixture", "fedvi", "bpfed", "pfedbayes", "bayes-admm", "fedpop", "fedpa", "fedbe")
"""Methods with a posterior of parameters."""
UNLABELLED = ("fedvi",)
"""Methods whose `adapt` reads no labels."""
CLOSE = 1.0
"""The distance up to which a measured set counts as like the data."""
CLEAR, SEEDS = 2.0, 3
"""Standard errors and seeds that a difference needs to be called one."""
COLUMNS = {"5": 10, "20": 50, "all": math.inf}
"""Rows that newcomers had in the measurements, and up to how many rows each stands for."""


@dataclasses.dataclass(frozen=True)
class Gain:
    """A mean difference in log score, in nats a row, over seeds."""

    mean: float
    error: float | None
    """Standard error; None for one seed."""
    seeds: int

    @property
    def standing(self) -> str:
        """The difference in a word.

        >>> Gain(0.05, 0.01, 3).standing, Gain(0.05, 0.04, 3).standing, Gain(-0.05, 0.01, 5).standing
        ('ahead', 'level', 'behind')
        >>> Gain(0.05, 0.01, 2).standing
        'too few seeds to tell'
        """
        if self.error is None or self.seeds < SEEDS:
            return "too few seeds to tell"
        return "level" if abs(self.mean) <= CLEAR * self.error else "ahead" if self.mean > 0 else "behind"

    def text(self) -> str:
        """The mean, its standard error and the seeds.

        >>> Gain(0.0213, 0.0161, 2).text()
        '+0.021 ± 0.016 nats a row (2 seeds)'
        """
        error = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.mean:+.3f}{error} nats a row ({self.seeds} seed{'s' * (self.seeds != 1)})"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A data set on which methods were compared."""

    title: str
    profile: Profile
    shared: float
    """Log score of FedAvg's model as it is, on newcomers."""
    tuned: dict[str, float]
    """Log score of FedAvg after `adapt`, by the newcomers' rows."""
    methods: dict[str, dict[str, Gain]]
    """Gains of other methods over fine-tuned FedAvg, by the newcomers' rows."""
    unlabelled: dict[str, dict[str, Gain]] = dataclasses.field(default_factory=dict)
    """Gains over FedAvg's model as it is, of methods whose `adapt` reads no labels."""


class Candidate(NamedTuple):
    """A method to try, and why."""

    method: str
    reason: str


class Advice(NamedTuple):
    """Candidates, the sets that they were measured on with their distances, and what a reader has to know of it."""

    rows: str
    nearest: list[tuple[float, Measured]]
    candidates: list[Candidate]
    remarks: list[str]


def read(path: Path = EVIDENCE) -> dict[str, Measured]:
    """The measurements.

    >>> "digits" in read()
    True
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.DecodeError) as problem:
        reason = f"{path} cannot be read as measurements ({problem})"
        raise UserError(f"{reason}; install fedbayes again, or write it with benchmarks/newcomers.py --report") from problem


def write(measured: Mapping[str, Measured]) -> bytes:
    """The content of an evidence file.

    >>> gains = {"fedpop": {"5": Gain(0.1, None, 1)}}
    >>> one = Measured("a set", Profile("numbers", 9, 20.0, None, None, 0.1), -1.0, {"5": -0.9}, gains)
    >>> msgspec.json.decode(write({"a": one}), type=dict[str, Measured])["a"] == one
    True
    """
    return msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n"


def distance(one: Profile, other: Profile) -> float:
    """How unlike two data sets of the same task are.

    >>> one, more = Profile("classes", 20, 50.0, 10, 3.0, 0.7), Profile("classes", 200, 50.0, 10, 3.0, 0.2)
    >>> distance(one, one), round(distance(one, more), 3)
    (0.0, 1.414)
    """
    clients, rows = math.log10(one.clients / other.clients), math.log10(max(one.rows, 1) / max(other.rows, 1))
    return math.hypot(clients, rows, (one.skew - other.skew) / 0.5)


def column(rows: float) -> str:
    """The measurement that stands for newcomers with so many rows.

    >>> column(3), column(30), column(300)
    ('5', '20', 'all')
    """
    return next(name for name, most in COLUMNS.items() if rows <= most)


def promising(gains: Mapping[str, Gain]) -> list[str]:
    """The two methods with the largest gains, without those that lie two standard errors below FedAvg.

    >>> promising({"bpfed": Gain(-0.2, 0.01, 2), "fedper": Gain(-0.01, 0.02, 3), "fedpop": Gain(0.1, None, 1)})
    ['fedpop', 'fedper']
    """
    order = sorted(gains, key=lambda name: -gains[name].mean)
    return [name for name in order if gains[name].mean >= -CLEAR * (gains[name].error or math.inf)][:2]


def advise(of: Profile, measured: Mapping[str, Measured], rows: float | None = None, unlabelled: bool = False) -> Advice:
    """Candidates for a data set whose newcomers have so many rows; by default as many as its median client.

    >>> gains = {"fedpop": {"20": Gain(0.05, 0.01, 5)}, "fedper": {"20": Gain(-0.2, 0.01, 5)}}
    >>> known = {"a": Measured("a set", Profile("numbers", 9, 20.0, None, None, 0.1), -1.0, {"20": -0.9}, gains)}
    >>> [one.method for one in advise(Profile("numbers", 12, 30.0, None, None, 0.2), known).candidates]
    ['fedavg', 'fedpop']
    """
    if of.clients < 2:
        divide = "name the column that says whose a row is with --client-column, or divide the rows with --partition"
        raise UserError(f"the data has {of.clients} client, but a federation needs two or more: {divide}")
    if rows is not None and not rows > 0:
        raise UserError(f"newcomers have {rows:g} rows, but advice is for newcomers with one row or more")
    place = column(of.rows if rows is None else rows)
    known = [one for one in measured.values() if _gains(one, place, unlabelled)]
    alike = [one for one in known if one.profile.task == of.task]
    order = sorted(((distance(of, one.profile), one) for one in alike or known), key=lambda pair: pair[0])
    close = [pair for pair in order[:2] if alike and pair[0] <= CLOSE]
    nearest = close or order[:1]
    remarks = [] if close else [_not_close(of, order, bool(alike), place)]
    sets = [one for _, one in nearest]
    found = [_gains(one, place, unlabelled) for one in sets]
    pooled = {name: _pooled([gains[name] for gains in found if name in gains]) for gains in found for name in gains}
    where = f"{_rows(place)} on {' and '.join(one.title for one in sets)}"
    if unlabelled:
        return Advice(place, nearest, _without_labels(pooled, where), [*remarks, READ_UNLABELLED])
    return Advice(place, nearest, _with_labels(pooled, where), [*remarks, *_verdict(pooled)])


READ_UNLABELLED = "in the tables, compare fedvi in the adapted mode with fedavg in the global mode, on unseen clients"


def _gains(one: Measured, place: str, unlabelled: bool) -> dict[str, Gain]:
    """Gains of methods that a command can name."""
    of, registered = one.unlabelled if unlabelled else one.methods, names("clients")
    return {name: gains[place] for name, gains in of.items() if place in gains and name in registered}


def _pooled(gains: Sequence[Gain]) -> Gain:
    """The mean over data sets, which count alike."""
    errors = [gain.error for gain in gains]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) / len(gains) if len(known) == len(gains) else None
    return Gain(statistics.mean(gain.mean for gain in gains), error, min(gain.seeds for gain in gains))


def _with_labels(pooled: Mapping[str, Gain], where: str) -> list[Candidate]:
    """FedAvg, and the best two that were not behind; the best Bayesian method where all were."""
    order = sorted(pooled, key=lambda name: -pooled[name].mean)
    best = promising(pooled) or [name for name in order if name in BAYESIAN][:1] or order[:1]
    reasons = [Candidate(name, _against(pooled[name], "fine-tuned FedAvg", where)) for name in best]
    return [Candidate(BASELINE, "the baseline: one shared network, and `adapt` fine-tunes a copy of it"), *reasons]


def _against(gain: Gain, other: str, where: str) -> str:
    return f"{gain.text()} against {other} {where}, {gain.standing}"


def _without_labels(pooled: Mapping[str, Gain], where: str) -> list[Candidate]:
    """FedAvg's shared model, and methods that read a newcomer's rows without labels."""
    found = [Candidate(BASELINE, "the baseline: without labels, newcomers have its shared network as it is")]
    for name in UNLABELLED:
        known = _against(pooled[name], "FedAvg's shared network", where) if name in pooled else "not measured so yet"
        found.append(Candidate(name, f"`adapt` reads no labels: {known}"))
    return found


def _verdict(pooled: Mapping[str, Gain]) -> list[str]:
    """One sentence where no Bayesian method was ahead."""
    bayesian = [gain for name, gain in pooled.items() if name in BAYESIAN]
    if any(gain.standing == "ahead" for gain in bayesian):
        return []
    if not bayesian:
        return ["no Bayesian method was measured there"]
    few = "; some have too few seeds to tell" if any(gain.seeds < SEEDS for gain in bayesian) else ""
    return [f"no Bayesian method was clearly ahead of fine-tuned FedAvg there{few}"]


def _not_close(of: Profile, order: Sequence[tuple[float, Measured]], alike: bool, place: str) -> str:
    """One sentence where nothing that was measured is like the data."""
    if not order:
        return f"no method was measured on newcomers {_rows(place)}"
    apart, one = order[0]
    if not alike:
        return (
            f"no measured set has {of.task} as targets; {one.title} is only the nearest in size, so trust your own comparison"
        )
    return f"no measured set is close: the nearest, {one.title}, is at distance {apart:.1f}, so trust your own comparison"


def _rows(place: str) -> str:
    return "with all rows" if place == "all" else f"with {place} rows"
