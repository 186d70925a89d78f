"""`fedbayes quickstart`: what the library is for, in two minutes: personal networks, a posterior over silos, a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedbayes.cli.arguments import python_file
from fedbayes.cli.compare import bars
from fedbayes.cli.display import plain_table, progress_bar, result_table, show
from fedbayes.errors import UserError
from fedbayes.results.simulate import simulate
from fedbayes.results.structured_fit import SiloFit
from fedbayes.study.run import run_study
from fedbayes.study.study import parse

OUT = Path("runs") / "quickstart"
STUDY = parse(
    {
        "rounds": 30,
        "cohort": 10,
        "seeds": 1,
        "model": "mlp:64",
        "data": {"digits": {"partition": "labels:3", "clients": 20, "hold_out": 5}},
        "set": {"train": {"batch": 20}},
        "methods": {
            "fedavg": {"train": {"epochs": 2}, "tune": {"batch": 10, "epochs": 10, "lr": 0.02}},
            # The weight of a divergence is a choice; with 70 rows a client, a whole one leaves little but the prior.
            "bpfed": {"kl": 0.01, "train": {"epochs": 3, "lr": 0.01}, "tune": {"batch": 10, "epochs": 40, "lr": 0.01}},
            "fedhb-niw": {"train": {"epochs": 2}, "tune": {"batch": 10, "epochs": 10, "lr": 0.01}},
            "fedhb-mixture": {"train": {"epochs": 2}, "tune": {"batch": 10, "epochs": 10, "lr": 0.02}},
            "fedvi": {"train": {"epochs": 2}, "server_lr": 1.0},
        },
    }
)
SIX_CITIES = Path(__file__).parents[3] / "examples" / "six_cities.py"
"""Where a clone has it; an installed package has no examples."""
MEANING = """\
global: the shared model. personal: with what the client kept from training. adapted: after fitting to the client's
own rows, which FedVI does without their labels. An unseen client never trained before. Every client is scored on its
own test rows. BPFed's last layer is the client's own; its shared model has the population's.
"""
NUTS = {
    "beta[0]": (-3.161, 0.228),
    "beta[1]": (0.462, 0.292),
    "beta[2]": (-0.218, 0.087),
    "beta[3]": (0.106, 0.140),
    "omega": (-0.788, 0.086),
}
"""Mean and deviation by NUTS on all children together, from docs/results/six-cities.md."""


def main(arguments: Sequence[str]) -> None:
    """Train the papers' methods for networks beside FedAvg, fit a mixed model over two silos by theirs, and write the page."""
    if arguments:
        if arguments[0] in ("-h", "--help"):
            print("usage: fedbayes quickstart\n\nTwo minutes of what there is; the runs and their page are in runs/quickstart.")
            return
        raise UserError(f"quickstart takes no options, but {arguments[0]!r} was given; see fedbayes compare --help")
    from fedbayes.report.page import report

    started = time.perf_counter()
    show("Handwritten digits: 20 clients with three labels each, 5 of them held out of training.\n")
    outcome = run_study(STUDY, OUT, None, bars, force=True)
    if outcome.failures:
        raise UserError("; ".join(f"{place} failed: {why}" for place, why in outcome.failures.items()))
    (results,) = outcome.results.values()
    shown = {name: list(seeds.values()) for name, seeds in results.items()}
    show(result_table(shown, f"{STUDY.run.rounds} rounds, {STUDY.run.cohort} clients a round"))
    show(MEANING)
    if SIX_CITIES.exists():
        show("Six Cities: wheezing of 537 children in two silos, a mixed model in NumPyro (examples/six_cities.py).\n")
        show(beside_nuts(six_cities()))
        show("For SFVI the silos sent gradients of what they share, 10,000 times, for SFVI-Avg posteriors of it, 20 times; the")
        show("children's own effects stayed. NUTS was run once, for docs/results/six-cities.md.\n")
    page = report([OUT / "fedavg-0", OUT], OUT / "report.html")  # differences are from the first
    show(f"{time.perf_counter() - started:.0f} s. All figures, pictures and what was sent: {page}; next: docs/your-data.md.")


def six_cities() -> dict[str, SiloFit]:
    """SFVI and SFVI-Avg over the example's silos."""
    from fedbayes import SFVI, Family, SFVIAvg

    model = python_file(SIX_CITIES, ["population", "silo", "silos"], "the example")
    family = Family(moving_scale=True, bound=5)
    planned: dict[str, tuple[SFVI | SFVIAvg, int]] = {
        "SFVI": (SFVI(model.population, model.silo, family=family, lr=0.05, decay=0.01), 10_000),
        "SFVI-Avg": (SFVIAvg(model.population, model.silo, family=family, lr=0.05, steps=300), 20),
    }
    found = {}
    with progress_bar() as add:
        for name, (algorithm, rounds) in planned.items():
            bar, folder = add(f"six cities, {name}", rounds), OUT / f"six-cities-{name.lower()}"
            found[name] = simulate(algorithm, model.silos(), rounds, folder=folder, force=True, callbacks=(bar,))
    return found


def beside_nuts(fits: dict[str, SiloFit]) -> Table:
    """The posteriors over silos beside that of pooled data."""
    rows = []
    for name, pooled in NUTS.items():
        posteriors = [fit.result["posterior"][name] for fit in fits.values()]
        cells = [*((one["mean"], one["sd"]) for one in posteriors), pooled]
        rows.append([name, *(f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in cells)])
    return plain_table(["", *(f"two silos, {name}" for name in fits), "all together, NUTS"], rows)
