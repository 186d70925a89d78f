"""Seconds a round of fedbayes and of its peers, side by side: `python benchmarks/speed.py --help`.

Every engine is a process of its own that lives for the whole job. The engines take turns, one at a time, cycle after cycle, and
each cycle starts with another engine; ratios are taken within a cycle, so that a slow spell of the machine meets both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jobs
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ENGINES = {
    "fedbayes": "fedbayes_peer",
    "floor": "floor",
    "pytorch": "pytorch",
    "pfl": "pfl_research",
    "fedjax": "fedjax_peer",
}
REFERENCES = ("floor", "pytorch", "pfl")
TOLERANCE = 1e-4


class Skipped(Exception):
    """The engine cannot take part, and why."""


class Worker:
    """An engine's process, with its job set up."""

    def __init__(self, engine: str, python: str, job: str, options: argparse.Namespace, check: str | None = None):
        command = [python, "-m", f"peers.{ENGINES[engine]}", "--job", job, "--seed", str(options.seed)]
        command += ["--threads", str(options.threads), *(["--check", check] if check else [])]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the worker)
        try:
            self.process = subprocess.Popen(
                command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
            )
        except OSError as problem:
            raise Skipped(f"{python}: {problem.strerror}") from None
        self.facts = self._answer()
        if "skipped" in self.facts:
            self.close()
            raise Skipped(self.facts["skipped"])

    def ask(self, **request: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        written = self.errors.read().strip().splitlines()
        raise Skipped(f"stopped with {self.process.returncode}: {written[-1] if written else 'no message'}")

    def processor_seconds(self) -> float:
        """Processor time that the worker has used, where the system says."""
        try:
            fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return float("nan")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def busy_seconds() -> float:
    """Processor time that the whole machine has used, where the system says."""
    try:
        fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return float("nan")
    idle = int(fields[3]) + int(fields[4])
    return (sum(map(int, fields[:8])) - idle) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(patience: float) -> None:
    """Wait, at most so many seconds, for a second in which the machine is nearly idle."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(1)
        if not busy_seconds() - before > 0.1:
            return


def turn(worker: Worker, rounds: int) -> tuple[float, float]:
    """Mean seconds a round of a turn, and the cores that others used meanwhile."""
    start, busy, own = time.monotonic(), busy_seconds(), worker.processor_seconds()
    seconds = worker.ask(run=rounds)["seconds"]
    elapsed = time.monotonic() - start
    others = (busy_seconds() - busy - (worker.processor_seconds() - own)) / elapsed
    return statistics.fmean(seconds), max(others, 0.0)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All engines on one job."""
    job, workers, skipped = jobs.JOBS[name], {}, {}
    seconds: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    facts = {}
    try:
        for engine in options.engines:
            try:
                workers[engine] = Worker(engine, options.pythons.get(engine, sys.executable), name, options)
                turn(workers[engine], max(2, job.rounds))  # compilation and first touch, not counted
                facts[engine], seconds[engine], others[engine] = workers[engine].facts, [], []
            except Skipped as reason:
                skipped[engine] = str(reason)
                workers.pop(engine, None)
                print(f"{name} {engine}: skipped, {reason}", flush=True)
        for cycle in range(options.cycles):
            order = list(workers)
            shift = cycle % max(1, len(order))
            for engine in order[shift:] + order[:shift]:
                if options.patience:
                    wait_until_quiet(options.patience)
                taken, elsewhere = turn(workers[engine], job.rounds)
                seconds[engine].append(taken)
                others[engine].append(elsewhere)
                print(
                    f"{name} cycle {cycle + 1} {engine:9} {taken:.4f} s a round; others used {elsewhere:.2f} cores", flush=True
                )
        for engine, worker in workers.items():
            with tempfile.TemporaryDirectory() as folder:
                if not worker.ask(save=f"{folder}/parameters.npz")["finite"]:
                    raise SystemExit(f"{name} {engine}: training left the finite numbers, so its times mean nothing")
    finally:
        for worker in workers.values():
            worker.close()
    return {"job": name, "seconds": seconds, "others": others, "facts": facts, "skipped": skipped}


def check(name: str, options: argparse.Namespace) -> bool:
    """One round of each engine from the same parameters must end in the same parameters as the floor's."""
    fine = True
    for kind in jobs.CHECKS:
        reference: dict[str, np.ndarray] | None = None
        start = [value for layer in jobs.parameters(jobs.JOBS[name], options.seed) for value in layer]
        for engine in ("floor", *(engine for engine in options.engines if engine != "floor")):
            try:
                worker = Worker(engine, options.pythons.get(engine, sys.executable), name, options, kind)
                with tempfile.TemporaryDirectory() as folder:
                    worker.ask(run=1)
                    worker.ask(save=f"{folder}/parameters.npz")
                    with np.load(f"{folder}/parameters.npz") as archive:
                        found = {key: archive[key] for key in archive.files}
                worker.close()
            except Skipped as reason:
                print(f"{name} {kind:8} {engine:9} skipped: {reason}")
                continue
            if reference is None:
                reference = found
                moved = max(float(abs(a - b).max()) for a, b in zip(found.values(), start, strict=True))
                print(f"{name} {kind:8} {engine:9} moved the parameters by up to {moved:.1e}")
                continue
            gap = max(float(abs(found[key] - reference[key]).max()) for key in reference)
            fine &= gap <= TOLERANCE
            verdict = "ok" if gap <= TOLERANCE else "DIFFERS"
            print(f"{name} {kind:8} {engine:9} {verdict}: largest difference from the floor {gap:.1e}")
    return fine


def ratios(result: dict[str, Any], engine: str, reference: str) -> str:
    """The median over cycles of one engine's time over another's, and the range."""
    if reference not in result["seconds"]:
        return "–"
    values = [a / b for a, b in zip(result["seconds"][engine], result["seconds"][reference], strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def table(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Everything measured, in Markdown."""
    lines = ["# Seconds a round", "", "`benchmarks/README.md` says what is measured and how.", ""]
    lines += ["```", command_shown(), "```", "", *machine()]
    lines += [f"- seed {options.seed}, {options.cycles} cycles, PyTorch threads: {options.threads}; JAX as it comes"]
    lines += [*versions(results), ""]
    for result in results:
        job = jobs.JOBS[result["job"]]
        lines += [
            f"## Job {job.name}",
            "",
            f"{job.clients} clients × {job.rows} rows ({jobs.source(job)}), {job.cohort} a round, batch {job.batch}, "
            f"one local epoch, SGD {job.lr:g}, network {job.network()}. {job.rounds} round{'s' * (job.rounds > 1)} a turn.",
            "",
            "| engine | median s | least s | × floor by cycle | × PyTorch by cycle | × pfl by cycle | cores used by others |",
            "|---|---|---|---|---|---|---|",
        ]
        for engine, seconds in result["seconds"].items():
            cells = [f"{statistics.median(seconds):.4f}", f"{min(seconds):.4f}"]
            cells += [ratios(result, engine, reference) for reference in REFERENCES]
            others = result["others"][engine]
            lines.append(f"| {engine} | {' | '.join(cells)} | {statistics.median(others):.2f} ({max(others):.2f}) |")
        lines += ["", *(f"- {engine}: skipped, {reason}" for engine, reason in result["skipped"].items())]
        lines += [f"- {engine}: {facts['note']}" for engine, facts in result["facts"].items() if facts["note"]]
        lines += [""] if lines[-1] else []
    lines += [
        "A ratio is the median over the cycles, with the least and the largest; cores used by others: the median and the most."
    ]
    return "\n".join(lines) + "\n"


def machine() -> list[str]:
    """What a reader needs to know of the machine, and nothing that names it."""
    model = platform.processor() or platform.machine()
    information = pathlib.Path("/proc/cpuinfo")
    if information.exists():
        names = [
            line.split(":", 1)[1].strip() for line in information.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return [f"- {os.cpu_count()} cores, {model}, {platform.system()}"]


def versions(results: list[dict[str, Any]]) -> list[str]:
    """Versions as each engine's own process reported them."""
    found = {}
    for result in results:
        for engine, facts in result["facts"].items():
            packages = ", ".join(f"{package} {version}" for package, version in facts["versions"].items())
            found[engine] = f"- {engine}: {packages}, Python {facts['python']}"
    return list(found.values())


def command_shown() -> str:
    """The command as it was given, without the paths of this machine's interpreters and files."""
    words = []
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        words.append(
            f"{name}=PYTHON" if equals and name in ENGINES else pathlib.Path(word).name if word.startswith("/") else word
        )
    return shlex.join(["python", "benchmarks/speed.py", *words])


def main() -> None:
    """Parse the options, then check or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=sorted(jobs.JOBS), choices=sorted(jobs.JOBS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--cycles", type=int, default=7, help="turns of each engine; at least 5 for a result to be quoted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch; by default one for each core")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENGINE=PATH",
        help="an engine's interpreter; also FEDBAYES_BENCHMARK_<ENGINE>",
    )
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait before a turn for the machine to be quiet")
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, as Markdown")
    parser.add_argument("--check", action="store_true", help="do not measure: compare the engines' parameters after one round")
    options = parser.parse_args()
    options.pythons = {
        engine: os.environ[f"FEDBAYES_BENCHMARK_{engine.upper()}"]
        for engine in ENGINES
        if f"FEDBAYES_BENCHMARK_{engine.upper()}" in os.environ
    }
    for word in options.python:
        engine, equals, path = word.partition("=")
        if not equals or engine not in ENGINES:
            parser.error(f"--python takes ENGINE=PATH with an engine of {', '.join(ENGINES)}, not {word!r}")
        options.pythons[engine] = path
    if options.check:
        agreed = [check(name, options) for name in options.jobs]
        sys.exit(0 if all(agreed) else 1)
    results = []
    for name in options.jobs:
        results.append(measure(name, options))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(table(results, options))
    print("\n" + table(results, options))


if __name__ == "__main__":
    main()
