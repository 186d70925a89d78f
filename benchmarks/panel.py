"""The panel: hierarchical models × methods × seeds at the methods' defaults, each judged by NUTS on the pooled rows.

    FEDBAYES_DATA=<folder> python benchmarks/panel_judges.py                     # once: NUTS on the pooled rows
    FEDBAYES_DATA=<folder> python benchmarks/panel.py                            # every cell that has not run yet
    FEDBAYES_DATA=<folder> python benchmarks/panel.py --models radon --methods ep pvi --seeds 0
    python benchmarks/panel.py --report                                          # write docs/results/panel.md

A cell runs in a process of its own with a time limit, because compiled programs stay in memory. Its figures are appended to
benchmarks/panel.jsonl under `--label`; a cell that is there under the same label is not run again (`--again` does).

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import panel_peers
from panel_judges import FOLDER, Judge, Stopwatch, judge, on_real_line, sample
from panel_models import MODELS, Model, load

import fedbayes as fb
from fedbayes import wire
from fedbayes.models.structured import numbers
from fedbayes.results import structured_text
from fedbayes.results.structured_run import fit_silos

SEEDS = (0, 1, 2)
DRAWS = 20_000
MISSING = "not there"
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


Method = Callable[[Model, int], Iterator[Found]]
"""A method gives its result, and a second one if it can correct the first (`CORRECTED`)."""
CORRECTED = " corrected"


class Missing(Exception):
    """A method that this version of fedbayes does not have."""


def federated(name: str) -> Method:
    """A method of fedbayes at its defaults: without the correction of its posterior, then with it."""

    def run(model: Model, seed: int) -> Iterator[Found]:
        kind = getattr(fb, name, None)
        if kind is None:
            raise Missing(f"fedbayes has no {name}")
        corrects = "correct" in inspect.signature(fit_silos).parameters
        options = {"correct": False} if corrects else {}
        fit = fb.simulate(kind(model.population, model.silo), model.silos, seed=seed, **options)
        simulation = fit.simulation
        rounds = int(simulation.round)
        leaves = [wire.manifest(simulation.algorithm, data) for data in model.silos.values()]
        sent = rounds * max(sum(leaf.bytes for leaf in one if leaf.message == "up") for one in leaves)
        yield found(fit, rounds, sent, seed)
        if corrects:
            fit.result["verdict"] = cast(Any, fit).assess("auto").verdict
            yield found(fit, rounds, sent, seed)

    return run


def found(fit: Any, rounds: int, sent: int, seed: int) -> Found:
    """What a fit says now; evidence rounds, which the verdict needs, are counted."""
    told = fit.result.get("verdict")
    asked = (told or {}).get("checks", {}).get("reference", {})
    rounds, sent = rounds + asked.get("rounds", 0), sent + asked.get("bytes", 0)
    facts = {key: fit.result.get(key) for key in ("khat", "ess", "bound", "verdict")}
    draws = {name: np.asarray(value) for name, value in fit.draws(DRAWS, seed=seed).items()}
    return Found(draws, rounds, sent, *verdict(fit.result), facts=facts)


def verdict(result: dict[str, Any]) -> tuple[str, bool | None]:
    """What a fit says of itself, and whether this is a warning; None where nothing was checked."""
    told, text = result.get("verdict"), structured_text.verdict(result)
    if told is not None:
        return text, None if told["verdict"] == "not checked" else told["verdict"] != "good"
    if (khat := result.get("khat")) is None:  # a version that has no verdict
        return text, None
    return text, not (result["ess"] > 0.8 and khat <= 0.7)


def in_double_precision(method: Callable[[Model, int], tuple[Draws, int]]) -> Method:
    """A method of one message from each silo, in double precision."""

    def run(model: Model, seed: int) -> Iterator[Found]:
        jax.config.update("jax_enable_x64", True)
        draws, sent = method(model, seed)
        yield Found(draws, 1, sent, "none", None, {})

    return run


def pooled_nuts(model: Model, seed: int) -> Iterator[Found]:
    """NUTS on the pooled rows as it is commonly run, in JAX's default precision."""
    found = sample(model, 4, 1000, 1000, None, seed + 1)
    yield Found(found.draws, 0, 0, f"r-hat {found.facts['r_hat']:.3f}", found.facts["r_hat"] > 1.01, found.facts)


METHODS: dict[str, Method] = {
    "ep": federated("EP"),
    "pvi": federated("PVI"),
    "sfvi": federated("SFVI"),
    "sfvi-avg": federated("SFVIAvg"),
    "consensus": in_double_precision(panel_peers.consensus),
    "meta-analysis": in_double_precision(panel_peers.meta_analysis),
    "pooled nuts": pooled_nuts,
}
PEERS = ("consensus", "meta-analysis", "pooled nuts")
"""Methods that no version of fedbayes changes: their figures have the label "peer"."""


def compare(model: Model, found: Draws, judged: Judge) -> dict[str, Any]:
    """The worst mean and the worst standard deviation, and of which latent, on the real line and on the latents' own scale.

    With a closed form, that is the judge. A point estimate is compared on its own scale and has no standard deviation.
    """
    given = {latent.name: found[latent.name] for latent in model.structured.global_latents()}
    scales = {"real": (on_real_line(model, given), judged.real), "own": (given, judged.own)}
    points = dict(numbers(given))
    figures: dict[str, dict[str, list[float | None]]] = {}
    for scale, (draws, truth) in scales.items():
        figures[scale] = {}
        for label, value in numbers(draws):
            mean, sd = (model.exact or {}).get(label, truth[label])
            if sd < 1e-9 or (scale == "own" and label.split("[")[0] in model.heavy):
                continue
            off, ratio = (value.mean() - mean) / sd, value.std() / sd
            if not np.isfinite(value).all() or ratio < 1e-6:  # nothing, or a point
                ratio = None
                if label in points:
                    off = (points[label].mean() - judged.own[label][0]) / judged.own[label][1]
            figures[scale][label] = [float(off) if np.isfinite(off) else None, None if ratio is None else float(ratio)]
    found = {f"{key} {scale}": value for scale in figures for key, value in worst(figures[scale]).items()}
    return found | {"latents": figures["real"]}


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


def cell(name: str, method: str, seed: int) -> Iterator[dict[str, Any]]:
    """Run a method on a model once: a row for its result, and one for the corrected result if there is one."""
    model = load(name)
    judged = judge(model)
    runs, seconds, compiling = METHODS[method](model, seed), 0.0, 0.0
    for suffix in ("", CORRECTED):
        with Stopwatch() as watch:
            found = next(runs, None)
        if found is None:
            return
        seconds, compiling = seconds + watch.seconds, compiling + watch.compiling
        yield {
            "model": name,
            "method": method + suffix,
            "seed": seed,
            **compare(model, found.draws, judged),
            "verdict": found.verdict,
            "warned": found.warned,
            "rounds": found.rounds,
            "bytes": found.bytes,
            "seconds": seconds,
            "compiling": min(compiling, seconds),
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "word": (found.facts.get("verdict") or {}).get("verdict"),
            "nuts": {key: judged.facts[key] for key in ("seconds", "compiling", "ess", "draws")},
        }


def in_process(name: str, method: str, seed: int, limit: float) -> list[dict[str, Any]]:
    """The rows of a cell, in a process of its own; or why there are none."""
    command = [sys.executable, __file__, "--cell", name, method, str(seed)]
    try:
        # Seeds share compiled programs, so that only the first of them shows how long compiling takes.
        environment = {"JAX_COMPILATION_CACHE_DIR": str(FOLDER / "compiled"), **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=environment)
        said, problem = done.stdout, (done.stderr.strip().splitlines() or ["no message"])[-1][:500]
        failed = done.returncode != 0
    except subprocess.TimeoutExpired as late:
        said, problem, failed = (late.stdout or b"").decode(), f"more than {limit:.0f} s", True
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if failed and problem.startswith(f"{MISSING}: "):
        raise Missing(problem.removeprefix(f"{MISSING}: "))
    return [*rows, {"model": name, "method": method, "seed": seed, "error": problem}] if failed else rows


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
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--report", action="store_true", help="write docs/results/panel.md")
    parser.add_argument("--cell", nargs=3, metavar=("MODEL", "METHOD", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        name, method, seed = options.cell
        try:
            for row in cell(name, method, int(seed)):
                print(json.dumps(row, default=float), flush=True)
        except Missing as problem:
            raise SystemExit(f"{MISSING}: {problem}") from None
        return 0
    if options.report:
        import panel_report

        return panel_report.write(results(options.out), options.label)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for method in options.methods:
            label = "peer" if method in PEERS else options.label
            for name in options.models:
                known = results(options.out).get((label, name, method, seed))
                if known and "error" not in known and not options.again:
                    continue
                try:
                    rows = in_process(name, method, seed, options.limit)
                except Missing as problem:
                    print(f"{method}: skipped, {problem}", flush=True)
                    break
                with options.out.open("a") as file:
                    file.writelines(json.dumps({"label": label, **row}) + os.linesep for row in rows)
                for row in rows:
                    print(line(row), flush=True)
    return 0


def line(row: dict[str, Any]) -> str:
    """A cell in one line."""
    start = f"{row['model']:18}{row['method']:16}seed {row['seed']}  "
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
