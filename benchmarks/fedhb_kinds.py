"""FedHB-Mixture on clients of four kinds, against IFCA, FedEM and ensembles.

    python benchmarks/fedhb_kinds.py                                        # every cell that has not run yet
    python benchmarks/fedhb_kinds.py --kinds rotated --methods mixture-4 ifca-4 --seeds 0
    python benchmarks/fedhb_kinds.py --report                               # the tables of docs/results/fedhb-kinds.md

48 clients share the embedded digits, 37 rows each; 12 of them never train. Of each kind there are 12: images are rotated by 0,
90, 180 or 270 degrees ("rotated"), or labels are permuted in four ways ("relabelled"). All methods have one hidden layer of 64
and 60 rounds of two epochs of all clients. FedHB-Mixture "for kinds" has the settings KINDRED: prototypes start at random, a
client's round at the best of them, and σ² is learnt. IFCA without fine-tuning adapts by choosing a network. New clients are
scored without rows, with 5 and with all of their training rows. Figures are appended to benchmarks/fedhb_kinds.jsonl. "purity"
is the share of training clients whose prototype is that of the majority of their kind, "apart" the prototypes that a majority
of some kind has, and "gate" the share of new clients whom the gate sends to the prototype of their kind, from rows without
labels; a run whose clients all have the same prototype has no such share.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

import fedbayes as fb
from fedbayes.data import Clients
from fedbayes.primitives.training import mean_loss

OUT = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).parent.parent / "docs" / "results" / "fedhb-kinds.md"
CLIENTS, NEW, ROUNDS, KINDS = 48, 12, 60, 4
MODES = ("global", "personal", "adapted:5", "adapted")
TRAIN = fb.Training(epochs=2, batch=20, lr=0.1, momentum=0.9)
Make = Callable[[Any], Any]
KINDRED: dict[str, Any] = {"learnt": True, "balance": 0.3, "noise": None, "start": "best"}
METHODS: dict[str, tuple[str, Make]] = {
    "mixture-1": ("FedHB-Mixture, for kinds, K = 1", lambda model: fb.FedHBMixture(model, K=1, **KINDRED)),
    "mixture-4": ("FedHB-Mixture, for kinds, K = 4", lambda model: fb.FedHBMixture(model, K=4, **KINDRED)),
    "default-4": ("FedHB-Mixture, defaults, K = 4", lambda model: fb.FedHBMixture(model, K=4)),
    "ifca-4": ("IFCA, K = 4, without fine-tuning", lambda model: fb.IFCA(model, K=4)),
    "ifca-4-tuned": ("IFCA, K = 4, fine-tuned", lambda model: fb.IFCA(model, K=4, fine_tune=True)),
    "fedem-4": ("FedEM, K = 4", lambda model: fb.FedEM(model, K=4)),
    "ensemble-4": ("Ensemble, K = 4", lambda model: fb.Ensemble(model, K=4)),
}


def load(how: str, seed: int) -> tuple[Clients, np.ndarray]:
    """Digits of clients of four kinds, and each client's kind."""
    digits = fb.data.load("digits", clients=CLIENTS, partition="iid", seed=seed)
    random = np.random.default_rng([11, seed])
    kind = np.arange(CLIENTS) % KINDS
    permutations = [np.arange(10), *(random.permutation(10) for _ in range(KINDS - 1))]
    of_row = np.repeat(kind, np.diff(digits.offsets))
    x, y = np.array(digits.x), np.array(digits.y)
    if how == "rotated":
        images = x.reshape(len(x), 8, 8)
        turned = [np.rot90(images[of_row == k], k, axes=(1, 2)) for k in range(KINDS)]
        for k in range(KINDS):
            x[of_row == k] = turned[k].reshape(-1, *x.shape[1:])
    else:
        y = np.stack(permutations)[of_row, y].astype(y.dtype)
    new = np.concatenate([random.choice(np.flatnonzero(kind == k), NEW // KINDS, replace=False) for k in range(KINDS)])
    unseen = np.isin(np.arange(CLIENTS), new)
    return dataclasses.replace(digits, x=x, y=y, unseen=unseen), kind


def cell(how: str, method: str, seed: int) -> dict[str, Any]:
    """Train once; score participants and new clients."""
    clients, kind = load(how, seed)
    algorithm = dataclasses.replace(METHODS[method][1](fb.network("mlp", clients, hidden=(64,))), train=TRAIN)
    began = time.perf_counter()
    fit = fb.simulate(algorithm, clients, ROUNDS, seed=seed, modes=MODES)
    found: dict[str, Any] = {"kinds": how, "method": method, "seed": seed, "seconds": round(time.perf_counter() - began, 1)}
    for mode, groups in fit.evaluation.summary().items():
        for group, figures in groups.items():
            found[f"{group} {mode}"] = [round(figures[one]["rows"], 5) for one in ("accuracy", "log_score")]
    down = fit.simulation.down()
    if isinstance(algorithm, fb.FedHBMixture | fb.IFCA) and algorithm.K > 1:
        found |= sorted_by_kind(fit.simulation.algorithm, down, clients, kind)
    return found


def sorted_by_kind(algorithm: Any, down: Any, clients: Clients, kind: np.ndarray) -> dict[str, Any]:
    """Purity of the prototypes that fit best, and how often the gate sends a new client to its kind's."""
    mixture = isinstance(algorithm, fb.FedHBMixture)
    networks = down.r if mixture else down.theta
    best, gated = [], []
    for index in range(len(clients)):
        data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([index], int(clients.train_counts[index])))
        losses = jax.vmap(lambda one, data=data: mean_loss(algorithm.model, one, data))(networks)
        best.append(int(jnp.argmin(losses)))
        if mixture:
            gated.append(int(jnp.argmax(jnp.mean(algorithm.gate_shares(down, data.x), axis=0))))
    place, K = np.array(best), algorithm.K
    trained = ~clients.unseen
    counts = np.array([[(place[trained & (kind == k)] == j).sum() for j in range(K)] for k in range(KINDS)])
    found: dict[str, Any] = {"purity": float(counts.max(axis=1).sum() / trained.sum()), "used": int((counts.max(0) > 0).sum())}
    found["apart"] = len(set(counts.argmax(axis=1)))
    if mixture:
        found["gate"] = float((np.array(gated) == counts.argmax(axis=1)[kind])[clients.unseen].mean())
        found["sigma2"] = None if down.sigma2 is None else float(down.sigma2)
    return found


def main() -> int:
    """Run cells, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("rotated", "relabelled"), default=["rotated", "relabelled"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.report:
        return report(lines)
    known = {(one["kinds"], one["method"], one["seed"]) for one in lines}
    for seed in options.seeds:
        for how in options.kinds:
            for method in options.methods:
                if (how, method, seed) in known:
                    continue
                found = cell(how, method, seed)
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(found, flush=True)
    return 0


def report(lines: list[dict[str, Any]]) -> int:
    """A table for each way in which kinds differ."""
    for how in ("rotated", "relabelled"):
        table = ["| | new, no rows | new, 5 rows | new, all rows | participants, all rows | kinds apart | gate | seeds |"]
        table.append("|---" * 8 + "|")
        for method, (title, _) in METHODS.items():
            ran = [one for one in lines if one["kinds"] == how and one["method"] == method]
            if not ran:
                continue
            cells = []
            for mode in ("unseen global", "unseen adapted:5", "unseen adapted", "participating adapted"):
                values = [one[mode] for one in ran if mode in one]
                accuracy = common.spread([100 * value[0] for value in values], 1)
                cells.append(f"{accuracy} / {common.spread([value[1] for value in values], 3)}")
            cells.append(common.spread([one["apart"] for one in ran if "apart" in one], 1))
            cells.append(common.spread([100 * one["gate"] for one in ran if "gate" in one and one["apart"] > 1], 0))
            table.append(f"| {title} | {' | '.join(cells)} | {len(ran)} |")
        common.put(PAGE, how, "\n".join(table))
    return 0


if __name__ == "__main__":
    common.command(main)
