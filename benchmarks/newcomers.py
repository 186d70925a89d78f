"""Newcomers with 5, 20 and all rows: methods at their defaults, with the settings that the federation chooses.

    FEDBAYES_DATA=<folder> python benchmarks/newcomers.py                                   # every cell that has not run yet
    FEDBAYES_DATA=<folder> python benchmarks/newcomers.py --sets digits --methods fedavg fedpop --seeds 0 1 2
    python benchmarks/newcomers.py --report                                                 # docs/results/newcomers.md

A cell is a set, a method and a seed, which draws the clients, the rows and the start. All methods have the same network,
rounds and cohorts. Each is scored on the test rows of clients that never trained, after `adapt` on 5, 20 or all of their
training rows. "FedAvg" is the shared model, "FedAvg, fine-tuned" the same run after `adapt`. Figures are appended to
benchmarks/newcomers.jsonl. A cell whose method refuses the network or the target is kept there with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import jax
import newcomers_evidence
import numpy as np

import fedbayes as fb
from fedbayes.algorithms import find
from fedbayes.data import Clients

PAGE = Path(__file__).parent.parent / "docs" / "results" / "newcomers.md"
OUT = Path(__file__).with_suffix(".jsonl")
MODES = {"5": "adapted:5", "20": "adapted:20", "all": "adapted"}
METHODS = ("fedavg", "fedper", "fedpop", "bpfed", "fedvi", "fedhb-niw", "fedhb-mixture", "bayes-admm")


@dataclasses.dataclass(frozen=True)
class Set:
    """A data set with clients that never train."""

    title: str
    load: Callable[[int], Clients]
    rounds: int
    network: str = "mlp"
    cohort: int | None = None


def spread_out(seed: int) -> Clients:
    """60 clients, 20 of them new, with linear weights N(w, .5²) of their own and noise of sd .5."""
    random = np.random.default_rng([7, seed])
    clients, rows, features = 60, 80, 5
    x = random.normal(size=(clients * rows, features)).astype(np.float32)
    client = np.repeat(np.arange(clients), rows)
    weights = random.normal(size=features) + WIDTH * random.normal(size=(clients, features))
    y = np.sum(x * weights[client], axis=1) + 0.5 * random.normal(size=len(x))
    return Clients.build(x, y.astype(np.float32), client, test=0.5, seed=seed, name="spread").hold_out(20, seed=seed)


WIDTH = 0.5


def adult(target: str, task: str) -> Callable[[int], Clients]:
    """Adult by occupation, of which three are new."""

    def load(seed: int) -> Clients:
        import pandas as pd

        path = Path(os.environ["FEDBAYES_DATA"]) / "adult" / "adult.csv.gz"
        table = pd.read_csv(path)
        table = table[table["occupation"] != "?"].sample(6000, random_state=seed)
        columns = ["age", "education-num", "hours-per-week", "capital-gain", "capital-loss"]
        x = table[[one for one in columns if one != target]].to_numpy(np.float32)
        flags = [(table[name] == value).to_numpy(np.float32) for name, value in (("sex", "Male"), ("race", "White"))]
        flags.append(table["marital-status"].str.startswith("Married").to_numpy(np.float32))
        x = np.concatenate([np.sign(x) * np.log1p(np.abs(x)), np.stack(flags, axis=1)], axis=1)
        y = (table[target].str.startswith(">")).to_numpy(np.int32) if task == "labels" else table[target].to_numpy(np.float32)
        named = Clients.build(x, y, table["occupation"].to_numpy(), seed=seed, name="adult")
        return named.hold_out(3, seed=seed).standardised()

    return load


SETS = {
    "spread": Set("known spread between clients (numbers)", spread_out, 60, "linear"),
    "digits": Set(
        "digits, 3 labels a client",
        lambda seed: fb.data.load("digits", partition="labels:3", clients=20, hold_out=4, seed=seed),
        60,
    ),
    "heart": Set("heart disease, 4 hospitals", lambda seed: fb.data.load("heart_disease_uci", hold_out=1, seed=seed), 60),
    "adult": Set("Adult by occupation, income", adult("income", "labels"), 60),
    "hours": Set("Adult by occupation, hours (numbers)", adult("hours-per-week", "numbers"), 60),
    "chars": Set("handwritten characters, 55 writers", lambda seed: fb.data.load("chars74k_hnd", hold_out=10, seed=seed), 100),
    "writers": Set("MNIST by writer, 836 writers", lambda seed: fb.data.load("mnist_writers", seed=seed), 100, cohort=20),
    "fashion": Set(
        "Fashion-MNIST, 5 shards", lambda seed: fb.data.load("fashion_mnist", hold_out=20, seed=seed), 100, cohort=20
    ),
}


def cell(name: str, method: str, seed: int) -> dict[str, Any]:
    """Train a method once and score newcomers; where the method refuses the set, the reason."""
    of = SETS[name]
    clients = of.load(seed)
    try:
        return {"set": name, "method": method, "seed": seed, **trained(of, clients, method, seed)}
    except fb.UserError as problem:
        return {"set": name, "method": method, "seed": seed, "refused": str(problem)}


def built(of: Set, clients: Clients, method: str) -> Any:
    """A method at its defaults with the set's network."""
    algorithm = find(method, "clients")(fb.network(of.network, clients))
    if of.network == "linear" and method in ("fedper", "bpfed"):  # nothing else is left to share
        return dataclasses.replace(algorithm, personal=("head/bias",))
    return algorithm


def trained(of: Set, clients: Clients, method: str, seed: int) -> dict[str, Any]:
    """Figures of a method at its defaults, and the settings that were chosen."""
    algorithm = built(of, clients, method)
    began = time.perf_counter()
    modes = ("global", *MODES.values())
    fit = fb.simulate(algorithm, clients, of.rounds, seed=seed, cohort=of.cohort, modes=modes)
    seconds, summary = time.perf_counter() - began, fit.evaluation.summary()
    found = {group: figures(summary, group) for group in ("unseen", "participating")}
    chosen = [list(one["settings"].values()) for one in fit.result.get("choice", {}).values()]
    return {"seconds": round(seconds, 1), **found, "chosen": chosen}


def figures(summary: Any, group: str) -> dict[str, dict[str, float]]:
    """Figures of a group of clients over its rows, for each mode."""
    metrics = ("accuracy", "rmse", "log_score", "ece", "coverage")
    return {
        mode: {metric: round(groups[group][metric]["rows"], 5) for metric in metrics if metric in groups[group]}
        for mode, groups in summary.items()
        if group in groups
    }


def rows(out: Path = OUT) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The last figures of each cell."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {(one["set"], one["method"], one["seed"]): one for one in lines}


def report() -> int:
    """Tables of log scores as differences from fine-tuned FedAvg over the same seeds, and of other metrics as they are."""
    known = rows()
    for section, group in (("log score", "unseen"), ("participants", "participating")):
        common.put(PAGE, section, differences(known, group))
    common.put(PAGE, "accuracy", levels(known, ("accuracy", "rmse")))
    common.put(PAGE, "calibration", levels(known, ("ece", "coverage")))
    common.put(PAGE, "calibration of participants", levels(known, ("ece", "coverage"), "participating"))
    ran = {key: one for key, one in known.items() if "refused" not in one}
    newcomers_evidence.update(SETS, ran)  # for fedbayes advise
    return 0


def differences(known: dict[tuple[str, str, int], dict[str, Any]], group: str) -> str:
    """Log scores, FedAvg's as they are and others' less fine-tuned FedAvg's."""
    lines = [
        "| | rows | FedAvg | FedAvg, fine-tuned | " + " | ".join(METHODS[1:]) + " | seeds |",
        "|---" * (len(METHODS) + 4) + "|",
    ]
    for name, of, seeds, label, mode in cells(known):
        base = {seed: known[name, "fedavg", seed][group] for seed in seeds}
        tuned = [base[seed][mode]["log_score"] for seed in seeds]
        found = [common.spread([base[seed]["global"]["log_score"] for seed in seeds], 3), common.spread(tuned, 3)]
        for method in METHODS[1:]:
            pairs = [(known.get((name, method, seed)), base[seed]) for seed in seeds]
            ran = [(one[group], other) for one, other in pairs if one and "refused" not in one]
            gaps = [one[mode]["log_score"] - other[mode]["log_score"] for one, other in ran]
            found.append("refused" if not ran and any(one for one, _ in pairs) else gap(gaps))
        lines.append(f"| {of.title} | {label} | {' | '.join(found)} | {len(seeds)} |")
    return "\n".join(lines)


def levels(known: dict[tuple[str, str, int], dict[str, Any]], metrics: tuple[str, ...], group: str = "unseen") -> str:
    """One of these metrics of a group of clients, whichever a set has."""
    lines = ["| | rows | metric | " + " | ".join(METHODS) + " | seeds |", "|---" * (len(METHODS) + 4) + "|"]
    for name, of, seeds, label, mode in cells(known):
        metric = next(one for one in metrics if one in known[name, "fedavg", seeds[0]][group][mode])
        found = []
        for method in METHODS:
            ran = [one for seed in seeds if (one := known.get((name, method, seed))) and "refused" not in one]
            found.append(common.spread([one[group][mode][metric] for one in ran], 3))
        lines.append(f"| {of.title} | {label} | {metric} | {' | '.join(found)} | {len(seeds)} |")
    return "\n".join(lines)


def cells(known: dict[tuple[str, str, int], dict[str, Any]]) -> Iterator[tuple[str, Set, list[int], str, str]]:
    """Each set with its seeds, and each number of rows with its mode."""
    for name, of in SETS.items():
        seeds = sorted(seed for data, method, seed in known if data == name and method == "fedavg")
        for label, mode in MODES.items() if seeds else ():
            yield name, of, seeds, label, mode


def gap(values: list[float]) -> str:
    """A mean difference and its standard error over seeds; bold where it is ahead by more than that."""
    if not values:
        return common.MISSING
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:+.3f}"
    error = statistics.stdev(values) / len(values) ** 0.5
    text = f"{mean:+.3f} ± {error:.3f}"
    return f"**{text}**" if mean > error else text


def main() -> int:
    """Run cells, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--again", action="store_true", help="run cells that have figures too")
    parser.add_argument("--out", type=Path, default=OUT, help="where figures are appended; --report reads the default")
    parser.add_argument("--report", action="store_true", help="write docs/results/newcomers.md")
    options = parser.parse_args()
    if options.report:
        return report()
    for seed in options.seeds:
        for name in options.sets:
            for method in options.methods:
                if (name, method, seed) in rows(options.out) and not options.again:
                    continue
                found = cell(name, method, seed)
                jax.clear_caches()  # what was compiled for a cell serves no other
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                if "refused" in found:
                    print(f"{name:10}{method:16}seed {seed}  refused: {found['refused']}", flush=True)
                    continue
                scores = {mode: round(one["log_score"], 3) for mode, one in found["unseen"].items()}
                print(f"{name:10}{method:16}seed {seed}  {found['seconds']:6.1f} s  {scores}  {found['chosen']}", flush=True)
    return 0


if __name__ == "__main__":
    common.command(main)
