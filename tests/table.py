"""One row for each registered algorithm, and for other forms of some: a small instance for every common test.

Over clients, a row is a function of the network that the tests train; over silos, of the two functions of their model.
"""

import numpy as np
import pytest

import fedbayes as fb
from fedbayes.algorithms import REGISTRY
from fedbayes.models import Normal, mlp

TRAIN = fb.Training(epochs=2, batch=8, lr=0.2, momentum=0.5)
TUNE = fb.Training(epochs=3, batch=8, lr=0.1)
LONG = fb.Training(epochs=10, batch=8, lr=0.2, momentum=0.5)
LINEAR = mlp((4,), Normal(), hidden=())  # for methods that predict numbers
ROWS = fb.Unlabelled(np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32))  # it is equal to itself alone

TABLE = {
    "fedavg": lambda model: fb.FedAvg(model, train=TRAIN, tune=TUNE),
    "fedprox": lambda model: fb.FedProx(model, mu=0.1, train=TRAIN, tune=TUNE),
    "scaffold": lambda model: fb.Scaffold(model, train=fb.Training(2, batch=8, lr=0.2), tune=TUNE),
    "fedbabu": lambda model: fb.FedBABU(model, head_scale=3.0, train=TRAIN, tune=TUNE),
    "fedhb-niw": lambda model: fb.FedHBNIW.paper(
        model, p=0.95, sigma0=1.0, lambda0=0.1, draws=3, elbo=True, train=TRAIN, tune=TUNE, N=4, D=80
    ),
    "fedhb-mixture": lambda model: fb.FedHBMixture.paper(model, K=2, elbo=True, draws=4, train=TRAIN, tune=TUNE, N=4),
    "fedvi": lambda model: fb.FedVI.paper(
        model, constructor=(8,), draws=3, train=fb.Training(epochs=5, batch=16, lr=0.1), server_lr=1.0, server_momentum=0.5
    ),
    "fedvi-experts": lambda model: fb.FedVI(model, constructor=(8,), draws=3, train=TRAIN),
    # Not by Adam, which makes steps of rounding errors where a slope is nearly 0.
    "bpfed": lambda model: fb.BPFed.paper(model, population=True, kl=0.1, draws=3, train=TRAIN, tune=TUNE),
    "bpfed-population": lambda model: fb.BPFed(model, draws=3, train=TRAIN, tune=TUNE),
    "lg-fedavg": lambda model: fb.LGFedAvg(model, train=TRAIN, tune=TUNE),
    "per-fedavg": lambda model: fb.PerFedAvg(model, alpha=0.1, train=fb.Training(2, batch=8, lr=0.2)),
    "pfedme": lambda model: fb.PFedMe(model, lam=2.0, personal_lr=0.1, train=fb.Training(3, batch=8, lr=0.1)),
    "pfedbayes": lambda model: fb.PFedBayes(
        model, zeta=0.1, draws=3, train=fb.Training(2, "adam", 8, lr=0.02), tune=fb.Training(5, "adam", 8, lr=0.02)
    ),
    "bayes-admm": lambda model: fb.BayesADMM(model, draws=3, train=fb.Training(2, batch=8, lr=0.1), tune=TUNE),
    "fedpop": lambda model: fb.FedPop(model, form="langevin", eta=0.01, sigma=0.5, adapt_steps=20, draws=3, train=TRAIN),
    "fedpop-laplace": lambda model: fb.FedPop(model, draws=3, train=TRAIN),
    "fedpop-feature": lambda model: fb.FedPop(model, spread="feature", temperature=0.1, draws=3, train=TRAIN),
    "ifca": lambda model: fb.IFCA(model, K=2, fine_tune=True, train=TRAIN, tune=TUNE),
    "ditto": lambda model: fb.Ditto(model, lam=0.1, personal_epochs=2, train=TRAIN, tune=TUNE),
    "apfl": lambda model: fb.APFL(model, train=TRAIN, tune=TUNE),
    "fedrep": lambda model: fb.FedRep(model, head=TRAIN, train=TRAIN, tune=TUNE),
    "knn-per": lambda model: fb.KNNPer(model, k=3, capacity=32, train=TRAIN),
    "fedrecon": lambda model: fb.FedRecon(model, reconstruct=LONG, train=TRAIN, tune=LONG),
    "fedper": lambda model: fb.FedPer(model, train=TRAIN, tune=TUNE),
    "fedpa": lambda model: fb.FedPA(model, burn_in_rounds=1, rho=0.1, train=TRAIN, tune=TUNE),
    "fedem": lambda model: fb.FedEM(model, K=2, draws=4, train=TRAIN, tune=TUNE),
    "fedbe": lambda model: fb.FedBE(model, unlabelled=ROWS, samples=2, cycle=2, train=TRAIN, distil=TUNE, tune=TUNE),
    "ensemble": lambda model: fb.Ensemble(model, K=2, train=TRAIN, tune=TUNE),
    "ep": lambda population, silo: fb.EP(population, silo, draws=20, most=40),
    "sfvi": lambda population, silo: fb.SFVI(population, silo),
    "sfvi-avg": lambda population, silo: fb.SFVIAvg(population, silo, steps=5),
    "pvi": lambda population, silo: fb.PVI(population, silo, steps=5),
}

VARIANTS = {"fedvi-experts": "fedvi", "bpfed-population": "bpfed", "fedpop-laplace": "fedpop", "fedpop-feature": "fedpop"}
"""Rows that are another form of a registered algorithm."""


def registered(name):
    """The name in the registry of a row's algorithm."""
    return VARIANTS.get(name, name)


OFTEN = ("fedavg", "fedper", "fedhb-niw", "fedvi", "bpfed", "pvi")
"""Methods of different shapes, for which `make test` runs all common tests."""

POPULATED = ("fedper", "fedrep", "lg-fedavg", "fedrecon", "bpfed")
"""Methods whose clients keep layers, of which the server learns the population's mean."""


def methods(kind=None, often=OFTEN):
    """Parametrise a test by `name`, a row of the table; those not in `often` are left to `make test-all`."""
    chosen = [name for name in TABLE if kind is None or REGISTRY[registered(name)].kind == kind]
    return pytest.mark.parametrize("name", [method(name, often=often) for name in chosen])


def method(name, *more, often=OFTEN, id=None):
    """One such parameter."""
    slow = [] if name in often else [pytest.mark.slow]
    return pytest.param(name, *more, marks=slow, id=id)
