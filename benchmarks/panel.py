"""The panel: hierarchical models × methods × seeds at the methods' defaults, each judged by NUTS on the pooled rows.

    FEDBAYES_DATA=<folder> python benchmarks/panel_judges.py                     # once: NUTS on the pooled rows
    FEDBAYES_DATA=<folder> python benchmarks/panel.py                            # every cell that has not run yet
    FEDBAYES_DATA=<folder> python benchmarks/panel.py --models radon --methods ep pvi --seeds 0
    python benchmarks/panel.py --report                                          # write docs/results/panel.md

A cell runs in a process of its own with a time limit, because compiled programs stay in memory. Its figures are appended to
runs/panel/results.jsonl under `--label`; a cell that is there under the same label is not run again (`--again` does).

Means and standard deviations are compared on the real line, where a positive latent is its logarithm, and on the latents' own
scale: means in standard deviations of the judge, standard deviations as ratios.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import panel_peers
from panel_judges import FOLDER, Judge, Stopwatch, judge, on_real_line, sample
from panel_models import MODELS, Model, load

import fedbayes as fb
from fedbayes import wire
from fedbayes.models.structured import numbers
from fedbayes.results import structured_text
from fedbayes.results.structured_fit import fit_silos

SEEDS = (0, 1, 2)
DRAWS = 20_000
Draws = dict[str, Any]


class Found(NamedTuple):
    """What a method gives for a model and a seed."""

    draws: Draws
    """Of the global latents: NaN where the method gives nothing, all alike for a point estimate."""
    rounds: int
    bytes: int
    """Sent by the silo that sends most, in the whole run."""
    verdict: str
    warned: bool | None
    """Whether the verdict warns of the result; None where nothing was checked."""
    facts: dict[str, Any]


class Missing(Exception):
    """A method that this version of fedbayes does not have."""


def federated(name: str, **options: Any) -> Callable[[Model, int], Found]:
    """A method of fedbayes at its defaults."""

    def run(model: Model, seed: int) -> Found:
        kind = getattr(fb, name, None)
        if kind is None:
            raise Missing(f"fedbayes has no {name}")
        known = inspect.signature(fit_silos).parameters
        if unknown := options.keys() - known.keys():
            raise Missing(f"fedbayes.simulate has no {', '.join(unknown)}")
        fit = fb.simulate(kind(model.population, model.silo), model.silos, seed=seed, **options)
        simulation = fit.simulation
        leaves = [wire.manifest(simulation.algorithm, data) for data in model.silos.values()]
        sent = max(sum(leaf.bytes for leaf in one if leaf.message == "up") for one in leaves)
        kept = {key: fit.result[key] for key in ("khat", "ess", "bound") if key in fit.result}
        facts = {"result": kept | {"verdict": fit.result.get("verdict")}, "draws_from": "posterior"}
        return Found(drawn(fit, seed), int(simulation.round), sent * int(simulation.round), *verdict(fit.result), facts=facts)

    return run


def drawn(fit: Any, seed: int) -> Draws:
    """Draws of what a fit gives as its posterior of the global latents."""
    return {name: np.asarray(value) for name, value in fit.draws(DRAWS, seed=seed).items()}


def verdict(result: dict[str, Any]) -> tuple[str, bool | None]:
    """What a fit says of itself, and whether this is a warning; None where nothing was checked."""
    text = structured_text.verdict(result)
    if (khat := result.get("khat")) is None:
        return text, None
    return text, not (result["ess"] > 0.8 and khat <= 0.7)


def in_double_precision(method: Callable[[Model, int], tuple[Draws, int]]) -> Callable[[Model, int], Found]:
    """A method of one message from each silo, in double precision."""

    def run(model: Model, seed: int) -> Found:
        jax.config.update("jax_enable_x64", True)
        draws, sent = method(model, seed)
        return Found(draws, 1, sent, "none", None, {})

    return run


def pooled_nuts(model: Model, seed: int) -> Found:
    """NUTS on the pooled rows as it is commonly run, in JAX's default precision."""
    found = sample(model, 4, 1000, 1000, None, seed + 1)
    return Found(found.draws, 0, 0, f"r-hat {found.facts['r_hat']:.3f}", found.facts["r_hat"] > 1.01, found.facts)


METHODS: dict[str, Callable[[Model, int], Found]] = {
    "ep": federated("EP", correct=False),
    "ep corrected": federated("EP"),
    "pvi": federated("PVI"),
    "sfvi": federated("SFVI"),
    "sfvi-avg": federated("SFVIAvg"),
    "consensus": in_double_precision(panel_peers.consensus),
    "meta-analysis": in_double_precision(panel_peers.meta_analysis),
    "pooled nuts": pooled_nuts,
}


def compare(model: Model, found: Draws, judged: Judge) -> dict[str, Any]:
    """The worst mean and the worst standard deviation, and of which latent, on the real line and on the latents' own scale.

    With a closed form, that is the judge. A point estimate is compared on its own scale and has no standard deviation.
    """
    given = {latent.name: found[latent.name] for latent in model.structured.global_latents()}
    scales = {
        "real": (on_real_line(model, given), on_real_line(model, judged.draws)),
        "own": (given, {name: judged.draws[name] for name in given}),
    }
    points = {label: (value, right) for (label, value), (_, right) in zip(*map(numbers, scales["own"]), strict=True)}
    figures: dict[str, dict[str, list[float | None]]] = {}
    for scale, (draws, truth) in scales.items():
        figures[scale] = {}
        for (label, value), (_, right) in zip(numbers(draws), numbers(truth), strict=True):
            mean, sd = (model.exact or {}).get(label, (right.mean(), right.std()))
            if sd < 1e-9 or (scale == "own" and label.split("[")[0] in model.heavy):
                continue
            off, ratio = (value.mean() - mean) / sd, value.std() / sd
            if not np.isfinite(value).all() or ratio < 1e-6:  # nothing, or a point
                ratio = None
                if label in points:
                    value, right = points[label]
                    off = (value.mean() - right.mean()) / right.std()
            figures[scale][label] = [float(off) if np.isfinite(off) else None, None if ratio is None else float(ratio)]
    return {f"{key} {scale}": value for scale in figures for key, value in worst(figures[scale]).items()} | {"figures": figures}


def worst(figures: dict[str, list[float | None]]) -> dict[str, Any]:
    """The mean that is farthest off and the standard deviation whose ratio is farthest from 1, with their latents."""
    means = {label: abs(off) for label, (off, _) in figures.items() if off is not None}
    sds = {label: ratio for label, (_, ratio) in figures.items() if ratio is not None}
    mean = max(means, key=means.__getitem__, default=None)
    sd = max(sds, key=lambda label: abs(math.log(max(sds[label], 1e-9))), default=None)
    return {
        "mean": means[mean] if mean else None,
        "mean of": mean,
        "sd": sds[sd] if sd else None,
        "sd of": sd,
        "none": [label for label, (off, _) in figures.items() if off is None],
    }


def cell(name: str, method: str, seed: int) -> dict[str, Any]:
    """Run a method on a model once."""
    model = load(name)
    judged = judge(model)
    with Stopwatch() as watch:
        try:
            found = METHODS[method](model, seed)
        except Missing as problem:
            return {"missing": str(problem)}
    return {
        **compare(model, found.draws, judged),
        "verdict": found.verdict,
        "warned": found.warned,
        "rounds": found.rounds,
        "bytes": found.bytes,
        "seconds": watch.seconds,
        "compiling": min(watch.compiling, watch.seconds),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "facts": found.facts,
        "nuts": {key: judged.facts[key] for key in ("seconds", "compiling", "ess", "draws")},
    }


def in_process(name: str, method: str, seed: int, limit: float) -> dict[str, Any]:
    """A cell in a process of its own: its figures, or why there are none."""
    command = [sys.executable, __file__, "--cell", name, method, str(seed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {limit:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:500]}
    return json.loads(done.stdout.splitlines()[-1])


def results(file: Path) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """The last figures of each cell, by label, model, method and seed."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["label"], row["model"], row["method"], row["seed"]): row for row in rows}


def main() -> int:
    """Run cells, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--label", default="now", help="which version of fedbayes the figures are of")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for a cell")
    parser.add_argument("--again", action="store_true", help="run cells that have figures too")
    parser.add_argument("--out", type=Path, default=FOLDER / "results.jsonl")
    parser.add_argument("--report", action="store_true", help="write docs/results/panel.md")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "METHOD", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        name, method, seed = options.cell
        print(json.dumps(cell(name, method, int(seed))))
        return 0
    if options.report:
        import panel_report

        return panel_report.write(results(options.out), options.label)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for method in options.methods:
            for name in options.models:
                known = results(options.out).get((options.label, name, method, seed))
                if known and "error" not in known and not options.again:
                    continue
                figures = in_process(name, method, seed, options.limit)
                if "missing" in figures:
                    print(f"{method}: skipped, {figures['missing']}", flush=True)
                    break
                row = {"label": options.label, "model": name, "method": method, "seed": seed, **figures}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + os.linesep)
                print(line(row), flush=True)
    return 0


def line(row: dict[str, Any]) -> str:
    """A cell in one line."""
    start = f"{row['model']:18}{row['method']:14}seed {row['seed']}  "
    if "error" in row:
        return start + row["error"]
    mean, sd = (f"{row[key]:.2f}" if row[key] is not None else "none" for key in ("mean real", "sd real"))
    own = [f"{row[key]:.2f}" if row[key] is not None else "none" for key in ("mean own", "sd own")]
    return (
        f"{start}mean {mean} ({row['mean of real']}), sd {sd} ({row['sd of real']}); own scale {own[0]}, {own[1]}; "
        f"{row['rounds']} rounds, {row['bytes'] / 1000:.1f} kB, {row['seconds']:.0f} s ({row['compiling']:.0f} compiling), "
        f"warned: {row['warned']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
