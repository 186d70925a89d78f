"""The only place that writes files: replaced whole, checksummed and locked, with one sentence for an error of the disk.

A file is written beside the one that it replaces, put on the disk and renamed, so a reader finds the old content or the new,
also after a crash. JSON files and lines carry a checksum of their content, safetensors files one of arrays and metadata.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from fedbayes import trees, wire
from fedbayes.errors import UserError

SCHEMA = 2  # of JSON files; it grows when a field changes its meaning. Files of schema 1 have no checksum.
BLOCK = 8 * 2**20  # bytes that are read at a time


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk, such as one that is full, into a sentence."""
    try:
        yield
    except OSError as problem:
        why, advice = problem.strerror or problem, "so make room or choose another place"
        raise UserError(f"cannot write to {path}: {why}; what was written before is intact, {advice}") from None


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` that takes its place when the block ends well, and leaves no trace when it does not."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            part.unlink(missing_ok=True)
            yield part
            sync(part)
            os.replace(part, path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically."""
    with replacing(path) as part, open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def make_folder(folder: Path) -> Path:
    """Make a folder and those above it, where they are missing."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def new_folder(folder: Path, marker: str) -> Iterator[Path]:
    """A folder beside `folder` that takes its place when the block ends well, and disappears when it does not.

    A folder that is there is replaced if it is empty or holds the file `marker`.
    """
    if folder.exists() and not (folder / marker).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and holds no {marker}; choose another folder, nothing was overwritten")
    parent = make_folder(folder.absolute().parent)
    with writing(folder):
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
        try:
            yield made
            for path in (*made.iterdir(), made):
                sync(path)
            old = made.with_name(made.name + "-old")
            if folder.exists():
                os.rename(folder, old)
            os.rename(made, folder)
            sync(parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def write_blocks(path: Path, blocks: Iterable[Any]) -> int:
    """Write a new file block by block; gives its CRC-32."""
    crc = 0
    with writing(path), open(path, "xb") as file:
        for block in blocks:
            crc = zlib.crc32(block, crc)
            file.write(block)
    return crc


def crc32(path: Path) -> int:
    """The CRC-32 of a file, which is read in blocks: .3 s of one core for each gigabyte, and the time to read it."""
    crc, buffer = 0, memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Locks


def lock(folder: Path, who: str = "", wait: float = 0.0) -> int:
    """Keep everybody else out of a folder until the open file that this gives is closed, or the process dies.

    A child that inherits the file holds the folder too. `wait` is how many seconds another process has to be gone.
    """
    with writing(make_folder(folder)):
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(file)
                problem = f"another process is working in {folder}; wait for it, or choose another folder"
                raise UserError(f"{who}: {problem}" if who else problem) from None
            time.sleep(0.05)


@contextlib.contextmanager
def locked(folder: Path, who: str = "", wait: float = 0.0) -> Iterator[int]:
    """Hold the `lock` of a folder."""
    file = lock(folder, who, wait)
    try:
        yield file
    finally:
        os.close(file)


# JSON


def write_json(path: Path, content: Mapping[str, Any], *, compact: bool = False, finite: bool = False) -> None:
    """Write a JSON object with its schema and a checksum; with `finite`, NaN is a ValueError."""
    form: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    write(path, json.dumps(_sealed({"schema": SCHEMA, **content}), allow_nan=not finite, **form).encode())


def read_json(path: Path, **needed: type) -> dict[str, Any]:
    """The content of a JSON file that `write_json` wrote: its checksum is right and the fields that are needed are there."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        said = problem.strerror if isinstance(problem, OSError) else problem
        raise UserError(f"{path} cannot be read ({said}); it is damaged or not a file of a run") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__} instead of an object; it is damaged or not a file of a run")
    checksum = content.pop("checksum", None)
    if (checksum is not None or content.get("schema", 1) != 1) and checksum != _checksum(content):
        raise UserError(f"{path} does not match its checksum: it was changed or is damaged")
    if content.get("schema", 1) > SCHEMA:
        raise UserError(f"{path} has schema {content['schema']}, but this version reads up to {SCHEMA}; update fedbayes")
    if content.get("schema", 1) == 1:
        content = upgraded(content)
    if wrong := [name for name, kind in needed.items() if not isinstance(content.get(name), kind)]:
        raise UserError(f"{path} lacks {', '.join(wrong)}; it is damaged or not a file of a run")
    return content


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """A table of schema 1 with the names of schema 2: evaluation modes were stances.

    >>> upgraded({"schema": 1, "stances": ["global"]})
    {'schema': 1, 'modes': ['global']}
    """
    return {{"stance": "mode", "stances": "modes"}.get(name, name): value for name, value in content.items()}


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file, after its last whole line."""
    with writing(path), open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # its writer was killed
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(_line(entry))


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file of such lines."""
    write(path, b"".join(map(_line, entries)))


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines of a file that are whole, and how many are damaged. A last line that was cut off by a kill is neither."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], 0
    except OSError as problem:
        raise UserError(f"{path} cannot be read: {problem.strerror}") from None
    found = [_parsed(line) for line in lines]
    # The last line may lack nothing but its end, which is then missing or damaged.
    found += [one for one in (_parsed(rest), _parsed(rest[:-1])) if one is not None][:1]
    checked = any("checksum" in one for one in found if one)  # runs of schema 1 have lines without
    good = [one for one in found if one is not None and (not checked or one.pop("checksum", None) == _checksum(one))]
    return good, len(found) - len(good)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(_sealed(entry)).encode() + b"\n"


def _sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    content = json.loads(json.dumps(content))  # as it will be read
    return {**content, "checksum": _checksum(content)}


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# Arrays


def save(path: Path, tree: Any, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a pytree and metadata as safetensors.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(Path(folder) / "a", {"a": np.ones(2, np.float32)}, {"round": 3})
    ...     load(Path(folder) / "a", {"a": np.zeros(2, np.float32)}, "the example", "make it again")
    ({'a': array([1., 1.], dtype=float32)}, {'round': 3})
    """
    write(path, pack(tree, metadata or {}))


def pack(tree: Any, metadata: Mapping[str, Any]) -> bytes:
    """A pytree and metadata as safetensors, with a checksum of both."""
    metadata = json.loads(json.dumps(metadata))
    return wire.pack(tree, {**metadata, "sha256": digest(metadata, trees.named(tree))})


def load(
    path: Path, template: Any, what: str, advice: str, *, finite: bool = False, unchecked: bool = False
) -> tuple[Any, Any]:
    """The pytree of `template`'s form and the metadata that `save` wrote; `unchecked` files may lack a checksum."""
    arrays, metadata = read_arrays(path, what, advice, unchecked=unchecked)
    return wire.assemble(arrays, template, f"{what} {path}", finite=finite), metadata


def read_arrays(path: Path, what: str, advice: str, *, unchecked: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays by name and the metadata that `save` wrote."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise UserError(f"{what} {path} cannot be read ({problem.strerror}); {advice}") from None
    try:
        arrays, metadata = safetensors.numpy.load(content), wire.metadata(content)
        checksum = metadata.pop("sha256", None)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise UserError(f"{what} {path} cannot be read ({problem}): it is damaged; {advice}") from None
    if checksum != digest(metadata, arrays) and not (unchecked and checksum is None):
        raise UserError(f"{what} {path} does not match its checksum: it is damaged; {advice}")
    return arrays, metadata


def digest(metadata: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """A checksum of arrays, their names and types, and of metadata."""
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, leaf in sorted(jax.device_get(dict(arrays)).items()):
        array = np.asarray(leaf, order="C")
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


# Records that are written in place


def open_records(path: Path) -> Any:
    """An unbuffered file to read and write at places, made where it is missing; read alone where the folder is read-only."""
    with writing(path):
        exists = path.exists()
        return open(path, "rb" if exists and not os.access(path, os.W_OK) else "r+b" if exists else "w+b", buffering=0)


def write_at(file: int, content: bytes, offset: int, what: Path) -> None:
    """Write some bytes at a place of an open file."""
    with writing(what):
        if os.pwrite(file, content, offset) != len(content):
            raise OSError(None, "the disk is full")
