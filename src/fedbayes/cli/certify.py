"""`fedbayes certify`: bounds on the error of clients that did not train."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.table import Table
from tyro.conf import Positional, arg

from fedbayes import files
from fedbayes.cli.arguments import parse
from fedbayes.cli.display import plain_table, show
from fedbayes.cli.personalise import rows_of
from fedbayes.cli.run import opened, reloaded
from fedbayes.errors import UserError
from fedbayes.evaluation.pac_bayes import Certificate, certify, certify_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes certify`."""

    run: Positional[Path]
    """Folder that `fedbayes run fedvi --no-bias --hold-out …` left."""
    client: Annotated[tuple[str, ...], arg(metavar="NAME")] = ()
    """Clients, by name; by default all that were held out, whose rows are read again from where they were."""
    data: Path | None = None
    """Labelled rows of somebody who had no part in the run (.csv, .tsv, .parquet or .npz)."""
    delta: float = 0.05
    """δ: each bound holds with probability 1 − δ."""
    draws: int = 200
    """Draws of the client's own parameters for each row."""
    json: Path | None = None
    """Also write the certificates to this file."""


def main(arguments: Sequence[str]) -> None:
    """Print a certificate for each client."""
    does = (
        "Bound the error of clients that did not train. With probability 1 − δ over a client's labelled rows, a network with "
        "one draw of its own parameters errs on its next row with no more than the bound's probability (PAC-Bayes-kl)."
    )
    options = parse(Options, arguments, "fedbayes certify", does)
    found = of_rows(options) if options.data is not None else of_clients(options)
    show(certificate_table(found))
    if options.json is not None:
        files.write(options.json, json.dumps([one._asdict() for one in found], indent=2).encode())
        show(f"certificates: {options.json}")


def of_rows(options: Options) -> list[Certificate]:
    """A certificate from the rows of a file; the run folder is enough."""
    assert options.data is not None
    if options.client:
        raise UserError("data and client were both given; choose one: rows of somebody's own, or clients that were held out")
    model = opened(options.run).newcomer
    x, y = rows_of(model, options.data, labels=True)
    given = (model.algorithm, model.key, model.down, model.local, model.rows.data(x, y), options.data.stem)
    return [certify_rows(*given, delta=options.delta, draws=options.draws)]


def of_clients(options: Options) -> list[Certificate]:
    """Certificates of clients of the run that were held out."""
    members = opened(options.run).members
    held_out = [name for name, unseen in zip(members.names, members.unseen, strict=True) if unseen]
    if not options.client and not held_out:
        raise UserError("no client was held out, and no certificate holds for one that trained; train with --hold-out")
    simulation = reloaded(options.run).simulation
    return [certify(simulation, client, delta=options.delta, draws=options.draws) for client in options.client or held_out]


def certificate_table(found: Sequence[Certificate]) -> Table:
    """A line for each client, and the median."""
    empty = sum(one.says_nothing for one in found)
    bounds = np.array([one.bound for one in found])
    said = f"median bound {np.median(bounds):.3f}" + (f"; {empty} of {len(found)} say nothing" if empty else "")
    half, shared = (np.median([getattr(one, name) for one in found]) for name in ("half_bound", "shared_bound"))
    caption = (
        f"{said}; drawn: one draw of β a row, which the bound is for; averaged: the prediction to use. By Clopper–Pearson, "
        f"half: a bound of the averaged prediction from half of the rows, by its errors on the others, median {half:.3f}; "
        f"shared: one of the shared model as it is, by its errors on all rows, median {shared:.3f}"
    )
    title = f"each error of one draw is at most its bound with probability {1 - found[0].delta:g}"
    rows = []
    for one in found:
        figures = (f"{one.divergence:.2f}", f"{one.gibbs:.3f}", f"{one.averaged:.3f}", f"{one.bound:.3f}")
        rows.append([one.client, str(one.rows), *figures, f"{one.half_bound:.3f}", f"{one.shared_bound:.3f}"])
    headings = ["client", "rows", "KL(q‖r)", "drawn", "averaged", "bound", "half", "shared"]
    return plain_table(headings, rows, title=title, caption=caption)
