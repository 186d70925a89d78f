"""The worth of each part of a method's uncertainty, in nats a test row, and a verdict in words. `dissect` measures it.

Predictions on clients' test rows are compared with those of the same fit without one part of it. A difference in log score is
paired by client: its mean over clients d̄, each of which counts the same, and its standard error s/√C.

    averaging     draws from the posterior, less the posterior's mean alone (all scales 0)
    scales        the learnt scales, less the same mean square in one number for each array ("layer"), in one number for all
                  weights ("one"), and less the learnt numbers at other weights ("shuffled"); the same random numbers throughout
    person        the client's own state, less another client's
    one draw      all draws averaged, less the mean over draws of the log score of one; never negative
    prior         the prior's scales under which `adapt` fits, less one number for each array, one for all, shuffled
    training      the mean alone, less the prediction of a twin that was trained without noise, for as many steps

A part is worth something where d̄ > 2 standard errors and d̄ > `LEAST`; it does harm where −d̄ is. Beside these: KL(posterior ‖
prior) by array, the mutual information between prediction and weights on test rows and on rows from elsewhere, and contraction,
the posterior's variance after `adapt` on few and on many rows.

A method declares what its posterior and its prior are (`NetworkAlgorithm.beliefs`). The person and one draw are measured for
every method.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbayes.sheets import Cell, Sheet, html

LEAST = 1e-3
"""Nats a row below which a difference is nothing, however sure it is."""
SCALES = ("scales: layer", "scales: one", "scales: shuffled")
POSTERIOR = ("averaging", *SCALES)
PRIOR = ("prior: layer", "prior: one", "prior: shuffled")
AGAINST = {"layer": "one number for each array", "one": "one number for all weights", "shuffled": "the same numbers shuffled"}
TITLES = {
    "training": "noise while training",
    "averaging": "averaging at prediction",
    **{f"scales: {name}": f"learnt scales against {said}" for name, said in AGAINST.items()},
    "person": "the client's own state against another's",
    "one draw": "all draws against one",
    **{f"prior: {name}": f"scales of the prior against {said}" for name, said in AGAINST.items()},
}
STATES = {1: "alive", 0: "inert", -1: "harmful"}


class Worth(NamedTuple):
    """A mean over clients of paired differences in log score, in nats a row, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, differences: np.ndarray) -> Worth:
        """The mean and its error.

        >>> Worth.of(np.array([0.1, 0.3])), Worth.of(np.array([0.1, 0.3])).sign
        (Worth(mean=0.2, error=0.1), 0)
        """
        error = differences.std(ddof=1) / math.sqrt(len(differences))
        return cls(round(float(differences.mean()), 9), round(float(error), 9))

    @property
    def sign(self) -> int:
        """1 where the part is worth something, −1 where it does harm, else 0."""
        return int(math.copysign(1, self.mean)) if abs(self.mean) > max(2 * self.error, LEAST) else 0

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.error:.4f}"


class Contraction(NamedTuple):
    """After `adapt` on so many rows, over clients that have them: variances of a weight, and the log score of a test row."""

    rows: int
    clients: int
    variance: float
    prior: float
    log_score: float


class Life(NamedTuple):
    """The parts in one mode."""

    mode: str
    clients: int
    draws: int
    log_score: float
    """Of a test row, mean over clients."""
    parts: dict[str, Worth]
    scale: float | None
    """Root mean square of the posterior's scales; None where the method declares no posterior."""
    information: float
    """Mutual information of prediction and weights on test rows; for a number, variance of its mean."""
    elsewhere: float
    """The same on rows from elsewhere."""
    divergence: dict[str, float]
    """KL(posterior ‖ prior) by array, mean over clients."""
    contraction: list[Contraction]

    @property
    def averaging(self) -> str:
        """The state of averaging at prediction: alive, harmful or inert; or a point, where there is nothing to average over."""
        return STATES[self.parts["averaging"].sign] if self.scale else "point"

    @property
    def scales(self) -> str:
        """The state of the learnt scales: alive where constant or shuffled ones predict worse, harmful where better."""
        signs = [self.parts[name].sign for name in SCALES] if self.scale else []
        return STATES[1 if max(signs) > 0 else min(signs)] if signs else "point"

    @property
    def word(self) -> str:
        """The verdict in one word: alive, harmful (the mean alone predicts better), inert, or a point."""
        return self.scales if self.averaging == "inert" else self.averaging

    @property
    def verdict(self) -> str:
        """The verdict in one sentence.

        >>> nothing = dict.fromkeys(POSTERIOR, Worth(0.0, 0.0))
        >>> life = Life("adapted", 9, 10, -0.5, {**nothing, "person": Worth(0.2, 0.05)}, 0.1, 0.0, 0.0, {}, [])
        >>> life.verdict.partition("; ")[2]
        'the person is worth +0.2000 ± 0.0500'
        >>> life._replace(parts={**nothing, "averaging": Worth(0.1, 0.01)}).verdict.partition(", ")[0]
        'adapted: alive: averaging is worth +0.1000 ± 0.0100'
        """
        known = self.parts
        if self.word == "point":
            said = "point: all scales are 0, so that predictions are of one network"
            if self.scale is None:
                many = "one network" if self.draws == 1 else f"{self.draws} networks, by draws without scales"
                said = f"point: predictions are of {many}"
        elif self.word == "inert":
            said = "inert: setting the learnt scales to 0, constant or shuffled changes the log score by no more than "
            said += f"two standard errors or {f'{LEAST:g}'.lstrip('0')} nats a row"
        else:
            does = {"alive": "is worth", "harmful": "does harm (the mean alone predicts better)", "inert": "is worth nothing:"}
            said = f"{self.word}: averaging {does[self.averaging]} {known['averaging']}, "
            pick = max if self.scales == "alive" else min
            name = pick(SCALES, key=lambda name: known[name].mean)
            against = f"{known[name]} against {AGAINST[name.partition(': ')[2]]}"
            nothing = "the learnt scales nothing: constant or shuffled, they predict as well"
            said += nothing if self.scales == "inert" else f"the learnt scales {against}"
        for name, of in (("person", "the person"), ("training", "noise while training")):
            if name in known:
                said += f"; {of} is worth {known[name] if known[name].sign else 'nothing'}"
        if prior := [name for name in PRIOR if name in known and known[name].sign]:
            name = max(prior, key=lambda name: abs(known[name].mean))
            said += f"; the prior's learnt scales {known[name]} against {AGAINST[name.partition(': ')[2]]}"
        return f"{self.mode}: {said}"

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        parts = {name: list(worth) for name, worth in self.parts.items()}
        more = {"parts": parts, "contraction": [list(one) for one in self.contraction], "verdict": self.verdict}
        return {**self._asdict(), **more}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Life:
        """The reverse of `to_json`."""
        known = {name: given[name] for name in cls._fields}
        known["parts"] = {str(name): Worth(*map(float, worth)) for name, worth in given["parts"].items()}
        known["divergence"] = {str(name): float(value) for name, value in given["divergence"].items()}
        known["contraction"] = [Contraction(*one) for one in given["contraction"]]
        return cls(**known)


@dataclasses.dataclass(frozen=True)
class Check:
    """The parts of a fit in each mode, `check["adapted"]`; printed, its verdicts."""

    algorithm: str
    data: str
    lives: tuple[Life, ...]
    numeric: bool
    elsewhere: str
    """The rows from elsewhere."""

    def __str__(self) -> str:
        return "\n".join(life.verdict for life in self.lives)

    def _repr_html_(self) -> str:
        return "".join(html(sheet, words=1) for sheet in (self.sheet(), *self.more())) + "<br>".join(str(self).splitlines())

    def __getitem__(self, mode: str) -> Life:
        return {life.mode: life for life in self.lives}[mode]

    def sheet(self) -> Sheet:
        """One line for each part, one column for each mode; bold where it is worth something or does harm."""
        names = [name for name in TITLES if any(name in life.parts for life in self.lives)]
        rows = []
        for name in names:
            worths = [life.parts.get(name) for life in self.lives]
            cells = [Cell("—") if worth is None else Cell(str(worth), worth.sign != 0) for worth in worths]
            rows.append([Cell(TITLES[name]), *cells])
        caption = (
            "log score with the part less without it, nats a test row; mean over clients ± its standard error; bold where it "
            f"is more than two standard errors and {LEAST:g}"
        )
        headings = ["part", *(f"{life.mode}, {life.clients} clients" for life in self.lives)]
        return Sheet(f"{self.algorithm} on {self.data}: the worth of each part", caption, headings, [rows])

    def more(self) -> list[Sheet]:
        """Mutual information, the divergence by array, and contraction, as far as there are such."""
        unit = "variance of the mean" if self.numeric else "mutual information, nats a row"
        rows = [[life.mode, f"{life.information:.2g}", f"{life.elsewhere:.2g}"] for life in self.lives if life.draws > 1]
        found = [_sheet(unit, self.elsewhere, ["mode", "test rows", "elsewhere"], rows)] if rows else []
        rows = []
        for life in self.lives:
            total = sum(life.divergence.values())
            ordered = sorted(life.divergence.items(), key=lambda item: -item[1]) if total > 0 else []
            rows += [[f"{life.mode}: {name}", f"{value:.3g}", f"{100 * value / total:.1f}"] for name, value in ordered]
        if rows:
            found.append(_sheet("KL(posterior ‖ prior) by array", "nats, mean over clients", ["array", "KL", "%"], rows))
        rows = [
            [f"{one.rows}{'' if place < len(life.contraction) - 1 else ' (all)'}", str(one.clients), *_shown(one)]
            for life in self.lives
            for place, one in enumerate(life.contraction)
        ]
        if rows:
            caption = "after adapt; variances are means over weights and clients; all: the mean number of rows"
            found.append(_sheet("contraction", caption, ["rows", "clients", "variance", "of the prior", "log score"], rows))
        return found

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return {**dataclasses.asdict(self), "lives": [life.to_json() for life in self.lives]}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Check:
        """The reverse of `to_json`."""
        known = {field.name: given[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**known, "lives": tuple(Life.from_json(one) for one in given["lives"])})


def _shown(one: Contraction) -> list[str]:
    spread = [f"{value:.3g}" if value > 0 else "—" for value in (one.variance, one.prior)]
    return [*spread, f"{one.log_score:.4f}"]


def _sheet(title: str, caption: str, headings: list[str], rows: list[list[str]]) -> Sheet:
    return Sheet(title, caption, headings, [[[Cell(text) for text in row] for row in rows]])
