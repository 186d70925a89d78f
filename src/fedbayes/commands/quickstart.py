"""`fedbayes quickstart`: the embedded digits, four methods, one table, one run folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from fedbayes.commands import compare
from fedbayes.commands.display import result_table, show
from fedbayes.commands.options import DataOptions, RunOptions
from fedbayes.errors import UserError

OPTIONS = compare.Options(
    algorithms=compare.USUAL,
    seeds=1,
    out=Path("runs") / "quickstart",
    force=True,
    model="mlp:64",
    set=("train.batch=20", "train.epochs=2", "tune.batch=10", "tune.epochs=10", "tune.lr=0.02"),
    data=DataOptions(data="digits", partition="labels:3", clients=20, hold_out=5),
    settings=RunOptions(rounds=40, cohort=10),
)


def main(arguments: Sequence[str]) -> None:
    """Train four methods on handwritten digits whose clients differ in their labels, and say what the table shows."""
    if arguments:
        if arguments[0] in ("-h", "--help"):
            print(
                "usage: fedbayes quickstart\n\nCompare four methods on the embedded digits; runs are kept in runs/quickstart."
            )
            return
        raise UserError(f"quickstart takes no options, but {arguments[0]!r} was given; see fedbayes compare --help")
    started = time.perf_counter()
    show("Handwritten digits: 20 clients with three labels each, 5 of them held out of training.\n")
    (results,) = compare.compare(OPTIONS).results.values()
    shown = {name: list(seeds.values()) for name, seeds in results.items()}
    show(result_table(shown, f"{OPTIONS.settings.rounds} rounds, 10 clients a round"))
    show("global: the shared model. personal: with what the client kept from training. adapted: after fitting to the client's")
    show("own training rows. An unseen client never trained before. Every client is scored on its own test rows.\n")
    show(f"{time.perf_counter() - started:.0f} s. The runs are in {OPTIONS.out}; next: docs/your-data.md.")
