"""Peak memory of a run over many clients against the same run over few: `python benchmarks/memory.py --help`.

Each run is a process of its own: synthetic clients with 10 rows each (mapped from a file, as data of that size would be),
cohorts of 100, 20 rounds, without and with a state at each client (FedAvg, FedPer), then every client scored.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time


def measure(algorithm: str, count: int, rounds: int, evaluate: bool) -> None:
    import fedbayes as fb
    from fedbayes.algorithms import find

    with tempfile.TemporaryDirectory() as folder:
        clients = fb.data.synthetic(count, rows=10, features=20, classes=10, folder=pathlib.Path(folder) / "data")
        started = time.perf_counter()
        simulation = fb.Simulation(find(algorithm)(fb.network("mlp", clients, hidden=(64,))), clients, cohort=100)
        for _ in range(rounds):
            simulation.step()
        trained = time.perf_counter() - started
        if evaluate:
            fb.assess(simulation)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak": peak, "trained": trained, "total": time.perf_counter() - started}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs=2, default=(1_000, 100_000), metavar=("FEW", "MANY"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, help="write the table here, as Markdown")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--evaluate", action="store_true", help="score every client at the end too")
    options = parser.parse_args()
    if options.one:
        measure(options.one[0], int(options.one[1]), options.rounds, options.evaluate)
        return
    lines = [
        "| method | scored at the end | clients | peak MB, least and most of the repeats | MB above few | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for algorithm in ("fedavg", "fedper"):
        for evaluate in (False, True):
            base = 0.0
            for count in options.clients:
                command = [sys.executable, __file__, "--one", algorithm, str(count), "--rounds", str(options.rounds)]
                runs = [
                    json.loads(subprocess.run(command + ["--evaluate"] * evaluate, check=True, capture_output=True).stdout)
                    for _ in range(options.repeats)
                ]
                peaks, seconds = [run["peak"] for run in runs], [run["total"] for run in runs]
                base = base or min(peaks)
                yes = "yes" if evaluate else "no"
                lines.append(
                    f"| {algorithm} | {yes} | {count:,} | {min(peaks):.0f}–{max(peaks):.0f} | {max(peaks) - base:.0f} "
                    f"| {min(seconds):.0f}–{max(seconds):.0f} |"
                )
                print(lines[-1], flush=True)
    if options.out:
        command = " ".join(["python", "benchmarks/memory.py", *sys.argv[1:]])
        text = [
            "# Memory over many clients",
            "",
            (__doc__ or "").split("\n\n", 1)[1].strip(),
            f"{options.rounds} rounds, {options.repeats} repeats, seed 0. MB above few: the most of the repeats minus the",
            "least of those with few clients.",
            "",
            f"    {command}",
            "",
            *lines,
            "",
        ]
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    main()
