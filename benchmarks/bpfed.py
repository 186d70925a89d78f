"""BPFed's Tables I and II, its convergence, its novel clients (Chen et al. 2023, section VI). `--help` says how.

    FEDBAYES_DATA=… python benchmarks/bpfed.py                                   all methods, both sets and sizes, seeds 0, 1, 2
    FEDBAYES_DATA=… python benchmarks/bpfed.py --only bpfed,fedper --data mnist --sizes small --seeds 0
    FEDBAYES_DATA=… python benchmarks/bpfed.py --novel                           a new client, over the number of its rows
    FEDBAYES_DATA=… python benchmarks/bpfed.py --together                        how far five clients would come with all rows
    FEDBAYES_DATA=… python benchmarks/bpfed.py --overlap                         large Fashion-MNIST, tested as released
    FEDBAYES_DATA=… python benchmarks/bpfed.py --cost                            a mean-field step over a deterministic one
    FEDBAYES_DATA=… python benchmarks/bpfed.py --table                           only write what there is

Ten clients have five of ten labels each, those with even numbers 0 to 4 and the others 5 to 9, as the code that pFedBayes'
and BPFed's authors released divides them; of each label 50 rows train and 950 test (small) or 900 train and 300 test (large),
all ten in each round. Pixels are scaled to −1…1. The network is 784-100-10. A round is four epochs on small sets and one on
large ones, of Adam at 1e-3 in batches of 50, except where a method has its own optimiser.
Figures are of the personal models, pooled over test rows; every client has as many. A seed is that of the split and the
start. Each run has a folder under --out: what is there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import spread
from released import ReleasedFedRep
from sklearn.metrics import roc_auc_score

import fedbayes as fb
from fedbayes.algorithm import Data
from fedbayes.evaluation.score import Score, metrics, pooled, score
from fedbayes.files import write
from fedbayes.models import Categorical, Model, cnn, mlp
from fedbayes.primitives.training import descend, mean_loss
from fedbayes.report.calibration import reliability

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results" / "bpfed.md"
SIZES = {"small": (50, 950), "large": (900, 300)}
"""Rows of each label of a client: training, test."""
SUBSET = {"small": (25, 200), "large": (150, 90)}
"""The same of CIFAR-10, of which there are 12,000 images here; the paper has 25 and 475, 450 and 150, and twenty clients."""
OVERLAP = "large, tested as released"
"""The large set's training rows with the *small* set's test rows, as the released code can read them: 46 % are in both."""
EPOCHS = {"small": 4, "large": 1, OVERLAP: 1}
"""Of a round: 20 minibatches, as many as a round of the released code, which calls them epochs; on large sets one epoch, 90."""
ROUNDS = {"small": (200, 20), "large": (100, 20), OVERLAP: (180, 20)}
"""Rounds, and how often every client is scored."""
THEIR_ROUNDS = {"pfedbayes": {"small": (100, 20), "large": (40, 8), OVERLAP: (100, 20)}, "bpfed": {OVERLAP: (360, 20)}}
"""The same of pFedBayes, which takes five steps with each minibatch, and of BPFed, whose minibatches have 100 rows there."""
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10, subset"}
TUNE = fb.Training(20, "adam", 50, lr=0.001)
PAPER: dict[str, Any] = {"population": False}
"""As published: nothing of the personal layers leaves a client."""


def adam(size: str, **options: Any) -> fb.Training:
    return fb.Training(**{"epochs": EPOCHS[size], "optimiser": "adam", "batch": 50, "lr": 0.001, **options})


def sgd(size: str, lr: float) -> fb.Training:
    return adam(size, optimiser="sgd", lr=lr)


METHODS = {
    "bpfed": lambda model, size: fb.BPFed.paper(model, train=adam(size), tune=TUNE),
    "pfedbayes": lambda model, size: fb.PFedBayes(model, train=adam(size), tune=TUNE),
    "fedsoul": lambda model, size: fb.FedPop(model, form="langevin", eta=1e-3, prior_step=0.5, steps=20, train=adam(size)),
    "fedper": lambda model, size: fb.FedPer(model, train=adam(size), tune=TUNE, **PAPER),
    "fedrep": lambda model, size: fb.FedRep(model, head=adam(size), train=adam(size, epochs=1), tune=TUNE, **PAPER),
    "fedrep-released": lambda model, size: ReleasedFedRep(model, adam(size)),
    "lg-fedavg": lambda model, size: fb.LGFedAvg(model, train=adam(size), tune=TUNE, **PAPER),
    "per-fedavg": lambda model, size: fb.PerFedAvg(model, alpha=0.01, train=sgd(size, 0.1)),
    "pfedme": lambda model, size: fb.PFedMe(model, train=sgd(size, 0.01)),
    "fedavg": lambda model, size: fb.FedAvg(model, train=adam(size), tune=TUNE),
    "fedper-tempered": lambda model, size: fb.Tempered(fb.FedPer(model, train=adam(size), tune=TUNE, **PAPER)),
}
LABELS = dict(
    zip(
        METHODS,
        [
            "BPFed",
            "pFedBayes",
            "FedSOUL",
            "FedPer",
            "FedRep",
            "FedRep, as released",
            "LG-FedAvg",
            "Per-FedAvg",
            "pFedMe",
            "FedAvg",
            "FedPer, tempered",
        ],
        strict=True,
    )
)
PUBLISHED = {
    ("mnist", "small"): {"fedper": 93.9, "fedrep-released": 94.8, "lg-fedavg": 91.6, "pfedbayes": 94.4, "bpfed": 93.6},
    ("mnist", "large"): {"fedper": 98.5, "fedrep-released": 98.6, "lg-fedavg": 97.2, "pfedbayes": 98.2, "bpfed": 98.6},
    ("fashion_mnist", "small"): {"fedper": 88.3, "fedrep-released": 88.2, "lg-fedavg": 86.4, "pfedbayes": 88.0, "bpfed": 88.1},
    ("fashion_mnist", "large"): {"fedper": 95.4, "fedrep-released": 95.7, "lg-fedavg": 95.6, "pfedbayes": 95.0, "bpfed": 96.2},
}
"""Accuracy of the personal model, best of 800 rounds, from the authors' saved curves."""
PUBLISHED_ECE = {
    ("mnist", "small"): {"bpfed": 4.4, "pfedbayes": 4.7, "fedsoul": 6.2},
    ("mnist", "large"): {"bpfed": 1.2, "pfedbayes": 1.4, "fedsoul": 1.9},
    ("fashion_mnist", "small"): {"bpfed": 8.9, "pfedbayes": 9.2, "fedsoul": 9.7},
    ("fashion_mnist", "large"): {"bpfed": 6.6, "pfedbayes": 7.1, "fedsoul": 7.8},
}
"""Table II; its "19" for FedSOUL on large MNIST is read as 1.9."""


@functools.cache
def clients(data: str, size: str, seed: int) -> fb.data.Clients:
    """Five clients with the labels 0 to 4, five with 5 to 9, in turn; but for OVERLAP, a row belongs to one client at most."""
    whole = fb.data.load(data, partition="iid", clients=1)
    sizes = SUBSET if data == "cifar10" else SIZES
    generator, rows, owner, is_test = np.random.default_rng(seed), [], [], []
    for label in range(10):
        places = generator.permutation(np.flatnonzero(whole.y == label))
        for number in range(5):
            if size == OVERLAP:
                train = generator.permutation(np.concatenate(share(places, number, *sizes["large"])))[: sizes["large"][0]]
                test = share(places, number, *sizes["small"])[1]
            else:
                train, test = share(places, number, *sizes[size])
            for part in (train, test):
                rows += part.tolist()
                owner += [2 * number + label // 5] * len(part)
                is_test += [part is test] * len(part)
    order = np.argsort(rows, kind="stable")
    rows, owner, is_test = (np.array(values)[order] for values in (rows, owner, is_test))
    names = [str(number) for number in range(10)]
    return fb.data.Clients.build(whole.x[rows], whole.y[rows], owner, names=names, is_test=is_test, name=f"{data}-{size}")


def share(places: Any, number: int, train: int, test: int) -> tuple[Any, Any]:
    """Training and test rows of one label of a client."""
    mine = places[number * (train + test) : (number + 1) * (train + test)]
    return mine[:train], mine[train:]


def network(data: str) -> Model:
    if data == "cifar10":  # two convolutions and three dense layers
        return cnn((32, 32, 3), Categorical(10), (6, 16), (120, 84), shift=120.0, scale=64.0)
    return mlp((28, 28), Categorical(10), (100,), shift=127.5, scale=127.5)


def found_in(evaluation: Any, mode: str = "personal") -> dict[str, float]:
    group = evaluation.summary()[mode]["participating"]
    return {name: group[name]["rows"] for name in ("accuracy", "log_score", "brier", "ece", "mce", "mutual_information")}


def curve_of(fit: Any, mode: str) -> list[tuple[int, float]]:
    """Accuracy in the rounds that were scored."""
    scored = [entry for entry in fit.history if "evaluation" in entry]
    return [(entry["round"], entry["evaluation"][mode]["participating"]["accuracy"]["rows"]) for entry in scored]


OTHERS = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
"""Where inputs from elsewhere come from."""


def strangers(fit: Any, data: str, seed: int) -> float:
    """AUROC of telling rows of the other set from test rows by mutual information, mean over clients."""
    if data not in OTHERS:
        return float("nan")
    other = clients(OTHERS[data], "small", seed)
    areas = []
    for name in fit.simulation.data.names:
        own, _ = fit.simulation.data.rows(str(name), "test")
        foreign, _ = other.rows(str(name), "test")
        rows = np.concatenate([own[:1000], foreign[:1000]])
        doubt = fit.uncertainty(rows, str(name))
        kind = doubt.epistemic if float(doubt.epistemic.max()) > 0 else doubt.total  # a point has no epistemic part
        areas.append(roc_auc_score(np.arange(len(rows)) >= len(own[:1000]), np.asarray(kind)))
    return float(np.mean(areas))


def run(name: str, data: str, size: str, seed: int, out: Path) -> dict[str, Any]:
    folder = out / f"{name}-{data}-{size}-{seed}"
    done = folder / "figures.json"
    if done.exists():
        return json.loads(done.read_text())
    rounds, every = (ROUNDS | THEIR_ROUNDS.get(name, {}))[size]
    if data == "cifar10":  # a convolutional network takes its time
        rounds, every = rounds // 2, every // 2
    began = time.perf_counter()
    fit = fb.simulate(
        METHODS[name](network(data), size),
        clients(data, size, seed),
        rounds,
        seed=seed,
        choose=False,
        modes=("personal",),
        evaluate_every=every,
        folder=folder,
        resume=True,
    )
    curve = curve_of(fit, "personal")
    bins = pooled(fit.evaluation.scores["personal"])
    found = {
        **found_in(fit.evaluation),
        "best": max(accuracy for _, accuracy in curve),
        "curve": curve,
        "auroc": strangers(fit, data, seed),
        "score": {key: np.asarray(value).tolist() for key, value in bins._asdict().items()},
        "seconds": time.perf_counter() - began,
    }
    write(done, json.dumps(found, indent=2).encode())
    return found


def read(out: Path, name: str, data: str, size: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(out.glob(f"{name}-{data}-{size}-[0-9]/figures.json")):
        whole = json.loads((path.parent / "result.json").read_text())["metrics"]["personal"]["participating"]["ece"]
        found.append({**json.loads(path.read_text()), "ece_clients": whole["clients"], "ece_worst": whole["worst_tenth"]})
    return found


def tables(out: Path) -> str:
    lines = ["| | | " + " | ".join(LABELS.values()) + " |", "|---" * (len(LABELS) + 2) + "|"]
    rows = (
        ("accuracy", "accuracy, last round", 100, 2),
        ("best", "accuracy, best round", 100, 2),
        ("ece", "ECE, %", 100, 2),
        ("ece_clients", "ECE, mean over clients, %", 100, 2),
        ("ece_worst", "ECE, the worst client, %", 100, 2),
        ("mce", "MCE, %", 100, 1),
        ("brier", "Brier score", 1, 4),
        ("log_score", "log score", 1, 3),
        ("auroc", "AUROC, other set", 1, 3),
    )
    for data, title in TITLES.items():
        for size in SIZES:
            found = {name: read(out, name, data, size) for name in METHODS}
            for key, what, times, digits in rows if data in OTHERS else rows[:-1]:
                cells = [spread([times * one[key] for one in runs], digits) for runs in found.values()]
                lines.append(f"| {title}, {size} | {what} | " + " | ".join(cells) + " |")
                paper = {"best": PUBLISHED, "ece": PUBLISHED_ECE}.get(key, {}).get((data, size))
                if paper:
                    cells = [str(paper.get(name, "")) for name in METHODS]
                    lines.append(f"| {title}, {size} | published | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def overlap(out: Path) -> str:
    """Large Fashion-MNIST with test rows of its own, and with those of the small set, most of which some client trains on."""
    data, size = "fashion_mnist", "large"
    lines = [
        "| large Fashion-MNIST, best round | published | its own test rows | the small set's test rows |",
        "|---" * 4 + "|",
    ]
    for name, published in PUBLISHED[data, size].items():
        cells = [spread([100 * one["best"] for one in read(out, name, data, kind)]) for kind in (size, OVERLAP)]
        lines.append(f"| {LABELS[name]} | {published} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pictures(out: Path) -> None:
    """Reliability of MNIST's personal models (Figure 6), and accuracy over rounds (Figures 3 and 4)."""
    from matplotlib.figure import Figure  # noqa: TID251

    shown: dict[str, Score] = {}
    for size in SIZES:
        for name in ("bpfed", "pfedbayes", "fedper"):
            if runs := read(out, name, "mnist", size):
                shown[f"{LABELS[name]}, {size}"] = Score(**{key: np.asarray(v) for key, v in runs[0]["score"].items()})
    if shown:
        reliability(shown).savefig(ROOT / "docs" / "images" / "bpfed-reliability.png", dpi=100)
    settings = [(d, size) for d in OTHERS for size in SIZES if any(read(out, name, d, size) for name in METHODS)]
    if not settings:
        return
    figure = Figure(figsize=(9, 2.8 * -(-len(settings) // 2)), layout="constrained")
    lines = {}
    for axes, (data, size) in zip(figure.subplots(-(-len(settings) // 2), 2, squeeze=False).flat, settings, strict=False):
        for place, (name, label) in enumerate(LABELS.items()):
            if runs := read(out, name, data, size):
                curves = np.array([[value for _, value in one["curve"]] for one in runs])
                rounds = [number for number, _ in runs[0]["curve"]]
                style = {"color": f"C{place}", "linestyle": "-" if place < 10 else "--", "label": label, "linewidth": 1.3}
                (lines[label],) = axes.plot(rounds, 100 * curves.mean(axis=0), **style)
        axes.set_title(f"{TITLES[data]}, {size}", fontsize=9, loc="left")
        axes.set_ylabel("accuracy, %")
        axes.set_xlabel("round")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in figure.axes[len(settings) :]:
        axes.remove()
    figure.legend(lines.values(), lines.keys(), frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(ROOT / "docs" / "images" / "bpfed-curves.png", dpi=100)


COUNTS = (5, 10, 20, 50, 100)
"""Rows of a new client."""


def novel(data: str, size: str, seeds: list[int], out: Path) -> str:
    """Nine clients train; the tenth adapts to few rows. Beside it, training alone. With the picture."""
    from matplotlib.figure import Figure  # noqa: TID251

    names = ("bpfed", "fedper", "fedrep", "alone")
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for seed in seeds:
        for name in names:
            done = out / f"novel-{name}-{data}-{size}-{seed}.json"
            if not done.exists():
                done.parent.mkdir(parents=True, exist_ok=True)
                write(done, json.dumps(newcomer(name, data, size, seed), indent=2).encode())
            for count, figures in json.loads(done.read_text()).items():
                found.setdefault((name, int(count)), []).append(figures)
            print(f"{name} {data} {size} seed {seed} done", file=sys.stderr, flush=True)
    labels = {**LABELS, "alone": "alone"}
    lines = ["| rows | " + " | ".join(f"{labels[name]}: accuracy, ECE" for name in names) + " |", "|---" * 5 + "|"]
    for count in COUNTS:
        cells = [
            spread([100 * one["accuracy"] for one in found[name, count]])
            + ", "
            + spread([100 * one["ece"] for one in found[name, count]])
            for name in names
        ]
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, key, title in zip(
        figure.subplots(1, 2), ("accuracy", "ece"), ("accuracy, %", "calibration error, %"), strict=True
    ):
        for name in names:
            values = np.array([[100 * one[key] for one in found[name, count]] for count in COUNTS])
            axes.errorbar(COUNTS, values.mean(axis=1), values.std(axis=1), marker="o", capsize=2, label=labels[name])
        axes.set_xscale("log")
        axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
        axes.set_xlabel("rows of the new client")
        axes.set_ylabel(title)
    figure.axes[0].legend(frameon=False)
    figure.savefig(ROOT / "docs" / "images" / f"bpfed-novel-{data}.png", dpi=100)
    return "\n".join(lines)


def newcomer(name: str, data: str, size: str, seed: int) -> dict[int, dict[str, float]]:
    """Accuracy and ECE of a client that was held out, by how many rows it adapts to, in 100 epochs; BPFed's are ten rounds."""
    whole = clients(data, size, seed).hold_out(1, seed)
    mine = str(whole.names[whole.unseen][0])
    x, y = whole.rows(mine)
    test_x, test_y = whole.rows(mine, "test")
    places = np.random.default_rng(seed).permutation(len(y))
    found = {}
    method = METHODS["fedper" if name == "alone" else name](network(data), size)
    fit = fb.simulate(
        method, whole, 1 if name == "alone" else ROUNDS[size][0] // 2, seed=seed, modes=("personal",), choose=False
    )
    for count in COUNTS:
        steps = fb.Training(100, "adam", 50, lr=0.001)
        rows = Data(jnp.asarray(x[places[:count]]), jnp.asarray(y[places[:count]]), jnp.ones(count, bool))
        if name == "alone":
            model = network(data)
            w = model.init(jax.random.key(seed))
            w, _ = descend(model, lambda w, _, batch: mean_loss(model, w, batch), w, steps, 1e-3, jax.random.key(0), rows)  # noqa: B023
            outputs = model.apply(w, jnp.asarray(test_x))[None]
        else:
            tuned = {"tune": steps}
            if name == "bpfed":
                tuned = {"tune": dataclasses.replace(steps, epochs=10), "tune_rounds": 10}
            fit.simulation.algorithm = dataclasses.replace(fit.simulation.algorithm, **tuned)
            outputs = fit.adapt(x[places[:count]], y[places[:count]]).draws(test_x)
        figures = metrics(score(Categorical(10), outputs, jnp.asarray(test_y), jnp.ones(len(test_y), bool)), numeric=False)
        found[count] = {key: float(figures[key]) for key in ("accuracy", "ece", "log_score")}
    return found


def together(data: str, seeds: list[int]) -> str:
    """What no client can have: one network for each group of labels, on the rows of its five clients together (large sets)."""
    lines = ["| a network for each group, on all its rows | labels 0 to 4 | labels 5 to 9 | mean |", "|---|---|---|---|"]
    best = np.zeros((len(seeds), 2))
    for place, seed in enumerate(seeds):
        whole = clients(data, "large", seed)
        for group in (0, 1):
            parts = [whole.rows(str(name), part) for part in ("train", "test") for name in range(group, 10, 2)]
            x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
            is_test = np.arange(len(y)) >= sum(len(labels) for _, labels in parts[:5])
            one = fb.data.Clients.build(x, y % 5, np.zeros(len(y), int), names=["all"], is_test=is_test, name=f"group{group}")
            method = fb.FedAvg(mlp((28, 28), Categorical(5), (100,), shift=127.5, scale=127.5), train=adam("large", epochs=2))
            fit = fb.simulate(method, one, 15, seed=seed, modes=("global",), evaluate_every=1, choose=False)
            best[place, group] = 100 * max(accuracy for _, accuracy in curve_of(fit, "global"))
    cells = [spread(values.tolist()) for values in (best[:, 0], best[:, 1], best.mean(axis=1))]
    lines.append(f"| {TITLES[data]}, large, best of 15 rounds of two epochs | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost() -> str:
    """Rounds of BPFed, without and with the copy that follows (11), over one of FedPer: same network and steps, in turns."""
    data = clients("mnist", "small", 0)
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([0], 250))
    lines = ["| network | a mean-field step over a deterministic one | local reparametrisation | with (11), as by default |"]
    lines.append("|---" * 4 + "|")
    networks = {
        "784-100-10": network("mnist"),
        "784-256-10": mlp((28, 28), Categorical(10), (256,)),
        "cnn": fb.models.cnn((28, 28), Categorical(10), (8, 16), (32,)),
    }
    for title, model in networks.items():
        train = adam("small", epochs=10)
        methods = [fb.FedPer(model, train=train, **PAPER)]
        for local in (False, True):
            methods.append(fb.BPFed.paper(model, train=train, reinforce=False, local_reparametrisation=local))
        methods.append(fb.BPFed.paper(model, train=train))
        rounds = [prepared(method, rows) for method in methods]
        times: list[list[float]] = [[] for _ in methods]
        for _ in range(100):
            for one, seconds in zip(rounds, times, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(one())
                seconds.append(time.perf_counter() - began)
        base = np.array(times[0])
        cells = []
        for seconds in times[1:]:
            low, middle, high = np.quantile(np.array(seconds) / base, [0.25, 0.5, 0.75])
            cells.append(f"{middle:.2f} (quartiles {low:.2f}–{high:.2f})")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def prepared(method: Any, rows: Data) -> Any:
    key = jax.random.key(0)
    down, local = method.broadcast(key, method.init_server(key)), method.init_local(key, rows)
    client = jax.jit(method.client)
    jax.block_until_ready(client(key, down, local, rows))
    return lambda: client(key, down, local, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(METHODS), help="methods, by name, with commas")
    parser.add_argument("--data", nargs="+", default=list(TITLES))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bpfed"), help="folder of the runs")
    parser.add_argument("--novel", action="store_true", help="a new client, over the number of its rows")
    parser.add_argument("--cost", action="store_true", help="a mean-field step over a deterministic one")
    parser.add_argument("--overlap", action="store_true", help="large Fashion-MNIST with test rows that were trained on")
    parser.add_argument("--together", action="store_true", help="a network on the rows of all clients with the same labels")
    parser.add_argument("--table", action="store_true", help="run nothing, only write what there is")
    options = parser.parse_args()
    if options.cost:
        common.put(PAGE, "cost", cost())
        return 0
    if options.together:
        common.put(PAGE, "together", together("fashion_mnist", options.seeds))
        return 0
    if options.novel:
        for data in (name for name in options.data if name in OTHERS):
            common.put(PAGE, f"novel-{data}", novel(data, options.sizes[0], options.seeds, options.out))
        return 0
    if options.overlap:
        options.data, options.sizes = ["fashion_mnist"], [OVERLAP]
        options.only = ",".join(PUBLISHED["fashion_mnist", "large"])
    for seed in options.seeds if not options.table else []:
        for size in options.sizes:
            for data in options.data:
                for name in options.only.split(","):
                    found = run(name, data, size, seed, options.out)
                    print(
                        f"{name} {data} {size} seed {seed}: accuracy {100 * found['accuracy']:.2f} (best "
                        f"{100 * found['best']:.2f}), ECE {100 * found['ece']:.2f}, log score {found['log_score']:.3f}, "
                        f"AUROC {found['auroc']:.3f}, {found['seconds']:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
    common.put(PAGE, "tables", tables(options.out))
    common.put(PAGE, "overlap", overlap(options.out))
    pictures(options.out)
    return 0


if __name__ == "__main__":
    common.command(main)
