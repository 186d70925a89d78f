"""How the pages name and write figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedbayes.evaluation.assess import MODES
from fedbayes.evaluation.tables import PERCENT
from fedbayes.evaluation.tables import TITLES as MAIN_TITLES
from fedbayes.report.records import Record
from fedbayes.results import folder

TITLES = {**MAIN_TITLES, "brier": "Brier", "crps": "CRPS", "entropy": "entropy", "mutual_information": "mutual information"}
TABLED = {False: ("accuracy", "log_score", "brier", "ece", "mce"), True: ("rmse", "log_score", "crps", "calibration_error")}
STYLES = {"personal": 0, "adapted": 1, "global": 2}  # colour and dash of each mode


def styles(modes: Iterable[str]) -> dict[str, int]:
    """Colour and dash of each mode; those such as adapted:5 follow the usual ones.

    >>> styles(["global", "adapted:5", "adapted:20"])
    {'personal': 0, 'adapted': 1, 'global': 2, 'adapted:5': 3, 'adapted:20': 4}
    """
    more = [mode for mode in modes if mode not in STYLES]
    return STYLES | {mode: place for place, mode in enumerate(more, len(STYLES))}


def number(name: str, value: float) -> str:
    """A figure as the tables have it.

    >>> number("accuracy", 0.875), number("log_score", -0.25)
    ('87.5', '-0.250')
    """
    return f"{100 * value:.1f}" if name in PERCENT else f"{value:.3f}"


def scaled(name: str, values: Any) -> np.ndarray:
    """Figures as the pictures have them."""
    return np.asarray(values, float) * (100 if name in PERCENT else 1)


def flat(options: Any) -> dict[str, str]:
    """Nested options by dotted name, in words.

    >>> flat({"train": {"lr": 0.1}, "mu": None})
    {'train.lr': '0.1', 'mu': '—'}
    """
    return {name: _words(value) for name, value in folder.flat(options).items()}


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else "—" if value is None else str(value)


def distinct(record: Record, group: str) -> list[str]:
    """The modes of a group: for clients that never trained, personal is global, and there is none without a global model."""
    modes = [*(mode for mode in MODES if mode in record.figures), *(mode for mode in record.figures if mode not in MODES)]
    if group != "unseen":
        return modes
    own = "global" not in modes and group in record.figures.get("personal", {})
    return [mode for mode in modes if mode != "personal" or own]


def size(count: float) -> str:
    """Bytes in a unit that people read.

    >>> size(1234), size(5e6)
    ('1.2 kB', '5.0 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"
