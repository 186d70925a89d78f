"""FedHB's Tables 10 and 11 with the same budget of step sizes for every method, chosen on validation rows. `--help` says how.

    FEDBAYES_DATA=… python benchmarks/fedhb_budget.py                        all methods, both sets, τ = 1 and 5, seeds 0, 1, 2
    FEDBAYES_DATA=… python benchmarks/fedhb_budget.py --only niw,fedavg --data mnist --epochs 1
    FEDBAYES_DATA=… python benchmarks/fedhb_budget.py --at .3333 3 --only fedavg --data fashion_mnist --epochs 5
    FEDBAYES_DATA=… python benchmarks/fedhb_budget.py --table                only write what there is into docs/results/fedhb.md

A method has twelve tries: its training step size of benchmarks/fedhb.py times 1/3, 1 or 3, and one of four step sizes of
personalisation (FedPop, which has none, has nine: one of three lengths of its chain). Tries are scored on a fifth of each
client's training rows, which are not trained on, with seed 0 and τ = 1; the test rows have no part in it. The try with the
best personalised accuracy is then trained on all training rows and tested, with each seed and each τ. Each run has a file
under --out: what is there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import common
import fedhb
from fedhb_mnist import clients, network

import fedbayes as fb
from fedbayes.files import write

FACTORS = (1 / 3, 1.0, 3.0)
PERSONAL = (1.0, 3.0, 10.0, 30.0)
"""Times the step size of personalisation, or for FedPop times the length of its chain."""


def trained_at(algorithm: Any, factor: float) -> Any:
    return dataclasses.replace(algorithm, train=dataclasses.replace(algorithm.train, lr=algorithm.train.lr * factor))


def tuned_at(algorithm: Any, factor: float) -> Any:
    if isinstance(algorithm, fb.FedPop):
        return dataclasses.replace(algorithm, adapt_steps=round(algorithm.adapt_steps * factor))
    return dataclasses.replace(algorithm, tune=dataclasses.replace(algorithm.tune, lr=algorithm.tune.lr * factor))


def scored(fit: Any, factors: tuple[float, ...]) -> dict[str, Any]:
    """Figures of the shared model and after personalisation with each factor; a try that diverges has none."""
    found: dict[str, Any] = {"global": fedhb.figures(fit.evaluation, "global")}
    start = fit.simulation.algorithm
    for factor in factors[:3] if isinstance(start, fb.FedPop) else factors:
        fit.simulation.algorithm = tuned_at(start, factor)
        try:
            found[f"{factor:g}"] = fedhb.figures(fb.assess(fit.simulation, ("adapted",)), "adapted")
        except fb.UserError as problem:
            print(f"personalised at {factor:g}: {problem}", file=sys.stderr)
    return found


def fitted(algorithm: Any, data: Any, epochs: int, seed: int) -> Any:
    return fb.simulate(algorithm, data, 100 // epochs, cohort=10, seed=seed, modes=("global",), choose=False)


def choose(name: str, data: str, out: Path, epochs: int = 1) -> tuple[float, float]:
    """The factors with the best personalised accuracy on validation rows."""
    done = out / f"choice-{name}-{data}-{epochs}.json"
    tries: dict[str, Any] = json.loads(done.read_text()) if done.exists() else {}
    for factor in FACTORS:
        if f"{factor:g}" in tries:
            continue
        algorithm = trained_at(fedhb.METHODS[name](network(data), epochs, data), factor)
        try:
            fit = fitted(algorithm, fedhb.validation(data, 0), epochs, 0)
            tries[f"{factor:g}"] = scored(fit, PERSONAL)
        except fb.UserError as problem:
            print(f"{name} at {factor:g}: {problem}", file=sys.stderr)
            tries[f"{factor:g}"] = {}
        done.parent.mkdir(parents=True, exist_ok=True)
        write(done, json.dumps(tries, indent=2).encode())
    best = max(
        (one["accuracy"], train, tune) for train, found in tries.items() for tune, one in found.items() if tune != "global"
    )
    return float(best[1]), float(best[2])


def run(name: str, data: str, epochs: int, seed: int, out: Path) -> dict[str, Any]:
    train, tune = choose(name, data, out)
    done = out / f"test-{name}-{data}-{epochs}-{seed}.json"
    if done.exists():
        return json.loads(done.read_text())
    train = min(FACTORS, key=lambda factor: abs(factor - train))  # 1/3 was written with six digits
    fit = fitted(trained_at(fedhb.METHODS[name](network(data), epochs, data), train), clients(data, seed), epochs, seed)
    found = {"train": train, "tune": tune, **scored(fit, (tune,))}
    found["adapted"] = found.pop(f"{tune:g}")
    write(done, json.dumps(found, indent=2).encode())
    return found


def tried(name: str, data: str, epochs: int, seeds: list[int], train: float, tune: float) -> str:
    """What other factors than the chosen ones come to."""
    found = []
    for seed in seeds:
        algorithm = trained_at(fedhb.METHODS[name](network(data), epochs, data), train)
        found.append(scored(fitted(algorithm, clients(data, seed), epochs, seed), (tune,)))
    figures = [
        f"{common.spread([one[mode]['accuracy'] for one in found])} {title}"
        for mode, title in (("global", "global"), (f"{tune:g}", "personalised"))
    ]
    return f"{name} {data} τ={epochs} at {train:.2g}, {tune:g}: {', '.join(figures)}"


def table(out: Path) -> str:
    lines = ["| | | " + " | ".join(fedhb.LABELS) + " |", "|---" * (len(fedhb.LABELS) + 2) + "|"]
    for data, epochs in fedhb.SETTINGS:
        title = fedhb.title(data, epochs)
        runs = {name: common.found(out, f"test-{name}-{data}-{epochs}-*.json") for name in fedhb.METHODS}
        for mode, kind in (("global", "global"), ("adapted", "personalised")):
            for figure, digits in (("accuracy", 2), ("ece", 2), ("log_score", 3)):
                cells = [common.spread([one[mode][figure] for one in found], digits) for found in runs.values()]
                lines.append(f"| {title}, {kind} | {figure.replace('_', ' ')} | " + " | ".join(cells) + " |")
        chosen = [f"{found[0]['train']:.2g}, {found[0]['tune']:g}" if found else common.MISSING for found in runs.values()]
        lines.append(f"| {title} | chosen factors | " + " | ".join(chosen) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(fedhb.METHODS), help="methods, by name, with commas")
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion_mnist"])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5], help="τ")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/fedhb-budget"), help="folder of the runs")
    parser.add_argument("--at", type=float, nargs=2, metavar="FACTOR", help="only try these two factors, on test rows")
    parser.add_argument("--table", action="store_true", help="run nothing, only write what there is")
    options = parser.parse_args()
    if options.at:
        for name, data, epochs in itertools.product(options.only.split(","), options.data, options.epochs):
            print(tried(name, data, epochs, options.seeds, *options.at))
        return 0
    for seed in options.seeds if not options.table else []:
        for data in options.data:
            for epochs in options.epochs:
                for name in options.only.split(","):
                    found = run(name, data, epochs, seed, options.out)
                    print(
                        f"{name} {data} τ={epochs} seed {seed}: factors {found['train']:.2g}, {found['tune']:g}: "
                        f"global {found['global']['accuracy']:.2f}, personalised {found['adapted']['accuracy']:.2f}",
                        file=sys.stderr,
                        flush=True,
                    )
    common.put(fedhb.PAGE, "budget", table(options.out))
    return 0


if __name__ == "__main__":
    common.command(main)
