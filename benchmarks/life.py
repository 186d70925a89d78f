"""A test of life for every Bayesian method over clients, at its defaults: the worth of each part of its uncertainty.

    FEDBAYES_DATA=<folder> python benchmarks/life.py --label before                      # every cell that has not run yet
    FEDBAYES_DATA=<folder> python benchmarks/life.py --label before --sets digits --methods bpfed fedpop --seeds 0
    python benchmarks/life.py --report                                                   # docs/results/life.md

A cell is a label, a set, a method and a seed, which draws the clients, the rows and the start. A method is trained at its
defaults, with the choice of settings that is on by default, and taken apart by `fb.check`; with `--twin`, where it has a twin
without noise in its steps, that is trained too. Figures are appended to benchmarks/life.jsonl. A label says which state of the
defaults a cell was run with: run the cells again under another label when they change, and the page has both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

import fedbayes as fb
from fedbayes.algorithms import find
from fedbayes.data import Clients
from fedbayes.evaluation.life import TITLES, Life, Worth
from fedbayes.sheets import Cell, Sheet, markdown

PAGE = Path(__file__).parent.parent / "docs" / "results" / "life.md"
OUT = Path(__file__).with_suffix(".jsonl")
METHODS = ("bpfed", "pfedbayes", "fedhb-niw", "fedhb-mixture", "fedvi", "fedpop")


@dataclasses.dataclass(frozen=True)
class Set:
    """A data set with clients that never train."""

    title: str
    load: Callable[[int], Clients]
    rounds: int
    cohort: int | None = None


def levels(seed: int) -> Clients:
    """40 clients, 10 of them new, with linear weights N(w, .5²) of their own, noise of sd .5, and 20 rows to adapt to."""
    random = np.random.default_rng([7, seed])
    clients, rows, features = 40, 60, 5
    x = random.normal(size=(clients * rows, features)).astype(np.float32)
    client = np.repeat(np.arange(clients), rows)
    weights = random.normal(size=features) + 0.5 * random.normal(size=(clients, features))
    y = np.sum(x * weights[client], axis=1) + 0.5 * random.normal(size=len(x))
    is_test = np.tile(np.arange(rows) >= 20, clients)
    built = Clients.build(x, y.astype(np.float32), client, is_test=is_test, name="levels")
    return built.hold_out(10, seed=seed)


SETS = {
    "synthetic": Set(
        "made-up labels: each of 24 clients has features and weights of its own",
        lambda seed: fb.data.synthetic(clients=24, rows=80, features=10, classes=4, seed=seed).hold_out(6, seed=seed),
        60,
    ),
    "levels": Set("made-up numbers: linear weights N(w, .5²) of 40 clients, 20 rows each", levels, 60),
    "digits": Set(
        "digits, 3 labels a client, 20 clients",
        lambda seed: fb.data.load("digits", partition="labels:3", clients=20, hold_out=4, seed=seed),
        60,
    ),
    "writers": Set(
        "MNIST by writer, 836 writers, of whom 64 are checked", lambda seed: fb.data.load("mnist_writers", seed=seed), 100, 20
    ),
}


def run(label: str, name: str, method: str, seed: int, twin: bool) -> dict[str, Any]:
    """One cell."""
    of, began = SETS[name], time.perf_counter()
    clients = of.load(seed)
    algorithm = find(method)(fb.network("linear" if name == "levels" else "mlp", clients))
    fit = fb.simulate(algorithm, clients, of.rounds, seed=seed, cohort=of.cohort)
    trained = time.perf_counter()
    found = fb.check(fit, twin=twin and fit.shared.algorithm.deterministic is not None)
    seconds = {"train": trained - began, "check": time.perf_counter() - trained}
    where = {"label": label, "set": name, "method": method, "seed": seed}
    return {**where, "title": algorithm.title, "seconds": seconds, "check": found.to_json()}


def known() -> list[dict[str, Any]]:
    """The cells that have run."""
    return [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.exists() else []


def pooled(worths: list[Worth]) -> Worth:
    """The mean over seeds, with the standard error over their clients."""
    return Worth(float(np.mean([one.mean for one in worths])), math.sqrt(sum(one.error**2 for one in worths)) / len(worths))


def table(cells: list[dict[str, Any]], title: str) -> str:
    """One row for each label, method and mode."""
    rows = []
    for method in METHODS:
        for label in dict.fromkeys(cell["label"] for cell in cells):
            chosen = [cell for cell in cells if (cell["label"], cell["method"]) == (label, method)]
            failed = next((cell["refused"] for cell in chosen if "refused" in cell), None)
            if failed:
                rows.append([Cell(method), Cell(label), Cell(f"refuses the set: {failed}"), *[Cell("")] * len(SHOWN), Cell("")])
                continue
            lives = [Life.from_json(life) for cell in chosen for life in cell["check"]["lives"]]
            for mode in dict.fromkeys(life.mode for life in lives):
                each = [life for life in lives if life.mode == mode]
                words = [life.word for life in each]
                verdict = ", ".join(f"{word} ({words.count(word)})" for word in dict.fromkeys(words))
                cells_of = []
                for part in SHOWN:
                    worths = [life.parts[part] for life in each if part in life.parts]
                    worth = pooled(worths) if worths else None
                    cells_of.append(
                        Cell("—") if worth is None else Cell(f"{worth.mean:+.3f} ± {worth.error:.3f}", worth.sign != 0)
                    )
                score = Cell(f"{np.mean([life.log_score for life in each]):.3f}")
                rows.append([Cell(method), Cell(label), Cell(mode), Cell(verdict), score, *cells_of])
    seeds = sorted({cell["seed"] for cell in cells})
    caption = f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))}); bold: more than two standard errors"
    headings = ["method", "defaults", "mode", "verdict (seeds)", "log score", *(SHORT[name] for name in SHOWN)]
    return markdown(Sheet(title, caption, headings, [rows]))


SHORT = {
    "training": "noise in training",
    "averaging": "averaging",
    "scales: layer": "scales: by array",
    "scales: one": "scales: one number",
    "scales: shuffled": "scales: shuffled",
    "person": "the person",
    "prior: one": "prior: one number",
    "prior: shuffled": "prior: shuffled",
}
SHOWN = tuple(SHORT)
assert set(SHOWN) <= set(TITLES)


def report() -> None:
    """Write the tables of the page."""
    cells = known()
    for name, of in SETS.items():
        if chosen := [cell for cell in cells if cell["set"] == name]:
            common.put(PAGE, name, table(chosen, of.title))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="now", help="the state of the defaults")
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--twin", action="store_true", help="also train twins without noise in their steps")
    parser.add_argument("--report", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.report:
        there = {(cell["label"], cell["set"], cell["method"], cell["seed"]) for cell in known()}
        for seed in given.seeds:
            for name in given.sets:
                for method in given.methods:
                    if (given.label, name, method, seed) in there:
                        continue
                    try:
                        cell = run(given.label, name, method, seed, given.twin)
                        print(name, method, seed, {key: round(value) for key, value in cell["seconds"].items()}, flush=True)
                        print("\n".join(life["verdict"] for life in cell["check"]["lives"]), flush=True)
                    except fb.UserError as problem:
                        cell = {"label": given.label, "set": name, "method": method, "seed": seed, "refused": str(problem)}
                        print(name, method, seed, problem, flush=True)
                    with OUT.open("a") as file:
                        file.write(json.dumps(cell) + "\n")
    report()
    return 0


if __name__ == "__main__":
    common.command(main)
