"""FedHB on CIFAR-100 and CIFAR-100-Corrupted (Kim and Hospedales 2023, Tables 1 and 2). `--help` says how.

    FEDBAYES_DATA=… python benchmarks/fedhb_corrupted.py                     small: fits a laptop; seeds 0, 1, 2
    FEDBAYES_DATA=… python benchmarks/fedhb_corrupted.py benchmarks/fedhb_cifar100.toml            the paper's size: needs a GPU
    FEDBAYES_DATA=… python benchmarks/fedhb_corrupted.py benchmarks/fedhb_mobilenet.toml      the same for two cores
    FEDBAYES_DATA=… python benchmarks/fedhb_corrupted.py --only fedhb-niw,fedavg --seeds 0
    FEDBAYES_DATA=… python benchmarks/fedhb_corrupted.py --table             only write what there is into docs/results/fedhb.md

Ten of nineteen corruptions train, a group of clients each; the clients of the other nine are new and adapt to their own rows.
Every setting is in a TOML file, by default benchmarks/fedhb_corrupted.toml. Needs `pip install 'fedbayes[corruptions]'`.
Each run has a folder under --out: what is there is not run again.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import common
import fedhb

import fedbayes as fb
from fedbayes.files import write

CONFIG = Path(__file__).with_suffix(".toml")
LABELS = {"fedhb-niw": "NIW", "fedhb-mixture": "Mixture", "fedbabu": "FedBABU", "fedavg": "FedAvg", "fedprox": "FedProx"}


@functools.cache
def images(per_class: int, part: str) -> tuple[Any, Any]:
    """The first images of each class."""
    whole = fb.data.load("cifar100", partition="iid", clients=1)
    x, y = whole.rows("0", part)  # type: ignore[arg-type]
    keep = [place for label in range(100) for place in (y == label).nonzero()[0][:per_class]]
    return x[keep], y[keep]


def corrupted(config: dict[str, Any], seed: int, out: Path) -> fb.data.Clients:
    """The clients, made once: corrupting takes a minute or more."""
    folder, of = out / f"clients-{seed}", config["data"]
    if not folder.exists():
        x, y = images(of["images_per_class"], "test")
        kinds = {key: of[key] for key in ("train", "each", "partition", "severity")}
        fb.data.corrupted(x, y, seed=seed, **kinds).standardised().save(folder)
    return fb.data.Clients.load(folder)


def plain(config: dict[str, Any], seed: int, out: Path) -> fb.data.Clients:
    return fb.data.load("cifar100", partition=config["data"]["partition"], clients=config["data"]["clients"], seed=seed)


def run(name: str, config: dict[str, Any], seed: int, out: Path) -> dict[str, Any]:
    done = out / f"{name}-{seed}" / "figures.json"
    if done.exists():
        return json.loads(done.read_text())
    began = time.perf_counter()
    data = (corrupted if "severity" in config["data"] else plain)(config, seed, out)
    options = {"train": config["train"], "tune": config["tune"], **config["methods"].get(name, {})}
    fit = fb.simulate(
        common.algorithm(name, options, common.network(config["network"], data)),
        data,
        config["rounds"],
        cohort=config["cohort"],
        seed=seed,
        choose=False,
        modes=("global", "adapted"),
        folder=done.parent,
        resume=True,
    )
    found: dict[str, Any] = {"seconds": time.perf_counter() - began}
    for mode, groups in fit.evaluation.summary().items():
        for group, figures in groups.items():
            found[f"{mode}, {group}"] = common.figures(figures)
    write(done, json.dumps(found, indent=2).encode())
    return found


def same_settings(config: dict[str, Any], out: Path) -> None:
    """A folder's runs and clients are of one configuration."""
    known = out / "settings.json"
    found = json.loads(known.read_text()) if known.exists() else None
    if found != config and (found is not None or any(out.glob("*/figures.json"))):
        raise fb.UserError(f"{out} has runs with other settings than these; give another folder with --out")
    write(known, json.dumps(config, indent=2).encode())


def table(names: list[str], out: Path) -> str:
    runs = {name: common.found(out, f"{name}-*/figures.json") for name in names}
    lines = ["| | | " + " | ".join(LABELS[name] for name in runs) + " |", "|---" * (len(runs) + 2) + "|"]
    groups = {group for found in runs.values() for one in found for group in one if group != "seconds"}
    for rows in sorted(groups, key=lambda group: (group.startswith("adapted"), group)):
        for figure, digits in (("accuracy", 2), ("ece", 2), ("log_score", 3)):
            cells = [common.spread([one[rows][figure] for one in found], digits) for found in runs.values()]
            lines.append(f"| {rows} | {figure.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=CONFIG, help="TOML file")
    parser.add_argument("--only", default=None, help="methods, by name, with commas")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs, by default runs/ and the file's name")
    parser.add_argument("--table", action="store_true", help="run nothing, only write what there is")
    options = parser.parse_args()
    config = tomllib.loads(options.config.read_text())
    out, names = options.out or Path("runs") / options.config.stem, list(config.pop("compare"))
    out.mkdir(parents=True, exist_ok=True)
    same_settings(config, out)
    for seed in options.seeds if not options.table else []:
        for name in options.only.split(",") if options.only else names:
            found = run(name, config, seed, out)
            accuracies = ", ".join(f"{key} {value['accuracy']:.2f}" for key, value in found.items() if key != "seconds")
            print(f"{name} seed {seed}: {accuracies}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    common.put(fedhb.PAGE, options.config.stem, table(names, out))
    return 0


if __name__ == "__main__":
    common.command(main)
