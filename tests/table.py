"""One row for each registered algorithm: a small instance that test_algorithms.py puts through everything."""

import numpy as np

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
from fedbayes.data.unlabelled import Unlabelled
from fedbayes.primitives.training import Training

TRAIN = Training(epochs=2, batch=8, lr=0.2, momentum=0.5)
TUNE = Training(epochs=3, batch=8, lr=0.1)
LONG = Training(epochs=10, batch=8, lr=0.2, momentum=0.5)
ROWS = Unlabelled(np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32))  # it is equal to itself alone

TABLE = {
    "fedavg": lambda model: FedAvg(model, train=TRAIN, tune=TUNE),
    "fedprox": lambda model: FedProx(model, mu=0.1, train=TRAIN, tune=TUNE),
    "fedbabu": lambda model: FedBABU(model, head_scale=3.0, train=TRAIN, tune=TUNE),
    "fedhb-niw": lambda model: FedHBNIW(
        model, p=0.95, sigma0=1.0, lambda0=0.1, draws=3, elbo=True, train=TRAIN, tune=TUNE, N=4, D=80
    ),
    "fedhb-mixture": lambda model: FedHBMixture(model, K=2, elbo=True, draws=4, train=TRAIN, tune=TUNE, N=4),
    "fedvi": lambda model: FedVI(
        model, constructor=(8,), draws=3, train=Training(epochs=5, batch=16, lr=0.1), server_lr=1.0, server_momentum=0.5
    ),
    # Not by Adam, which makes steps of rounding errors where a slope is nearly 0.
    "bpfed": lambda model: BPFed(model, kl=0.1, draws=3, train=TRAIN, tune=TUNE),
    "lg-fedavg": lambda model: LGFedAvg(model, train=TRAIN, tune=TUNE),
    "per-fedavg": lambda model: PerFedAvg(model, alpha=0.1, train=Training(2, batch=8, lr=0.2)),
    "pfedme": lambda model: PFedMe(model, lam=2.0, personal_lr=0.1, train=Training(3, batch=8, lr=0.1)),
    "pfedbayes": lambda model: PFedBayes(
        model, zeta=0.1, draws=3, train=Training(2, "adam", 8, lr=0.02), tune=Training(5, "adam", 8, lr=0.02)
    ),
    "fedpop": lambda model: FedPop(model, eta=0.01, sigma=0.5, adapt_steps=20, draws=3, train=TRAIN),
    "ifca": lambda model: IFCA(model, K=2, fine_tune=True, train=TRAIN, tune=TUNE),
    "ditto": lambda model: Ditto(model, lam=0.1, personal_epochs=2, train=TRAIN, tune=TUNE),
    "apfl": lambda model: APFL(model, train=TRAIN, tune=TUNE),
    "fedrep": lambda model: FedRep(model, head=TRAIN, train=TRAIN, tune=TUNE),
    "knn-per": lambda model: KNNPer(model, k=3, capacity=32, train=TRAIN),
    "fedrecon": lambda model: FedRecon(model, reconstruct=LONG, train=TRAIN, tune=LONG),
    "fedper": lambda model: FedPer(model, train=TRAIN, tune=TUNE),
    "fedpa": lambda model: FedPA(model, burn_in_rounds=1, rho=0.1, train=TRAIN, tune=TUNE),
    "fedem": lambda model: FedEM(model, K=2, draws=4, train=TRAIN, tune=TUNE),
    "fedbe": lambda model: FedBE(model, unlabelled=ROWS, samples=2, cycle=2, train=TRAIN, distil=TUNE, tune=TUNE),
    "ensemble": lambda model: Ensemble(model, K=2, train=TRAIN, tune=TUNE),
}
