"""FedHB's Tables 10 and 11 (Kim and Hospedales 2023): ten methods on MNIST and Fashion-MNIST. `--help` says how.

    FEDBAYES_DATA=… python benchmarks/fedhb.py                          all methods, both sets, τ = 1 and 5, seeds 0, 1, 2
    FEDBAYES_DATA=… python benchmarks/fedhb.py --only niw,mixture --data mnist --epochs 1 --seeds 0
    FEDBAYES_DATA=… python benchmarks/fedhb.py --table                  only write what there is into docs/results/fedhb.md
    FEDBAYES_DATA=… python benchmarks/fedhb.py --scales                 accuracy and ECE over σ0, and the literal prior
    FEDBAYES_DATA=… python benchmarks/fedhb.py --rates                  the methods over the step size of personalisation
    FEDBAYES_DATA=… python benchmarks/fedhb.py --paired                 FedHB against its rivals, seed by seed, ten of them
    FEDBAYES_DATA=… python benchmarks/fedhb.py --own                    each at its own step size, chosen on validation rows
    FEDBAYES_DATA=… python benchmarks/fedhb.py --ensembles              Mixture beside networks of random groups
    FEDBAYES_DATA=… python benchmarks/fedhb.py --centralised            one model on all rows together
    FEDBAYES_DATA=… python benchmarks/fedhb.py --cost                   a client's round over FedBABU's, in one run

100 clients with 5 shards each, 10 a round, 100/τ rounds of τ epochs in batches of 50, a network 784-256-10 on standardised
pixels, SGD with momentum .9 and step size .1, times .1 after half and three quarters of the rounds. "Global" is the shared
model after the last round on each client's own test rows; "personalised" the same after 5 more epochs on its training rows.
A seed is that of the partition, the cohorts and the start. Each run has a folder under --out: what is there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import spread
from fedhb_mnist import clients, network

import fedbayes as fb
from fedbayes.files import write

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results" / "fedhb.md"
NOTES = Path(__file__).parent / "notes" / "fedhb.md"
RATES = (1e-3, 1e-2)
"""Step sizes of personalisation; the first is the protocol's."""
BETWEEN = (1e-3, 5e-3, 1e-2)
"""The same and one between them, for the comparison seed by seed."""
CURVE = (1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 3e-2)
SETTINGS = [(data, epochs) for data in ("mnist", "fashion_mnist") for epochs in (1, 5)]
PUBLISHED = {
    ("mnist", 1): (
        "97.81 97.94 97.16 97.15 97.38 97.32 93.38 97.16 97.38 97.42",
        "98.78 98.85 97.73 97.83 97.96 97.88 96.66 97.62 97.89 97.91",
    ),
    ("mnist", 5): (
        "95.51 95.68 94.59 94.86 95.28 94.28 94.87 95.11 95.33 94.98",
        "96.53 96.67 95.89 96.10 96.45 95.49 95.93 96.37 96.46 95.80",
    ),
    ("fashion_mnist", 1): (
        "84.18 84.28 83.86 81.98 83.25 81.20 81.10 80.35 83.51 82.40",
        "92.48 92.54 91.03 90.59 90.72 90.31 91.60 89.96 92.10 91.14",
    ),
    ("fashion_mnist", 5): (
        "77.48 77.60 76.10 73.70 73.67 72.35 73.47 73.28 76.69 72.93",
        "89.91 89.53 89.02 86.85 87.35 86.38 88.76 85.00 89.65 86.40",
    ),
}
"""Global and personalised accuracy, in the order of METHODS."""


def training(epochs: int, **options: Any) -> fb.Training:
    return fb.Training(**{"epochs": epochs, "batch": 50, "lr": 0.1, "decay_at": (0.5, 0.75), "momentum": 0.9, **options})


def tuning(lr: float) -> fb.Training:
    return fb.Training(epochs=5, batch=50, lr=lr, momentum=0.9)


@functools.cache
def unlabelled(data: str) -> fb.Unlabelled:
    """The server's rows for FedBE: 2,000 of the other set, so that nobody's test rows are among them."""
    other = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}[data]
    x = clients(other, 0).x
    return fb.Unlabelled(x[np.random.default_rng(0).choice(len(x), 2000, replace=False)], other)


METHODS = {
    "niw": lambda model, tau, data: fb.FedHBNIW.paper(model, head_scale=3.0, sigma0=0.3, train=training(tau)),
    "mixture": lambda model, tau, data: fb.FedHBMixture.paper(model, head_scale=3.0, shrink=True, train=training(tau)),
    "fedbabu": lambda model, tau, data: fb.FedBABU(model, head_scale=3.0, train=training(tau)),
    "fedavg": lambda model, tau, data: fb.FedAvg(model, train=training(tau)),
    "fedprox": lambda model, tau, data: fb.FedProx(model, mu=0.01, train=training(tau)),
    "pfedbayes": lambda model, tau, data: fb.PFedBayes(
        model, train=fb.Training(tau, "adam", 50, lr=0.001), tune=fb.Training(5, "adam", 50, lr=0.001)
    ),
    "fedpa": lambda model, tau, data: fb.FedPA(model),
    "fedbe": lambda model, tau, data: fb.FedBE(model, unlabelled=unlabelled(data), train=training(tau)),
    "fedem": lambda model, tau, data: fb.FedEM(model, fine_tune=True, train=training(tau)),
    "fedpop": lambda model, tau, data: fb.FedPop(
        model, form="langevin", eta=1e-3, prior_step=0.5, steps=20, train=training(tau)
    ),
}
ALL_LAYERS = {
    "niw-all": lambda model, tau, data: fb.FedHBNIW.paper(model, head=(), sigma0=0.2, train=training(tau)),
    "mixture-all": lambda model, tau, data: fb.FedHBMixture.paper(model, head=(), shrink=True, train=training(tau)),
    "fedbabu-plain": lambda model, tau, data: fb.FedBABU(model, train=training(tau)),
}
"""FedHB with no layer frozen, and FedBABU with its head as it starts, as its own code has it."""
ENSEMBLES = {
    "ensemble-preset": lambda model, tau, data: fb.Ensemble(model, train=training(tau)),
    "ensemble-all": lambda model, tau, data: fb.Ensemble(model, use="ensemble", train=training(tau)),
}
"""The paper's F.2: two networks, each trained by a random half of the clients."""
LABELS = ["NIW", "Mixture", "FedBABU", "FedAvg", "FedProx", "pFedBayes", "FedPA", "FedBE", "FedEM", "FedPop"]


def figures(evaluation: Any, mode: str) -> dict[str, float]:
    return common.figures(evaluation.summary()[mode]["participating"])


def validation(data: str, seed: int) -> fb.Clients:
    """A fifth of each client's training rows in the place of its test rows."""
    return clients(data, seed).validation(0.2)


def run(
    label: str,
    algorithm: Any,
    data: str,
    epochs: int,
    seed: int,
    out: Path,
    rates: tuple[float, ...] = RATES,
    rows: Callable[[str, int], fb.Clients] = clients,
) -> dict[str, Any]:
    """Train, then personalise at each step size; what is in its folder is not done again."""
    folder = out / f"{label}-{data}-{epochs}-{seed}"
    done = folder / "figures.json"
    trained = (folder / "result.json").exists()  # or else figures that are left would be of another training
    found: dict[str, Any] = json.loads(done.read_text()) if done.exists() and trained else {}
    if not hasattr(algorithm, "tune") or algorithm.tune.optimiser != "sgd":
        rates = RATES[:1]
    missing = [rate for rate in rates if f"{rate:g}" not in found]
    if not missing:
        return found
    began = time.perf_counter()
    rounds = 100 // epochs
    fit = fb.simulate(
        algorithm, rows(data, seed), rounds, cohort=10, seed=seed, modes=("global",), folder=folder, resume=True, choose=False
    )
    found = {"global": figures(fit.evaluation, "global"), "seconds": time.perf_counter() - began, **found}
    for lr in missing:
        if hasattr(algorithm, "tune"):
            tune = dataclasses.replace(algorithm.tune, lr=lr)
            fit.simulation.algorithm = dataclasses.replace(fit.simulation.algorithm, tune=tune)
        found[f"{lr:g}"] = figures(fb.assess(fit.simulation, ("adapted",)), "adapted")
    write(done, json.dumps(found, indent=2).encode())
    return found


def runs(out: Path, seeds: list[int], name: str, data: str, epochs: int) -> dict[int, dict[str, Any]]:
    """The figures that a method's runs left, by seed."""
    files = {seed: out / f"{name}-{data}-{epochs}-{seed}" / "figures.json" for seed in seeds}
    return {seed: json.loads(file.read_text()) for seed, file in files.items() if file.exists()}


def values(found: dict[int, dict[str, Any]], mode: str, figure: str = "accuracy") -> dict[int, float]:
    return {seed: one[mode][figure] for seed, one in found.items() if mode in one}


def cell(found: dict[int, dict[str, Any]], mode: str, figure: str = "accuracy", digits: int = 2) -> str:
    return spread(list(values(found, mode, figure).values()), digits)


def kind(mode: str) -> str:
    return mode if mode == "global" else f"personalised at {mode}"


def tables(out: Path, seeds: list[int]) -> str:
    """Markdown: accuracies beside the published ones, each personalised step size, and calibration."""
    lines = ["| | " + " | ".join(LABELS) + " |", "|---" * (len(LABELS) + 1) + "|"]
    rates = ["| | " + " | ".join(LABELS) + " |", lines[1]]
    calibration = ["| | | " + " | ".join(LABELS) + " |", "|---" * (len(LABELS) + 2) + "|"]
    for data, epochs in SETTINGS:
        found = [runs(out, seeds, name, data, epochs) for name in METHODS]
        setting = title(data, epochs)
        for place, mode in enumerate(("global", f"{RATES[0]:g}")):
            row = f"{setting}, {('global', 'personalised')[place]}"
            lines.append(f"| {row} | " + " | ".join(cell(one, mode) for one in found) + " |")
            lines.append("| published | " + " | ".join(PUBLISHED[data, epochs][place].split()) + " |")
            for figure, digits in (("ece", 2), ("log_score", 3)):
                cells = [cell(one, mode, figure, digits) for one in found]
                calibration.append(f"| {row} | {figure} | " + " | ".join(cells) + " |")
        for rate in RATES:
            rates.append(f"| {setting}, step size {rate:g} | " + " | ".join(cell(one, f"{rate:g}") for one in found) + " |")
    return "\n".join(
        [
            "### Accuracy",
            "",
            *lines,
            "",
            "### Personalised at other step sizes",
            "",
            *rates,
            "",
            "### Calibration",
            "",
            *calibration,
        ]
    )


def all_layers(out: Path, seeds: list[int]) -> str:
    """FedHB with no layer frozen and plain FedBABU, beside the published figures."""
    lines = ["| | NIW, all layers | published | Mixture, all layers | published | FedBABU, head as it starts | published |"]
    lines.append("|---" * 7 + "|")
    for data, epochs in SETTINGS:
        found = [runs(out, seeds, name, data, epochs) for name in ALL_LAYERS]
        for mode in ("global", *(f"{rate:g}" for rate in RATES)):
            printed = PUBLISHED[data, epochs][0 if mode == "global" else 1].split()
            cells = [text for one, figure in zip(found, printed, strict=False) for text in (cell(one, mode), figure)]
            lines.append(f"| {title(data, epochs)}, {kind(mode)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


FLAT = {
    "mixture-flat": lambda model, tau, data: fb.FedHBMixture.paper(model, head=(), train=training(tau)),
    "mixture-frozen": lambda model, tau, data: fb.FedHBMixture.paper(model, head_scale=3.0, train=training(tau)),
}
"""Prototypes with a flat prior, the library's default."""
FROZEN = {"niw": "NIW, head frozen", "mixture": "Mixture, head frozen"}
FREE = {
    "niw-all": "NIW, all layers",
    "mixture-all": "Mixture, all layers",
    "mixture-flat": "Mixture, all layers, flat prior",
}
RIVALS = {"fedavg": "FedAvg", "fedprox": "FedProx", "fedbabu-plain": "FedBABU as it starts", "fedbabu": "FedBABU, head × 3"}
THREE = {name: RIVALS[name] for name in ("fedavg", "fedprox", "fedbabu-plain")}
"""The rivals as their papers have them."""
TRIES = FROZEN | FREE | {"mixture-frozen": "Mixture, head frozen, flat prior"} | RIVALS
EVERY = METHODS | ALL_LAYERS | ENSEMBLES | FLAT


def paired(out: Path, seeds: list[int]) -> str:
    """NIW's and Mixture's accuracy, and how far ahead they are of a rival with the same seed, with the standard error."""
    titles = ["seeds", "accuracy", "published", *(f"ahead of {label}" for label in RIVALS.values())]
    lines = ["| | | " + " | ".join(titles) + " |", "|---" * (len(titles) + 2) + "|"]
    for mode in ("global", *(f"{rate:g}" for rate in BETWEEN)):
        for name, label in (FROZEN | FREE).items():
            for data, epochs in SETTINGS:
                own = values(runs(out, seeds, name, data, epochs), mode)
                others = [values(runs(out, seeds, rival, data, epochs), mode) for rival in RIVALS]
                cells = [str(len(own)), spread(list(own.values())), published(name, data, epochs, mode)]
                cells = cells if own else [common.MISSING] * 3
                cells += [common.MISSING if lead is None else signed(*lead) for lead in (ahead(own, one) for one in others)]
                lines.append(f"| {label}, {kind(mode)} | {title(data, epochs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def published(name: str, data: str, epochs: int, mode: str) -> str:
    """NIW's figure or Mixture's in Tables 10 and 11."""
    printed = PUBLISHED[data, epochs][0 if mode == "global" else 1].split()
    return printed[0 if name.startswith("niw") else 1]


def mean_error(numbers: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return statistics.mean(numbers), statistics.stdev(numbers) / len(numbers) ** 0.5


def ahead(own: dict[int, float], other: dict[int, float]) -> tuple[float, float] | None:
    """The mean difference of runs with the same seed and its standard error."""
    both = own.keys() & other.keys()
    return mean_error([own[seed] - other[seed] for seed in both]) if len(both) > 1 else None


def signed(mean: float, error: float) -> str:
    return f"{mean:+.2f} ± {error:.2f}"


def curve(out: Path, seeds: list[int]) -> str:
    """All layers trained: accuracy, less the published one, and the nearest of three rivals, over the step size."""
    lines = ["| | | " + " | ".join(title(*setting) for setting in SETTINGS) + " |", "|---" * (len(SETTINGS) + 2) + "|"]
    for name, label in FREE.items():
        for mode in (f"{rate:g}" for rate in CURVE):
            cells = [_place(out, seeds, name, data, epochs, mode) for data, epochs in SETTINGS]
            lines.append(f"| {label} | at {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _place(out: Path, seeds: list[int], name: str, data: str, epochs: int, mode: str) -> str:
    own = values(runs(out, seeds, name, data, epochs), mode)
    leads = {}
    for rival in THREE:
        lead = ahead(own, values(runs(out, seeds, rival, data, epochs), mode))
        if lead is None:
            return common.MISSING
        leads[RIVALS[rival]] = lead
    nearest = min(leads, key=lambda rival: leads[rival][0])
    mean = statistics.mean(own.values())
    behind = mean - float(published(name, data, epochs, mode))
    return f"{mean:.2f} ({behind:+.2f}); {signed(*leads[nearest])} {nearest}"


def curve_picture(out: Path, seeds: list[int]) -> None:
    """Personalised accuracy over the step size, a panel for each setting."""
    from matplotlib.figure import Figure  # noqa: TID251

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    for axes, (data, epochs) in zip(figure.subplots(2, 2).flat, SETTINGS, strict=True):
        for name, label in (FREE | RIVALS).items():
            found = runs(out, seeds, name, data, epochs)
            points = [list(values(found, f"{rate:g}").values()) for rate in CURVE]
            if min(map(len, points)) < 2:
                print(f"no picture: {name} {title(data, epochs)} has not two seeds at every step size", file=sys.stderr)
                return
            y, error = zip(*map(mean_error, points), strict=True)
            axes.errorbar(CURVE, y, error, marker="o", markersize=3, linewidth=1.2, label=label)
        axes.set_xscale("log")
        axes.set_xticks(CURVE, [f"{rate:g}"[1:] for rate in CURVE])
        axes.minorticks_off()
        axes.set_title(title(data, epochs), fontsize=10)
        axes.set_xlabel("step size of personalisation")
        axes.set_ylabel("personalised accuracy, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(ROOT / "docs" / "images" / "fedhb-rates.png", dpi=100)


def ensembles(out: Path, seeds: list[int]) -> str:
    """Mixture beside networks of random groups, with τ = 1; all layers trained."""
    lines = ["| | Mixture, K = 2 | its group's network | both networks | FedAvg |", "|---" * 5 + "|"]
    names = ("mixture-all", *ENSEMBLES, "fedavg")
    for data in ("mnist", "fashion_mnist"):
        found = [runs(out, seeds, name, data, 1) for name in names]
        for mode in ("global", *(f"{rate:g}" for rate in RATES)):
            lines.append(f"| {title(data, 1)}, {kind(mode)} | " + " | ".join(cell(one, mode) for one in found) + " |")
    return "\n".join(lines)


OWN = {
    "NIW": ("niw", "niw-all"),
    "Mixture": ("mixture-frozen", "mixture-flat"),
    **{label: (name,) for name, label in RIVALS.items()},
}
"""The tries of a method: FedHB with its head frozen at three times its start, or with all layers trained."""


def choices(out: Path) -> tuple[str, dict[tuple[str, str, int], tuple[str, float]]]:
    """The table of validation, and each method's try and step size with the best mean over seeds 0, 1, 2."""
    scores: dict[tuple[str, str, int], dict[tuple[str, float], float]] = {}
    lines = ["| | " + " | ".join(title(*setting) for setting in SETTINGS) + " |", "|---" * (len(SETTINGS) + 1) + "|"]
    for label, names in OWN.items():
        for name in names:
            cells = []
            for data, epochs in SETTINGS:
                algorithm = EVERY[name](network(data), epochs, data)
                found = {seed: run(name, algorithm, data, epochs, seed, out, CURVE, validation) for seed in range(3)}
                means = {(name, rate): statistics.mean(values(found, f"{rate:g}").values()) for rate in CURVE}
                scores.setdefault((label, data, epochs), {}).update(means)
                best = f"{max(means, key=means.__getitem__)[1]:g}"
                cells.append(f"{cell(found, best)} at {best}")
            lines.append(f"| {TRIES[name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines), {place: max(tries, key=tries.__getitem__) for place, tries in scores.items()}


def own(out: Path, seeds: list[int], chosen: dict[tuple[str, str, int], tuple[str, float]]) -> str:
    """What was chosen, trained on all training rows and tested with other seeds; leads over each rival's own choice."""
    tested: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = {place: {} for place in chosen}
    for seed in seeds:
        for (label, data, epochs), (name, rate) in chosen.items():
            found = run(name, EVERY[name](network(data), epochs, data), data, epochs, seed, out, (rate,))
            tested[label, data, epochs][seed] = found
            print(f"{label} {data} τ={epochs} seed {seed}: {found[f'{rate:g}']['accuracy']:.2f}", file=sys.stderr)
    titles = ["chosen", "global", "published", "personalised", "published", *(f"ahead of {rival}" for rival in RIVALS.values())]
    lines = ["| | | " + " | ".join(titles) + " |", "|---" * (len(titles) + 2) + "|"]
    for (label, data, epochs), (name, rate) in chosen.items():
        if label in RIVALS.values():
            continue
        found, mode = tested[label, data, epochs], f"{rate:g}"
        cells = [f"{'all layers' if name in FREE else 'head frozen'}, {mode}"]
        for one in ("global", mode):
            cells += [cell(found, one), published(name, data, epochs, one)]
        for rival in RIVALS.values():
            other = values(tested[rival, data, epochs], f"{chosen[rival, data, epochs][1]:g}")
            lead = ahead(values(found, mode), other)
            cells.append(common.MISSING if lead is None else signed(*lead))
        lines.append(f"| {label} | {title(data, epochs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def title(data: str, epochs: int) -> str:
    return f"{'MNIST' if data == 'mnist' else 'Fashion-MNIST'}, τ = {epochs}"


SCALES = {"mnist": (0.003, 0.01, 0.03, 0.1, 0.3), "fashion_mnist": (0.03, 0.1, 0.3)}


def scales(data: str, seeds: list[int], out: Path) -> str:
    """FedAvg, NIW over σ0 and, on MNIST, the literal prior, with τ = 1; on MNIST writes the picture."""
    model, rows = network(data), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the literal prior
        methods = {"FedAvg": ("fedavg", METHODS["fedavg"](model, 1, data))}
        for sigma0 in SCALES[data]:
            algorithm = fb.FedHBNIW.paper(model, head_scale=3.0, sigma0=sigma0, draws=20, train=training(1))
            methods[f"{sigma0:g}"] = (f"scale-{sigma0:g}", algorithm)
        if data == "mnist":
            literal = fb.FedHBNIW.paper(model, head_scale=3.0, prior="literal", lambda0=1.0, draws=20, train=training(1))
            methods["literal"] = ("scale-literal", literal)
        for name, (label, algorithm) in methods.items():
            rows[name] = [run(label, algorithm, data, 1, seed, out) for seed in seeds]
    if data == "mnist":
        picture(rows)
    lines = ["| σ0 | global | ECE | log score | personalised | ECE | log score |", "|---|---|---|---|---|---|---|"]
    for name, found in rows.items():
        cells = [
            spread([one[mode][what] for one in found], 3 if what == "log_score" else 2)
            for mode in ("global", "0.001")
            for what in ("accuracy", "ece", "log_score")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(rows: dict[str, list[dict[str, Any]]]) -> None:
    """Accuracy and ECE over σ0."""
    from matplotlib.figure import Figure  # noqa: TID251

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    over = {float(name): found for name, found in rows.items() if name not in ("literal", "FedAvg")}
    for axes, what in zip(figure.subplots(1, 2), ("accuracy", "ece"), strict=True):
        for mode, label in (("global", "global"), ("0.001", "personalised")):
            y = [statistics.mean(one[mode][what] for one in found) for found in over.values()]
            (line,) = axes.plot(list(over), y, marker="o", label=label)
            # The deviation that a client's prior has under the literal form, with d = 203,530, |D| = 60,000 and N = 100
            literal = statistics.mean(one[mode][what] for one in rows["literal"])
            axes.plot([0.0017], [literal], marker="x", markersize=9, color=line.get_color(), linestyle="")
            average = statistics.mean(one[mode][what] for one in rows["FedAvg"])
            axes.axhline(average, color=line.get_color(), linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("σ0; crosses: the literal prior; dotted: FedAvg")
        axes.set_ylabel(f"{what}, %")
    figure.axes[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "images" / "fedhb-scale.png", dpi=100)


def cost(rounds: int = 30) -> str:
    """Seconds of a round over FedBABU's, all methods in turn within one run, and what a client uploads in numbers of d."""
    model, data = network("mnist"), clients("mnist", 0)
    chosen = {
        "FedBABU": fb.FedBABU(model, train=training(1)),
        "NIW": fb.FedHBNIW.paper(model, train=training(1)),
        "NIW with its bound": fb.FedHBNIW.paper(model, elbo=True, train=training(1)),
        "Mixture, K = 2": fb.FedHBMixture.paper(model, train=training(1)),
        "Mixture, K = 2, gate on all rows": fb.FedHBMixture.paper(model, gate_rows=600, train=training(1)),
        "Mixture, K = 5": fb.FedHBMixture.paper(model, K=5, train=training(1)),
    }
    simulations, d = {}, 784 * 256 + 256
    for name, algorithm in chosen.items():
        simulations[name] = fb.Simulation(algorithm.planned(100, **data.facts), data, cohort=10, seed=0)
        for _ in range(2):
            simulations[name].step()
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, simulation in simulations.items():
            began = time.perf_counter()
            simulation.step()
            seconds[name].append(time.perf_counter() - began)
    lines = ["| | a round over FedBABU's | quartiles | upload, in d |", "|---|---|---|---|"]
    for name, values in seconds.items():
        ratio = np.array(values) / np.array(seconds["FedBABU"])
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        leaves = fb.wire.manifest(simulations[name].algorithm, data.example)
        size = sum(int(np.prod(leaf.shape)) for leaf in leaves if leaf.message == "up")
        lines.append(f"| {name} | {middle:.2f} | {low:.2f}–{high:.2f} | {size / d:.2f} |")
    return "\n".join(lines)


def centralised(seeds: list[int], out: Path) -> str:
    """One model on all rows together, which no federation can have: as many rows are seen as in the runs with τ = 1."""
    lines = ["| centralised | global | ECE | personalised | ECE |", "|---|---|---|---|---|"]
    for data, title in (("mnist", "MNIST"), ("fashion_mnist", "Fashion-MNIST")):
        found = []
        for seed in seeds:
            done = out / f"centralised-{data}-{seed}" / "figures.json"
            if not done.exists():
                algorithm = fb.FedAvg(network(data), train=training(1), tune=tuning(RATES[0]))
                fit = fb.simulate(algorithm, clients(data, seed).pooled(), 10, seed=seed, modes=("global",), choose=False)
                everyone = fb.Simulation(fit.simulation.algorithm, clients(data, seed), seed=seed)
                everyone.state = fit.simulation.state
                scores = fb.assess(everyone, ("global", "adapted"))
                done.parent.mkdir(parents=True, exist_ok=True)
                write(done, json.dumps({mode: figures(scores, mode) for mode in ("global", "adapted")}).encode())
            found.append(json.loads(done.read_text()))
        cells = [spread([one[mode][key] for one in found]) for mode in ("global", "adapted") for key in ("accuracy", "ece")]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="methods, by name, with commas")
    parser.add_argument("--data", nargs="+", default=["mnist", "fashion_mnist"])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5], help="τ")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, help="0 1 2; 0 to 9 for --paired, 10 to 29 for --own")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs: runs/fedhb, or one of its own")
    parser.add_argument("--table", action="store_true", help="run nothing, only write what there is")
    parser.add_argument("--scales", action="store_true", help="the table and the picture over σ0")
    parser.add_argument("--paired", action="store_true", help="FedHB against its rivals, seed by seed")
    parser.add_argument("--own", action="store_true", help="each method at its own step size, chosen on validation rows")
    parser.add_argument("--rates", action="store_true", help="all layers trained, over the step size of personalisation")
    parser.add_argument("--ensembles", action="store_true", help="Mixture beside networks of random groups of clients")
    parser.add_argument("--cost", action="store_true", help="the table of cost and upload")
    parser.add_argument("--centralised", action="store_true", help="one model on all rows together")
    options = parser.parse_args()
    options.seeds = options.seeds or list(range(10, 30) if options.own else range(10 if options.paired else 3))
    folder = next((f"fedhb-{name}" for name in ("paired", "own") if getattr(options, name)), "fedhb")
    options.out = options.out or Path("runs") / folder
    if options.own:
        table, chosen = choices(options.out / "choice")
        common.put(PAGE, "choices", table)
        common.put(PAGE, "own", own(options.out, options.seeds, chosen))
        return 0
    if options.scales:
        for data in options.data:
            common.put(PAGE, f"scales-{data}", scales(data, options.seeds, options.out))
        return 0
    names, rates = [*METHODS, *ALL_LAYERS], RATES
    if options.ensembles:
        names, options.epochs = ["mixture-all", *ENSEMBLES, "fedavg"], [1]
    elif options.paired:
        names, rates = [*FROZEN, *FREE, *RIVALS], BETWEEN
    elif options.rates:
        names, rates = [*FREE, *RIVALS], CURVE
    if options.only:
        names = options.only.split(",")
    if options.cost:
        common.put(PAGE, "cost", cost())
        return 0
    if options.centralised:
        common.put(PAGE, "centralised", centralised(options.seeds, options.out))
        return 0
    for seed in options.seeds if not options.table else []:
        for data in options.data:
            for epochs in options.epochs:
                for name in names:
                    algorithm = EVERY[name](network(data), epochs, data)
                    found = run(name, algorithm, data, epochs, seed, options.out, rates)
                    accuracies = " ".join(f"{key} {value['accuracy']:.2f}" for key, value in found.items() if key != "seconds")
                    print(f"{name} {data} τ={epochs} seed {seed}: {accuracies}, {found['seconds']:.0f} s", file=sys.stderr)
    if options.paired:
        common.put(NOTES, "paired", paired(options.out, options.seeds))
        return 0
    if options.rates:
        curve_picture(options.out, options.seeds)
        common.put(NOTES, "rates", curve(options.out, options.seeds))
        return 0
    common.put(PAGE, "tables", tables(options.out, options.seeds))
    common.put(NOTES, "all-layers", all_layers(options.out, options.seeds))
    common.put(PAGE, "ensembles", ensembles(options.out, options.seeds))
    return 0


if __name__ == "__main__":
    common.command(main)
