"""The registry: one line for each algorithm. Names are loaded when they are asked for, so that listing them is free."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from fedbayes.errors import UserError

REGISTRY = {
    "fedavg": ("fedbayes.algorithms.fedavg", "FedAvg", "clients", "federated averaging; personalised by fine-tuning"),
    "fedprox": ("fedbayes.algorithms.fedprox", "FedProx", "clients", "averaging with a pull towards the broadcast model"),
    "fedbabu": ("fedbayes.algorithms.fedbabu", "FedBABU", "clients", "body learnt together under a head that nobody trains"),
    "fedper": ("fedbayes.algorithms.fedper", "FedPer", "clients", "shared base, personal last layers"),
    "fedhb-niw": ("fedbayes.algorithms.fedhb_niw", "FedHBNIW", "clients", "hierarchical Bayes: clients around one network"),
    "fedhb-mixture": (
        "fedbayes.algorithms.fedhb_mixture",
        "FedHBMixture",
        "clients",
        "hierarchical Bayes: K prototypes, a gate",
    ),
    "fedvi": ("fedbayes.algorithms.fedvi", "FedVI", "clients", "amortised personal posteriors, from rows without labels"),
    "bpfed": ("fedbayes.algorithms.bpfed", "BPFed", "clients", "Gaussian layers, the first shared and the last personal"),
    "pfedbayes": ("fedbayes.algorithms.pfedbayes", "PFedBayes", "clients", "personal Gaussian networks around a shared one"),
    "fedpop": ("fedbayes.algorithms.fedpop", "FedPop", "clients", "shared base, heads sampled under a population prior"),
    "ifca": ("fedbayes.algorithms.ifca", "IFCA", "clients", "K models, each averaged over the clients it fits best"),
    "ditto": ("fedbayes.algorithms.ditto", "Ditto", "clients", "personal models pulled towards the averaged one"),
    "apfl": ("fedbayes.algorithms.apfl", "APFL", "clients", "a learnt mixture of a personal and the averaged model"),
    "fedrep": ("fedbayes.algorithms.fedrep", "FedRep", "clients", "shared representation and personal heads, in turns"),
    "knn-per": ("fedbayes.algorithms.knn_per", "KNNPer", "clients", "averaging, mixed with a client's own nearest rows"),
    "fedrecon": ("fedbayes.algorithms.fedrecon", "FedRecon", "clients", "personal layers rebuilt each round, never kept"),
    "lg-fedavg": ("fedbayes.algorithms.lg_fedavg", "LGFedAvg", "clients", "personal representations under a shared last layer"),
    "per-fedavg": ("fedbayes.algorithms.per_fedavg", "PerFedAvg", "clients", "a start from which one step personalises"),
    "pfedme": ("fedbayes.algorithms.pfedme", "PFedMe", "clients", "personal models at Moreau envelopes of a shared one"),
    "fedpa": (
        "fedbayes.algorithms.fedpa",
        "FedPA",
        "clients",
        "posterior averaging: sampled posteriors, whose common mode is sought",
    ),
    "fedem": ("fedbayes.algorithms.fedem", "FedEM", "clients", "clients are mixtures of shared components"),
    "fedbe": ("fedbayes.algorithms.fedbe", "FedBE", "clients", "sampled models distilled on the server's unlabelled rows"),
    "ensemble": ("fedbayes.algorithms.ensemble", "Ensemble", "clients", "K networks, each averaged over a random group"),
    "sfvi": ("fedbayes.algorithms.sfvi", "SFVI", "silos", "structured variational inference: a gradient a round, as if pooled"),
    "sfvi-avg": ("fedbayes.algorithms.sfvi_avg", "SFVIAvg", "silos", "SFVI with local steps; posteriors averaged (barycentre)"),
    "pvi": ("fedbayes.algorithms.pvi", "PVI", "silos", "partitioned variational inference: the pooled posterior in few rounds"),
}
"""Name on the command line: module, class, what it runs over, one line.

Over `clients`: a network and rows (`fedbayes run`). Over `silos`: a NumPyro model of a population and silos (`fedbayes fit`).
"""


def names(over: str) -> list[str]:
    """The algorithms that run over clients, or over silos.

    >>> names("silos")
    ['sfvi', 'sfvi-avg', 'pvi']
    """
    return [name for name, (_, _, kind, _) in REGISTRY.items() if kind == over]


def find(name: str, over: str | None = None) -> type[Any]:
    """The algorithm's class by its registered name.

    >>> find("fedper").__name__
    'FedPer'
    """
    if name not in REGISTRY:
        known = list(REGISTRY) if over is None else names(over)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}" if near else f"choose one of {', '.join(known)}"
        raise UserError(f"there is no algorithm {name!r}; {hint} (fedbayes list shows all)")
    module, cls, kind, _ = REGISTRY[name]
    if over == "clients" and kind == "silos":
        raise UserError(f"{name} fits a NumPyro model over silos, not a network; use fedbayes fit FILE --algorithm {name}")
    if over == "silos" and kind == "clients":
        raise UserError(f"{name} trains a network over clients, not a NumPyro model; choose one of {', '.join(names('silos'))}")
    return getattr(importlib.import_module(module), cls)
