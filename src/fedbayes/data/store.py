"""Clients on disk: a folder of .npy files and one .json, written whole or not at all, mapped when read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedbayes.data.layout import Column, Layout
from fedbayes.data.rows import blocks
from fedbayes.errors import UserError

MANIFEST = "clients.json"
ARRAYS = ("x", "y", "offsets", "train_counts", "names", "unseen", "shift", "scale")


def save(clients: Any, folder: Path) -> None:
    """Write to a folder beside `folder`, then rename it."""
    with new_folder(folder) as writing:
        for name in ARRAYS:
            array = getattr(clients, name)
            with (writing.path / f"{name}.npy").open("wb") as file:
                write_header(file, array.shape, array.dtype)
                for _, block in blocks(array) if array.ndim else [(0, array)]:
                    file.write(np.ascontiguousarray(block).tobytes())
        write_manifest(writing.path, clients.name, clients.classes, clients.features, clients.layout)


def load(folder: Path) -> dict[str, Any]:
    """The fields of `Clients` that `save` wrote, the rows mapped."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS}
        classes, features = manifest["classes"], manifest["features"]
        name = str(manifest["name"])
        layout = Layout.from_json(manifest["layout"]) if "layout" in manifest else Layout(tuple(map(Column, features or ())))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise UserError(f"{folder} does not hold complete clients ({error}); write it again with Clients.save") from error
    # What is small and asked for at every round stays in memory.
    small = {key: np.array(array) for key, array in arrays.items() if key not in ("x", "y")}
    return {
        "x": arrays["x"],
        "y": arrays["y"],
        **small,
        "classes": None if classes is None else tuple(classes),
        "features": None if features is None else tuple(features),
        "name": name,
        "layout": layout,
    }


def write_header(file: BinaryIO, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """The header of a .npy file whose rows follow."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def write_manifest(
    folder: Path, name: str, classes: tuple[str, ...] | None, features: tuple[str, ...] | None, layout: Layout = Layout()
) -> None:
    """The .json beside the arrays."""
    manifest = {"version": 1, "name": name, "classes": classes, "features": features, "layout": layout.to_json()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


class new_folder:  # noqa: N801  # used as a verb: with new_folder(path) as writing
    """A temporary folder that takes the place of `folder` when the block ends well, and disappears when it does not."""

    def __init__(self, folder: Path):
        if folder.exists() and not (folder / MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and does not hold clients; choose another folder, nothing was overwritten")
        self.folder = folder.absolute()
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=self.folder.parent))
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror}); choose a folder that can be written") from error

    def __enter__(self) -> new_folder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                old = self.path.with_name(self.path.name + "-old")
                if self.folder.exists():
                    os.rename(self.folder, old)
                os.rename(self.path, self.folder)
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {self.folder} ({error.strerror}); nothing was kept: free some space") from error
