"""Bayesian federated learning on JAX: shared and personal posteriors over data that stays where it is.

>>> import fedbayes as fb
>>> clients = fb.data.load("digits", hold_out=5)
>>> algorithm = fb.FedPer(fb.network("mlp", clients, hidden=(16,)))
>>> fit = fb.simulate(algorithm, clients, rounds=2, cohort=5)
>>> x, y = clients.rows("7", "test")
>>> fit.predict(x[:3], client="7", adapted=True).shape
(3, 10)

Names are loaded when they are first used, so that `import fedbayes` and `fedbayes --help` do not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbayes import data, models
    from fedbayes.algorithm import Algorithm, Data, Mean, NetworkAlgorithm, Reduce, Stack, StructuredAlgorithm, Sum
    from fedbayes.algorithms.apfl import APFL
    from fedbayes.algorithms.bpfed import BPFed
    from fedbayes.algorithms.ditto import Ditto
    from fedbayes.algorithms.ensemble import Ensemble
    from fedbayes.algorithms.fedavg import FedAvg
    from fedbayes.algorithms.fedbabu import FedBABU
    from fedbayes.algorithms.fedbe import FedBE
    from fedbayes.algorithms.fedem import FedEM
    from fedbayes.algorithms.fedhb_mixture import FedHBMixture
    from fedbayes.algorithms.fedhb_niw import FedHBNIW
    from fedbayes.algorithms.fedpa import FedPA
    from fedbayes.algorithms.fedper import FedPer
    from fedbayes.algorithms.fedpop import FedPop
    from fedbayes.algorithms.fedprox import FedProx
    from fedbayes.algorithms.fedrecon import FedRecon
    from fedbayes.algorithms.fedrep import FedRep
    from fedbayes.algorithms.fedvi import FedVI
    from fedbayes.algorithms.ifca import IFCA
    from fedbayes.algorithms.knn_per import KNNPer
    from fedbayes.algorithms.lg_fedavg import LGFedAvg
    from fedbayes.algorithms.per_fedavg import PerFedAvg
    from fedbayes.algorithms.pfedbayes import PFedBayes
    from fedbayes.algorithms.pfedme import PFedMe
    from fedbayes.algorithms.pvi import PVI
    from fedbayes.algorithms.sfvi import SFVI
    from fedbayes.algorithms.sfvi_avg import SFVIAvg
    from fedbayes.algorithms.tempered import Tempered
    from fedbayes.data import Clients
    from fedbayes.data.unlabelled import Unlabelled
    from fedbayes.engine.clients import Simulation
    from fedbayes.errors import UserError
    from fedbayes.evaluation.assess import assess
    from fedbayes.models import network
    from fedbayes.primitives.optimisers import ServerStep
    from fedbayes.primitives.training import Training
    from fedbayes.primitives.variational import Family
    from fedbayes.results import trackers
    from fedbayes.results.fit import Fit
    from fedbayes.results.opened import open
    from fedbayes.results.posterior import Posterior
    from fedbayes.results.simulate import simulate
    from fedbayes.results.structured_fit import SiloFit

__version__ = "0.1.0"

_WHERE = {
    "APFL": "algorithms.apfl",
    "BPFed": "algorithms.bpfed",
    "Ditto": "algorithms.ditto",
    "IFCA": "algorithms.ifca",
    "Algorithm": "algorithm",
    "NetworkAlgorithm": "algorithm",
    "StructuredAlgorithm": "algorithm",
    "Clients": "data",
    "Data": "algorithm",
    "Ensemble": "algorithms.ensemble",
    "Family": "primitives.variational",
    "FedAvg": "algorithms.fedavg",
    "FedBABU": "algorithms.fedbabu",
    "FedBE": "algorithms.fedbe",
    "FedEM": "algorithms.fedem",
    "FedHBMixture": "algorithms.fedhb_mixture",
    "FedHBNIW": "algorithms.fedhb_niw",
    "FedPA": "algorithms.fedpa",
    "FedPer": "algorithms.fedper",
    "FedPop": "algorithms.fedpop",
    "FedProx": "algorithms.fedprox",
    "FedVI": "algorithms.fedvi",
    "FedRep": "algorithms.fedrep",
    "KNNPer": "algorithms.knn_per",
    "FedRecon": "algorithms.fedrecon",
    "Fit": "results.fit",
    "Mean": "algorithm",
    "LGFedAvg": "algorithms.lg_fedavg",
    "PerFedAvg": "algorithms.per_fedavg",
    "PFedBayes": "algorithms.pfedbayes",
    "PFedMe": "algorithms.pfedme",
    "PVI": "algorithms.pvi",
    "Posterior": "results.posterior",
    "Reduce": "algorithm",
    "SFVI": "algorithms.sfvi",
    "SFVIAvg": "algorithms.sfvi_avg",
    "ServerStep": "primitives.optimisers",
    "SiloFit": "results.structured_fit",
    "Simulation": "engine.clients",
    "Stack": "algorithm",
    "Sum": "algorithm",
    "Tempered": "algorithms.tempered",
    "Training": "primitives.training",
    "Unlabelled": "data.unlabelled",
    "UserError": "errors",
    "assess": "evaluation.assess",
    "network": "models",
    "open": "results.opened",
    "simulate": "results.simulate",
}
_MODULES = {"data": "data", "models": "models", "trackers": "results.trackers"}

__all__ = [
    "APFL",
    "IFCA",
    "PVI",
    "SFVI",
    "Algorithm",
    "BPFed",
    "Clients",
    "Data",
    "Ditto",
    "Ensemble",
    "Family",
    "FedAvg",
    "FedBABU",
    "FedBE",
    "FedEM",
    "FedHBMixture",
    "FedHBNIW",
    "FedPA",
    "FedPer",
    "FedPop",
    "FedProx",
    "FedRecon",
    "FedRep",
    "FedVI",
    "Fit",
    "KNNPer",
    "LGFedAvg",
    "Mean",
    "NetworkAlgorithm",
    "PFedBayes",
    "PFedMe",
    "PerFedAvg",
    "Posterior",
    "Reduce",
    "SFVIAvg",
    "ServerStep",
    "SiloFit",
    "Simulation",
    "Stack",
    "StructuredAlgorithm",
    "Sum",
    "Tempered",
    "Training",
    "Unlabelled",
    "UserError",
    "assess",
    "data",
    "models",
    "network",
    "open",
    "simulate",
    "trackers",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"fedbayes.{_WHERE[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fedbayes.{_MODULES[name]}")
    raise AttributeError(f"module 'fedbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
