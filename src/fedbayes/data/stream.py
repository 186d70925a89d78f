"""Rows of a file a block at a time, read as a `Layout` says: memory is that of a block, whatever the file's size."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedbayes.data.layout import Layout
from fedbayes.errors import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd

FORMATS = "a .csv, .tsv, .parquet or .npz file"
BLOCK = 8192  # rows that are read at once
MISSING, UNKNOWN = -1, -2  # in place of a label: there is none, or it is none of the classes


class Block(NamedTuple):
    """Some rows, and their labels (`MISSING` or `UNKNOWN` for some) or numbers (NaN) where the file has any."""

    start: int
    x: np.ndarray
    y: np.ndarray | None
    unknown: str = ""
    """The first label that is none of the classes, and its row."""


class RowReader:
    """The rows of a file. `ignored` are columns that are of no use, `labelled` says whether the target is there."""

    def __init__(
        self, path: Path, layout: Layout, shape: tuple[int, ...], classes: tuple[str, ...] | None, block: int = BLOCK
    ) -> None:
        if not path.is_file():
            raise UserError(f"there is no file {path}; give {FORMATS}")
        if not path.stat().st_size:
            raise UserError(f"{path} is empty; expected {FORMATS} with rows")
        self.path, self.layout, self.shape, self.classes, self.block = path, layout, shape, classes, block
        kinds = [suffix.lower() for suffix in path.suffixes]
        self.kind = next((kind for kind in (".npz", ".parquet", ".csv", ".tsv") if kind in kinds[-2:]), "")
        if not self.kind:
            raise UserError(f"{path} is of an unknown kind; expected {FORMATS}")
        names = self._guarded(self._names)
        self.target = layout.target or ("y" if self.kind == ".npz" else "")
        """The name that labels have in the file."""
        self.labelled = self.target in names
        self.ignored: list[str] = []
        if self.kind == ".npz":
            if "x" not in names:
                raise UserError(f"{path} has no array 'x': {nearest('x', names)}")
            return
        if not layout.columns:
            raise UserError(
                f"the model's rows are arrays of shape {shape} without column names; give them as x in an .npz file"
            )
        layout.absent(names, str(path))
        self.ignored = layout.ignored(names)

    def __iter__(self) -> Iterator[Block]:
        read = {".npz": self._arrays, ".parquet": self._parquet}.get(self.kind, self._text)
        parts, start = read(), 0
        while (part := self._guarded(lambda: next(parts, None))) is not None:
            x, target = part
            y, unknown = (None, "") if target is None else self._labels(target, start)
            yield Block(start, x, y, unknown)
            start += len(x)
        if not start:
            raise UserError(f"{self.path} has no rows; expected at least one after the names of the columns")

    def about(self) -> int | None:
        """How many rows there are, more or less: text has as many as the lengths of its first lines let expect."""
        if self.kind == ".npz":
            return self._guarded(self._length)
        if self.kind == ".parquet":
            import pyarrow.parquet

            return self._guarded(lambda: pyarrow.parquet.read_metadata(self.path).num_rows)
        if self.path.suffix.lower() != self.kind:  # compressed
            return None
        with open(self.path, "rb") as file:
            start = file.read(2**20)
        return max(1, round(self.path.stat().st_size / len(start) * start.count(b"\n")))

    def labels(self) -> np.ndarray:
        """All labels, refused where one is missing or unknown."""
        found = []
        for block in self:
            assert block.y is not None
            gaps = np.isnan(block.y) if block.y.dtype.kind == "f" else block.y == MISSING
            if gaps.any():
                row, what = block.start + int(gaps.argmax()), "number" if self.classes is None else "label"
                gap = f"column {self.target!r} has no {what} in row {row} (from 0)"
                raise UserError(f"{self.path}: {gap}; complete it or leave the row out")
            if block.unknown:
                assert self.classes is not None
                raise UserError(f"{self.path}: {block.unknown}; the classes are {', '.join(self.classes)}")
            found.append(block.y)
        return np.concatenate(found)

    def _guarded(self, read: Any) -> Any:
        """What `read` gives; what readers say of a damaged file becomes a sentence."""
        try:
            return read()
        except UserError:
            raise
        except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{self.path} cannot be read ({reason}); it may be damaged, cut off or of another kind") from error

    # Tables

    @property
    def _separator(self) -> str:
        return "\t" if self.kind == ".tsv" else ","

    def _names(self) -> list[str]:
        if self.kind == ".npz":
            with zipfile.ZipFile(self.path) as archive:
                return [name.removesuffix(".npy") for name in archive.namelist()]
        if self.kind == ".parquet":
            import pyarrow.parquet

            return list(map(str, pyarrow.parquet.read_schema(self.path).names))
        import pandas as pd

        try:
            return list(map(str, pd.read_csv(self.path, sep=self._separator, nrows=0).columns))
        except pd.errors.EmptyDataError:
            raise UserError(f"{self.path} is empty; expected the names of the columns and rows") from None

    def _frame(self, frame: pd.DataFrame, start: int) -> tuple[np.ndarray, Any]:
        return self.layout.encode(frame, str(self.path), start), frame[self.target] if self.labelled else None

    def _text(self) -> Iterator[tuple[np.ndarray, Any]]:
        import pandas as pd

        # Plain float64, so that numbers are parsed as they were when the model was trained.
        types: dict[str, Any] = {
            column.name: "string" if column.is_text else "boolean" if column.kind == "truth" else "float64"
            for column in self.layout.columns
        }
        if self.labelled and self.classes is not None and any(map(_is_text, self.classes)):
            types[self.target] = "string"
        types |= dict.fromkeys((*self.ignored, *self.layout.aside), "string")
        # All columns are read, as pandas cuts lines that are too long where it is told which to use.
        options: dict[str, Any] = {"sep": self._separator, "chunksize": self.block}
        start = 0
        try:
            with pd.read_csv(self.path, dtype=types, dtype_backend="numpy_nullable", **options) as reader:
                for frame in reader:
                    if len(frame):
                        yield self._frame(frame, start)
                    start += len(frame)
        except UserError:
            raise
        except (ValueError, TypeError):  # a word among numbers: pandas does not say where
            with pd.read_csv(self.path, dtype="string", **options) as reader:
                start = 0
                for frame in reader:
                    for column in self.layout.columns:
                        column.check_numbers(frame[column.name], str(self.path), start)
                    start += len(frame)
            raise

    def _parquet(self) -> Iterator[tuple[np.ndarray, Any]]:
        import pandas as pd
        import pyarrow.parquet

        types = {"int64": pd.Int64Dtype(), "bool": pd.BooleanDtype(), "double": pd.Float64Dtype(), "string": pd.StringDtype()}
        start = 0
        with pyarrow.parquet.ParquetFile(self.path) as file:
            wanted = [column.name for column in self.layout.columns] + ([self.target] if self.labelled else [])
            for batch in file.iter_batches(self.block, columns=wanted):
                if batch.num_rows:
                    yield self._frame(batch.to_pandas(types_mapper=lambda kind: types.get(str(kind))), start)
                start += batch.num_rows

    # Arrays

    def _length(self) -> int:
        with zipfile.ZipFile(self.path) as archive, archive.open("x.npy") as file:
            shape = _header(file)[0]
            return int(shape[0]) if shape else 0

    def _arrays(self) -> Iterator[tuple[np.ndarray, Any]]:
        with zipfile.ZipFile(self.path) as archive:
            x = _member(archive, "x", self.block, str(self.path))
            y = _member(archive, self.target, self.block, str(self.path)) if self.labelled else None
            start = 0
            for part in x:
                part = part[:, None] if part.ndim == 1 else part
                if part.shape[1:] != self.shape or part.dtype.kind not in "biuf":
                    given = f"{part.dtype} in rows of shape {part.shape[1:]}"
                    raise UserError(f"{self.path}: x is {given}; expected numbers in rows of shape {self.shape}")
                with np.errstate(over="ignore"):
                    part = part if part.dtype == np.uint8 else part.astype(np.float32)
                labels = None if y is None else next(y, None)
                if y is not None and (labels is None or labels.shape != part.shape[:1]):
                    raise UserError(f"{self.path}: {self.target} does not have one value for each row of x")
                yield self.layout.complete(part, str(self.path), start), labels
                start += len(part)

    # Labels

    def _labels(self, target: Any, start: int) -> tuple[np.ndarray, str]:
        import pandas as pd

        values = pd.Series(target)
        if self.classes is None:
            return pd.to_numeric(values, errors="coerce").to_numpy(np.float32, na_value=np.nan), ""
        if self.kind == ".npz" and values.dtype.kind in "iu" and any(map(_is_text, self.classes)):
            # As when such a file was trained on: numbers beside names are places among them.
            values = pd.Series([self.classes[y] if 0 <= y < len(self.classes) else str(y) for y in values], dtype=object)
        missing = values.isna().to_numpy(bool)
        known = values[~missing]
        if pd.api.types.is_float_dtype(known.dtype) and (known == known.round()).all():
            known = known.astype("int64")
        words = known.astype(str).to_numpy(object)
        labels = np.full(len(values), MISSING)
        codes = pd.Index(self.classes, dtype=object).get_indexer(pd.Index(words, dtype=object))
        labels[~missing] = np.where(codes < 0, UNKNOWN, codes)
        if not (codes < 0).any():
            return labels, ""
        row = start + int((labels == UNKNOWN).argmax())
        word = words[int((codes < 0).argmax())]
        return labels, f"column {self.target!r} has {word!r} in row {row} (from 0), which is none of the classes"


def _is_text(word: str) -> bool:
    """Whether a class's name is neither a number nor a truth value, so that its column must not be taken for one."""
    if word in ("True", "False"):
        return False
    try:
        return not math.isfinite(float(word)) or str(int(word)) != word
    except ValueError:
        return True


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def _member(archive: zipfile.ZipFile, name: str, block: int, where: str) -> Iterator[np.ndarray]:
    """An array of an .npz file, some rows at a time; never pickled objects."""
    with archive.open(f"{name}.npy") as file:
        shape, fortran, dtype = _header(file)
        if dtype.hasobject:
            raise UserError(f"{where} holds Python objects, which are not read; save plain arrays of numbers or text")
        if not shape or (fortran and len(shape) > 1):
            raise UserError(f"{where}: {name} does not lie row after row; save it with numpy.ascontiguousarray")
        row = dtype.itemsize * math.prod(shape[1:])
        for start in range(0, shape[0], block):
            count = min(block, shape[0] - start)
            content = file.read(count * row)
            if len(content) != count * row:
                raise EOFError(f"{name} ends after {start + len(content) // max(1, row)} of {shape[0]} rows")
            yield np.frombuffer(content, dtype).reshape(count, *shape[1:])
