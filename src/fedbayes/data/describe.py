"""What the clients are: how many, how large, which labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fedbayes.data.rows import blocks
from fedbayes.errors import printable

SHOWN = 20  # clients with a line of their own
COLUMNS = 12  # classes with a column of their own


def label_counts(clients: Any) -> np.ndarray:
    """(N, k): how many rows of each class each client has.

    >>> from fedbayes.data import Clients
    >>> clients = Clients.build(np.ones((4, 1)), np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]))
    >>> label_counts(clients).tolist()
    [[1, 1], [0, 2]]
    """
    if clients.classes is None:
        raise ValueError("a numeric target has no labels to count")
    N, k = len(clients), len(clients.classes)
    counts = np.zeros((N, k), np.int64)
    for start, labels in blocks(clients.y):
        owners = np.searchsorted(clients.offsets, np.arange(start, start + len(labels)), side="right") - 1
        counts += np.bincount(owners * k + labels, minlength=N * k).reshape(N, k)
    return counts


class Facts(NamedTuple):
    """What a picture or a page tells of the clients, without their rows; a list has an entry for each client."""

    name: str
    names: list[str]
    unseen: list[bool]
    train: list[int]
    test: list[int]
    classes: list[str] | None
    labels: list[list[int]] | None
    """Rows of each class; None for a numeric target."""
    quantiles: list[list[float]] | None
    """5, 25, 50, 75 and 95 % of a numeric target."""


def facts(clients: Any, most: int | None = None) -> Facts:
    """Who has how many rows of which labels; more than `most` clients times classes are left out.

    >>> from fedbayes.data import Clients
    >>> clients = Clients.build(np.ones((4, 1)), np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]))
    >>> facts(clients).labels
    [[1, 1], [0, 2]]
    """
    labels, quantiles, width = None, None, 5 if clients.classes is None else len(clients.classes)
    if most is not None and len(clients) * width > most:
        pass
    elif clients.classes is not None:
        labels = label_counts(clients).tolist()
    else:
        parts = zip(clients.offsets[:-1], clients.offsets[1:], strict=True)
        quantiles = [np.quantile(clients.y[start:stop], [0.05, 0.25, 0.5, 0.75, 0.95]).tolist() for start, stop in parts]
    each = (clients.names.astype(str), clients.unseen, clients.train_counts, clients.test_counts)
    names, unseen, train, test = (values.tolist() for values in each)
    classes = None if clients.classes is None else list(clients.classes)
    return Facts(clients.name, names, unseen, train, test, classes, labels, quantiles)


def describe(clients: Any) -> str:
    """A few lines on all clients, and a table with a line for each, or for the first ones if they are many.

    >>> y = np.array([0, 1, 1, 0, 1, 0])
    >>> from fedbayes.data import Clients
    >>> clients = Clients.build(np.ones((6, 3)), y, np.array(list("aaaabb")), classes=["no", "yes"])
    >>> print(describe(clients.hold_out(1)))
    data: 2 clients, 1 of them unseen
    6 rows with 3 features (float32), 4 for training and 2 for testing
    rows per client: 2 to 4, median 3
    target: 2 classes
    <BLANKLINE>
    client  train  test  no  yes
    a *         3     1   2    2
    b           1     1   1    1
    all         4     2   3    3
    * unseen: never trains
    """
    rows, shape = np.diff(clients.offsets), clients.shape
    what = f"{shape[0]} features" if len(shape) == 1 else f"shape {'x'.join(map(str, shape))}"
    unseen = f", {clients.unseen.sum()} of them unseen" if clients.unseen.any() else ""
    lines = [
        f"{clients.name}: {len(clients)} clients{unseen}",
        f"{rows.sum()} rows with {what} ({clients.x.dtype}), {clients.train_counts.sum()} for training and "
        f"{clients.test_counts.sum()} for testing",
        f"rows per client: {rows.min()} to {rows.max()}, median {np.median(rows):g}",
        f"target: {'numeric' if clients.classes is None else f'{len(clients.classes)} classes'}",
        "",
        *_aligned(table(clients)),
    ]
    return "\n".join([*lines, *filter(None, [note(clients)])])


def table(clients: Any) -> list[list[str]]:
    """A heading, a line for each client or for the first ones if they are many, and a line for all."""
    shown = _shown(clients)
    if clients.classes is None:
        header, cells, total = _numbers(clients, shown)
    elif len(clients.classes) > COLUMNS:
        header, cells, total = _many_classes(clients.classes, label_counts(clients), shown)
    else:
        each = label_counts(clients)
        header, cells, total = list(clients.classes), each[:shown].astype(str).tolist(), each.sum(0).astype(str).tolist()
    lines = [["client", "train", "test", *_short(header)]]
    for i, name in enumerate(_short(clients.names[:shown])):
        counts = [str(clients.train_counts[i]), str(clients.test_counts[i])]
        lines.append([name + " *" * bool(clients.unseen[i]), *counts, *cells[i]])
    if shown < len(clients):
        lines.append([f"… {len(clients) - shown} more"] + [""] * (len(lines[0]) - 1))
    lines.append(["all", str(clients.train_counts.sum()), str(clients.test_counts.sum()), *total])
    return lines


def note(clients: Any) -> str:
    """What a mark in the table means, where there is one."""
    return "* unseen: never trains" if clients.unseen[: _shown(clients)].any() else ""


def _shown(clients: Any) -> int:
    return len(clients) if len(clients) <= SHOWN else SHOWN - 2


def _many_classes(classes: tuple[str, ...], counts: np.ndarray, shown: int) -> tuple[list[str], list[list[str]], list[str]]:
    def cells(row: np.ndarray) -> list[str]:
        most = int(row.argmax())
        return [str(np.count_nonzero(row)), *_short([classes[most]]), f"{row[most] / row.sum():.0%}"]

    return ["classes", "most frequent", "share"], [cells(row) for row in counts[:shown]], cells(counts.sum(0))


def _numbers(clients: Any, shown: int) -> tuple[list[str], list[list[str]], list[str]]:
    def cells(y: np.ndarray) -> list[str]:
        return [f"{value:.4g}" for value in (y.mean(), y.std(), y.min(), y.max())]

    parts = [clients.y[clients.offsets[i] : clients.offsets[i + 1]] for i in range(shown)]
    return ["mean", "deviation", "least", "most"], [cells(part) for part in parts], cells(clients.y)


def _short(names: Iterable[Any], width: int = 20) -> list[str]:
    """Names in one line, the long ones cut unless two would then be the same."""
    whole = [printable(str(name)).replace("\n", " ") for name in names]
    cut = [name if len(name) <= width else name[: width - 1] + "…" for name in whole]
    return cut if len(set(cut)) == len(set(whole)) else whole


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in table]
    return ["  ".join(row).rstrip() for row in rows]
