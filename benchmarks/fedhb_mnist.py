"""FedHB's MNIST table (Kim and Hospedales 2023, Tables 10 and 11) for FedAvg, FedProx and FedBABU: `--help` says how.

    FEDBAYES_DATA=... python benchmarks/fedhb_mnist.py                      the published rows, 3 seeds
    FEDBAYES_DATA=... python benchmarks/fedhb_mnist.py heads --seeds 0      a group of variants of FedBABU, 1 seed
    FEDBAYES_DATA=... python benchmarks/fedhb_mnist.py all --table          only print what there is

100 clients with 5 shards each, 10 a round, 100 rounds of one epoch in batches of 50, a network 784-256-10 on standardised
pixels, SGD with momentum .9 and step size .1, times .1 after half and three quarters of the rounds. "Global" is the shared
model after the last round on each client's own test rows; "personalised" the same after 5 more epochs on the client's training
rows. A seed is that of the partition, the cohorts and the start. The published rows are personalised at three step sizes,
variants at the first. Each run has a folder under --out: what is there is not run again, what was broken off goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
from common import spread

import fedbayes as fb
from fedbayes.files import write
from fedbayes.models import Categorical, Model, from_functions, mlp

PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}
"""Mean and deviation of a pixel in 0..1."""
PERSONAL = (1e-3, 1e-2, 1e-1)
"""Step sizes of personalisation; the first is FedBABU's own."""
PUBLISHED = {
    ("mnist", 1): {"FedAvg": (97.15, 97.83), "FedProx": (97.38, 97.96), "FedBABU": (97.16, 97.73)},
    ("mnist", 5): {"FedAvg": (94.86, 96.10), "FedProx": (95.28, 96.45), "FedBABU": (94.59, 95.89)},
    ("fashion_mnist", 1): {"FedAvg": (81.98, 90.59), "FedProx": (83.25, 90.72), "FedBABU": (83.86, 91.03)},
    ("fashion_mnist", 5): {"FedAvg": (73.70, 86.85), "FedProx": (73.67, 87.35), "FedBABU": (76.10, 89.02)},
}
"""(data, local epochs) → method → global and personalised accuracy."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of a table: an algorithm and what it is trained on."""

    label: str
    method: str
    """The algorithm."""
    model: Callable[[str], Model]
    options: tuple[tuple[str, Any], ...] = ()
    lr: float = 0.1
    momentum: float = 0.9
    data: str = "mnist"
    epochs: int = 1
    every: int = 0
    """Score the shared model each so many rounds too, to see how much the best round on test would add."""
    beside: str | None = None
    """Whose published figures stand beside it; by default the algorithm's."""

    @property
    def rounds(self) -> int:
        return 100 // self.epochs

    def algorithm(self) -> Any:
        train = fb.Training(epochs=self.epochs, batch=50, lr=self.lr, decay_at=(0.5, 0.75), momentum=self.momentum)
        kind = getattr(fb, self.method)
        return kind(self.model(self.data), train=train, tune=tuning(PERSONAL[0]), **dict(self.options))


def tuning(lr: float) -> fb.Training:
    return fb.Training(epochs=5, batch=50, lr=lr, momentum=0.9)


@functools.cache
def network(data: str, hidden: tuple[int, ...] = (256,), init: Any = "torch") -> Model:
    mean, deviation = PIXELS[data]
    return mlp((28, 28), Categorical(10), hidden, shift=255 * mean, scale=255 * deviation, init=init)


@functools.cache
def orthogonal(data: str, norm: float) -> Model:
    """The head's ten weight vectors at right angles, all of length `norm`; its bias zero."""
    model = network(data)

    def init(key: Any) -> Any:
        params = model.init(key)
        kernel = norm * jax.nn.initializers.orthogonal()(jax.random.fold_in(key, 1), (256, 10), jnp.float32)
        return {**params, "head": {"kernel": kernel, "bias": jnp.zeros(10, jnp.float32)}}

    return dataclasses.replace(model, init=init)


@functools.cache
def initialised(data: str, how: str) -> Model:
    """Both kernels drawn as the initialiser of that name in `jax.nn.initializers` does; biases zero."""
    model = network(data)
    draw = getattr(jax.nn.initializers, how)()

    def init(key: Any) -> Any:
        leaves, structure = jax.tree.flatten(jax.eval_shape(model.init, key))
        keys = jax.random.split(key, len(leaves))
        made = [
            draw(one, leaf.shape, jnp.float32) if leaf.ndim > 1 else jnp.zeros(leaf.shape, jnp.float32)
            for one, leaf in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, made)

    return dataclasses.replace(model, init=init)


@functools.cache
def equal_rows(data: str, norm: float) -> Model:
    """PyTorch's head with its ten weight vectors scaled to length `norm`; its bias zero."""
    model = network(data)

    def init(key: Any) -> Any:
        params = model.init(key)
        kernel = params["head"]["kernel"]
        kernel = norm * kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True)
        return {**params, "head": {"kernel": kernel, "bias": jnp.zeros(10, jnp.float32)}}

    return dataclasses.replace(model, init=init)


@functools.cache
def features(data: str, how: str, length: float = 16.0) -> Model:
    """A network whose 256 hidden values are normalised before the head: "length" to a length, "layer" as LayerNorm does."""
    mean, deviation = PIXELS[data]

    def apply(params: Any, x: Any) -> Any:
        dense, head = params["body"]["dense0"], params["head"]
        h = jax.nn.relu(x.reshape(len(x), 784) @ dense["kernel"] + dense["bias"].reshape(1, -1))
        if how == "layer":
            h = h - jnp.mean(h, axis=1, keepdims=True)
        h = length * h * jax.lax.rsqrt(jnp.sum(h**2, axis=1, keepdims=True) + 1e-5)
        return h @ head["kernel"] + head["bias"].reshape(1, -1)

    return from_functions(network(data).init, apply, Categorical(10), (28, 28), 255 * mean, 255 * deviation, name="normalised")


@functools.cache
def twice_softmax(data: str) -> Model:
    """A softmax as last layer under a loss that takes the softmax of its input, as in the MLP of FedBABU's public code."""
    model = network(data)
    return dataclasses.replace(model, apply=lambda params, x: jax.nn.softmax(model.apply(params, x)))


def wide(hidden: tuple[int, ...]) -> Callable[[str], Model]:
    return functools.partial(network, hidden=hidden)


def babu(
    label: str, model: Callable[[str], Model] = network, *, lr: float = 0.1, momentum: float = 0.9, **options: Any
) -> Variant:
    return Variant(label, "FedBABU", model, tuple(options.items()), lr, momentum)


def other(data: str, epochs: int) -> dict[str, Variant]:
    """The rows of another of the published tables, and FedBABU with the head that comes nearest on MNIST with one epoch."""
    name = f"{data.removesuffix('_mnist')}-{epochs}"
    where = f"{data.replace('_', ' ')}, {epochs} epoch{'s' * (epochs > 1)}"
    rows = [("FedAvg", ()), ("FedProx", ()), ("FedBABU", ()), ("FedBABU", (("head_scale", 3.0),))]
    return {
        f"{method.lower()}-{name}{'-scale-3' * bool(options)}": Variant(
            f"{where}: {method}{', head × 3' * bool(options)}", method, network, options, data=data, epochs=epochs
        )
        for method, options in rows
    }


GROUPS: dict[str, dict[str, Variant]] = {
    "published": {
        "fedavg": Variant("FedAvg", "FedAvg", network),
        "fedprox": Variant("FedProx", "FedProx", network),
        "fedbabu": Variant("FedBABU", "FedBABU", network),
    },
    "frozen": {
        "nothing": Variant(
            "nothing frozen, plain mean over clients", "FedAvg", network, (("uniform", True),), beside="FedBABU"
        ),
        "kernel": babu("head's kernel frozen, its bias trained", head=("head/kernel",)),
        "first": babu("first layer frozen, head trained", head=("body",)),
        "two-hidden": babu("784-256-256-10, last layer frozen", wide((256, 256))),
        "two-hidden-two": babu("784-256-256-10, last two layers frozen", wide((256, 256)), head=("body/dense1", "head")),
        "two-hidden-nothing": Variant("784-256-256-10, nothing frozen", "FedAvg", wide((256, 256)), beside="FedBABU"),
        "public-mlp": babu("784-512-256-256-128-10, last layer frozen", wide((512, 256, 256, 128))),
    },
    "heads": {
        **{f"scale-{s}": babu(f"head × {s}", head_scale=float(s)) for s in (2, 3, 5, 10, 20)},
        "lecun": babu("LeCun's start (both layers), bias 0", functools.partial(network, init="lecun")),
        "xavier": babu("Xavier's start (both layers), bias 0", functools.partial(initialised, how="glorot_uniform")),
        "he": babu("He's start (both layers), bias 0", functools.partial(initialised, how="he_normal")),
        **{
            f"equal-{n}": babu(f"head's rows of length {n}, bias 0", functools.partial(equal_rows, norm=float(n)))
            for n in (1, 3)
        },
        **{
            f"orthogonal-{n}": babu(
                f"head's rows orthogonal, of length {n}, bias 0", functools.partial(orthogonal, norm=float(n))
            )
            for n in (1, 3, 10)
        },
    },
    "steps": {
        "lr-0.01": babu("step size .01", lr=0.01),
        "lr-0.03": babu("step size .03", lr=0.03),
        "lr-0.3": babu("step size .3", lr=0.3),
        "no-momentum": babu("no momentum", momentum=0.0),
        "no-momentum-lr-1": babu("no momentum, step size 1", lr=1.0, momentum=0.0),
        **{
            f"scale-{s}-lr-{lr}": babu(f"head × {s}, step size {lr:g}", lr=lr, head_scale=float(s))
            for s, lr in ((5, 0.01), (5, 0.03), (10, 0.01), (20, 0.003))
        },
    },
    "features": {
        "feature-length": babu("hidden values of length 16", functools.partial(features, how="length")),
        "feature-length-64": babu("hidden values of length 64", functools.partial(features, how="length", length=64.0)),
        "feature-layer": babu("LayerNorm before the head", functools.partial(features, how="layer")),
        "softmax": babu("softmax twice, head frozen", twice_softmax),
        "softmax-nothing": Variant("softmax twice, nothing frozen", "FedAvg", twice_softmax, beside="FedBABU"),
    },
    "best": {
        "fedavg-best": Variant("FedAvg, scored each round", "FedAvg", network, every=1),
        "fedbabu-best": Variant("FedBABU, scored each round", "FedBABU", network, every=1),
    },
    "tables": {**other("mnist", 5), **other("fashion_mnist", 1), **other("fashion_mnist", 5)},
}
VARIANTS = {name: variant for group in GROUPS.values() for name, variant in group.items()}


@functools.cache
def clients(data: str, seed: int) -> Any:
    return fb.data.load(data, partition="shards:5", clients=100, seed=seed)


def accuracy(evaluation: Any, mode: str) -> dict[str, float]:
    """In percent: over all test rows, and the mean, deviation and worst tenth over clients."""
    figures = evaluation.summary()[mode]["participating"]["accuracy"]
    return {name: 100 * value for name, value in figures.items()}


def run(name: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one variant with one seed, then personalise at each step size; what is in its folder is not done again."""
    folder = out / name / str(seed)
    done = folder / "figures.json"
    if done.exists():
        return json.loads(done.read_text())
    variant, rates = VARIANTS[name], PERSONAL if name in GROUPS["published"] else PERSONAL[:1]
    algorithm, data = variant.algorithm(), clients(variant.data, seed)
    best: list[float] = []

    def score(simulation: Any, round: Any) -> None:
        if variant.every and round.round % variant.every == 0:
            best.append(accuracy(fb.assess(simulation, ("global",)), "global")["clients"])

    fit = fb.simulate(
        algorithm,
        data,
        variant.rounds,
        cohort=10,
        seed=seed,
        choose=False,
        modes=("global",),
        folder=folder,
        resume=True,
        callbacks=(score,),
        config={"variant": name, "label": variant.label},
    )
    figures: dict[str, Any] = {"global": accuracy(fit.evaluation, "global")}
    for lr in rates:
        fit.simulation.algorithm = dataclasses.replace(fit.simulation.algorithm, tune=tuning(lr))
        figures[f"{lr:g}"] = accuracy(fb.assess(fit.simulation, ("adapted",)), "adapted")
    if len(best) == variant.rounds:
        figures["best"] = {"clients": max(best)}
    write(done, json.dumps(figures, indent=2).encode())
    return figures


def found(name: str, out: Path) -> list[dict[str, Any]]:
    paths = sorted((out / name).glob("*/figures.json"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in paths]


def table(names: list[str], out: Path) -> str:
    """Markdown, one line for each variant that has been run; columns that no line has are left out."""
    runs = {name: figures for name in names if (figures := found(name, out))}
    columns: dict[str, tuple[str, str]] = {"global": ("global", "clients")}
    columns |= {f"personalised at {lr:g}": (f"{lr:g}", "clients") for lr in PERSONAL}
    columns |= {"global, by rows": ("global", "rows"), "personalised, by rows": (f"{PERSONAL[0]:g}", "rows")}
    columns |= {"best round on test": ("best", "clients")}
    columns = {title: at for title, at in columns.items() if any(at[0] in each[0] for each in runs.values())}
    lines = [["", "seeds", "published", *columns], ["---"] * (3 + len(columns))]
    for name, each in runs.items():
        variant = VARIANTS[name]
        published = PUBLISHED[variant.data, variant.epochs][variant.beside or variant.method]
        cells = [spread([one[mode][how] for one in each if mode in one]) for mode, how in columns.values()]
        lines.append([variant.label, str(len(each)), " / ".join(f"{value:.2f}" for value in published), *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["published"], help=f"all, groups ({', '.join(GROUPS)}) or variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/fedhb-mnist"), help="folder of the runs")
    parser.add_argument("--table", action="store_true", help="run nothing, only print what there is")
    options = parser.parse_args()
    groups: dict[str, list[str]] = {}
    for what in options.what:
        if what not in ("all", *GROUPS, *VARIANTS):
            parser.error(f"there is no group or variant {what!r}; there are {', '.join(['all', *GROUPS, *VARIANTS])}")
        for group in GROUPS if what == "all" else [what]:
            groups[group] = list(GROUPS.get(group, {group: None}))
    if not options.table:
        for name in [name for names in groups.values() for name in names]:
            for seed in options.seeds:
                figures = run(name, seed, options.out)
                text = " ".join(f"{mode} {figures[mode]['clients']:.2f}" for mode in figures)
                print(f"{name} seed {seed}: {text}", file=sys.stderr, flush=True)
    for group, names in groups.items():
        print(f"\n## {group}\n\n{table(names, options.out)}")
    return 0


if __name__ == "__main__":
    common.command(main)
