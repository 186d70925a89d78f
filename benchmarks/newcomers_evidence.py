"""Measurements of benchmarks/newcomers.py in short: for `fedbayes advise`, and for the table of docs/choose-a-method.md.

    FEDBAYES_DATA=<folder> python benchmarks/newcomers_evidence.py

`newcomers.py --report` calls it too. It reads benchmarks/newcomers.jsonl and writes src/fedbayes/study/evidence.json: of each
set its clients, rows and skew, FedAvg's log scores, and the gains of other methods over the same seeds. A set whose data is
not there keeps the profile that it has.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common

import fedbayes as fb
from fedbayes.data.profile import Profile, profile
from fedbayes.files import write
from fedbayes.study import advise

PAGE = Path(__file__).parent.parent / "docs" / "choose-a-method.md"
MODES = {"5": "adapted:5", "20": "adapted:20", "all": "adapted"}
EXAMPLE = {"data": "digits", "partition": "dirichlet:0.3", "clients": 30}
"""The data of the page's example."""

Rows = Mapping[tuple[str, str, int], dict[str, Any]]


def update(sets: Mapping[str, Any], rows: Rows) -> None:
    """Write the evidence and what follows from it on the page."""
    before = advise.read() if advise.EVIDENCE.exists() else {}
    found = {name: one for name, of in sets.items() if (one := measured(name, of, rows, before.get(name))) is not None}
    write(advise.EVIDENCE, advise.write(found))
    common.put(PAGE, "measured", table(found))
    common.put(PAGE, "example", example())


def measured(name: str, of: Any, rows: Rows, before: advise.Measured | None) -> advise.Measured | None:
    """The evidence of one set; None where no method ran beside FedAvg."""
    base = {seed: one["unseen"] for (data, method, seed), one in rows.items() if (data, method) == (name, "fedavg")}
    others = sorted({method for data, method, _ in rows if data == name and method != "fedavg"})
    if not base or not others:
        return None

    def gains(method: str, over: Mapping[str, str]) -> dict[str, advise.Gain]:
        pairs = [(rows[name, method, seed]["unseen"], base[seed]) for seed in base if (name, method, seed) in rows]
        return {label: gain for label, mode in MODES.items() if (gain := difference(pairs, mode, over[label])) is not None}

    seeds = sorted(base)
    tuned = {label: [base[seed][mode]["log_score"] for seed in seeds if mode in base[seed]] for label, mode in MODES.items()}
    return advise.Measured(
        of.title,
        known(of, seeds[0], before),
        round(statistics.mean(base[seed]["global"]["log_score"] for seed in seeds), 4),
        {label: round(statistics.mean(values), 4) for label, values in tuned.items() if values},
        {method: gains(method, MODES) for method in others},
        {method: gains(method, dict.fromkeys(MODES, "global")) for method in others if method in advise.UNLABELLED},
    )


def difference(pairs: list[tuple[Any, Any]], mode: str, over: str) -> advise.Gain | None:
    """The mean difference in log score between a method in a mode and FedAvg in another, over seeds."""
    values = [one[mode]["log_score"] - other[over]["log_score"] for one, other in pairs if mode in one and over in other]
    if not values:
        return None
    error = None if len(values) == 1 else round(statistics.stdev(values) / len(values) ** 0.5, 4)
    return advise.Gain(round(statistics.mean(values), 4), error, len(values))


def known(of: Any, seed: int, before: advise.Measured | None) -> Profile:
    """The profile of a set's clients; where their data is not there, the one that was written before."""
    try:
        found = profile(of.load(seed))
    except (KeyError, OSError, fb.UserError) as problem:
        if before is None:
            raise fb.UserError(f"{of.title}: its data cannot be read ({problem}); set FEDBAYES_DATA to its folder") from None
        return before.profile
    return Profile(found.task, found.clients, found.rows, found.classes, found.labels, round(found.skew, 3))


def table(found: Mapping[str, advise.Measured]) -> str:
    """A line for each set: what it is, and the methods that were ahead of fine-tuned FedAvg, or level with it."""
    lines = ["| | clients | rows | labels | skew | with 5 rows | with 20 rows | with all rows |", "|---" * 8 + "|"]
    for one in found.values():
        of = one.profile
        labels = "numbers" if of.labels is None else f"{of.labels:g} of {of.classes}"
        cells = [" · ".join(best(one, label)) or common.MISSING for label in MODES]
        lines.append(f"| {one.title} | {of.clients} | {of.rows:g} | {labels} | {of.skew:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best(one: advise.Measured, label: str) -> list[str]:
    """The best two methods with newcomers of so many rows, bold where ahead; FedAvg where all others are behind."""
    gains = {name: of[label] for name, of in one.methods.items() if label in of}
    order = advise.promising(gains)
    if gains and not order:
        return ["fedavg: all others behind"]
    return [cell(name, gains[name]) for name in order]


def cell(name: str, gain: advise.Gain) -> str:
    """A method with its gain and standard error; an asterisk where seeds are too few."""
    error = "" if gain.error is None else f" ± {gain.error:.3f}"
    few = "" if gain.seeds >= advise.SEEDS else " \\*"
    text = f"{name} {gain.mean:+.3f}{error}{few}"
    return f"**{text}**" if gain.standing == "ahead" else text


def example() -> str:
    """The command of the page and what it prints."""
    from fedbayes.cli.advise import text
    from fedbayes.study.options import DataOptions

    options = DataOptions(**EXAMPLE)
    return f"```text\n{text(options)}\n```"


def main() -> int:
    """Update from the rows that there are."""
    import newcomers

    update(newcomers.SETS, {key: one for key, one in newcomers.rows().items() if "refused" not in one})
    return 0


if __name__ == "__main__":
    common.command(main)
