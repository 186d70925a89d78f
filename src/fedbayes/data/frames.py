"""Tables with named columns: .csv, .tsv and .parquet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbayes.data.layout import Column, Layout, check_flat
from fedbayes.data.table import Options, Table, encode
from fedbayes.errors import UserError, nearest


def read_frame(path: Path, options: Options, name: str, categorical: Sequence[str] = ()) -> Table:
    """A .csv, .tsv or .parquet file; all columns but the client's, the target and the test flag are features."""
    return from_frame(_open(path), options, str(path), categorical)


def from_frame(frame: pd.DataFrame, options: Options, where: str, categorical: Sequence[str] = ()) -> Table:
    """The features, target and clients of a data frame; `where` is for messages.

    >>> frame = pd.DataFrame({"site": ["a", "b", "b"], "age": [30, 40, 50], "sex": ["f", "m", "f"], "ill": ["no", "yes", "no"]})
    >>> table = from_frame(frame, Options(client_column="site", target="ill"), "data")
    >>> table.features, table.x.tolist(), table.y.tolist(), table.classes
    (['age', 'sex=f', 'sex=m'], [[30.0, 1.0, 0.0], [40.0, 0.0, 1.0], [50.0, 1.0, 0.0]], [0, 1, 0], ('no', 'yes'))
    """
    frame = frame.rename(columns=str)
    if options.target is None:
        raise UserError(f"{where}: say which column to predict with --target; there is {', '.join(frame.columns[:20])}")
    roles = [column for column in (options.target, options.client_column, options.test_column) if column is not None]
    for column in (*roles, *options.ignore, *categorical):
        if column not in frame.columns:
            raise UserError(f"{where} has no column {column!r}: {nearest(column, frame.columns)}")
    if len(set(roles)) < len(roles):
        raise UserError(f"{where}: the target, the client column and the test column must differ; given {', '.join(roles)}")
    for column in roles:
        check_flat(frame[column], where)
        gaps = frame[column].isna().to_numpy()
        if gaps.any() and options.missing != "drop":
            rows = f"{int(gaps.sum())} rows, first in row {int(gaps.argmax())} (from 0)"
            advice = "it is never filled in: complete it or choose missing=drop"
            raise UserError(f"{where}: column {column!r} is missing in {rows}; {advice}")
        frame = frame.loc[frame[column].notna()]
    if not len(frame):
        raise UserError(f"{where} has no rows")
    chosen = [column for column in frame.columns if column not in roles and column not in options.ignore]
    if not chosen:
        raise UserError(f"{where} has no column left for features beside {', '.join(roles)}")
    columns = tuple(Column.learn(frame[column], column, where, column in categorical) for column in chosen)
    aside = (*(column for column in roles if column != options.target), *options.ignore)
    y, classes = encode(_plain(frame[options.target]), options.task, where, options.target)
    x = np.concatenate([column.encode(frame[column.name], where) for column in columns], axis=1)
    client = None if options.client_column is None else _plain(frame[options.client_column])
    is_test = None if options.test_column is None else _flags(frame[options.test_column], where)
    features, layout = [name for column in columns for name in column.features], Layout(columns, options.target, aside)
    return Table(x, y, client=client, is_test=is_test, classes=classes, features=features, layout=layout)


def _open(path: Path) -> pd.DataFrame:
    try:
        if ".parquet" in path.suffixes:
            return pd.read_parquet(path, dtype_backend="numpy_nullable")
        # Nullable types keep whole numbers whole where one is missing, so that they are still labels.
        separator = "\t" if ".tsv" in path.suffixes else ","
        return pd.read_csv(path, sep=separator, dtype_backend="numpy_nullable")
    except pd.errors.EmptyDataError as error:
        raise UserError(f"{path} is empty; expected a header and rows") from error
    except (OSError, ValueError, EOFError) as error:  # pandas' and Arrow's errors are ValueErrors
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}); it may be damaged, cut off or of another kind") from error


def _plain(column: pd.Series[Any]) -> np.ndarray:
    """A complete column as an array of numbers, truth values or text."""
    types, kind = pd.api.types, column.dtype
    for fits, dtype in ((types.is_bool_dtype, bool), (types.is_integer_dtype, np.int64), (types.is_float_dtype, np.float64)):
        if fits(kind):
            return np.asarray(column.to_numpy(dtype))
    return np.asarray(column.astype(str).to_numpy(dtype=str))


def _flags(column: pd.Series[Any], where: str) -> np.ndarray:
    values = _plain(column)
    words = np.char.lower(values) if values.dtype.kind == "U" else values.astype(float).astype(int).astype(str)
    known = {"true": True, "1": True, "test": True, "false": False, "0": False, "train": False}
    if unknown := [word for word in np.unique(words) if word not in known]:
        given = f"test column {column.name!r} has {str(unknown[0])!r}"
        raise UserError(f"{where}: {given}; expected true and false, 1 and 0, or test and train")
    return np.array([known[word] for word in words])
