"""The registry: one line for each algorithm. Modules are imported when an algorithm is asked for, so listing them is free."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from fedbayes.errors import UserError, nearest


class Entry(NamedTuple):
    """An algorithm's line. Its module is its name, with underscores for dashes."""

    cls: str
    """The class in that module."""
    kind: str
    """The kind of data: `clients` for a network and rows (`fedbayes run`), `silos` for a NumPyro model (`fedbayes fit`)."""
    summary: str
    """One line for `fedbayes list`."""
    shared: str
    """What is learnt together."""
    local: str
    """What stays with a client or silo."""
    reference: str
    """The paper."""


# fmt: off
REGISTRY = {
    "fedavg": Entry("FedAvg", "clients", "federated averaging; personalised by fine-tuning", "the network", "nothing; `adapt` fine-tunes a copy", "McMahan et al. 2017, arXiv:1602.05629"),
    "fedprox": Entry("FedProx", "clients", "averaging with a pull towards the broadcast model", "the network, with a pull of strength μ towards it", "nothing; `adapt` fine-tunes under the same pull", "Li et al. 2020, arXiv:1812.06127"),
    "scaffold": Entry("Scaffold", "clients", "averaging with control variates against client drift", "the network, and the mean gradient c", "its own gradient c_i; `adapt` fine-tunes a copy", "Karimireddy et al. 2020, arXiv:1910.06378"),
    "fedbabu": Entry("FedBABU", "clients", "body learnt together under a head that nobody trains", "the body, under a head that nobody trains", "nothing; `adapt` fine-tunes body and head", "Oh et al. 2022, arXiv:2106.06042"),
    "fedper": Entry("FedPer", "clients", "shared base, personal last layers", "the body, and the mean of the heads", "the head", "Arivazhagan et al. 2019, arXiv:1912.00818"),
    "fedhb-niw": Entry("FedHBNIW", "clients", "hierarchical Bayes: clients around one network", "m0 and V0: a network and how far clients lie apart, weight by weight", "nothing; `adapt` finds its own network under that prior", "Kim and Hospedales 2023, arXiv:2305.04979"),
    "fedhb-mixture": Entry("FedHBMixture", "clients", "hierarchical Bayes: K prototypes, a gate", "K prototypes of the network, and a gate that tells them apart", "nothing; `adapt` finds its own network near one of them", "Kim and Hospedales 2023, arXiv:2305.04979"),
    "fedvi": Entry("FedVI", "clients", "personal posteriors of the last layer, from rows with or without labels", "the network, and a constructor that tells a client's posterior from its rows", "nothing; `adapt` reads its rows, with their labels where there are any", "Vedadi et al. 2023, arXiv:2305.13672"),
    "bpfed": Entry("BPFed", "clients", "Gaussian layers, the first shared and the last personal", "Gaussian layers, all but the last, and the population of the last", "Gaussian layers of its own, the last", "Chen et al. 2023, arXiv:2309.15499"),
    "pfedbayes": Entry("PFedBayes", "clients", "personal Gaussian networks around a shared one", "a Gaussian network, the prior of all clients", "a Gaussian network of its own", "Zhang et al. 2022, arXiv:2206.07977"),
    "bayes-admm": Entry("BayesADMM", "clients", "Gaussian posteriors of one network by ADMM, with natural-gradient steps", "a Gaussian posterior of the network", "what its rows say of the weights, a Gaussian factor; `adapt` fine-tunes the mean", "Möllenhoff et al. 2026, arXiv:2506.13150"),
    "fedpop": Entry("FedPop", "clients", "shared base, posteriors of heads under a population prior", "the body, and a population prior of the head", "nothing; `adapt` draws its head from a Laplace posterior, or by Langevin steps", "Kotelevskii et al. 2022, arXiv:2206.03611"),
    "ifca": Entry("IFCA", "clients", "K models, each averaged over the clients it fits best", "K networks, each of the clients that it fits best", "nothing; `adapt` picks one", "Ghosh et al. 2020, arXiv:2006.04088"),
    "ditto": Entry("Ditto", "clients", "personal models pulled towards the averaged one", "the network", "a network of its own, pulled towards the shared one", "Li et al. 2021, arXiv:2012.04221"),
    "apfl": Entry("APFL", "clients", "a learnt mixture of a personal and the averaged model", "the network", "a network of its own, and its share in a mixture of both", "Deng et al. 2020, arXiv:2003.13461"),
    "fedrep": Entry("FedRep", "clients", "shared representation and personal heads, in turns", "the body, and the mean of the heads", "the head, trained before the body in each round", "Collins et al. 2021, arXiv:2102.07078"),
    "knn-per": Entry("KNNPer", "clients", "averaging, mixed with a client's own nearest rows", "the network", "its rows' features and labels, after `adapt`", "Marfoq et al. 2022, arXiv:2111.09360"),
    "fedrecon": Entry("FedRecon", "clients", "personal layers rebuilt each round, never kept", "the body, and the mean of the heads", "nothing; the head is rebuilt in each round and in `adapt`", "Singhal et al. 2021, arXiv:2102.03448"),
    "lg-fedavg": Entry("LGFedAvg", "clients", "personal representations under a shared last layer", "the head, and the mean of the bodies", "the body", "Liang et al. 2020, arXiv:2001.01523"),
    "per-fedavg": Entry("PerFedAvg", "clients", "a start from which one step personalises", "the network, as a start for one step", "the network after its own step", "Fallah et al. 2020, arXiv:2002.07948"),
    "pfedme": Entry("PFedMe", "clients", "personal models at Moreau envelopes of a shared one", "the network", "a network of its own, at a Moreau envelope of the shared one", "Dinh et al. 2020, arXiv:2006.08848"),
    "fedpa": Entry("FedPA", "clients", "posterior averaging: sampled posteriors, whose common mode is sought", "the network", "nothing; `adapt` fine-tunes a copy", "Al-Shedivat et al. 2021, arXiv:2010.05273"),
    "fedem": Entry("FedEM", "clients", "clients are mixtures of shared components", "K networks", "its shares in them", "Marfoq et al. 2021, arXiv:2108.10252"),
    "fedbe": Entry("FedBE", "clients", "sampled models distilled on the server's unlabelled rows", "the network, distilled from sampled ones on unlabelled rows of the server", "nothing; `adapt` fine-tunes a copy", "Chen and Chao 2021, arXiv:2009.01974"),
    "ensemble": Entry("Ensemble", "clients", "K networks, each averaged over a random group", "K networks, each of a random group of clients", "its group", "a baseline of Kim and Hospedales 2023, appendix F.2"),
    "ep": Entry("EP", "silos", "expectation propagation: NUTS in each silo, the pooled posterior in few rounds", "q(Z_G) as a product of the prior and a factor for each silo", "its chains of NUTS over Z_G and its own latents, and its factor", "Vehtari et al. 2020, JMLR 21, arXiv:1412.4869"),
    "sfvi": Entry("SFVI", "silos", "structured variational inference: a gradient a round, as if pooled", "q(Z_G), a Gaussian posterior of the global latents, and parameters θ", "the posterior of its own latents given Z_G", "Hassan, Salomone and Mengersen 2023, arXiv:2302.03314, Algorithm 1"),
    "sfvi-avg": Entry("SFVIAvg", "silos", "SFVI with local steps; posteriors averaged (barycentre)", "q(Z_G) and θ, averaged after local steps", "the posterior of its own latents given Z_G", "Hassan, Salomone and Mengersen 2023, arXiv:2302.03314, Algorithm 2"),
    "pvi": Entry("PVI", "silos", "partitioned variational inference: the pooled posterior in few rounds", "q(Z_G) as a product of the prior and a factor for each silo", "its factor, and the posterior of its own latents given Z_G", "Ashman et al. 2022, arXiv:2202.12275"),
}
# fmt: on


def names(kind: str) -> list[str]:
    """The algorithms that run over clients, or over silos.

    >>> names("silos")
    ['ep', 'sfvi', 'sfvi-avg', 'pvi']
    """
    return [name for name, entry in REGISTRY.items() if entry.kind == kind]


def module_of(name: str) -> str:
    """An algorithm's module within the package.

    >>> module_of("fedhb-niw")
    'algorithms.fedhb_niw'
    """
    return f"algorithms.{name.replace('-', '_')}"


def find(name: str, kind: str | None = None) -> type[Any]:
    """The algorithm's class by its registered name.

    >>> find("fedper").__name__
    'FedPer'
    """
    if name not in REGISTRY:
        known = list(REGISTRY) if kind is None else names(kind)
        raise UserError(f"there is no algorithm {name!r}; {nearest(name, known)} (fedbayes list shows all)")
    entry = REGISTRY[name]
    if (kind, entry.kind) == ("clients", "silos"):
        raise UserError(f"{name} fits a NumPyro model over silos, not a network; use fedbayes fit FILE --algorithm {name}")
    if (kind, entry.kind) == ("silos", "clients"):
        raise UserError(f"{name} trains a network over clients, not a NumPyro model; choose one of {', '.join(names('silos'))}")
    return getattr(importlib.import_module(f"fedbayes.{module_of(name)}"), entry.cls)
