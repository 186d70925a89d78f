"""The registry: one line for each algorithm. Names are loaded when they are asked for, so that listing them is free."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from fedbayes.errors import UserError

REGISTRY = {
    "fedavg": ("fedbayes.algorithms.fedavg", "FedAvg", "federated averaging; personalised by fine-tuning"),
    "fedprox": ("fedbayes.algorithms.fedprox", "FedProx", "averaging with a pull towards the broadcast model"),
    "fedbabu": ("fedbayes.algorithms.fedbabu", "FedBABU", "body learnt together under a head that nobody trains"),
    "fedper": ("fedbayes.algorithms.fedper", "FedPer", "shared base, personal last layers"),
}
"""Name on the command line: module, class, one line."""


def find(name: str) -> type[Any]:
    """The algorithm's class by its registered name.

    >>> find("fedper").__name__
    'FedPer'
    """
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}" if near else f"choose one of {', '.join(REGISTRY)}"
        raise UserError(f"there is no algorithm {name!r}; {hint} (fedbayes list shows all)")
    module, cls, _ = REGISTRY[name]
    return getattr(importlib.import_module(module), cls)
