"""Bayesian federated learning on JAX: shared and personal posteriors over data that stays where it is.

>>> import fedbayes as fb
>>> clients = fb.data.load("digits", hold_out=5)
>>> algorithm = fb.FedPer(fb.network("mlp", clients, hidden=(16,)))
>>> fit = fb.simulate(algorithm, clients, rounds=2, cohort=5)
>>> x, y = clients.rows("7", "test")
>>> fit.predict(x[:3], client="7", adapted=True).shape
(3, 10)

Names are loaded when they are first used, so that `import fedbayes` and `fedbayes --help` do not wait for JAX. Every algorithm
of the registry is one of them. Type checkers read `__init__.pyi`, which `make tables` writes.
"""

import lazy_loader

from fedbayes.algorithms import REGISTRY, module_of

__version__ = "0.1.0"

MODULES = ["data", "models"]
NAMES = {
    "algorithm": ["Algorithm", "Data", "Mean", "NetworkAlgorithm", "Reduce", "Stack", "StructuredAlgorithm", "Sum"],
    "algorithms.tempered": ["Tempered"],
    "data": ["Clients"],
    "data.unlabelled": ["Unlabelled"],
    "engine.clients": ["Simulation"],
    "errors": ["UserError"],
    "evaluation.assess": ["assess"],
    "models": ["network"],
    "primitives.optimisers": ["ServerStep"],
    "primitives.training": ["Training"],
    "primitives.variational": ["Family"],
    "results": ["trackers"],
    "results.check": ["check"],
    "results.fit": ["Fit"],
    "results.opened": ["open"],
    "results.posterior": ["Posterior"],
    "results.simulate": ["fit", "simulate"],
    "results.structured_fit": ["SiloFit"],
    **{module_of(name): [entry.cls] for name, entry in REGISTRY.items()},
}
"""The public names by module."""

__getattr__, _, __all__ = lazy_loader.attach(__name__, MODULES, NAMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
