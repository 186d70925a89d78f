"""Step time of the FEMNIST network by kind of convolution, inside the loops that a simulator has, beside plain PyTorch.

    python benchmarks/convolution.py --clients 4 --cycles 7

Clients × local steps of SGD are one compiled scan within a scan. The ways alternate, so that all of them see the same load of
the machine; the table has the smallest and the median time over the cycles, both as ratios to PyTorch (or to fedbayes, where
PyTorch is not installed). Processor time counts all threads, and says what is left where other programs take the cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbayes.models import Categorical, cnn, networks
from fedbayes.models import convolution as ours

CLASSES = 62
STEP_SIZE = 0.01
ONE_THREAD = {"xla_cpu_multi_thread_eigen": False}


def xla(x: Any, kernel: Any, stride: int = 1, padding: str = "VALID") -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def plain(x: Any, kernel: Any, stride: int = 1, padding: str = "VALID") -> Any:
    return ours.im2col(x, kernel, stride)


def jax_round(convolve: Callable[..., Any], x: Any, y: Any, batch: int, threads: int = 1) -> Callable[[], Any]:
    """One local epoch of every client; with `threads`, that many clients at a time, each on one thread."""
    model = cnn((28, 28), Categorical(CLASSES))
    params = model.init(jax.random.key(0))

    def loss(params: Any, x: Any, y: Any) -> Any:
        return -model.likelihood.log_prob(model.apply(params, x), y).mean()

    def step(params: Any, rows: Any) -> Any:
        gradient = jax.grad(loss)(params, *rows)
        return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, gradient), None

    def clients(params: Any, x: Any, y: Any) -> Any:
        def client(total: Any, rows: Any) -> Any:
            trained, _ = jax.lax.scan(step, params, rows)
            return jax.tree.map(jnp.add, total, trained), None

        return jax.lax.scan(client, jax.tree.map(jnp.zeros_like, params), (x, y))[0]

    def batches(array: Any) -> Any:
        count, rows = array.shape[:2]
        return jnp.asarray(array[:, : rows // batch * batch].reshape(count, rows // batch, batch, *array.shape[2:]))

    x, y = batches(x), batches(y)
    options = ONE_THREAD if threads > 1 else None
    parts = [(x[i::threads], y[i::threads]) for i in range(threads)]
    networks.conv2d, before = convolve, networks.conv2d
    try:
        compiled = [jax.jit(clients).lower(params, *part).compile(compiler_options=options) for part in parts]
    finally:
        networks.conv2d = before
    if threads == 1:
        return lambda: jax.block_until_ready(compiled[0](params, x, y))
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(lambda f, part: jax.block_until_ready(f(params, *part)), compiled, parts))


def torch_round(x: Any, y: Any, batch: int, threads: int) -> Callable[[], Any]:
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    images, labels = torch.from_numpy(x)[:, :, None], torch.from_numpy(y).long()
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*convolutions, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
    loss = nn.CrossEntropyLoss()

    def epoch() -> None:
        for client in range(len(images)):
            model.load_state_dict(start)
            for first in range(0, images.shape[1] - batch + 1, batch):
                optimiser.zero_grad()
                loss(model(images[client, first : first + batch]), labels[client, first : first + batch]).backward()
                optimiser.step()

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch, and clients at a time in the last way")
    parser.add_argument("--skip", nargs="*", default=[], help="ways to leave out, by the first word of their name")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    x = random.random((options.clients, options.rows, 28, 28), dtype=np.float32)
    y = random.integers(0, CLASSES, (options.clients, options.rows)).astype(np.int32)

    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "pytorch": lambda: torch_round(x, y, options.batch, options.threads),
        "xla convolution": lambda: jax_round(xla, x, y, options.batch),
        "im2col": lambda: jax_round(plain, x, y, options.batch),
        "fedbayes": lambda: jax_round(ours.conv2d, x, y, options.batch),
        "threads, a client each": lambda: jax_round(ours.conv2d, x, y, options.batch, options.threads),
    }
    ways = {}
    for name, make in makers.items():
        if name.replace(",", " ").split()[0] in options.skip:
            continue
        try:
            ways[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        ways[name]()
    steps = options.clients * (options.rows // options.batch)
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.cycles):
        for name, way in ways.items():
            began, used = time.perf_counter(), time.process_time()
            way()
            wall[name].append(1e3 * (time.perf_counter() - began) / steps)
            processor[name].append(1e3 * (time.process_time() - used) / steps)
    base = "pytorch" if "pytorch" in ways else "fedbayes"
    print(f"\nbatch {options.batch}, {options.clients} clients × {options.rows} rows, {options.cycles} cycles\n")
    print(f"| way | ms a step, least | median | ratio to {base}, least | median | processor ms, least |")
    print("|---|---|---|---|---|---|")
    for name in ways:
        least, median = min(wall[name]), statistics.median(wall[name])
        ratios = least / min(wall[base]), median / statistics.median(wall[base])
        print(f"| {name} | {least:.1f} | {median:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {min(processor[name]):.1f} |")


if __name__ == "__main__":
    main()
