"""A data set in five numbers, by which it can be compared with others: clients, rows, labels, and how far clients differ."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from fedbayes.data.describe import label_counts

DEALS = 20  # random deals of the labels, whose mean distance is taken as zero


@dataclasses.dataclass(frozen=True)
class Profile:
    """The size and the spread of the clients, unseen ones included."""

    task: Literal["classes", "numbers"]
    """The kind of target."""
    clients: int
    """How many there are."""
    rows: float
    """The median of their training rows."""
    classes: int | None
    """Labels in all; None for numbers."""
    labels: float | None
    """Labels of the median client; None for numbers."""
    skew: float
    """How far clients' targets lie apart: 0 as if rows were dealt at random, 1 with one label, or one number, a client."""

    def text(self) -> str:
        """One line.

        >>> Profile("classes", 20, 54.0, 10, 3.0, 0.71).text()
        '10 classes, 20 clients, median 54 training rows and 3 labels a client, skew 0.71'
        """
        what = "numbers" if self.classes is None else f"{self.classes} classes"
        labels = "" if self.labels is None else f" and {self.labels:g} labels"
        return f"{what}, {self.clients} clients, median {self.rows:g} training rows{labels} a client, skew {self.skew:.2f}"


def profile(clients: Any) -> Profile:
    """Describe clients by the numbers that say which data sets are alike.

    The skew of labels is the mean total variation distance between a client's shares of the labels and those of all,
    where the mean distance of as many rows dealt at random counts as 0, and that of clients with one label each as 1.
    The skew of numbers is the share of their variance that lies between clients, with the same correction for chance
    (ε²). It is about targets only: clients whose inputs differ, or whose inputs mean something else, may have none.

    >>> from fedbayes.data import Clients
    >>> owner = np.repeat(np.arange(4), 20)
    >>> apart = profile(Clients.build(np.ones((80, 1)), owner // 2, owner))
    >>> apart.clients, apart.rows, apart.labels, round(apart.skew, 2)
    (4, 15.0, 1.0, 1.0)
    >>> profile(Clients.build(np.ones((80, 1)), np.arange(80) % 2, owner)).skew
    0.0
    >>> round(profile(Clients.build(np.ones((80, 1)), owner + np.arange(80) % 2 / 10, owner)).skew, 3)
    0.998
    """
    rows = float(np.median(clients.train_counts))
    if clients.classes is None:
        return Profile("numbers", len(clients), rows, None, None, _between(clients))
    counts = label_counts(clients)
    labels = float(np.median(np.count_nonzero(counts, axis=1)))
    return Profile("classes", len(clients), rows, len(clients.classes), labels, _skew(counts))


def _skew(counts: np.ndarray) -> float:
    counts = counts[counts.sum(axis=1) > 0]
    rows, shares = counts.sum(axis=1), counts.sum(axis=0) / counts.sum()

    def distance(dealt: np.ndarray) -> float:
        return float(np.mean(np.abs(dealt / rows[:, None] - shares).sum(axis=1)) / 2)

    random = np.random.default_rng(0)
    chance = float(np.mean([distance(random.multinomial(rows, shares)) for _ in range(DEALS)]))
    most = 1 - float((shares**2).sum())
    return 0.0 if chance >= most else min(1.0, max(0.0, (distance(counts) - chance) / (most - chance)))


def _between(clients: Any) -> float:
    rows = np.diff(clients.offsets)
    used = rows > 0
    y = np.asarray(clients.y, np.float64)
    total, (n, N) = float(((y - y.mean()) ** 2).sum()), (len(y), int(used.sum()))
    if total == 0 or n <= N:
        return 0.0
    means = np.add.reduceat(y, clients.offsets[:-1][used]) / rows[used]
    within = total - float((rows[used] * (means - y.mean()) ** 2).sum())
    return max(0.0, 1 - within / (n - N) * (n - 1) / total)
