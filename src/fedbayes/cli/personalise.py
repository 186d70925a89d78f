"""`fedbayes personalise`: a personal model of a finished run, in a file to take away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from tyro.conf import Positional, arg

from fedbayes import wire
from fedbayes.cli.arguments import parse
from fedbayes.cli.display import show
from fedbayes.cli.run import finished
from fedbayes.data.stream import RowReader
from fedbayes.errors import UserError
from fedbayes.results.fit import Fit
from fedbayes.results.posterior import Posterior


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes personalise`."""

    run: Positional[Path]
    """Folder that `fedbayes run` left."""
    out: Path
    """File to write, such as me.safetensors."""
    data: Path | None = None
    """Somebody's own rows (.csv, .tsv, .parquet or .npz); labels may be missing where the method does not look at them."""
    client: Annotated[str | None, arg(metavar="NAME")] = None
    """A client of the run, by name: what it has kept since it trained."""
    adapted: bool = False
    """With --client: fit the model to the client's training rows first."""


def main(arguments: Sequence[str]) -> None:
    """Write the file and say what is in it."""
    does = (
        "Take a model away from a run: for somebody's own rows (--data), for a client of the run (--client), or, with neither, "
        "the shared model. The file needs nothing else to predict: see fedbayes predict."
    )
    options = parse(Options, arguments, "fedbayes personalise", does)
    if options.data is not None and options.client is not None:
        raise UserError("data and client were both given; choose one: rows of somebody's own, or a client of the run")
    if options.adapted and options.client is None:
        raise UserError("adapted is for a client of the run; name it with --client, or give rows with --data")
    if not options.out.resolve().parent.is_dir():
        raise UserError(f"there is no folder {options.out.parent} to write {options.out.name} to; make it first")
    if options.data is not None and options.out.resolve() == options.data.resolve():
        raise UserError(f"out is {options.out}, which is the data; choose another file")
    fit = finished(options.run)
    found = of_rows(fit, options.data) if options.data is not None else of_client(fit, options.client, options.adapted)
    found.save(options.out)
    show(repr(found))
    show(f"personal model: {options.out} ({options.out.stat().st_size:,} bytes)")


def of_client(fit: Fit, client: str | None, adapted: bool) -> Posterior:
    """What a client of the run has; one that never trained has nothing of its own."""
    data = fit.simulation.data
    if client is not None and not adapted and data.unseen[data.index(client)]:
        raise UserError(f"client {client!r} was held out and never trained, so it has kept nothing; use --adapted")
    return fit.posterior_of(client, adapted=adapted)


def of_rows(fit: Fit, path: Path) -> Posterior:
    """A model for the rows of a file, with their labels where the method looks at them."""
    data = fit.simulation.data
    rows = RowReader(path, data.layout, data.shape, data.classes)
    if rows.ignored:
        show(f"ignored: {', '.join(rows.ignored)}")
    labels = wire.adapt_reads_labels(fit.simulation.algorithm, data.example)
    if labels and not rows.labelled:
        there = f"no column {rows.target!r}" if rows.target else "no column that says them in this data set's own classes"
        raise UserError(
            f"{fit.result['algorithm']} adapts to rows with labels, but {path} has {there}; add it, or train a method that "
            "needs none, such as fedvi"
        )
    x = np.concatenate([block.x for block in rows])
    return fit.adapt(x.astype(data.x.dtype) if data.x.dtype == np.float32 else x, rows.labels() if labels else None)
