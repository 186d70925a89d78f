"""`fedbayes predict`: what a personal model says of each row of a file."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tyro.conf import Positional

from fedbayes import files
from fedbayes.cli.arguments import parse
from fedbayes.cli.display import progress_bar
from fedbayes.data.stream import MISSING, Block, RowReader
from fedbayes.errors import UserError, printable
from fedbayes.results.posterior import Posterior


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `fedbayes predict`."""

    model: Positional[Path]
    """File that `fedbayes personalise` or Posterior.save wrote."""
    data: Path
    """Rows: a .csv, .tsv, .parquet or .npz file of any size."""
    out: Path | None = None
    """CSV file to write; by default the predictions go to standard output."""


def main(arguments: Sequence[str]) -> None:
    """Read, predict and write block by block."""
    does = (
        "Predict the rows of a file. Labels: the probability of each class, the entropy of the prediction and the mutual "
        "information, in nats. Numbers: mean, standard deviation, 5 % and 95 % quantiles, and the two parts of the variance."
    )
    options = parse(Options, arguments, "fedbayes predict", does)
    posterior = Posterior.load(options.model)
    if options.out is not None and options.out.resolve() in (options.data.resolve(), options.model.resolve()):
        raise UserError(f"out is {options.out}, which is read here; choose another file")
    rows = RowReader(options.data, posterior.rows.layout, posterior.rows.shape, posterior.rows.classes)
    if rows.ignored:
        _say(f"ignored: {', '.join(rows.ignored)}")
    tally = Tally(posterior.numeric)
    with output(options.out) as file, progress_bar() as add:
        moved = None if options.out is None else add("rows", rows.about())  # no bar among what is printed
        file.write(line(posterior.columns))
        for block in rows:
            table = posterior.table(block.x).to_numpy()
            tally.add(table, block)
            file.write(lines_of(table))
            if moved is not None:
                moved(tally.rows)
    _say(f"{tally.rows:,} rows predicted" + (f": {options.out}" if options.out else ""))
    for sentence in tally.sentences():
        _say(sentence)


@dataclasses.dataclass
class Tally:
    """How right the predictions were, where the file knows."""

    numeric: bool
    rows: int = 0
    known: int = 0
    error: float = 0.0
    strange: int = 0
    unknown: str = ""

    def add(self, table: np.ndarray, block: Block) -> None:
        """Count a block."""
        self.rows += len(block.x)
        if block.y is None:
            return
        there = ~np.isnan(block.y) if self.numeric else block.y != MISSING
        self.known += int(there.sum())
        if self.numeric:
            self.error += float(((table[there, 0].astype(np.float64) - block.y[there]) ** 2).sum())
            return
        self.error += float((table[there, :-2].argmax(axis=1) != block.y[there]).sum())
        self.strange += int((block.y < MISSING).sum())
        self.unknown = self.unknown or block.unknown

    def sentences(self) -> Iterator[str]:
        """What to say of it."""
        if self.known and self.numeric:
            yield f"the file's {self.known:,} values were not used; RMSE {np.sqrt(self.error / self.known):.4g}"
        elif self.known:
            yield f"the file's {self.known:,} labels were not used; accuracy {100 * (1 - self.error / self.known):.1f} %"
        if self.strange:
            yield f"{self.strange:,} of the labels are none of the model's classes and count as wrong; {self.unknown}"


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[BinaryIO]:
    """A file that is there whole or not at all, or standard output."""
    if path is None:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with files.replacing(path) as part, open(part, "xb") as file:
        yield file


def line(words: Sequence[str]) -> bytes:
    r"""A line of a CSV, in which no name is a formula to a spreadsheet (an apostrophe in front, as OWASP advises).

    >>> line(["=cmd|' /C calc'!A0", "-1", "a,b"])
    b'\'=cmd|\' /C calc\'!A0,-1,"a,b"\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_harmless(printable(word)) for word in words])
    return text.getvalue().encode()


def lines_of(table: np.ndarray) -> bytes:
    """Lines of numbers with as many digits as float32 needs to be read back the same."""
    import pyarrow
    import pyarrow.csv

    columns = pyarrow.table([np.ascontiguousarray(column) for column in table.T], names=list(map(str, range(table.shape[1]))))
    text = io.BytesIO()
    pyarrow.csv.write_csv(columns, text, pyarrow.csv.WriteOptions(include_header=False))  # ten times as fast as pandas
    return text.getvalue()


def _harmless(word: str) -> str:
    try:
        float(word)  # a number stays a number
    except ValueError:
        return f"'{word}" if word[:1] in ("=", "+", "-", "@") else word
    return word


def _say(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)
