"""`Layout`: how the named columns of a table become rows of numbers, so that another table is read in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedbayes.errors import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = 100  # a text column with more different values than this is taken for a name or a date, and refused


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: numbers, truth values, or categories that become one column of 0 and 1 each.

    >>> Column("sex", "category", ("f", "m")).features
    ('sex=f', 'sex=m')
    """

    name: str
    kind: Literal["number", "truth", "category"] = "number"
    categories: tuple[str | float, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """A name for each number that the column becomes."""
        if self.kind != "category":
            return (self.name,)
        return tuple(f"{self.name}={f'{one:g}' if isinstance(one, float) else one}" for one in self.categories)

    @property
    def is_text(self) -> bool:
        """Whether its values are text."""
        return any(isinstance(value, str) for value in self.categories)

    @classmethod
    def learn(cls, column: pd.Series[Any], name: str, where: str, categorical: bool = False) -> Column:
        """What a column of a table holds; `where` is for messages."""
        import pandas as pd

        check_flat(column, where)
        kind = column.dtype
        if pd.api.types.is_bool_dtype(kind):
            return cls(name, "truth")
        if pd.api.types.is_numeric_dtype(kind) and not categorical:
            if pd.api.types.is_complex_dtype(kind):
                raise UserError(f"{where}: column {name!r} is complex; expected numbers or text")
            return cls(name)
        if pd.api.types.is_datetime64_any_dtype(kind) or pd.api.types.is_timedelta64_dtype(kind):
            raise UserError(f"{where}: column {name!r} is a date; turn it into a number, such as days, or ignore it")
        try:
            _, found = pd.factorize(column, sort=True)
        except TypeError:
            raise UserError(f"{where}: column {name!r} mixes kinds of values; expected numbers or text, or ignore it") from None
        if len(found) > CATEGORIES or not all(isinstance(value, (str, int, float, np.number)) for value in found):
            expected = f"expected numbers or at most {CATEGORIES} categories: correct it or ignore it"
            raise UserError(
                f"{where}: column {name!r} has {len(found)} different values, such as {str(found[0])!r}; {expected}"
            )
        values = [value.item() if isinstance(value, np.generic) else value for value in found]
        return cls(name, "category", tuple(values))

    def encode(self, column: pd.Series[Any], where: str, start: int = 0) -> np.ndarray:
        """The column as float32, one number or one for each category; NaN where a value is missing.

        `start` is the number of the first row, for messages.
        """
        import pandas as pd

        check_flat(column, where)
        if self.kind != "category":
            if not (pd.api.types.is_bool_dtype(column.dtype) or pd.api.types.is_numeric_dtype(column.dtype)):
                self.check_numbers(column, where, start)
                column = pd.to_numeric(column)
            with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinite
                return column.to_numpy(np.float32, na_value=np.nan)[:, None]
        missing = column.isna().to_numpy(bool)
        if self.is_text:
            codes = pd.Index(self.categories, dtype=object).get_indexer(pd.Index(column.to_numpy(object), dtype=object))
        else:
            if not pd.api.types.is_numeric_dtype(column.dtype):
                self.check_numbers(column, where, start)
                column = pd.to_numeric(column)
            given = pd.Index(column.to_numpy(np.float64, na_value=np.nan))
            codes = pd.Index(np.array(self.categories, np.float64)).get_indexer(given)
        unknown = (codes < 0) & ~missing
        if unknown.any():
            row, word = int(unknown.argmax()), str(column.iloc[int(unknown.argmax())])
            given = f"column {self.name!r} has {word!r} in row {start + row} (from 0), which the training data did not have"
            raise UserError(f"{where}: {given}: {nearest(word, self.categories)}; correct it or leave the row out")
        values = (codes[:, None] == np.arange(len(self.categories))).astype(np.float32)
        values[missing] = np.nan
        return values

    def check_numbers(self, column: pd.Series[Any], where: str, start: int = 0) -> None:
        """Refuse text that stands for no number, or no truth value, in a column of them; with the row of the first."""
        import pandas as pd

        if self.is_text:
            return
        there = column.notna()
        fine = pd.to_numeric(column, errors="coerce").notna()
        if self.kind == "truth":
            fine |= column.astype("string").str.lower().isin(("true", "false")).fillna(False)
        bad = (there & ~fine).to_numpy(bool)
        if bad.any():
            row, what = int(bad.argmax()), "true or false" if self.kind == "truth" else "a number"
            given = f"column {self.name!r} has {str(column.iloc[row])!r} in row {start + row} (from 0)"
            raise UserError(f"{where}: {given}; expected {what}")


def check_flat(column: pd.Series[Any], where: str) -> None:
    """Refuse a column of lists or records, as Parquet has them."""
    nested = (one for one in column if isinstance(one, Mapping | list | tuple | np.ndarray)) if column.dtype == object else ()
    for one in nested:
        kind = "records" if isinstance(one, Mapping) else "lists"
        raise UserError(f"{where}: column {column.name!r} holds {kind}; give each part a column of its own, or ignore it")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How tables become rows: the columns in their order, what to predict, and what takes the place of a missing value.

    >>> import pandas as pd
    >>> layout = Layout((Column("age"), Column("sex", "category", ("f", "m"))), target="ill")
    >>> layout.encode(pd.DataFrame({"sex": ["m"], "town": ["Ulm"], "age": [40]}), "data").tolist()
    [[40.0, 0.0, 1.0]]
    """

    columns: tuple[Column, ...] = ()
    """Of the features; none where rows are arrays without names."""
    target: str | None = None
    """The column to predict."""
    aside: tuple[str, ...] = ()
    """Columns that are known to be no features: the client's, the test flag, those that were ignored."""
    fill: tuple[float, ...] | None = None
    """A number for each feature that takes the place of a missing one; without it, missing values are refused."""

    def absent(self, names: Sequence[str], where: str) -> None:
        """Refuse a table that lacks a column."""
        if missing := [column.name for column in self.columns if column.name not in names]:
            hint = f": {nearest(missing[0], names)}" if len(missing) == 1 else f"; there is {', '.join(map(str, names[:20]))}"
            raise UserError(f"{where} has no column {', '.join(map(repr, missing))}, which the model needs{hint}")

    def ignored(self, names: Sequence[str]) -> list[str]:
        """The columns of a table that are of no use."""
        known = {*(column.name for column in self.columns), self.target, *self.aside}
        return [name for name in names if name not in known]

    def encode(self, frame: pd.DataFrame, where: str, start: int = 0) -> np.ndarray:
        """The rows of a table: columns are found by name, others are not looked at, missing values are filled or refused."""
        self.absent(list(frame.columns), where)
        parts = [column.encode(frame[column.name], where, start) for column in self.columns]
        return self.complete(np.concatenate(parts, axis=1), where, start)

    def complete(self, x: np.ndarray, where: str, start: int = 0) -> np.ndarray:
        """Rows without gaps: filled as the layout says, or refused with the place of the first."""
        if x.dtype.kind != "f":
            return x
        gaps = np.isnan(x)
        if self.fill is not None and gaps.any():
            x = np.where(gaps, np.asarray(self.fill, x.dtype).reshape(x.shape[1:])[None], x)
        bad = ~np.isfinite(x)
        if bad.any():
            row, *place = (int(i) for i in np.argwhere(bad)[0])
            names = [(column.name, feature) for column in self.columns for feature in column.features]
            at = f"column {names[place[0]][0]!r}" if names else f"feature {', '.join(map(str, place))}"
            what = "no value" if np.isnan(x[(row, *place)]) else "an infinite value"
            raise UserError(f"{where}: {at} has {what} in row {start + row} (from 0); complete it or leave the row out")
        return x

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Layout:
        """From what `to_json` gave.

        >>> layout = Layout((Column("sex", "category", ("f", "m")),), "ill", fill=(0.5, 0.5))
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        columns = tuple(Column(one["name"], one["kind"], tuple(one["categories"])) for one in given["columns"])
        fill = given["fill"]
        return cls(columns, given["target"], tuple(given["aside"]), None if fill is None else tuple(fill))
