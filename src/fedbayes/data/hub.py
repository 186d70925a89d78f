"""The hub: data sets of Hugging Face through flwr-datasets (extra `hub`), and its partitioners for labels of any source."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from fedbayes.data.table import Options, Table, encode
from fedbayes.errors import UserError, nearest

INSTALL = "install it with: pip install 'fedbayes[hub]'"

NATURAL = {"flwrlabs/femnist": "writer_id", "flwrlabs/shakespeare": "character_id", "flwrlabs/pacs": "domain"}
"""Columns that say whose a row is, for data sets where that is known."""

TARGETS = ("label", "labels", "character", "fine_label", "y", "target")
"""Columns that are taken as the target if the user names none."""


def read(name: str, options: Options) -> Table:
    """A data set of the hub, its train and test parts; the client column by default the one in `NATURAL`."""
    try:
        from flwr_datasets import FederatedDataset  # noqa: TID251  # here is where it is allowed
    except ImportError as error:
        raise UserError(f"hub:{name} needs flwr-datasets, which is not installed; {INSTALL}") from error
    try:
        # Whole parts in their own order: who gets which row is decided here, as for every other source.
        source = FederatedDataset(dataset=name, partitioners={"train": 1}, shuffle=False)
        parts = [source.load_split("train")]
        with contextlib.suppress(ValueError):  # there is no test part
            parts.append(source.load_split("test"))
    except Exception as error:  # the hub's errors have no common class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"hub:{name} could not be loaded ({reason}); check its name and the connection") from error
    natural = NATURAL.get(name)
    column = options.client_column or (natural if natural in parts[0].column_names else None)
    return from_datasets(parts, options, f"hub:{name}", column)


def from_datasets(parts: list[Any], options: Options, where: str, client_column: str | None) -> Table:
    """A table from `datasets.Dataset`s: the training part, and the test part if there is one."""
    columns = parts[0].column_names
    target = options.target or next((name for name in TARGETS if name in columns), None)
    if target is None:
        raise UserError(f"{where}: say which column to predict with --target; there is {', '.join(columns)}")
    for column in (target, client_column, options.test_column, *options.ignore):
        if column is not None and column not in columns:
            raise UserError(f"{where} has no column {column!r}: {nearest(column, columns)}")
    roles = {target, client_column, options.test_column}
    features = [column for column in columns if column not in roles and column not in options.ignore]
    first = parts[0][0]  # an image, or a list of numbers of one length, is an array
    arrays = [name for name in features if hasattr(first[name], "getbands") or isinstance(first[name], (list, np.ndarray))]
    if len(arrays) != 1:
        import pandas as pd

        from fedbayes.data.frames import from_frame

        frame = pd.concat([part.to_pandas() for part in parts], ignore_index=True)
        return from_frame(frame, dataclasses.replace(options, target=target, client_column=client_column), where)
    x = np.concatenate([_stack(part, arrays[0], where) for part in parts])
    y = np.concatenate([np.asarray(part[target][:]) for part in parts])
    named = getattr(parts[0].features[target], "names", None)
    classes: tuple[str, ...] | None = tuple(named) if named and options.task in (None, "classification") else None
    if classes is None:
        y, classes = encode(y, options.task, where, target)
    is_test = np.arange(len(y)) >= len(parts[0]) if len(parts) > 1 else None
    if options.test_column:
        is_test = np.concatenate([np.asarray(part[options.test_column][:], bool) for part in parts])
    client = None
    if client_column is not None:
        client = np.concatenate([np.asarray(part[client_column][:]) for part in parts])
        is_test = is_test if options.test_column else None  # each client's rows are split, of whichever part they are
    return Table(x, y, client=client, is_test=is_test, classes=classes)


def partition(partitioner: Any, labels: np.ndarray, column: str = "label") -> np.ndarray:
    """A client for each row by any partitioner of flwr-datasets, which reads labels from `column`; -1 for rows it leaves out.

    For example `partition(DirichletPartitioner(10, "label", alpha=0.3), labels)`, then `Clients.build(x, labels, client)`.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"partitioners of flwr-datasets need flwr-datasets, which is not installed; {INSTALL}") from error
    partitioner.dataset = datasets.Dataset.from_dict({column: labels.tolist(), "row": np.arange(len(labels)).tolist()})
    client = np.full(len(labels), -1)
    for owner in range(partitioner.num_partitions):
        client[np.asarray(partitioner.load_partition(owner)["row"][:], np.int64)] = owner
    return client


def _stack(part: Any, column: str, where: str) -> np.ndarray:
    """The rows of a column in one array, decoded one after the other: as images they would take several times the room."""
    first = np.asarray(part[0][column])
    x = np.empty((len(part), *first.shape), np.uint8 if first.dtype == np.uint8 else np.float32)
    for i, row in enumerate(part.select_columns(column)):
        value = np.asarray(row[column])
        if value.shape != first.shape:
            raise UserError(
                f"{where}: column {column!r} has shape {value.shape} in row {i}, {first.shape} in row 0; expected one"
            )
        x[i] = value
    return x
