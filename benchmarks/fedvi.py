"""FedVI's Table 1 and Figure 5 (Vedadi et al. 2023) on the sets that are here. `--help` says how.

    FEDBAYES_DATA=… python benchmarks/fedvi.py                                      digits by writer: all methods, seeds 0, 1, 2
    FEDBAYES_DATA=… python benchmarks/fedvi.py benchmarks/fedvi_chars.toml --seeds 0         another set
    FEDBAYES_DATA=… python benchmarks/fedvi.py --only fedvi,fedavg
    FEDBAYES_DATA=… python benchmarks/fedvi.py --tau                                the ablation of τ, and its picture
    FEDBAYES_DATA=… python benchmarks/fedvi.py --certify                            certificates of unseen clients, a picture
    FEDBAYES_DATA=… python benchmarks/fedvi.py --table                              only write what there is
    python benchmarks/fedvi.py benchmarks/fedvi_femnist.toml                        the paper's own size, for a GPU

A TOML file has the data, the network, the rounds and each method's settings. Figures are the mean over the evaluations of the
last hundred rounds, one in `every`. A method's personalised figure is that of its adapted mode; FedAvg's is FedAvg+. FedVI
with β = 0 is its global classifier alone, which no client's rows have reached. Each run has a folder under --out: what is
there is not run again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import common
import numpy as np

import fedbayes as fb
from fedbayes.evaluation.pac_bayes import certify
from fedbayes.files import write

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results" / "fedvi.md"
CONFIG = Path(__file__).parent / "fedvi_writers.toml"
LABELS = {
    "fedavg": "FedAvg",
    "fedavg+": "FedAvg+",
    "ifca": "IFCA",
    "ditto": "Ditto",
    "fedrep": "FedRep",
    "apfl": "APFL",
    "knn-per": "kNN-Per",
    "fedrecon": "FedRecon",
    "fedvi-": "FedVI, β = 0",
    "fedvi": "FedVI",
}
TAUS = (0.0, 1e-3, 0.1, 1.0, 10.0)


@functools.cache
def clients(spec: str, seed: int) -> fb.data.Clients:
    """The clients of a table [data], as JSON; a seed changes the partition, the split and who is held out."""
    options = json.loads(spec)
    return fb.data.load(options.pop("name"), seed=seed, **options)


def run(label: str, name: str, options: dict[str, Any], config: dict[str, Any], seed: int, out: Path) -> dict[str, Any]:
    """Train and score; the mean over the evaluations of the last hundred rounds."""
    folder = out / f"{label}-{seed}"
    done = folder / "figures.json"
    if done.exists():
        return json.loads(done.read_text())
    data, began = clients(json.dumps(config["data"]), seed), time.perf_counter()
    rounds, every = config["rounds"], config["every"]
    found: list[dict[str, Any]] = []

    def score(simulation: Any, done: Any) -> None:
        if done.round > rounds - 100 and done.round % every == 0:
            found.append(fb.assess(simulation, ("global", "adapted")).summary())

    algorithm = common.algorithm(name, options, common.network(config["network"], data))
    fb.simulate(
        algorithm, data, rounds, cohort=config["cohort"], seed=seed, modes=("global",), callbacks=(score,), choose=False
    )
    result: dict[str, Any] = {"seconds": time.perf_counter() - began}
    for mode, groups in found[0].items():
        for group in groups:
            each = [common.figures(one[mode][group]) for one in found]
            result[f"{mode}, {group}"] = {key: statistics.mean(one[key] for one in each) for key in each[0]}
    folder.mkdir(parents=True, exist_ok=True)
    write(done, json.dumps(result, indent=2).encode())
    return result


def method(label: str, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = label.rstrip("+-")
    return name, config["methods"].get(name, {})


def found_of(label: str, out: Path) -> list[dict[str, Any]]:
    return common.found(out, f"{label}-[0-9]/figures.json")


def table(config: dict[str, Any], out: Path) -> str:
    """Accuracy over rows, as the paper weighs, then log score and ECE, for clients that took part and that did not."""
    lines = ["| | | " + " | ".join(LABELS.values()) + " |", "|---" * (len(LABELS) + 2) + "|"]
    for group in ("participating", "unseen"):
        for figure, digits in (("accuracy_rows", 2), ("log_score", 3), ("ece", 2), ("worst_tenth", 2)):
            cells = []
            for label in LABELS:
                mode = "global" if label in ("fedavg", "fedvi-") else "adapted"
                runs = found_of(label.rstrip("+-"), out)
                cells.append(common.spread([one[f"{mode}, {group}"][figure] for one in runs], digits))
            lines.append(f"| {group} | {figure.replace('_rows', '').replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ablation(config: dict[str, Any], seeds: list[int], out: Path, stem: str) -> str:
    """FedVI over τ, with its picture."""
    from matplotlib.figure import Figure  # noqa: TID251

    rows = {}
    for tau in TAUS:
        options = {**config["methods"]["fedvi"], "tau": tau}
        label = "fedvi" if tau == config["methods"]["fedvi"]["tau"] else f"tau{tau:g}"
        rows[tau] = [run(label, "fedvi", options, config, seed, out) for seed in seeds]
        print(f"τ = {tau:g}: {rows[tau][0]['adapted, unseen']['accuracy_rows']:.2f}", file=sys.stderr, flush=True)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    x = [tau or 1e-5 for tau in TAUS]
    for axes, what, title in zip(
        figure.subplots(1, 2), ("accuracy_rows", "ece"), ("accuracy, %", "calibration error, %"), strict=True
    ):
        for group in ("participating", "unseen"):
            values = [[one[f"adapted, {group}"][what] for one in rows[tau]] for tau in TAUS]
            mean = np.array([statistics.mean(each) for each in values])
            deviation = np.array([statistics.stdev(each) if len(each) > 1 else 0.0 for each in values])
            (line,) = axes.plot(x, mean, marker="o", label=group)
            axes.fill_between(x, mean - deviation, mean + deviation, alpha=0.2, color=line.get_color(), linewidth=0)
        axes.set_xscale("log")
        axes.set_xlabel("τ (0 at the left end)")
        axes.set_ylabel(title)
    figure.axes[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "images" / f"{stem}-tau.png", dpi=100)
    lines = ["| τ | participating | unseen | ECE, unseen | log score, unseen |", "|---|---|---|---|---|"]
    for tau, runs in rows.items():
        cells = [
            common.spread([one["adapted, participating"]["accuracy_rows"] for one in runs]),
            common.spread([one["adapted, unseen"]["accuracy_rows"] for one in runs]),
            common.spread([one["adapted, unseen"]["ece"] for one in runs]),
            common.spread([one["adapted, unseen"]["log_score"] for one in runs], 3),
        ]
        lines.append(f"| {tau:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def drawn_alone(simulation: Any) -> Any:
    """The same simulation, predicting with one draw of β: what a certificate is for."""
    alone = copy.copy(simulation)
    alone.algorithm = dataclasses.replace(simulation.algorithm, draws=1)
    return alone


def certificates(config: dict[str, Any], seed: int, stem: str) -> str:
    """Bounds of unseen clients from their training rows, against their error on test rows, with the picture."""
    from matplotlib.figure import Figure  # noqa: TID251

    data = clients(json.dumps(config["data"]), seed)
    options = {**config["methods"]["fedvi"], **config["certify"], "bias": False}
    algorithm = common.algorithm("fedvi", options, common.network(config["network"], data))
    fit = fb.simulate(
        algorithm, data, config["rounds"], cohort=config["cohort"], seed=seed, modes=("global", "adapted"), choose=False
    )
    certified, errors = [], []
    adapted = fb.assess(drawn_alone(fit.simulation), ("adapted",)).scores["adapted"]
    for place in np.flatnonzero(data.unseen):
        certified.append(certify(fit.simulation, str(data.names[place])))
        errors.append(float(adapted.error[place] / adapted.rows[place]))
    bounds = [one.bound for one in certified]
    figure = Figure(figsize=(4.2, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(errors, bounds, s=12, alpha=0.6)
    axes.axline((0, 0), slope=1, color="grey", linewidth=1)
    axes.set_xlabel("share of errors on test rows, one draw of β")
    axes.set_ylabel("bound, with probability .95")
    figure.savefig(ROOT / "docs" / "images" / f"{stem}-certificates.png", dpi=100)
    above = sum(e > b for e, b in zip(errors, bounds, strict=True))
    summary = fit.evaluation.summary()
    accuracy, alone = (summary[mode]["unseen"]["accuracy"]["rows"] for mode in ("adapted", "global"))
    rows = int(np.median(data.train_counts[data.unseen]))
    lines = [
        "| bound, with probability .95 | holds for | a tenth below | median | nine tenths below | say nothing |",
        "|---" * 6 + "|",
    ]
    for title, whom, values in (
        ("PAC-Bayes", "one draw of β, from all rows", bounds),
        ("Clopper–Pearson", "the averaged prediction, from half of the rows", [one.half_bound for one in certified]),
        ("Clopper–Pearson", "the shared model as it is", [one.shared_bound for one in certified]),
    ):
        low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
        empty = sum(value >= 0.9995 for value in values)
        lines.append(f"| {title} | {whom} | {low:.3f} | {middle:.3f} | {high:.3f} | {empty} |")
    half, shared = (sum(getattr(one, name) < one.bound for one in certified) for name in ("half_bound", "shared_bound"))
    text = (
        f"{len(bounds)} unseen clients with {rows} rows each in the median, seed {seed}. The second bound is below the first "
        f"for {half} of them, the third for {shared}. {above} have more errors on their test rows than the first. Error of the "
        f"averaged prediction on test rows {1 - accuracy:.3f}, of the shared model {1 - alone:.3f}."
    )
    return "\n".join([*lines, "", text])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG, help="TOML file")
    parser.add_argument("--only", default=None, help="methods, by name, with commas")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs, by default runs/ and the file's name")
    parser.add_argument("--tau", action="store_true", help="the ablation of τ")
    parser.add_argument("--certify", action="store_true", help="the certificates of unseen clients")
    parser.add_argument("--table", action="store_true", help="run nothing, only write what there is")
    options = parser.parse_args()
    config, stem = tomllib.loads(options.config.read_text()), options.config.stem
    out = options.out or Path("runs") / stem
    section = stem + "-tau" * options.tau + "-certificates" * options.certify
    common.check(PAGE, section)  # before anything runs for hours
    if options.tau:
        common.put(PAGE, section, ablation(config, options.seeds, out, stem))
        return 0
    if options.certify:
        common.put(PAGE, section, certificates(config, options.seeds[0], stem))
        return 0
    chosen = options.only.split(",") if options.only else [label for label in LABELS if label[-1] not in "+-"]
    for seed in options.seeds if not options.table else []:
        for label in chosen:
            found = run(label, *method(label, config), config, seed, out)
            accuracies = ", ".join(f"{key} {value['accuracy_rows']:.2f}" for key, value in found.items() if key != "seconds")
            print(f"{label} seed {seed}: {accuracies}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    common.put(PAGE, section, table(config, out))
    return 0


if __name__ == "__main__":
    common.command(main)
