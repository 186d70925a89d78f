"""`Table`: rows as a source has them, and the steps from there to clients that all sources share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedbayes.data.partitions import FORMS, Partition, follow, iid, parse
from fedbayes.errors import UserError

if TYPE_CHECKING:
    from fedbayes.data.layout import Layout

Missing = Literal["refuse", "mean", "drop"]
Task = Literal["classification", "regression", "counts"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user says about the columns of a source."""

    client_column: str | None = None
    target: str | None = None
    test_column: str | None = None
    ignore: tuple[str, ...] = ()
    missing: Missing | None = None
    task: Task | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Rows as a source has them, before they are clients."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    """Any value for each row; None where the source has no clients of its own."""
    names: np.ndarray | None = None
    """Names of the clients, if `client` is positions in them."""
    is_test: np.ndarray | None = None
    """For each row; None where the source has no test rows of its own."""
    unseen: np.ndarray | None = None
    """For each row: it belongs to a client that never trains."""
    classes: Sequence[str] | np.ndarray | None = None
    features: Sequence[str] | None = None
    layout: Layout | None = None
    """How the columns became features, where they have names."""
    coarse: np.ndarray | None = None
    """The coarse label of each label."""
    partition: str | None = None
    """The partition if the user names none."""
    clients: int = 20
    """The number of clients of a partition if the user gives none."""
    pooled: bool | None = None
    """One shift and scale for all columns."""
    missing: Missing = "refuse"
    """What to do with missing values if the user says nothing."""

    def rows(self, keep: np.ndarray) -> Table:
        """The rows where `keep` is True."""
        whole = {name: getattr(self, name) for name in ("x", "y", "client", "is_test", "unseen")}
        return dataclasses.replace(self, **{name: array[keep] for name, array in whole.items() if array is not None})

    def complete(self, name: str) -> Table:
        """The rows without a missing feature."""
        if self.x.dtype.kind != "f":
            return self
        keep = ~np.isnan(self.x).reshape(len(self.x), -1).any(1)
        if not keep.any():
            raise UserError(f"{name}: every row has a missing value, none is left; use missing=mean or ignore some columns")
        return self.rows(keep)

    def divided(self, partition: str | None, clients: int | None, seed: int, name: str) -> Table:
        """The rows with a client each: by a partition if one is given, else the source's own."""
        if partition is None and self.client is not None:
            if clients is not None:
                advice = f"leave it out or choose a partition: {', '.join(FORMS.values())}"
                raise UserError(f"{name}: has clients of its own, so their number cannot be set to {clients}; {advice}")
            return self
        chosen = partition or self.partition
        if chosen is None:
            advice = f"name the column with --client-column, or divide the rows with --partition: {', '.join(FORMS.values())}"
            raise UserError(f"{name}: nothing says which rows belong to which client; {advice}")
        N = self.clients if clients is None else clients
        client = assign(parse(chosen), self.y, self.is_test, N, seed, self.coarse)
        return dataclasses.replace(self, client=client, names=np.arange(N).astype(str), unseen=None)


def assign(
    partition: Partition, y: np.ndarray, is_test: np.ndarray | None, clients: int, seed: int, coarse: np.ndarray | None
) -> np.ndarray:
    """A client for each row; test rows follow the labels that the training rows of each have."""
    if is_test is None:
        return partition(y, clients, seed, coarse)
    client = np.empty(len(y), np.int64)
    own = client[~is_test] = partition(y[~is_test], clients, seed, coarse)
    numeric = y.dtype.kind == "f"
    client[is_test] = iid(y[is_test], clients, seed) if numeric else follow(y[~is_test], own, y[is_test], clients, seed)
    return client


def encode(values: np.ndarray, task: Task | None, name: str, what: str = "y") -> tuple[np.ndarray, tuple[str, ...] | None]:
    """A target as labels with the names of their classes, or as floats.

    Without a task, text and truth values are classes, whole numbers are labels that must be 0..k-1, floats are numeric.

    >>> encode(np.array(["no", "yes", "no"]), None, "data")
    (array([0, 1, 0], dtype=int32), ('no', 'yes'))
    >>> encode(np.array([3, 5]), "regression", "data")
    (array([3., 5.], dtype=float32), None)
    """
    text = values.dtype.kind not in "biuf"
    if task in ("regression", "counts"):
        if text:
            raise UserError(f"{name}: the target {what} is text, such as {str(values[0])!r}; task={task} needs numbers")
        numbers = values.astype(np.float32)
        if task == "counts" and ((numbers < 0) | (numbers != np.rint(numbers))).any():
            raise UserError(f"{name}: the target {what} has values that are not counts; expected whole numbers from 0")
        return numbers, None
    if text or values.dtype.kind == "b" or task == "classification":
        if values.dtype.kind == "f" and (values == np.rint(values)).all():
            values = values.astype(np.int64)
        found, labels = np.unique(values.astype(str) if text else values, return_inverse=True)
        return labels.astype(np.int32), tuple(str(value) for value in found)
    return values, None
