"""A round of FedVI over a bare jitted loop of the same arithmetic, and over FedAvg's: `python benchmarks/fedvi_speed.py`.

The job is B of benchmarks/speed.py: 20 clients of 200 rows, batches of 20, the network for FEMNIST. The floor is one compiled
call without a framework: shuffles, steps and mean, FedVI's loss written out by hand. All three take turns within one run, and
ratios are taken within a turn. First it is checked that both sides come to the same θ, with rows that are all alike and
without noise.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import jobs
import numpy as np

import fedbayes as fb
from fedbayes.models import Categorical, cnn
from fedbayes.models.convolution import conv2d, max_pool

PAGE = Path(__file__).parent.parent / "docs" / "results" / "fedvi.md"
JOB = jobs.JOBS["B"]
SHARED, LOCAL, CLASSES = 102, 26, 62


def floor(lr: float, server_lr: float, tau: float, noise: float, *, shuffle: bool = True) -> Any:
    """One round: θ, momentum, rows, labels and a key to θ and momentum."""
    sigma0 = math.sqrt(2 / (LOCAL + CLASSES))

    def loss(theta: Any, key: Any, x: Any, y: Any) -> Any:
        network, constructor = theta
        body = network["body"]
        h = jax.nn.relu(conv2d(x, body["conv0"]["kernel"]) + body["conv0"]["bias"])
        h = jax.nn.relu(max_pool(conv2d(h, body["conv1"]["kernel"]), 2) + body["conv1"]["bias"])
        h = jax.nn.relu(h.reshape(len(x), -1) @ body["dense0"]["kernel"] + body["dense0"]["bias"])
        half = len(x) // 2
        g = h[:half, :SHARED]
        for name in ("dense0", "dense1"):
            g = jax.nn.relu(g @ constructor["body"][name]["kernel"] + constructor["body"][name]["bias"])
        g = (g @ constructor["head"]["kernel"] + constructor["head"]["bias"]).mean(axis=0)
        size = LOCAL * CLASSES
        mean = 0.1 * g[:size].reshape(LOCAL, CLASSES)
        sigma = 1e-5 + sigma0 * jnp.exp(0.01 * g[size : 2 * size].reshape(LOCAL, CLASSES))
        beta = mean + noise * sigma * jax.random.normal(key, mean.shape)
        outputs = h[half:, :SHARED] @ network["head"]["kernel"] + network["head"]["bias"]
        outputs = outputs + h[half:, SHARED:] @ beta + g[2 * size :]
        nll = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(outputs), y[half:, None], axis=1))
        ratio = (sigma / sigma0) ** 2
        kl = jnp.sum(ratio + (mean / sigma0) ** 2 - 1 - jnp.log(ratio)) / 2
        return nll + tau / len(x) * kl

    def client(theta: Any, x: Any, y: Any, key: Any) -> Any:
        order = jax.random.permutation(key, JOB.rows) if shuffle else jnp.arange(JOB.rows)

        def step(theta: Any, of: Any) -> Any:
            rows, number = of
            slope = jax.grad(loss)(theta, jax.random.fold_in(key, number), x[rows], y[rows])
            return jax.tree.map(lambda w, g: w - lr * g, theta, slope), None

        return jax.lax.scan(step, theta, (order.reshape(JOB.steps, JOB.batch), jnp.arange(JOB.steps)))[0]

    @jax.jit
    def round(theta: Any, momentum: Any, x: Any, y: Any, key: Any) -> Any:
        def add(total: Any, of: Any) -> Any:
            moved = client(theta, *of)
            return jax.tree.map(lambda total, old, new: total + (old - new) / JOB.cohort, total, theta, moved), None

        zero = jax.tree.map(jnp.zeros_like, theta)
        delta, _ = jax.lax.scan(add, zero, (x, y, jax.random.split(key, JOB.cohort)))
        momentum = jax.tree.map(lambda m, d: 0.9 * m + d, momentum, delta)
        return jax.tree.map(lambda w, m: w - server_lr * m, theta, momentum), momentum

    return round


def clients(x: np.ndarray, y: np.ndarray) -> fb.data.Clients:
    owner = np.repeat(np.arange(JOB.clients), JOB.rows)
    flat = x.reshape(-1, *JOB.shape)
    names = [str(number) for number in range(JOB.clients)]
    classes = [str(number) for number in range(CLASSES)]
    still = np.zeros(len(flat), bool)
    return fb.data.Clients.build(flat, y.reshape(-1), owner, names=names, classes=classes, is_test=still)


def check() -> None:
    """The floor's θ after a round is FedVI's, where rows of a client are all alike and nothing is drawn."""
    x, y = jobs.arrays(JOB, check="alike")
    model = cnn(JOB.shape, Categorical(CLASSES))
    train = fb.Training(batch=JOB.batch, lr=JOB.lr)
    vi = fb.FedVI(model, tau=0.0, sigma0=1e-8, train=train, server_lr=1.0)  # with so small a σ0 the noise is 0 too
    simulation = fb.Simulation(vi, clients(x, y), seed=0)
    theta = jax.tree.map(jnp.asarray, tuple(simulation.state.theta))
    simulation.step()
    zero = jax.tree.map(jnp.zeros_like, theta)
    found, _ = floor(JOB.lr, 1.0, 0.0, 0.0)(theta, zero, jnp.asarray(x), jnp.asarray(y), jax.random.key(0))
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found, tuple(simulation.state.theta))
    gap = max(jax.tree.leaves(gaps))
    print(f"largest difference between the floor's θ and FedVI's after a round: {gap:.1e}", file=sys.stderr)
    if gap > 1e-4:
        raise SystemExit("the floor and FedVI do not compute the same")


def measure(cycles: int) -> str:
    x, y = jobs.arrays(JOB)
    data, model = clients(x, y), cnn(JOB.shape, Categorical(CLASSES))
    train = fb.Training(batch=JOB.batch, lr=JOB.lr)
    vi = fb.Simulation(fb.FedVI(model, train=train, server_lr=1.0), data, seed=0)
    avg = fb.Simulation(fb.FedAvg(model, train=train), data, seed=0)
    bare = floor(JOB.lr, 1.0, 1e-3, 1.0)
    state = [jax.tree.map(jnp.asarray, tuple(part)) for part in (vi.state.theta, vi.state.momentum)]
    on_device = jax.device_put((x, y))

    def floor_step() -> None:
        state[:] = jax.block_until_ready(bare(*state, *on_device, jax.random.key(0)))

    steps = {"floor": floor_step, "FedVI": vi.step, "FedAvg": avg.step}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for cycle in range(cycles + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if cycle:
                seconds[name].append(time.perf_counter() - began)
    lines = ["| | median s | ratio, median | quartiles |", "|---|---|---|---|"]
    for above, below in (("FedVI", "floor"), ("FedVI", "FedAvg")):
        low, middle, high = np.quantile(np.array(seconds[above]) / np.array(seconds[below]), [0.25, 0.5, 0.75])
        lines.append(
            f"| {above} over {below} | {np.median(seconds[above]):.2f} / {np.median(seconds[below]):.2f} | {middle:.2f} | "
            f"{low:.2f}–{high:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=9, help="turns of each")
    options = parser.parse_args()
    check()
    common.put(PAGE, "speed", measure(options.cycles))
    return 0


if __name__ == "__main__":
    common.command(main)
