"""Variances learnt by array (FedHB-NIW, form="gaussian"), on clients whose weights differ by layer.

    python benchmarks/fedhb_layers.py             # every cell that has not run yet
    python benchmarks/fedhb_layers.py --report    # the table of docs/results/fedhb-kinds.md

40 clients, 16 of them new, have 60 rows of 10 numbers. "intercepts": y is linear in x with the same weights for all, and each
client has an intercept of its own, sd 2. "last layer": y is a network of 16 tanh units that all clients share, under output
weights that vary with sd 1. "first layer": the output weights are shared and the input weights vary with sd .3. Noise has
sd .5. All runs have 100 rounds; the settings of `adapt` are chosen by the federation. "spike" is FedHB-NIW at its defaults.
"fixed" is the Gaussian form with prior="fixed": the same draws and curvature, but one variance σ0² for all weights, the default
or .3². Figures are appended to benchmarks/fedhb_layers.jsonl: log scores of new clients' test rows after `adapt`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
import numpy as np
from newcomers import gap

import fedbayes as fb
from fedbayes.data import Clients
from fedbayes.primitives import apart

OUT = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).parent.parent / "docs" / "results" / "fedhb-kinds.md"
CLIENTS, NEW, ROWS, FEATURES, UNITS, ROUNDS = 40, 16, 60, 10, 16, 100
MODES = {"5": "adapted:5", "20": "adapted:20", "all": "adapted"}
HOW = ("intercepts", "last layer", "first layer")
METHODS: dict[str, Any] = {
    "learnt": lambda model: fb.FedHBNIW(model, form="gaussian"),
    "spike": lambda model: fb.FedHBNIW(model),
    "fixed": lambda model: fb.FedHBNIW(model, form="gaussian", prior="fixed"),
    "fixed at .3": lambda model: fb.FedHBNIW(model, form="gaussian", prior="fixed", sigma0=0.3),
    "fedavg": lambda model: fb.FedAvg(model),
}


def load(how: str, seed: int) -> Clients:
    """Clients whose weights differ in one layer."""
    random = np.random.default_rng([13, seed])
    client = np.repeat(np.arange(CLIENTS), ROWS)
    x = random.normal(size=(len(client), FEATURES))
    if how == "intercepts":
        y = x @ random.normal(size=FEATURES) + 2 * random.normal(size=CLIENTS)[client]
    else:
        first = random.normal(size=(1, FEATURES, UNITS)) / np.sqrt(FEATURES)
        last = random.normal(size=(1, UNITS))
        if how == "last layer":
            last = last + random.normal(size=(CLIENTS, UNITS))
        else:
            first = first + 0.3 * random.normal(size=(CLIENTS, FEATURES, UNITS))
        first, last = (np.broadcast_to(one, (CLIENTS, *one.shape[1:])) for one in (first, last))
        hidden = np.tanh(np.einsum("nf,nfu->nu", x, first[client]))
        y = np.sum(hidden * last[client], axis=1)
    y = y + 0.5 * random.normal(size=len(y))
    names = Clients.build(x.astype(np.float32), y.astype(np.float32), client, test=0.5, seed=seed, name=how)
    return names.hold_out(NEW, seed=seed).standardised()


def cell(how: str, method: str, seed: int) -> dict[str, Any]:
    """Train once and score new clients."""
    clients = load(how, seed)
    network = fb.network("linear", clients) if how == "intercepts" else fb.network("mlp", clients, hidden=(32,))
    fit = fb.simulate(METHODS[method](network), clients, ROUNDS, seed=seed, modes=("global", *MODES.values()))
    summary, state = fit.evaluation.summary(), fit.simulation.state
    found = {mode: round(groups["unseen"]["log_score"]["rows"], 5) for mode, groups in summary.items()}
    chosen = [list(one["settings"].values()) for one in fit.result.get("choice", {}).values()]
    learnt = getattr(state, "apart", None)
    scales = {} if learnt is None else {name: round(float(one), 4) for name, one in apart.deviations(learnt).items()}
    heat = None if learnt is None else float(state.heat)
    return {"how": how, "method": method, "seed": seed, **found, "chosen": chosen, "sigma": scales, "heat": heat}


def main() -> int:
    """Run cells, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", nargs="+", choices=HOW, default=list(HOW))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[3, 4])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(one["how"], one["method"], one["seed"]): one for one in lines}
    if options.report:
        return report(known)
    for seed in options.seeds:
        for how in options.how:
            for method in options.methods:
                if (how, method, seed) in known:
                    continue
                found = cell(how, method, seed)
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(found, flush=True)
    return 0


def report(known: dict[tuple[str, str, int], dict[str, Any]]) -> int:
    """Log scores with learnt variances, and how far the others are from them."""
    rows = ["| | rows | learnt | spike, the default | fixed | fixed at .3 | FedAvg, fine-tuned | seeds |", "|---" * 8 + "|"]
    for how in HOW:
        seeds = sorted(seed for name, method, seed in known if name == how and method == "learnt")
        for label, mode in MODES.items() if seeds else ():
            cells = [common.spread([known[how, "learnt", seed][mode] for seed in seeds], 3)]
            for method in list(METHODS)[1:]:
                both = [seed for seed in seeds if (how, method, seed) in known]
                cells.append(gap([known[how, method, seed][mode] - known[how, "learnt", seed][mode] for seed in both]))
            rows.append(f"| {how} | {label} | {' | '.join(cells)} | {len(seeds)} |")
    common.put(PAGE, "layers", "\n".join(rows))
    return 0


if __name__ == "__main__":
    common.command(main)
