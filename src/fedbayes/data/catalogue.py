"""Data sets by name: digits comes with scikit-learn, the others are files under the folder in FEDBAYES_DATA."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data.files import read_arrays
from fedbayes.data.table import Options, Table
from fedbayes.errors import UserError


def digits(options: Options) -> Table:
    """1797 handwritten digits of 8x8 pixels 0..16; by default 20 clients by dirichlet:0.5."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Table(data.data.astype(np.uint8), data.target, classes=list("0123456789"), partition="dirichlet:0.5", pooled=True)


def mnist_writers(options: Options) -> Table:
    """MNIST by the person who wrote each digit: the writers of the training set train, those of the test set are unseen."""
    (x, y, client), is_unseen, _ = _both("mnist_writers", "mnist_writers.npz", ("x", "y", "writer"))
    return Table(x, y, client=client, unseen=is_unseen, classes=list("0123456789"))


def mnist(options: Options) -> Table:
    """MNIST with its own test set; by default FedHB's 100 clients of 5 shards."""
    return _official("mnist_writers", "mnist_writers.npz", list("0123456789"), "shards:5", 100)


def fashion_mnist(options: Options) -> Table:
    """Fashion-MNIST with its own test set; by default FedHB's 100 clients of 5 shards."""
    names = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
    return _official("fashion_mnist", "fashion_mnist.npz", list(names), "shards:5", 100)


def cifar10(options: Options) -> Table:
    """8000 training and 4000 test images of CIFAR-10; by default 20 clients by dirichlet:0.3."""
    return _official("cifar10", "cifar10_8k4k.npz", "classes", "dirichlet:0.3", 20)


def cifar100(options: Options) -> Table:
    """12000 training and 4000 test images of CIFAR-100; by default 100 clients by Pachinko allocation."""
    return _official("cifar100", "cifar100_12k4k.npz", "fine_names", "pachinko", 100, coarse="fine_to_coarse")


def chars74k_hnd(options: Options) -> Table:
    """62 handwritten characters by each of 55 writers, who are the clients."""
    arrays = read_arrays(_file("chars74k_hnd", "chars74k_hnd.npz"), ("x", "y", "writer", "classes"))
    return Table(arrays["x"], arrays["y"], client=arrays["writer"], classes=arrays["classes"])


def heart_disease_uci(options: Options) -> Table:
    """Heart disease in four hospitals, which are the clients: 10 features, disease or not.

    Slope, ca and thal are left out, as in FLamby (Ogier du Terrail et al. 2022): outside Cleveland they are mostly missing. By
    default rows with another missing value are dropped, which leaves FLamby's 740 patients.
    """
    from fedbayes.data.frames import read_frame

    path = _file("heart_disease_uci", "heart_disease_4hospitals.csv")
    columns = Options("hospital", "num", ignore=("slope", "ca", "thal"), missing=options.missing or "drop", task="regression")
    table = read_frame(path, columns, "heart_disease_uci", categorical=("cp", "restecg"))
    disease = (table.y > 0).astype(np.int32)
    # The file's own target is a grade, so no other file can give labels under its name.
    layout = table.layout and dataclasses.replace(table.layout, target=None, aside=("hospital", "num", *columns.ignore))
    return dataclasses.replace(table, y=disease, classes=["no disease", "disease"], missing="drop", layout=layout)


_ALL = (digits, mnist_writers, mnist, fashion_mnist, cifar10, cifar100, chars74k_hnd, heart_disease_uci)
SETS: dict[str, Callable[[Options], Table]] = {one.__name__: one for one in _ALL}


def _official(folder: str, file: str, classes: Any, partition: str, clients: int, coarse: str | None = None) -> Table:
    (x, y), is_test, more = _both(folder, file, ("x", "y"), *(key for key in (classes, coarse) if isinstance(key, str)))
    own = {"classes": more[classes] if isinstance(classes, str) else classes, "coarse": more[coarse] if coarse else None}
    return Table(x, y.astype(np.int32), is_test=is_test, partition=partition, clients=clients, **own)


def _both(folder: str, file: str, names: Sequence[str], *more: str) -> tuple[list[np.ndarray], np.ndarray, dict[str, Any]]:
    """Arrays of the training and then of the test part, which rows are of the latter, and what is of both."""
    found = read_arrays(_file(folder, file), [f"{name}_{part}" for part in ("train", "test") for name in names] + [*more])
    joined = [np.concatenate([found[f"{name}_train"], found[f"{name}_test"]]) for name in names]
    return joined, np.arange(len(joined[0])) >= len(found[f"{names[0]}_train"]), found


def _file(folder: str, file: str) -> Path:
    root = os.environ.get("FEDBAYES_DATA")
    if not root:
        advice = f"set it to the folder that has {folder}/, or start with --data digits, which needs no file"
        raise UserError(f"the file {folder}/{file} is needed but FEDBAYES_DATA is not set; {advice}")
    path = Path(root).expanduser() / folder / file
    if not path.is_file():
        raise UserError(f"there is no file {path}; put it there or set FEDBAYES_DATA (now {root}) to the folder of {folder}/")
    return path
