"""Rows without labels that the server itself has."""

from __future__ import annotations

import zlib

import numpy as np

from fedbayes.errors import UserError


class Unlabelled:
    """Rows without labels that the server has. Equal to itself alone, so that an algorithm that holds it can be hashed.

    >>> Unlabelled(np.zeros((3, 4), np.float32), name="noughts")
    Unlabelled(noughts, 3 rows, crc f288b395)
    """

    def __init__(self, x: np.ndarray, name: str = "rows") -> None:
        self.x, self.name = np.asarray(x), name
        if self.x.ndim < 2 or not len(self.x) or self.x.dtype.kind not in "fiub":
            expected = "numbers, at least one row, of the shape that the clients' rows have; give an array of rows"
            raise UserError(f"the unlabelled rows are {self.x.dtype}{list(self.x.shape)}, but they are {expected}")

    def __repr__(self) -> str:
        # The digest tells a run that is resumed whether these are the rows that it began with.
        return f"Unlabelled({self.name}, {len(self.x)} rows, crc {zlib.crc32(np.ascontiguousarray(self.x).data):08x})"
