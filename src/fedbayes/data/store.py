"""Clients on disk: a folder of .npy files and one .json, written whole or not at all, mapped when read."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes import files
from fedbayes.data.layout import Column, Layout
from fedbayes.data.rows import blocks
from fedbayes.errors import UserError

MANIFEST = "clients.json"
ARRAYS = ("x", "y", "offsets", "train_counts", "names", "unseen", "shift", "scale")
Part = tuple[tuple[int, ...], np.dtype[Any], Iterable[np.ndarray]]  # shape and type of an array, and its rows some at a time


def save(clients: Any, folder: Path) -> None:
    """Write clients to a folder."""
    parts: dict[str, Part] = {}
    for name in ARRAYS:
        array = getattr(clients, name)
        parts[name] = array.shape, array.dtype, (block for _, block in blocks(array)) if array.ndim else [array]
    write(folder, parts, clients.name, clients.classes, clients.features, clients.layout)


def write(
    folder: Path,
    parts: Mapping[str, Part],
    name: str,
    classes: tuple[str, ...] | None,
    features: tuple[str, ...] | None,
    layout: Layout = Layout(),
) -> None:
    """Write the arrays and, beside them, the manifest with a CRC-32 of each file."""
    with files.new_folder(folder, MANIFEST) as path:
        crc = {key: files.write_blocks(path / f"{key}.npy", _npy(*part)) for key, part in parts.items()}
        manifest = {"name": name, "classes": classes, "features": features, "layout": layout.to_json(), "crc32": crc}
        files.write_json(path / MANIFEST, manifest)


def _npy(shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[np.ndarray]) -> Iterator[Any]:
    """The bytes of a .npy file."""
    header = io.BytesIO()
    form = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, form)
    yield header.getvalue()
    for block in blocks:
        yield np.ascontiguousarray(block).tobytes()


def load(folder: Path) -> dict[str, Any]:
    """The fields of `Clients` that `save` wrote, the rows mapped."""
    try:
        manifest = files.read_json(folder / MANIFEST, name=str)
        for name, crc in manifest.get("crc32", {}).items():  # older manifests have none
            if files.crc32(folder / f"{name}.npy") != crc:
                raise UserError(f"{name}.npy does not match its checksum")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        classes, features = manifest["classes"], manifest["features"]
        layout = Layout.from_json(manifest["layout"]) if "layout" in manifest else Layout(tuple(map(Column, features or ())))
    except (UserError, OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise UserError(f"{folder} does not hold complete clients ({error}); write it again with Clients.save") from error
    # What is small and asked for at every round stays in memory.
    fields = {key: array if key in ("x", "y") else np.array(array) for key, array in arrays.items()}
    names = {key: None if value is None else tuple(value) for key, value in (("classes", classes), ("features", features))}
    return {**fields, **names, "name": manifest["name"], "layout": layout}
