"""What Flower's adapter costs: an empty round beside Flower's own FedAvg, and the server's memory with large messages.

    python benchmarks/flower.py --overhead          one run, rounds of both in turn, two sites
    python benchmarks/flower.py --memory            100 MB messages both ways, eight sites

Both start a SuperLink, nodes and a run as processes of this machine, on loopback with TLS and keys, and write their section of
docs/results/flower.md. An empty round is one of an algorithm with one number, whose client does nothing. Memory is what the
server app's process holds at most (VmHWM) above what it held before the first round, state and all.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import common
import numpy as np

from fedbayes.deploy.processes import federation
from fedbayes.deploy.template import write_project

PAGE = Path(__file__).parent.parent / "docs" / "results" / "flower.md"
EXPERIMENT = """\
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fedbayes as fb
from fedbayes.algorithm import Mean, Sum
from fedbayes.deploy.experiment import Experiment, SiteData, example_rows


class Server(NamedTuple):
    params: Any


class Local(NamedTuple):
    nothing: None


class Down(NamedTuple):
    params: Any


class Up(NamedTuple):
    params: Mean[Any]
    weight: Sum[Any]


@dataclasses.dataclass(frozen=True)
class Empty(fb.Algorithm[Server, Local, Down, Up]):
    layers: tuple[int, ...]

    def init_server(self, key):
        # Numbers that differ, as Flower sends what is the same only once.
        keys = jax.random.split(key, len(self.layers))
        return Server({{f"layer{{n}}": jax.random.normal(keys[n], (size,)) for n, size in enumerate(self.layers)}})

    def init_local(self, key, data):
        return Local(None)

    def broadcast(self, key, server):
        return Down(server.params)

    def client(self, key, down, local, data):
        noise = jax.random.normal(key)
        return Up({{name: leaf + noise for name, leaf in down.params.items()}}, jnp.float32(1)), local

    def server(self, key, server, down, up):
        return Server(up.params)

    def adapt(self, key, down, local, data):
        return local

    def predict(self, key, down, local, x):
        return x[None]


def load(settings):
    return SiteData(example_rows((1,)))


experiment = Experiment(Empty({layers}), example_rows((1,)), load, {rounds}, {sites}, patience=900.0)
"""
OVERHEAD = """
import json
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedbayes.deploy.coordinator import Coordinator
from fedbayes.deploy.flower import FlowerPost

server = ServerApp()


@client.train()
def plain(message, context):
    arrays = message.content.array_records["arrays"]
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    coordinator, post = Coordinator(experiment, out), FlowerPost(grid, experiment)
    arrays, times = ArrayRecord({"params": Array(np.zeros(1, np.float32))}), {"fedbayes": [], "flower": []}
    coordinator.step(post)  # greetings
    for number in range(experiment.rounds - 1):
        for name in ("fedbayes", "flower") if number % 2 else ("flower", "fedbayes"):
            began = time.perf_counter()
            if name == "fedbayes":
                coordinator.step(post)
            else:
                FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=1)
            times[name].append(time.perf_counter() - began)
    (out / "times.json").write_text(json.dumps(times))
"""
MEMORY = """
import json
from pathlib import Path

from flwr.serverapp import ServerApp

from fedbayes.deploy.coordinator import Coordinator
from fedbayes.deploy.flower import FlowerPost

server = ServerApp()


def held(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


@server.main()
def main(grid, context):
    out = Path(context.run_config["out"])
    coordinator, post = Coordinator(experiment, out), FlowerPost(grid, experiment)
    post.sites()
    Path("/proc/self/clear_refs").write_text("5")
    before, rounds = held("VmRSS"), []
    for _ in range(experiment.rounds):
        coordinator.step(post)
        rounds.append(held("VmHWM") - before)
    (out / "memory.json").write_text(json.dumps({"before": before, "rounds": rounds}))
"""


def ran(app: str, layers: tuple[int, ...], rounds: int, sites: int, result: str) -> dict:
    """What a run of such an app leaves in a file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_project(folder / "project", "fedavg", sites, rounds)
        code = folder / "project" / "federation"
        (code / "experiment.py").write_text(EXPERIMENT.format(layers=layers, rounds=rounds, sites=sites))
        with open(code / "app.py", "a") as file:
            file.write("\nimport numpy as np\n" + app)
        given = [{"number": number, "state": str(folder / "sites")} for number in range(sites)]
        with federation(folder / "project", folder, given) as running:
            running.run({"out": str(folder / "server")}, wait=3000)
        path = folder / "server" / result
        if not path.exists():
            raise SystemExit((folder / "logs" / "run.log").read_text()[-3000:])
        return json.loads(path.read_text())


def overhead(rounds: int) -> str:
    times = ran(OVERHEAD, (1,), rounds + 1, 2, "times.json")
    ratio = np.array(times["fedbayes"]) / np.array(times["flower"])
    low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
    lines = ["| | median of a round | quartiles |", "|---|---|---|"]
    for name, title in (("fedbayes", "fedbayes"), ("flower", "Flower's FedAvg")):
        a, b, c = np.quantile(times[name], [0.25, 0.5, 0.75])
        lines.append(f"| {title} | {b:.2f} s | {a:.2f}–{c:.2f} s |")
    lines.append(f"| ratio, round by round | {middle:.2f} | {low:.2f}–{high:.2f} |")
    return "\n".join(lines) + f"\n\n{rounds} rounds of each, in turn, in one run with two sites."


def memory() -> str:
    # A network of 26 million weights: 100 MB in six layers, the largest a third of it.
    layers = (1 << 20, 1 << 22, 1 << 23, 1 << 23, 1 << 22, 1 << 18)
    size = 4 * sum(layers)
    found = ran(MEMORY, layers, 2, 8, "memory.json")
    most = max(found["rounds"])
    return (
        f"One message is {size / 1e6:.0f} MB; eight sites answer with as much in each of two rounds. The server app's process "
        f"held {found['before'] / 1e6:.0f} MB before the first round, its state of {size / 1e6:.0f} MB among it, and at most "
        f"{most / 1e6:.0f} MB more after: **{most / size:.2f} messages**."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", action="store_true", help="an empty round beside Flower's own")
    parser.add_argument("--memory", action="store_true", help="large messages")
    parser.add_argument("--rounds", type=int, default=10, help="of each in --overhead")
    options = parser.parse_args()
    if options.overhead:
        common.put(PAGE, "overhead", overhead(options.rounds))
    if options.memory:
        common.put(PAGE, "memory", memory())
    return 0


if __name__ == "__main__":
    common.command(main)
