"""SFVI's MNIST tables (Hassan, Salomone and Mengersen, Tables 1 and S1): `--help` says how.

    FEDBAYES_DATA=... python benchmarks/sfvi_mnist.py                        both tables, seeds 0, 1, 2
    FEDBAYES_DATA=... python benchmarks/sfvi_mnist.py s1 --seeds 0           one table, one seed
    FEDBAYES_DATA=... python benchmarks/sfvi_mnist.py 1 --only fedpop-sfvi-10 --set rounds=200 --out /tmp/quick.jsonl
    FEDBAYES_DATA=... python benchmarks/sfvi_mnist.py --page docs/results/sfvi.md --table

The models are examples/hierarchical_bnn.py, examples/fedpop.py and examples/multinomial.py. A seed is that of the partition and
of everything random in the fit. Each run is a line of the file --out; what is there is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.primitives

import fedbayes as fb
from fedbayes.engine import silos
from fedbayes.engine.silo_data import plan
from fedbayes.primitives import variational

EXAMPLES = Path(__file__).parent.parent / "examples"
DRAWS = 50
"""Posterior draws whose probabilities are averaged."""

# On the CPU NumPyro draws a plate's subsample by a loop that is compiled again at each call outside jit: a second, many times.
numpyro.primitives._subsample_fn = jax.jit(numpyro.primitives._subsample_fn, static_argnums=(0, 1))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure of a table."""

    model: str
    method: str
    silos: int
    published: float
    """Test accuracy, percent."""
    published_spread: float | None = None
    """The paper's standard deviation, over silos."""
    rounds: int = 1000
    steps: int = 1
    """Local steps in a round."""
    lr: float = 0.01
    decay: float = 0.1
    start: float = 0.05
    """Standard deviations of q at the start."""
    jitter: float = 0.0
    """Standard deviation from which the means of q at the start are drawn, the same for all silos; 0 has them at zero."""
    batch: int = 32
    """Rows that a silo takes into a step, drawn afresh."""
    rows: int | None = None
    """Rows of a silo, where the paper gives them."""
    paper_rounds: str = ""

    def algorithm(self, module: Any, rows: int) -> Any:
        """`rows` is N, which SFVI-Avg scales by; where each silo is alone it is the silo's own number of rows."""
        options: dict[str, Any] = {"lr": self.lr, "decay": self.decay, "family": fb.Family.mean_field(start=self.start)}
        if self.method == "SFVI":
            return fb.SFVI(module.population, module.silo, rounds=self.rounds, **options)
        return fb.SFVIAvg(module.population, module.silo, steps=self.steps, rows=rows, rounds=self.rounds, **options)


def bnn(method: str, count: int, published: float, spread: float, **options: Any) -> Cell:
    return Cell("hierarchical_bnn", method, count, published, spread, paper_rounds=paper(method), jitter=0.1, **options)


def fedpop(method: str, count: int, published: float, spread: float, **options: Any) -> Cell:
    return Cell("fedpop", method, count, published, spread, paper_rounds=paper(method), jitter=0.1, **options)


def paper(method: str) -> str:
    return "10⁴" if method == "SFVI" else "20"


def multinomial(method: str, count: int, published: float, paper_rounds: str, **options: Any) -> Cell:
    rows = 200 if count == 25 else 10_000
    return Cell("multinomial", method, count, published, rows=rows, paper_rounds=paper_rounds, **options)


TABLES: dict[str, dict[str, Cell]] = {
    "1": {
        "bnn-avg-10": bnn("SFVI-Avg", 10, 96.6, 0.68, rounds=20, steps=25),
        "bnn-sfvi-10": bnn("SFVI", 10, 97.5, 0.50, rounds=500),
        "bnn-avg-50": bnn("SFVI-Avg", 50, 93.6, 1.68, rounds=20, steps=10, lr=0.02, batch=64),
        "bnn-sfvi-50": bnn("SFVI", 50, 96.0, 1.03, rounds=300),
        "fedpop-avg-10": fedpop("SFVI-Avg", 10, 97.0, 0.62, rounds=20, steps=25),
        "fedpop-sfvi-10": fedpop("SFVI", 10, 97.5, 0.46, rounds=500),
        "fedpop-avg-50": fedpop("SFVI-Avg", 50, 94.2, 1.33, rounds=20, steps=10, lr=0.02, batch=64),
        "fedpop-sfvi-50": fedpop("SFVI", 50, 96.2, 1.05, rounds=500),
    },
    "s1": {
        "independent-25": multinomial("independent", 25, 51.5, "0", rounds=1, steps=1000),
        "once-25": multinomial("SFVI-Avg", 25, 63.9, "1", rounds=1, steps=1000),
        "avg-25": multinomial("SFVI-Avg", 25, 69.3, "50", rounds=50, steps=20),
        "sfvi-25": multinomial("SFVI", 25, 84.0, "5·10⁴", rounds=1000),
        "independent-5": multinomial("independent", 5, 86.8, "0", rounds=1, steps=1000, batch=100),
        "once-5": multinomial("SFVI-Avg", 5, 90.4, "1", rounds=1, steps=1000, batch=100),
        "avg-5": multinomial("SFVI-Avg", 5, 90.2, "50", rounds=50, steps=20, batch=100),
        "sfvi-5": multinomial("SFVI", 5, 90.8, "5·10⁴", rounds=1000, batch=100),
    },
}
CELLS = {name: cell for table in TABLES.values() for name, cell in table.items()}


@functools.cache
def model(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module._MNIST.is_file():
        raise fb.UserError("MNIST is not there; set FEDBAYES_DATA to a folder that has mnist_writers/mnist_writers.npz")
    return module


@functools.cache
def images() -> dict[str, Any]:
    with np.load(model("multinomial")._MNIST) as arrays:
        x = {part: arrays[f"x_{part}"].reshape(-1, 784).astype(np.float32) / 255 for part in ("train", "test")}
        return {part: (x[part], arrays[f"y_{part}"].astype(np.int32)) for part in x}


def parts(cell: Cell, seed: int) -> tuple[list[Any], list[Any]]:
    """Training and test rows of each silo."""
    (_, y), (_, y_test) = images()["train"], images()["test"]
    if cell.rows is not None:
        order = np.random.default_rng(seed).permutation(len(y))[: cell.silos * cell.rows]
        return list(order.reshape(cell.silos, cell.rows)), [np.arange(len(y_test))] * cell.silos
    split = model(cell.model)._mostly_one_digit
    return split(y, cell.silos, seed), split(y_test, cell.silos, seed)


@functools.partial(jax.jit, static_argnums=0)
def accuracy(algorithm: Any, key: Any, shared: Any, eta: Any, data: Any) -> Any:
    """Percent of rows whose most probable digit, by the posterior predictive, is right."""
    draws = variational.predict(algorithm.at(data), key, shared, eta, count=DRAWS)
    found = jnp.argmax(jnp.mean(jax.nn.softmax(draws["logits"]), axis=0), axis=1)
    return 100 * jnp.mean(found == data["y"])


def fit_alone(cell: Cell, algorithm: Any, data: dict[str, Any], seed: int) -> list[tuple[Any, Any]]:
    """Each silo on its own: what it would send after local steps whose local term is not scaled, before any averaging."""
    key = jax.random.key(seed)
    first = next(iter(data.values()))
    down = algorithm.broadcast(key, algorithm.init_server(key, first))
    local = algorithm.init_local(key, first)
    x, y = (jnp.stack([one[name] for one in data.values()]) for name in ("x", "y"))
    client = lambda key, x, y: algorithm.client(key, down, local, {"x": x, "y": y, "batch": cell.batch})[0]  # noqa: E731
    ups = jax.jit(jax.vmap(client))(jax.random.split(key, len(data)), x, y)
    eta = down.shared.eta._replace(mean=ups.mean, log_scale=jnp.log(ups.scale))
    shared = variational.Shared(eta, ups.theta)
    return [(jax.tree.map(lambda leaf, i=i: leaf[i], shared), {}) for i in range(len(data))]


def fit_together(cell: Cell, algorithm: Any, data: dict[str, Any], seed: int) -> list[tuple[Any, Any]]:
    simulation = silos.SiloSimulation(plan(algorithm, data, cell.rounds), data, seed=seed)
    if cell.jitter:
        scatter(simulation, cell.jitter, seed)
    for _ in simulation.advance(cell.rounds):
        pass
    return [(simulation.state.shared, simulation.own(name).eta) for name in simulation.names]


def scatter(simulation: Any, jitter: float, seed: int) -> None:
    """Means at the start that are not zero: hidden units then differ from the start, and in the same way in all silos."""
    random = np.random.default_rng(seed)
    shared = simulation.state.shared
    mean = jnp.asarray(jitter * random.standard_normal(shared.eta.mean.shape), jnp.float32)
    simulation.state = simulation.state._replace(shared=shared._replace(eta=shared.eta._replace(mean=mean)))
    for group, states in enumerate(simulation.states):
        eta = {}
        for name, q in states.eta.items():
            mean = jnp.asarray(jitter * random.standard_normal(q.mean.shape[1:]), jnp.float32)
            eta[name] = q._replace(mean=jnp.broadcast_to(mean, q.mean.shape))
        simulation.states[group] = states._replace(eta=eta)


def run(name: str, cell: Cell, seed: int) -> dict[str, Any]:
    """Fit one cell with one seed, and score every silo."""
    began = time.perf_counter()
    (x, y), (x_test, y_test) = images()["train"], images()["test"]
    train, test = parts(cell, seed)
    data = {f"silo {i}": {"x": x[rows], "y": y[rows], "batch": cell.batch} for i, rows in enumerate(train)}
    total = sum(map(len, train))
    alone = cell.method == "independent"
    algorithm = cell.algorithm(model(cell.model), len(train[0]) if alone else total)
    fits = fit_alone(cell, algorithm, data, seed) if alone else fit_together(cell, algorithm, data, seed)
    seconds = time.perf_counter() - began
    if cell.rows is not None and not alone:  # no latents of silos: one posterior for all
        fits, test = fits[:1], test[:1]
    key = jax.random.key(seed + 1)
    figures = [
        float(accuracy(algorithm, key, shared, eta, {"x": jnp.asarray(x_test[rows]), "y": jnp.asarray(y_test[rows])}))
        for (shared, eta), rows in zip(fits, test, strict=True)
    ]
    settings = {name: getattr(cell, name) for name in ("rounds", "steps", "lr", "decay", "start", "jitter", "batch")}
    return {
        "cell": name,
        "seed": seed,
        "accuracy": statistics.mean(figures),
        "over_silos": statistics.pstdev(figures),
        "worst": min(figures),
        "train_rows": len(train[0]),
        "test_rows": len(test[0]),
        "seconds": round(seconds, 1),
        **settings,
    }


def recorded(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def spread(values: list[float]) -> str:
    """Mean ± standard deviation over seeds; a single seed has none."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """Markdown, one line for each cell that has been run."""
    titles = {
        "1": ["model", "method", "silos", "paper (over silos)", "here ± over seeds", "over silos", "paper's rounds"],
        "s1": ["silos", "rows of each", "method", "paper", "here ± over seeds", "paper's rounds"],
    }[name]
    more = ["rounds × local steps", "lr", "batch", "seeds", "seconds a run"]
    lines = [[*titles, *more], ["---"] * (len(titles) + len(more))]
    for key, cell in TABLES[name].items():
        found = [row for row in rows if row["cell"] == key]
        if not found:
            continue
        here = spread([row["accuracy"] for row in found])
        over = f"{statistics.mean(row['over_silos'] for row in found):.2f}"
        one = found[0]
        if name == "1":
            label = {"hierarchical_bnn": "hierarchical BNN", "fedpop": "fully Bayesian FedPop"}[cell.model]
            published = f"{cell.published:.1f} ({cell.published_spread:.2f})"
            cells = [label, cell.method, str(cell.silos), published, here, over, cell.paper_rounds]
        else:
            cells = [str(cell.silos), str(cell.rows), cell.method, f"{cell.published:.1f}", here, cell.paper_rounds]
        seconds = f"{statistics.mean(row['seconds'] for row in found):.0f}"
        ran = f"{one['rounds']} × {one['steps']}"
        lines.append([*cells, ran, f"{one['lr']:g}", str(one["batch"]), str(len(found)), seconds])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_page(page: Path, rows: list[dict[str, Any]]) -> None:
    """Put the tables between their marks; the sentences around them stay."""
    text = page.read_text()
    for name in TABLES:
        begin, end = f"<!-- table {name} -->\n", f"<!-- end of table {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n" + table(name, rows) + "\n\n" + end + rest.split(end)[1]
    page.write_text(text)


def setting(text: str) -> tuple[str, int | float]:
    name, _, value = text.partition("=")
    return name, float(value) if name in ("lr", "decay", "start", "jitter") else int(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=f"of {', '.join(TABLES)}; both by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CELLS), metavar="CELL", help=f"of {', '.join(CELLS)}")
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", help="other settings: rounds=200")
    parser.add_argument("--out", type=Path, default=Path("runs/sfvi-mnist.jsonl"), help="file of the runs, one a line")
    parser.add_argument("--page", type=Path, help="page to write the tables into")
    parser.add_argument("--table", action="store_true", help="run nothing, only print what there is")
    options = parser.parse_args()
    if unknown := set(options.tables) - set(TABLES):
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    names = [name for which in options.tables for name in TABLES[which] if not options.only or name in options.only]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, seed in [(name, seed) for seed in options.seeds for name in names if not options.table]:
        if any(row["cell"] == name and row["seed"] == seed for row in recorded(options.out)):
            continue
        row = run(name, dataclasses.replace(CELLS[name], **dict(options.set)), seed)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name} seed {seed}: {row['accuracy']:.2f}, {row['seconds']} s", file=sys.stderr, flush=True)
    for name in options.tables:
        print(f"\n{table(name, recorded(options.out))}")
    if options.page is not None:
        write_page(options.page, recorded(options.out))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except fb.UserError as problem:
        raise SystemExit(f"error: {problem}") from None
