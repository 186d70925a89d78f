"""`fedbayes personalise`: a personal model of a finished run, in a file to take away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from tyro.conf import Positional, arg

from fedbayes.cli.arguments import parse
from fedbayes.cli.display import show
from fedbayes.cli.run import opened, reloaded
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
    """With --client: fit the model to the client's training rows first, which are read again from where they were."""


def main(arguments: Sequence[str]) -> None:
    """Write the file and say what is in it."""
    does = (
        "Take a model away from a run: for somebody's own rows (--data), for a client of the run (--client), or, with neither, "
        "the shared model. The run folder is enough. The file needs nothing else to predict: see fedbayes predict. The "
        "algorithm's own settings, such as --tune.lr, may differ from the run's."
    )
    folder = next((Path(word) for word in arguments if (Path(word) / "result.json").is_file()), None)
    fit = None if folder is None else opened(folder)
    options = parse(Options, arguments, "fedbayes personalise", does, None if fit is None else fit.shared.algorithm)
    if options.data is not None and options.client is not None:
        raise UserError("data and client were both given; choose one: rows of somebody's own, or a client of the run")
    if options.adapted and options.client is None:
        raise UserError("adapted is for a client of the run; name it with --client, or give rows with --data")
    if not options.out.resolve().parent.is_dir():
        raise UserError(f"there is no folder {options.out.parent} to write {options.out.name} to; make it first")
    if options.data is not None and options.out.resolve() == options.data.resolve():
        raise UserError(f"out is {options.out}, which is the data; choose another file")
    if fit is None or folder != options.run:
        fit = opened(options.run)  # says what is wrong with it
    before, now = fit.shared.algorithm, options.algorithm
    pairs = ((field.name, getattr(before, field.name), getattr(now, field.name)) for field in dataclasses.fields(before))
    settings = {name: new for name, old, new in pairs if new is not old and new != old}
    fit = (reloaded(options.run) if options.adapted else fit).replace(**settings)
    found = of_rows(fit, options.data) if options.data is not None else of_client(fit, options.client, options.adapted)
    found.save(options.out)
    show(repr(found))
    show(f"personal model: {options.out} ({options.out.stat().st_size:,} bytes)")


def of_client(fit: Fit, client: str | None, adapted: bool) -> Posterior:
    """What a client of the run has; one that never trained has nothing of its own."""
    if client is not None and not adapted and fit.members.unseen[fit.members.index(client)]:
        raise UserError(f"client {client!r} was held out and never trained, so it has kept nothing; use --adapted")
    return fit.posterior_of(client, adapted=adapted)


def of_rows(fit: Fit, path: Path) -> Posterior:
    """A model for the rows of a file, with their labels where the method looks at them."""
    return fit.adapt(*rows_of(fit.shared, path, labels=fit.shared.reads_labels))


def rows_of(shared: Posterior, path: Path, *, labels: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows of a file as a run's model reads them, and their labels where they are needed."""
    spec = shared.rows
    rows = RowReader(path, spec.layout, spec.shape, spec.classes)
    if rows.ignored:
        show(f"ignored: {', '.join(rows.ignored)}")
    if labels and not rows.labelled:
        there = f"no column {rows.target!r}" if rows.target else "no column that says them in this data set's own classes"
        advice = "add it, or train a method that needs none, such as fedvi"
        raise UserError(f"{shared.algorithm.title} adapts to rows with labels, but {path} has {there}; {advice}")
    x = np.concatenate([block.x for block in rows])
    read = labels or (rows.labelled and shared.algorithm.labels_optional)
    return x.astype(np.float32) if spec.dtypes[0] == "float32" else x, rows.labels() if read else None
