"""Files: .npz, folders of IDX files (MNIST's format) and LEAF's folders of JSON; tables are in `frames`."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data.layout import Column, Layout
from fedbayes.data.table import Options, Table, encode
from fedbayes.errors import UserError, nearest

FORMATS = "a .npz, .csv, .tsv or .parquet file, a folder of IDX files, of LEAF's train/*.json, or one that Clients.save wrote"


def read(path: Path, options: Options, name: str) -> Table:
    """A file or folder in any of the `FORMATS`."""
    if path.is_dir():
        if _find(path, "train-images-idx3-ubyte") or _find(path, "train-labels-idx1-ubyte"):
            return read_idx(path, options, name)
        if any((path / "train").glob("*.json")):
            return read_leaf(path, options, name)
        raise UserError(f"the folder {path} has neither train-images-idx3-ubyte nor train/*.json; expected {FORMATS}")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; expected {FORMATS}")
    *_, before, kind = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    kind = before if before and kind in (".gz", ".xz", ".bz2", ".zip", ".zst") else kind
    if kind == ".npz":
        return read_npz(path, options, name)
    if kind in (".csv", ".tsv", ".parquet"):
        from fedbayes.data.frames import read_frame  # pandas only for those who have tables

        return read_frame(path, options, name)
    raise UserError(f"{path} is of an unknown kind; expected {FORMATS}")


def read_npz(path: Path, options: Options, name: str) -> Table:
    """x and y, and where there are: client, is_test, unseen (for each row), classes, features."""
    if options.ignore:
        raise UserError(f"{path}: ignore is for .csv and .parquet; leave the columns out of x instead")
    wanted = {"x": "x", "y": options.target or "y", "client": options.client_column or "client"}
    wanted |= {"is_test": options.test_column or "is_test", "unseen": "unseen", "classes": "classes", "features": "features"}
    required = [wanted["x"], wanted["y"], *filter(None, (options.client_column, options.test_column))]
    found = read_arrays(path, required, optional=list(wanted.values()))
    arrays = {role: found[key] for role, key in wanted.items() if key in found}
    lengths = {role: len(np.atleast_1d(arrays[role])) for role in ("x", "y", "client", "is_test", "unseen") if role in arrays}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} {n}" for key, n in lengths.items())
        raise UserError(f"{path}: the arrays have different lengths ({listed}); expected one value for each row")
    if not lengths["y"]:
        raise UserError(f"{path} has no rows")
    y, classes = arrays["y"], arrays.get("classes")
    named: Sequence[str] | None = None if classes is None else [str(label) for label in classes]
    if named is None or options.task in ("regression", "counts"):
        y, named = encode(y, options.task, str(path), wanted["y"])
    features = None if "features" not in arrays else [str(feature) for feature in arrays["features"]]
    flags: dict[str, Any] = {role: arrays[role].astype(bool) for role in ("is_test", "unseen") if role in arrays}
    layout = Layout(tuple(map(Column, features or ())), wanted["y"])
    return Table(arrays["x"], y, client=arrays.get("client"), classes=named, features=features, layout=layout, **flags)


def read_arrays(path: Path, keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of an .npz file; never pickled objects."""
    try:
        # Opened here: NumPy leaves a file open that turns out to be damaged.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for key in keys:
                if key not in archive:
                    raise UserError(f"{path} has no array {key!r}: {nearest(key, archive.files)}")
            return {key: archive[key] for key in dict.fromkeys([*keys, *optional]) if key in archive}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, TypeError, AttributeError) as error:
        if "allow_pickle" in str(error):
            raise UserError(f"{path} holds Python objects, which are not read; save plain arrays of numbers or text") from error
        raise UserError(f"{path} cannot be read as .npz ({error}); it may be damaged or cut off: copy it again") from error


def read_idx(folder: Path, options: Options, name: str) -> Table:
    """train-images-idx3-ubyte and train-labels-idx1-ubyte, and t10k-… for the test rows; each may end in .gz."""
    _no_columns(folder, options, "IDX files")
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for prefix in ("train", "t10k"):
        images, labels = _find(folder, f"{prefix}-images-idx3-ubyte"), _find(folder, f"{prefix}-labels-idx1-ubyte")
        if prefix == "t10k" and not images and not labels:
            continue
        if images is None or labels is None:
            raise UserError(f"{folder} has no {prefix}-{'labels-idx1' if images else 'images-idx3'}-ubyte[.gz]; expected both")
        x, y = idx(images), idx(labels)
        if len(x) != len(y) or y.ndim != 1:
            raise UserError(f"{images} has {len(x)} images but {labels} has {y.shape} labels; expected as many")
        parts.append((x, y))
    y, classes = encode(np.concatenate([y for _, y in parts]), options.task, name)
    is_test = np.arange(len(y)) >= len(parts[0][1])
    return Table(np.concatenate([x for x, _ in parts]), y, is_test=is_test if len(parts) > 1 else None, classes=classes)


IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def idx(path: Path) -> np.ndarray:
    """The array of one IDX file: two zero bytes, a type, the number of axes, their lengths, the values."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        zero, kind, axes = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{axes}I", content, 4)
        dtype = np.dtype(IDX_TYPES[kind])
        values = np.frombuffer(content, dtype, offset=4 + 4 * axes)
        if zero or not axes:
            raise ValueError("no IDX header")
        return values.reshape(shape).astype(dtype.newbyteorder("="))
    except (OSError, EOFError, ValueError, KeyError, struct.error, zlib.error) as error:
        raise UserError(f"{path} cannot be read as IDX ({error}); it may be damaged or cut off: copy it again") from error


def read_leaf(folder: Path, options: Options, name: str) -> Table:
    """LEAF's JSON: train/*.json and test/*.json, each with users and user_data; users only under test are unseen."""
    _no_columns(folder, options, "LEAF folders")
    train, test = (_leaf_users(folder / part) for part in ("train", "test"))
    users = list(dict.fromkeys([*train, *test]))
    if not users:
        raise UserError(f"{folder}: the files under train/ name no users; expected users and user_data")
    # Each user's part, and which of its rows are for testing.
    parts = [(place, *train[user], np.zeros(len(train[user][1]), bool)) for place, user in enumerate(users) if user in train]
    for place, user in enumerate(users):
        if user in test:
            rows = np.arange(len(test[user][1]))
            # Who is only under test is a client that never trains; some of its rows are there to adapt on.
            parts.append((place, *test[user], rows % 2 == 1 if user not in train else rows >= 0))
    parts = sorted((part for part in parts if len(part[2])), key=lambda part: part[0])  # stable: training rows stay first
    if not parts:
        raise UserError(f"{folder}: the users have no rows")
    if len(shapes := {x.shape[1:] for _, x, _, _ in parts}) > 1:
        raise UserError(f"{folder}: rows of different shapes ({sorted(shapes)}); expected one shape for all")
    x, target, is_test = (np.concatenate([part[column] for part in parts]) for column in (1, 2, 3))
    y, classes = encode(target, options.task, name)
    if y.dtype.kind in "iu" and classes is None and y.min() >= 0:
        classes = tuple(map(str, range(int(y.max()) + 1)))  # a sample of LEAF's users may miss a label
    client = np.repeat([part[0] for part in parts], [len(part[2]) for part in parts])
    unseen = np.array([user not in train for user in users])[client]
    flags: dict[str, Any] = {"is_test": is_test, "unseen": unseen} if test else {}
    return Table(x, y, client=client, names=np.array(users), classes=classes, **flags)


def _leaf_users(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    users: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content: dict[str, Any] = json.loads(path.read_text("utf-8"))
            data = {str(user): content["user_data"][user] for user in content["users"]}
            arrays = {user: (np.array(rows["x"]), np.array(rows["y"])) for user, rows in data.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"no {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path} is not LEAF's JSON ({problem}); expected users, and user_data with x and y") from error
        for user, (x, y) in arrays.items():
            if len(x) != len(y):
                raise UserError(f"{path}: user {user!r} has {len(x)} rows of x and {len(y)} of y; expected as many")
            if len(x) and x.dtype.kind not in "biuf":
                raise UserError(f"{path}: x of user {user!r} is text; turn it into numbers first, such as counts of words")
            users[user] = (x.astype(np.float32), y)
    return users


def _find(folder: Path, stem: str) -> Path | None:
    return next((p for p in (folder / stem, folder / f"{stem}.gz", folder / stem.replace("-idx", ".idx")) if p.is_file()), None)


def _no_columns(folder: Path, options: Options, what: str) -> None:
    if options.client_column or options.target or options.test_column or options.ignore:
        raise UserError(f"{folder}: {what} have no columns; leave client_column, target, test_column and ignore out")
