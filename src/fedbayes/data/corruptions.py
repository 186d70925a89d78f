"""Clients who see the same images through different faults: fog, blur, noise. FedHB's CIFAR-100-Corrupted is made so.

The corruptions are those of Hendrycks and Dietterich (2019), by the package imagecorruptions-imaug (`fedbayes[corruptions]`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedbayes.data.clients import Clients
from fedbayes.data.partitions import parse
from fedbayes.data.table import assign
from fedbayes.errors import UserError

KINDS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "frost",
    "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression", "speckle_noise", "gaussian_blur",
    "spatter", "saturate",
)  # fmt: skip
"""The nineteen of Hendrycks and Dietterich."""


def corrupted(
    x: np.ndarray,
    y: np.ndarray,
    *,
    train: int | Sequence[str] = 10,
    each: int = 10,
    partition: str = "shards:100",
    severity: int = 5,
    test: float = 0.1,
    same_test: bool = True,
    classes: Sequence[str] | None = None,
    seed: int = 0,
    corrupt: Callable[[np.ndarray, int, str], np.ndarray] | None = None,
    name: str = "corrupted",
) -> Clients:
    """One group of clients for each kind of corruption, all with the same images; groups of new kinds never train.

    Args:
        x: Images of bytes, (n, height, width, 3), at least 32 pixels a side.
        y: Their labels.
        train: The kinds of the clients that train, or how many of `KINDS` to draw for them; the clients of the others are
            unseen.
        each: Clients of each kind.
        partition: How a group's images are divided among its clients.
        severity: From 1 to 5. The levels of the package are made for images of 224 pixels; on one of 32 they weigh more.
        test: Share of a group's images that is for testing.
        same_test: Whether these are the same images in every group. FedHB draws them anew in each, so that most test images
            of a new kind of corruption were trained on under another one, and remembering them counts as knowing.
        classes: Names of the labels.
        seed: Of everything random: the kinds, the splits and the noise.
        corrupt: `corrupt(image, severity, kind)`; by default the package's.
        name: Of the data set.

    >>> images, labels = np.zeros((40, 32, 32, 3), np.uint8), np.arange(40) % 4
    >>> clients = corrupted(images, labels, each=2, partition="iid", corrupt=lambda image, severity, kind: image + severity)
    >>> clients, len(clients.participants), str(clients.names[0])
    (Clients(corrupted: 38 clients (18 unseen), 760 rows of (32, 32, 3), 4 classes), 20, 'brightness-0')
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[3] != 3 or min(x.shape[1:3]) < 32:
        expected = "a corruption is of colour images of bytes, at least 32 pixels a side"
        raise UserError(f"{name}: images have shape {x.shape[1:]} and type {x.dtype}, but {expected}")
    if severity not in (1, 2, 3, 4, 5):
        raise UserError(f"{name}: severity is {severity}, but it is a whole number from 1 to 5")
    random = np.random.default_rng([0xC0, seed])
    seen = _kinds(train, random, name)
    corrupt, divide = corrupt or _package(), parse(partition)
    rows: dict[str, list[np.ndarray]] = {"x": [], "y": [], "client": [], "is_test": []}
    tested = random.permutation(len(y)) < round(test * len(y))
    state = np.random.get_state()  # the package draws from NumPy's global stream, which is somebody else's
    try:
        for kind in KINDS:
            number = int(random.integers(2**31))
            np.random.seed(number)
            is_test = tested if same_test else np.random.default_rng(number).permutation(len(y)) < round(test * len(y))
            place = assign(divide, y, is_test, each, number, None)
            rows["x"].append(np.stack([np.asarray(corrupt(image, severity, kind), np.uint8) for image in x]))
            rows["y"].append(y)
            rows["client"].append(np.array([f"{kind}-{i}" for i in place]))
            rows["is_test"].append(is_test)
    finally:
        np.random.set_state(state)
    images, labels, client, is_test = (np.concatenate(rows[key]) for key in ("x", "y", "client", "is_test"))
    unseen = np.array([str(one).rsplit("-", 1)[0] not in seen for one in client])
    return Clients.build(images, labels, client, is_test=is_test, unseen=unseen, classes=classes, name=name)


def _kinds(train: int | Sequence[str], random: np.random.Generator, name: str) -> set[str]:
    if isinstance(train, int):
        if not 0 < train <= len(KINDS):
            raise UserError(f"{name}: train is {train}, but there are {len(KINDS)} kinds of corruption; give 1 to {len(KINDS)}")
        return set(random.choice(KINDS, train, replace=False).tolist())
    for kind in train:
        if kind not in KINDS:
            raise UserError(f"{name}: there is no corruption {kind!r}; there are {', '.join(KINDS)}")
    return set(train)


def _package() -> Callable[[np.ndarray, int, str], Any]:
    try:
        from imagecorruptions import corrupt
    except ImportError:
        raise UserError("corruptions need the package imagecorruptions-imaug: pip install 'fedbayes[corruptions]'") from None

    def one(image: np.ndarray, severity: int, kind: str) -> Any:
        # These two draw from a generator of their own, which nobody else's seed reaches
        own = {"seed": np.random.randint(2**31)} if kind in ("glass_blur", "impulse_noise") else {}
        return corrupt(image, severity=severity, corruption_name=kind, **own)

    return one
