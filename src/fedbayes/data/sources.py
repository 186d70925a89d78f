"""`load`: clients from a name, a file, a folder or the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbayes.data import catalogue, files
from fedbayes.data.clients import Clients
from fedbayes.data.store import MANIFEST
from fedbayes.data.synthetic import synthetic
from fedbayes.data.table import Missing, Options, Table, Task
from fedbayes.errors import UserError, nearest


def load(
    spec: str,
    *,
    partition: str | None = None,
    clients: int | None = None,
    client_column: str | None = None,
    target: str | None = None,
    test_column: str | None = None,
    ignore: Sequence[str] = (),
    missing: Missing | None = None,
    task: Task | None = None,
    test: float | None = None,
    hold_out: int | Sequence[str] = 0,
    standardise: bool = True,
    seed: int = 0,
) -> Clients:
    """Clients from a name such as `digits`, a path, or `hub:NAME`.

    Args:
        spec: A name in `NAMES`; an .npz, .csv or .parquet file; a folder of IDX files, of LEAF's JSON, or that `Clients.save`
            wrote; or `hub:` and a data set's name.
        partition: How to divide the rows, such as `shards:5` or `dirichlet:0.3`; by default the source's own clients.
        clients: How many clients a partition makes.
        client_column: The column that says whose a row is.
        target: The column to predict.
        test_column: A column that is true for test rows; by default a share `test` of each client's rows.
        ignore: Columns to leave out.
        missing: "refuse" missing values, replace them by the "mean" of the training rows, or "drop" their rows.
        task: "classification", "regression" or "counts"; by default classes for text and whole numbers, regression for floats.
        test: Share of each client's rows for testing; by default the source's own test rows, or 0.25 if it has none.
        hold_out: How many clients never train; or which, by name.
        standardise: Let the model see each feature with mean 0 and deviation 1 over the participants' training rows.
        seed: Of the partition, the split and the choice of unseen clients.

    >>> load("digits", hold_out=4)
    Clients(digits: 20 clients (4 unseen), 1797 rows of (64,), 10 classes)
    """
    path = Path(spec).expanduser()
    name = path.stem if path.exists() and spec not in NAMES else spec
    if spec == "synthetic" or (path / MANIFEST).is_file():
        given: dict[str, Any] = {"partition": partition, "client_column": client_column, "target": target}
        given |= {"test_column": test_column, "ignore": ignore, "missing": missing, "task": task, "test": test}
        given |= {} if spec == "synthetic" else {"clients": clients}
        if unfit := [option for option, value in given.items() if value]:
            raise UserError(f"{spec} has its clients and rows already, so {', '.join(unfit)} cannot be chosen; leave it out")
        whole = synthetic(clients or 100, seed=seed) if spec == "synthetic" else Clients.load(path)
        whole = whole.hold_out(hold_out, seed) if hold_out else whole
        return whole.standardised() if spec == "synthetic" and standardise else whole

    options = Options(client_column, target, test_column, tuple(ignore), missing, task)
    table = _read(spec, path, options, name)
    missing = missing or table.missing
    if missing == "drop":
        table = table.complete(name)
    if test is not None:  # the source's own test rows are divided anew, like the others
        table = dataclasses.replace(table, is_test=None)
    table = table.divided(partition, clients, seed, name)
    assert table.client is not None
    own: dict[str, Any] = {part: getattr(table, part) for part in ("names", "classes", "features", "is_test", "unseen")}
    own |= {"test": 0.25 if test is None else test, "missing": "keep" if missing == "mean" else "refuse"}
    built = Clients.build(table.x, table.y, table.client, seed=seed, name=name, **own)
    built = built if table.layout is None else dataclasses.replace(built, layout=table.layout)
    # In this order, so that no unseen client and no test row has a part in the means.
    built = built.hold_out(hold_out, seed) if hold_out else built
    built = built.imputed() if missing == "mean" and built.x.dtype.kind == "f" else built
    return built.standardised(table.pooled) if standardise else built


NAMES = (*catalogue.SETS, "synthetic")  # the data sets that `load` knows by name


def _read(spec: str, path: Path, options: Options, name: str) -> Table:
    if spec.startswith("hub:"):
        from fedbayes.data.hub import read as read_hub

        return read_hub(spec.removeprefix("hub:"), options)
    if spec in catalogue.SETS:
        if options.client_column or options.target or options.test_column or options.ignore:
            raise UserError(f"{spec} has fixed columns; client_column, target, test_column and ignore are for your own files")
        return catalogue.SETS[spec](options)
    if path.exists():
        return files.read(path, options, name)
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"there is no file or folder {spec}; give a path that exists, hub:NAME, or one of {', '.join(NAMES)}")
    raise UserError(f"unknown data set {spec!r}: {nearest(spec, NAMES)}; or give the path of a file, or hub:NAME")
