"""The federation's choice of settings for `adapt`: prior widths where the spread is known, regret, time and bytes.

    FEDBAYES_DATA=<folder> python benchmarks/choice.py                              # every cell that has not run yet
    FEDBAYES_DATA=<folder> python benchmarks/choice.py --parts regret --sets digits --seeds 0
    python benchmarks/choice.py --report                                            # docs/results/choice.md

Part `width`: FedPop on linear data whose clients' weights are N(w, s²), s known; the σ that is chosen, in units of the data.
Part `regret`: each candidate of the grid on clients that never trained, after one training run, beside the chosen one; the
seconds of choosing and of training, and the bytes of both, are measured in the same run. Figures are appended to
benchmarks/choice.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import newcomers
import numpy as np

import fedbayes as fb
from fedbayes import wire
from fedbayes.data import Clients
from fedbayes.engine.choose import LABELS, Choice, Choosing, Chosen, Plan, candidates
from fedbayes.evaluation.assess import assess

PAGE = Path(__file__).parent.parent / "docs" / "results" / "choice.md"
OUT = Path(__file__).with_suffix(".jsonl")
WIDTHS, WIDTH_SEEDS = (0.2, 0.5, 1.0), tuple(range(10))
SETS = ("digits", "adult", "hours", "spread", "chars", "writers", "fashion")
METHODS = ("fedavg", "fedpop", "fedhb-niw", "bpfed")
FACTOR = 1.5
"""A chosen width is right within this factor of the true one."""


class Trained:
    """A run round by round, with the seconds of each and of choosing, which is done twice: with compilation, and after."""

    def __init__(self, algorithm: Any, clients: Clients, rounds: int, seed: int, cohort: int | None = None) -> None:
        self.algorithm = algorithm.planned(rounds, **clients.facts)
        self.plan = Plan.of(self.algorithm, seed, clients.participants, rounds)
        assert self.plan is not None
        self.simulation = fb.Simulation(self.algorithm, clients, seed=seed, plan=self.plan, cohort=cohort)
        self.cohort = cohort
        self.rounds: list[float] = []
        self.choosing: list[float] = []
        for round in range(1, rounds + 1):
            self.rounds.append(self.simulation.step().seconds)
            if round == self.plan.until:
                self.chosen = self._choose()
                self._choose()

    def _choose(self) -> Chosen:
        began = time.perf_counter()
        found = self.simulation.choose()
        self.choosing.append(time.perf_counter() - began)
        return found

    def cost(self) -> dict[str, float]:
        """Seconds and bytes of choosing and of training."""
        assert self.plan is not None
        example, clients = self.simulation.data.example, len(self.simulation.data.participants)
        late = len(self.plan.newcomers)
        answers = clients * len(self.rounds) - late * self.plan.until if self.cohort is None else self.cohort * len(self.rounds)
        share = 1.0 if self.cohort is None else self.cohort / clients
        sent = {one: sum(leaf.bytes for leaf in wire.manifest(one, example) if leaf.message == "up") for one in self._both}
        choosing, training = (sent[one] for one in self._both)
        return {
            "first": self.choosing[0],
            "again": self.choosing[1],
            "train first": sum(self.rounds),
            "train": statistics.median(self.rounds) * len(self.rounds),
            "bytes": late * choosing,
            "train bytes": answers * training,
            "own bytes": choosing,
            "own train bytes": (len(self.rounds) - self.plan.until) * share * training,
        }

    @property
    def _both(self) -> tuple[Any, Any]:
        return Choosing(self.algorithm, self.plan.repeats), self.algorithm


def width(true: float, seed: int) -> dict[str, Any]:
    """σ as FedPop's newcomers choose it, in units of the data, for each number of rows."""
    newcomers.WIDTH, before = true, newcomers.WIDTH
    try:
        clients = newcomers.spread_out(seed)
    finally:
        newcomers.WIDTH = before
    run = Trained(fb.FedPop(fb.network("linear", clients)), clients, newcomers.SETS["spread"].rounds, seed)
    unit = clients.target_moments()[1]
    told = [dict(zip(run.chosen.choice.names, map(float, one), strict=True)) for one in run.chosen.choice.values]
    grid = sorted({dict(zip(run.chosen.choice.names, one, strict=True))["sigma"] for one in candidates(run.algorithm).values})
    return {"unit": unit, "grid": [unit * one for one in grid if one], "chosen": told, "gain": run.chosen.gain.tolist()}


def regret(name: str, method: str, seed: int) -> dict[str, Any]:
    """Log scores of newcomers with each candidate and with the chosen ones; and the cost of choosing."""
    of = newcomers.SETS[name]
    clients = of.load(seed)
    run = Trained(newcomers.built(of, clients, method), clients, of.rounds, seed, of.cohort)
    names, values = candidates(run.algorithm)
    every = [np.tile(np.asarray(one, np.float32), (len(LABELS), 1)) for one in values]
    began = time.perf_counter()
    fixed = [unseen(run, Choice(names, every[0]))]
    evaluation = time.perf_counter() - began
    fixed += [unseen(run, Choice(names, one)) for one in every[1:]]
    chosen = unseen(run, run.chosen.choice)
    return {
        "names": list(names),
        "values": [list(one) for one in values],
        "fixed": {label: [one[label] for one in fixed] for label in newcomers.MODES},
        "chosen": chosen,
        "settings": np.asarray(run.chosen.choice.values, float).tolist(),
        "cost": {**run.cost(), "evaluation": evaluation},
    }


def unseen(run: Trained, choice: Choice) -> dict[str, float]:
    """Log scores of clients that never trained, for each number of rows."""
    run.simulation.choice = choice
    summary = assess(run.simulation, tuple(newcomers.MODES.values())).summary()
    return {label: summary[mode]["unseen"]["log_score"]["rows"] for label, mode in newcomers.MODES.items()}


def rows() -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last figures of each cell."""
    lines = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []
    return {tuple(one["cell"]): one for one in lines}


def width_table(known: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """For each true width and number of rows the chosen ones over seeds."""
    lines = ["| | rows | candidates | chosen σ, median [least, largest] | within 1.5 | seeds |", "|---" * 6 + "|"]
    for true in WIDTHS:
        found = [one for cell, one in known.items() if cell[:2] == ("width", true)]
        for place, label in enumerate(LABELS) if found else ():
            sigmas = [one["unit"] * one["chosen"][place]["sigma"] for one in found]
            right = sum(true / FACTOR <= one <= true * FACTOR for one in sigmas)
            grid = ", ".join(f"{statistics.mean(values):.2f}" for values in zip(*(one["grid"] for one in found), strict=True))
            spread = f"{statistics.median(sigmas):.2f} [{min(sigmas):.2f}, {max(sigmas):.2f}]"
            lines.append(f"| s = {true:g} | {label} | {grid} | {spread} | {right} of {len(found)} | {len(found)} |")
    return "\n".join(lines)


def regret_table(known: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Mean regret and its standard deviation over seeds; and beside it what not adapting would lose."""
    lines = ["| | rows | " + " | ".join(METHODS) + " | seeds |", "|---" * (len(METHODS) + 3) + "|"]
    for name in SETS:
        for label in newcomers.MODES:
            cells, seeds = [], set()
            for method in METHODS:
                found = {cell[3]: one for cell, one in known.items() if cell[:3] == ("regret", name, method)}
                seeds |= set(found)
                lost = [max(one["fixed"][label]) - one["chosen"][label] for one in found.values()]
                still = [max(one["fixed"][label]) - one["fixed"][label][0] for one in found.values()]
                cells.append(f"{common.spread(lost, 3)} ({statistics.mean(still):.3f})" if found else common.MISSING)
            if seeds:
                lines.append(f"| {newcomers.SETS[name].title} | {label} | {' | '.join(cells)} | {len(seeds)} |")
    return "\n".join(lines)


def cost_table(known: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Seconds and bytes of choosing beside those of the run, of seed 0, which compiles its programs itself."""
    head = ["", "", "candidates", "seconds, compiled", "of training", "seconds with compilation", "of the rest of the run"]
    head += ["bytes of all clients", "bytes of a chooser"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in SETS:
        for method in METHODS:
            one = known.get(("regret", name, method, 0))
            if one is not None and "evaluation" in one["cost"]:
                cost = one["cost"]
                rest = cost["train first"] + cost["evaluation"]
                cells = [f"{cost['again']:.2f}", f"{100 * cost['again'] / cost['train']:.0f} %"]
                cells += [f"{cost['first']:.1f}", f"{100 * cost['first'] / rest:.0f} %"]
                pairs = (("bytes", "train bytes"), ("own bytes", "own train bytes"))
                cells += [f"{100 * cost[part] / cost[whole]:.3f} %" for part, whole in pairs]
                lines.append(f"| {newcomers.SETS[name].title} | {method} | {len(one['values'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report() -> int:
    """The tables of the page."""
    known = rows()
    for section, table in (("width", width_table), ("regret", regret_table), ("cost", cost_table)):
        common.put(PAGE, section, table(known))
    return 0


def cells(options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """The cells that are asked for."""
    if "width" in options.parts:
        yield from (("width", true, seed) for seed in WIDTH_SEEDS for true in WIDTHS)
    if "regret" in options.parts:
        yield from (
            ("regret", name, method, seed) for seed in options.seeds for name in options.sets for method in options.methods
        )


def main() -> int:
    """Run cells, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("width", "regret"), default=["width", "regret"])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the part regret; widths have ten")
    parser.add_argument("--again", action="store_true", help="run cells that have figures too")
    parser.add_argument("--report", action="store_true", help="write docs/results/choice.md")
    options = parser.parse_args()
    if options.report:
        return report()
    for cell in cells(options):
        if cell in rows() and not options.again:
            continue
        found = {"width": width, "regret": regret}[cell[0]](*cell[1:])
        with OUT.open("a") as file:
            file.write(json.dumps({"cell": cell, **found}) + "\n")
        print(*cell, found["chosen"], found.get("cost", ""), flush=True)
    return 0


if __name__ == "__main__":
    common.command(main)
