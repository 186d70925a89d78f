"""`Clients`: the rows of every client in flat arrays with offsets, gathered a cohort at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fedbayes.algorithm import Data
from fedbayes.data import describe, store
from fedbayes.data.layout import Column, Layout
from fedbayes.data.rows import blocks, check_finite, identify, place_of, release, split, take, targets
from fedbayes.errors import UserError
from fedbayes.sheets import listing

UNSEEN = 0x0FF  # in front of the seed, so that who is held out has nothing to do with who is drawn for a round


@dataclasses.dataclass(frozen=True, eq=False)
class Clients:
    """The rows of all clients, client after client, and of each client its training rows before its test rows.

    >>> clients = Clients.build(np.eye(6), np.array([0, 1, 0, 1, 0, 1]), np.array(["b", "a", "b", "a", "a", "b"]))
    >>> clients
    Clients(data: 2 clients, 6 rows of (6,), 2 classes)
    >>> clients.names.tolist(), clients.train_counts.tolist(), clients.test_counts.tolist()
    (['a', 'b'], [2, 2], [1, 1])
    >>> clients.train([1], length=3).mask.tolist()
    [[True, True, False]]
    """

    x: np.ndarray
    """(rows, *shape), as uint8 or float32."""
    y: np.ndarray
    """(rows,): int32 labels 0..k-1, or float32 targets."""
    offsets: np.ndarray
    """(N+1,): client i's rows are x[offsets[i]:offsets[i+1]]."""
    train_counts: np.ndarray
    """(N,): the first so many of a client's rows are for training, the others for testing."""
    names: np.ndarray
    """(N,): a name for each client."""
    classes: tuple[str, ...] | None
    """A name for each class; None for a numeric target."""
    unseen: np.ndarray
    """(N,): True for a client that never trains and is only evaluated."""
    shift: np.ndarray
    """The model sees (x - shift) / scale; broadcastable to `shape`."""
    scale: np.ndarray
    """See `shift`."""
    features: tuple[str, ...] | None = None
    """Names of the columns of x, where there are columns."""
    name: str = "data"
    """Of the data set."""
    layout: Layout = Layout()
    """How a table's columns became those of x."""

    def __post_init__(self) -> None:
        N, rows = len(self.names), len(self.x)
        if self.y.shape != (rows,) or self.offsets.shape != (N + 1,) or self.offsets[0] != 0 or self.offsets[-1] != rows:
            given = f"{rows} rows of x, {len(self.y)} of y and offsets up to {self.offsets[-1]} for {N} clients"
            raise UserError(f"{self.name}: {given} do not fit together; build the clients with Clients.build")
        if self.train_counts.shape != (N,) or self.unseen.shape != (N,):
            raise UserError(f"{self.name}: expected one training count and one flag `unseen` for each of {N} clients")
        counts = np.diff(self.offsets)
        self._refuse(counts <= 0, "has no rows; leave it out or give it some")
        self._refuse((self.train_counts < 0) | (self.train_counts > counts), "has fewer rows than its training count")
        self._refuse((self.train_counts == 0) & ~self.unseen, "has no training rows; add some or mark the client as unseen")

    def _refuse(self, bad: np.ndarray, why: str) -> None:
        if bad.any():
            others = f" (and {bad.sum() - 1} more clients)" if bad.sum() > 1 else ""
            raise UserError(f"{self.name}: client {str(self.names[bad.argmax()])!r} {why}{others}")

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        unseen = f" ({self.unseen.sum()} unseen)" if self.unseen.any() else ""
        target = "numeric target" if self.classes is None else f"{len(self.classes)} classes"
        return f"Clients({self.name}: {len(self)} clients{unseen}, {len(self.x)} rows of {self.shape}, {target})"

    def _repr_html_(self) -> str:
        headings, *lines = describe.table(self)
        return listing(repr(self), headings, lines, describe.note(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of x."""
        return self.x.shape[1:]

    @property
    def test_counts(self) -> np.ndarray:
        """(N,): how many test rows each client has."""
        return np.asarray(np.diff(self.offsets) - self.train_counts)

    @property
    def participants(self) -> np.ndarray:
        """Ids of the clients that may train."""
        return np.flatnonzero(~self.unseen)

    @property
    def facts(self) -> dict[str, int]:
        """What an algorithm may know of a run before it: how many clients may train, N, and how many rows they have, D."""
        return {"clients": len(self.participants), "rows": int(self.train_counts[self.participants].sum())}

    @property
    def example(self) -> Data:
        """The first client's training rows, for the shapes of what is sent (`wire.manifest`)."""
        return jax.tree.map(lambda leaf: leaf[0], self.train([0], max(2, int(self.train_counts[0]))))

    def train(self, ids: Sequence[Any] | np.ndarray, length: int, slots: int | None = None) -> Data:
        """Training rows of some clients, each padded to `length` rows, and with empty clients to `slots` clients."""
        ids = np.asarray(ids, np.int64)
        return self._gather(ids, self.offsets[ids], self.train_counts[ids], length, slots)

    def test(self, ids: Sequence[Any] | np.ndarray, length: int, slots: int | None = None) -> Data:
        """Test rows of some clients, each padded to `length` rows, and with empty clients to `slots` clients."""
        ids = np.asarray(ids, np.int64)
        starts = self.offsets[ids] + self.train_counts[ids]
        return self._gather(ids, starts, self.offsets[ids + 1] - starts, length, slots)

    def _gather(self, ids: np.ndarray, starts: np.ndarray, counts: np.ndarray, length: int, slots: int | None) -> Data:
        slots = len(ids) if slots is None else slots
        if len(ids) > slots or (len(ids) and counts.max() > length):
            raise ValueError(f"{len(ids)} clients of up to {counts.max()} rows do not fit {slots} slots of {length} rows")
        x = np.zeros((slots, length, *self.shape), self.x.dtype)
        y = np.zeros((slots, length), self.y.dtype)
        mask = np.zeros((slots, length), bool)
        mask[: len(ids)] = np.arange(length) < counts[:, None]
        # A slice per client: a mapped file is read in runs, and an index per row would be as large as the cohort's labels.
        for whole, padded in ((self.x, x), (self.y, y)):
            for slot, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
                padded[slot, :count] = whole[start : start + count]
            release(whole)
        return Data(x, y, mask)  # type: ignore[arg-type]  # NumPy here; the caller chooses when they go to a device

    def index(self, name: str) -> int:
        """The place of a client by its name."""
        return place_of(name, self.names, self.name)

    def rows(self, name: str, part: Literal["train", "test"] = "train") -> tuple[np.ndarray, np.ndarray]:
        """The training or test rows of one client, without padding: features and targets.

        >>> clients = Clients.build(np.eye(4), np.array([0, 1, 0, 1]), np.array(["a", "a", "a", "b"]))
        >>> x, y = clients.rows("a", "test")
        >>> x.shape, y.shape
        ((1, 4), (1,))
        """
        i = self.index(name)
        if part not in ("train", "test"):
            raise UserError(f"there are no rows {part!r} of a client; choose 'train' or 'test'")
        middle = self.offsets[i] + self.train_counts[i]
        chosen = slice(self.offsets[i], middle) if part == "train" else slice(middle, self.offsets[i + 1])
        return np.array(self.x[chosen]), np.array(self.y[chosen])

    def hold_out(self, who: int | Sequence[str], seed: int = 0) -> Clients:
        """The same clients, of which some never train: so many participants, drawn with `seed`, or those named.

        >>> clients = Clients.build(np.ones((8, 1)), np.arange(8) % 2, np.arange(8) // 2).hold_out(1, seed=3)
        >>> int(clients.unseen.sum()), len(clients.participants)
        (1, 3)
        >>> clients.hold_out(["0", "3"]).unseen[[0, 3]].tolist()
        [True, True]
        """
        left, places = len(self.participants), None
        if not isinstance(who, int | np.integer):
            places = np.array([self.index(name) for name in ([who] if isinstance(who, str) else who)], int)
            who = int(np.isin(self.participants, places).sum())
        if not 0 <= who < max(left, 1):
            raise UserError(f"{self.name}: cannot hold out {who} of {left} participating clients; give 0 to {left - 1}")
        unseen = self.unseen.copy()
        drawn = np.random.default_rng([UNSEEN, seed]).choice(self.participants, who, replace=False)
        unseen[drawn if places is None else places] = True
        fewer = dataclasses.replace(self, unseen=unseen)
        # Standardised clients are standardised anew: what is held out must not have a part in shift and scale.
        return fewer if (self.scale == 1).all() and not self.shift.any() else fewer.standardised(self.scale.ndim == 0 or None)

    def validation(self, share: float = 0.2, seed: int = 0) -> Clients:
        """The same clients without their test rows: a share of their training rows tests instead, to choose settings by.

        >>> clients = Clients.build(np.ones((20, 1)), np.arange(20) % 2, np.arange(20) // 10, test=0.5).validation(0.4)
        >>> clients.train_counts.tolist(), clients.test_counts.tolist()
        ([3, 3], [2, 2])
        """
        owner, is_test = self._owners()
        return self._rebuilt(np.where(is_test, -1, owner), self.names, self.unseen, test=share, seed=seed)

    def pooled(self) -> Clients:
        """All participants' rows as one client's, which is what no federation has; those that are unseen stay as they are.

        >>> Clients.build(np.ones((8, 1)), np.arange(8) % 2, np.arange(8) // 2).pooled()
        Clients(data: 1 clients, 8 rows of (1,), 2 classes)
        """
        owner, is_test = self._owners()
        place = np.where(self.unseen, np.cumsum(self.unseen), 0)
        names = np.array(["pooled", *self.names[self.unseen].tolist()])
        return self._rebuilt(place[owner], names, np.arange(len(names)) > 0, is_test=is_test)

    def _owners(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each row, whose it is and whether it is for testing."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return owner, np.arange(len(owner)) - self.offsets[owner] >= self.train_counts[owner]

    def _rebuilt(self, client: np.ndarray, names: np.ndarray, unseen: np.ndarray, **options: Any) -> Clients:
        gone = np.bincount(client[client >= 0], minlength=len(names)) == 0  # a client that had test rows alone
        place = np.append(np.where(gone, -1, np.cumsum(~gone) - 1), -1)
        own: dict[str, Any] = {"names": names[~gone], "unseen": unseen[~gone].tolist(), "classes": self.classes}
        own |= {"features": self.features, "name": self.name, "missing": "keep", **options}
        built = Clients.build(self.x, self.y, place[client], **own)
        return dataclasses.replace(built, shift=self.shift, scale=self.scale, layout=self.layout)

    def standardised(self, pooled: bool | None = None) -> Clients:
        """The same clients with `shift` and `scale` from the mean and standard deviation of the participants' training rows.

        Each column has its own; an image has one per colour channel, or one for all pixels if it has no channels.
        `pooled=True` takes one for everything, for columns that are pixels. A feature that never varies gets scale 1.

        >>> x = np.array([[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]], np.float32)
        >>> clients = Clients.build(x, np.array([0, 1, 0]), np.zeros(3, int), is_test=np.array([False, False, True]))
        >>> clients.standardised().shift.tolist(), clients.standardised().scale.tolist()
        ([2.0, 5.0], [1.0, 1.0])
        """
        axes = (0,) if len(self.shape) == 1 else tuple(range(1 + min(len(self.shape), 2)))
        axes = tuple(range(self.x.ndim)) if pooled else axes
        count, mean, squares = self._moments(axes)
        deviation = np.sqrt(squares / np.maximum(count, 1))
        scale = np.where(deviation > 1e-6 * np.maximum(1, np.abs(mean)), deviation, 1)
        return dataclasses.replace(self, shift=np.asarray(mean, np.float32), scale=np.asarray(scale, np.float32))

    def target_moments(self) -> tuple[float, float]:
        """Mean and deviation of a numeric target over the participants' training rows; the deviation of a constant is 1.

        >>> y, is_test = np.array([1.5, 2.5, 90.5]), np.array([False, False, True])
        >>> Clients.build(np.ones((3, 1)), y, np.zeros(3, int), is_test=is_test).target_moments()
        (2.0, 0.5)
        """
        parts = [self.y[self.offsets[i] : self.offsets[i] + self.train_counts[i]] for i in self.participants.tolist()]
        values = np.concatenate(parts).astype(np.float64)
        deviation = float(values.std())
        return float(values.mean()), deviation if deviation > 0 else 1.0

    def imputed(self) -> Clients:
        """The same clients with each missing value (NaN) replaced by its column's mean over the participants' training rows.

        >>> x = np.array([[1.0], [3.0], [np.nan]])
        >>> Clients.build(x, np.array([0, 1, 0]), np.zeros(3, int), missing="keep", seed=1).imputed().x.ravel().tolist()
        [1.0, 3.0, 2.0]
        """
        count, mean, _ = self._moments((0,))
        for place in np.flatnonzero(np.ravel(count == 0)):
            column = f"column {self.features[place]!r}" if self.features else f"feature {place}"
            raise UserError(f"{self.name}: {column} has no value in any participant's training rows; leave that column out")
        layout = dataclasses.replace(self.layout, fill=tuple(mean.astype(np.float32).ravel().tolist()))
        return dataclasses.replace(self, x=np.where(np.isnan(self.x), mean.astype(np.float32), self.x), layout=layout)

    def _moments(self, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count, mean and sum of squared deviations over the participants' training rows, ignoring NaN, in one pass."""
        count, mean, squares = np.float64(0), np.float64(0), np.float64(0)
        rows = np.zeros(len(self.x), bool)
        for i in self.participants.tolist():
            rows[self.offsets[i] : self.offsets[i] + self.train_counts[i]] = True
        for start, block in blocks(self.x):
            values = block[rows[start : start + len(block)]].astype(np.float64)
            here = ~np.isnan(values)
            n = here.sum(axes)
            if not len(values):
                continue
            average = np.where(here, values, 0).sum(axes) / np.maximum(n, 1)
            delta, total = average - mean, np.maximum(count + n, 1)
            # Chan's update: a difference of large sums would lose what varies little around a large mean.
            squares = squares + (np.where(here, values - average, 0) ** 2).sum(axes)
            squares = squares + delta**2 * count * n / total
            mean = mean + delta * n / total
            count = count + n
        return np.asarray(count), np.asarray(mean), np.asarray(squares)

    @classmethod
    def build(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        client: np.ndarray | Sequence[Any],
        *,
        names: Sequence[str] | np.ndarray | None = None,
        classes: Sequence[str] | np.ndarray | None = None,
        features: Sequence[str] | None = None,
        is_test: np.ndarray | None = None,
        unseen: np.ndarray | Sequence[Any] | None = None,
        test: float = 0.25,
        seed: int = 0,
        missing: str = "refuse",
        name: str = "data",
    ) -> Clients:
        """Clients from rows in any order.

        Args:
            x: Rows of features, of any number type; images stay uint8, everything else becomes float32.
            y: Whole numbers 0..k-1 for classes, or floats for a numeric target.
            client: For each row, which client it belongs to: any value; or, with `names`, a position in
                them, where -1 leaves the row out.
            names: Names of the clients; by default the values in `client`.
            classes: Names of the classes; by default "0".."k-1".
            features: Names of the columns of x.
            is_test: For each row, whether it is for testing; by default a seeded share `test` of each client's rows is.
            unseen: For each client, whether it never trains; or one value for each row.
            test: Share of test rows; a client of two rows or more has at least one of each kind.
            seed: Of the split.
            missing: "refuse" NaN in x, or "keep" it (`imputed` replaces it).
            name: Of the data set.

        A data set of more than `LARGE` bytes is written to a temporary file and mapped.
        """
        x, y, client = np.asanyarray(x), np.asarray(y), np.asarray(client)
        if not len(x):
            raise UserError(f"{name}: there are no rows; expected at least one")
        for what, array in (("y", y), ("client", client), ("is_test", is_test)):
            if array is not None and array.shape != (len(x),):
                raise UserError(f"{name}: {what} has shape {array.shape}, expected one value for each of the {len(x)} rows")
        if x.ndim < 2:
            x = x[:, None]
        y, class_names = targets(y, None if classes is None else [str(c) for c in classes], name)
        check_finite(x, features, name, allow_missing=missing == "keep")

        client, client_names = identify(client, names, name)
        N = len(client_names)
        kept = np.flatnonzero(client >= 0)
        counts = np.bincount(client[kept], minlength=N)
        if is_test is None:
            is_test = split(client, counts, test, seed)
        flags = np.zeros(N, bool) if unseen is None else np.asarray(unseen, bool)
        if len(flags) != N:  # one for each row
            flags = np.isin(np.arange(N), client[flags & (client >= 0)])
        order = kept[np.lexsort((is_test[kept], client[kept]))]
        shape = x.shape[1:]
        return cls(
            x=take(x, order, np.dtype(np.uint8 if x.dtype == np.uint8 else np.float32)),
            y=y[order],
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            train_counts=np.bincount(client[kept[~is_test[kept]]], minlength=N).astype(np.int64),
            names=client_names,
            classes=class_names,
            unseen=flags,
            shift=np.zeros((1,) * len(shape), np.float32),
            scale=np.ones((1,) * len(shape), np.float32),
            features=None if features is None else tuple(features),
            name=name,
            layout=Layout(tuple(map(Column, features or ()))),
        )

    def save(self, folder: Path | str) -> None:
        """Write the clients to a new folder, whole or not at all; `Clients.load` maps it."""
        store.save(self, Path(folder))

    @classmethod
    def load(cls, folder: Path | str) -> Clients:
        """The clients that `save` wrote; their rows stay in the file until they are gathered."""
        return cls(**store.load(Path(folder)))
