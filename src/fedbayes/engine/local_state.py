"""What clients keep between rounds, outside the process's heap: one file of equal records, two for each client.

A record is written to the slot that the last checkpoint does not need, so a run that is killed at any moment finds in the
other one what each client had then: of its two slots, the newer one that is not newer than the checkpoint. Memory is twelve
bytes a client, whatever a record's size.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path
from typing import Generic, TypeVar

import jax
import numpy as np

from fedbayes import files, trees
from fedbayes.errors import UserError

Local = TypeVar("Local")


class States(Generic[Local]):
    """The local states of `count` clients; one that was never written has `fresh`."""

    def __init__(self, fresh: Local, count: int, folder: Path | None = None) -> None:
        leaves, self._treedef = jax.tree.flatten(jax.device_get(fresh))
        self._leaves = [np.asarray(leaf) for leaf in leaves]
        self._size = trees.size(self._leaves)
        self._record = self._size + 4 if self._size else 0  # and a checksum
        self._count = count
        self._committed = 0
        self._where = folder or Path(tempfile.gettempdir())
        self._new = folder
        """Where files were made whose names may not be on the disk yet."""
        if folder is None:
            self._states, self._tags = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        else:
            files.make_folder(folder)
            self._states, self._tags = (files.open_records(folder / name) for name in ("states.bin", "rounds.bin"))
        content = os.pread(self._tags.fileno(), count * 8, 0)
        written = np.frombuffer(content[: len(content) // 4 * 4], np.int32)
        self._rounds = np.zeros((count, 2), np.int32)
        self._rounds.reshape(-1)[: written.size] = written
        self._newest = np.zeros(count, np.int32)

    def rewind(self, round: int, *, looking: bool = False) -> None:
        """Make the states those of a checkpoint at `round`: whatever was written later does not count.

        With `looking`, in memory alone: the files keep what is later.
        """
        self._committed = round
        later = self._rounds > round
        self._rounds[later] = 0
        if later.any() and not looking:
            files.write_at(self._tags.fileno(), self._rounds.tobytes(), 0, self._where)
        self._newest = np.argmax(self._rounds, axis=1).astype(np.int32)

    def commit(self, round: int) -> int:
        """Put the states up to `round` on the disk, before a checkpoint of that round; gives a checksum of them for it."""
        self.sync()
        self._committed = round
        return self.digest()

    def restore(self, round: int, kept: int | None, *, looking: bool = False) -> None:
        """`rewind`, checked against the checksum that the checkpoint kept."""
        self.rewind(round, looking=looking)
        if kept is not None and kept != self.digest():
            raise UserError("the clients' states are not those of the checkpoint; --force starts the run over")

    def sync(self) -> None:
        """Put what was written on the disk; the checkpoint stays where it is."""
        with files.writing(self._where):
            os.fsync(self._states.fileno())
            os.fsync(self._tags.fileno())
            if self._new is not None:
                files.sync(self._new)
                files.sync(self._new.parent)
                self._new = None

    def get(self, ids: np.ndarray, slots: int | None = None) -> Local:
        """The states of some clients, stacked, padded with `fresh` to `slots` of them."""
        slots = len(ids) if slots is None else slots
        stacked = [np.broadcast_to(leaf, (slots, *leaf.shape)).copy() for leaf in self._leaves]
        if self._record:
            for place, client in enumerate(ids):
                slot = self._newest[client]
                if round := self._rounds[client, slot]:
                    record = os.pread(self._states.fileno(), self._record, self._offset(client, slot))
                    if len(record) != self._record or record[self._size :] != _crc(client, round, record[: self._size]):
                        raise UserError(f"the state of client {client} is damaged or missing; --force starts the run over")
                    start = 0
                    for array, leaf in zip(stacked, self._leaves, strict=True):
                        array[place] = np.frombuffer(record, leaf.dtype, leaf.size, start).reshape(leaf.shape)
                        start += leaf.nbytes
        return jax.tree.unflatten(self._treedef, stacked)

    def put(self, ids: np.ndarray, states: Local, round: int) -> None:
        """Write the first `len(ids)` of the stacked states as those after `round`."""
        if not self._record:
            return
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(states)]
        for place, client in enumerate(ids):
            slot = int(self._newest[client])
            if self._rounds[client, slot] and self._rounds[client, slot] <= self._committed:
                slot = 1 - slot
            # The tag goes first: a record that is half written belongs to a round that no checkpoint has.
            tag = np.int32(round).tobytes()
            files.write_at(self._tags.fileno(), tag, (client * 2 + slot) * 4, self._where)
            record = b"".join(np.ascontiguousarray(leaf[place]).tobytes() for leaf in leaves)
            record += _crc(client, round, record)
            files.write_at(self._states.fileno(), record, self._offset(client, slot), self._where)
            self._rounds[client, slot] = round
            self._newest[client] = slot

    def digest(self) -> int:
        """A checksum of who has a state of which round, for the checkpoint."""
        return zlib.crc32(self._rounds.max(axis=1).tobytes())

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state after a round is here; of states without a number, all are."""
        return not self._record or bool((self._rounds[client] == round).any())

    def trained(self) -> np.ndarray:
        """Which clients have a state of their own."""
        return np.asarray(self._rounds.any(axis=1))

    def _offset(self, client: int, slot: int) -> int:
        return (int(client) * 2 + int(slot)) * self._record

    def __del__(self) -> None:
        for file in (getattr(self, "_states", None), getattr(self, "_tags", None)):
            if file is not None:
                file.close()


def _crc(client: int, round: int, record: bytes) -> bytes:
    """Of a record and of its tag: a record is that of one client after one round, or damaged."""
    return zlib.crc32(record, zlib.crc32(np.array([client, round], np.int32).tobytes())).to_bytes(4, "little")
