"""What a Gaussian q(Z_G) cannot represent, mended: weighted draws of Z_G from the federated evidence.

    points   z_s ~ a mixture: q, and t densities around it that are wider          first round
    weights  w_s = p(z_s) Π_j p(y_j | z_s) / Σ_r N_r/N proposal_r(z_s)              from all rounds so far
    next     a mixture of t densities fitted to the weighted points, and so on      while k̂ or the effective size is poor

This is adaptive multiple importance sampling (Cornuet et al. 2012) with Pareto-smoothed weights (Vehtari et al. 2024). A round
asks each silo for two numbers a point, of which the server needs the sums (algorithms/evidence.py). Nothing here knows who asks
the silos: a simulation does, or the coordinator of a deployment.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from fedbayes.algorithms.evidence import POINTS, Told
from fedbayes.primitives import gaussian
from fedbayes.primitives.evidence import FLOOR
from fedbayes.results import mixtures
from fedbayes.results.mixtures import Component, Mixture, Points
from fedbayes.trees import quietly

ROUNDS = 4
"""Evidence rounds of a correction, at most."""
MOST = 40
"""Global latents up to which a correction is tried."""
ENOUGH = 500
"""Effective draws from which on no further round is asked for."""
LEAST = 100
"""Effective draws below which weighted draws are not believed."""
TRUSTED = 0.7
"""k̂ up to which weights are believed."""
COMPONENTS = 4

Ask = Callable[[Points, int], Told]
"""What silos tell about points in the evidence round of this number, from 1 on."""
Density = Callable[[Points], Float[np.ndarray, " s"]]


@dataclasses.dataclass(frozen=True)
class Corrected:
    """Weighted draws of Z_G, on the real line."""

    z: Points
    weights: Float[np.ndarray, " s"]
    """They sum to 1."""
    khat: float
    """Of the weights."""
    ess: float
    """The effective number of draws."""
    rounds: int
    """Evidence rounds."""
    bytes: int
    """What a silo sent in them."""
    halves: tuple[Float[np.ndarray, " s"], Float[np.ndarray, " s"]]
    """The weights by either half of the silos' own draws."""

    @property
    def reliable(self) -> bool:
        """Whether the weights can be believed."""
        return self.khat <= TRUSTED and self.ess >= LEAST

    def resampled(self, count: int, seed: int = 0) -> Points:
        """Draws of equal weight, by systematic resampling, in random order."""
        random = np.random.default_rng([seed, 1])
        places = (random.random() + np.arange(count)) / count
        chosen = np.searchsorted(np.cumsum(self.weights), places).clip(max=len(self.weights) - 1)
        return random.permutation(self.z[chosen])


class Sampler:
    """Adaptive importance sampling of Z_G, a round at a time.

    Args:
        q: q(Z_G), around which the first points lie.
        log_prior: log p(Z_G) on the real line.
        ask: What silos tell.
        seed: Of the points.
        points: Points of a round.
    """

    def __init__(self, q: gaussian.Global, log_prior: Density, ask: Ask, seed: int = 0, points: int = POINTS) -> None:
        self.q, self.log_prior, self.ask, self.seed, self.points = q, log_prior, ask, seed, points
        mean, root = np.asarray(q.mean, float), np.linalg.cholesky(np.asarray(gaussian.covariance(q), float))
        self.normal = Component(1.0, mean, root, math.inf)
        self.proposals: list[Mixture] = []
        self.z: Points = np.zeros((0, len(mean)))
        self.log_p = self.difference = np.zeros(0)
        self.told: list[Told] = []

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return len(self.proposals)

    def round(self) -> Corrected:
        """One more evidence round, from q at first and then from a mixture fitted to the weighted points."""
        proposal = self._next() if self.rounds else self._first()
        random = np.random.default_rng([self.seed, self.rounds])
        # Points cross as the silos' numbers, and are what they are after that.
        z = mixtures.draw(proposal, random, self.points).astype(np.asarray(self.q.mean).dtype).astype(float)
        self.proposals.append(proposal)
        told = self.ask(z, self.rounds)
        with np.errstate(invalid="ignore"):
            log_p = np.asarray(told.evidence, float) + np.asarray(self.log_prior(z), float)
        log_p = np.where(np.isfinite(log_p) & (np.asarray(told.evidence) > FLOOR / 10), log_p, -np.inf)
        self.told.append(told)
        self.z = np.concatenate([self.z, z])
        self.log_p = np.concatenate([self.log_p, log_p])
        self.difference = np.concatenate([self.difference, np.asarray(told.difference, float)])
        return self.weighed()

    def of_q(self) -> tuple[Points, Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
        """The points that q itself gave, their log importance ratios, and the difference between halves."""
        count = round(self.proposals[0][0].share * self.points)
        z = self.z[:count]
        return z, self.log_p[:count] - self.normal.log_density(z), self.difference[:count]

    def weighed(self) -> Corrected:
        """All points so far, with their weights."""
        mixed = [mixtures.log_density(one, self.z) for one in self.proposals]
        log_q = np.logaddexp.reduce(mixed) - math.log(len(mixed))
        ratios = self.log_p - log_q
        weights, khat = smoothed(ratios)
        halves = tuple(smoothed(ratios + sign * self.difference / 2)[0] for sign in (1, -1))
        ess = float(1 / np.sum(weights**2))
        sent = self.rounds * (2 * self.points + 4) * np.asarray(self.q.mean).dtype.itemsize
        return Corrected(self.z, weights, khat, ess, self.rounds, sent, halves)  # type: ignore[arg-type]

    def _first(self) -> Mixture:
        mean, root = self.normal.mean, self.normal.root
        wider = [Component(0.35, mean, 1.2 * root, 5.0), Component(0.15, mean, 2.0 * root, 3.0)]
        return [self.normal._replace(share=0.5), *wider]

    def _next(self) -> Mixture:
        """A mixture for the points so far; where few have all of the weight, for flatter weights w^β."""
        now, n = self.weighed(), self.z.shape[1]
        wanted = min(max(100, 20 * n), 0.25 * len(self.z))
        weights = now.weights
        if now.ess < wanted:
            low, high = 0.0, 1.0
            for _ in range(30):
                middle = (low + high) / 2
                flat = _power(now.weights, middle)
                low, high = (middle, high) if 1 / np.sum(flat**2) >= wanted else (low, middle)
            weights = _power(now.weights, low)
        found = mixtures.fitted(self.z, weights, COMPONENTS)
        whole = mixtures.fitted(self.z, weights, 1)[0]
        return [
            *(one._replace(share=0.85 * one.share) for one in found),
            whole._replace(share=0.15, root=1.5 * whole.root, degrees=3.0),
        ]


def smoothed(ratios: Float[np.ndarray, " s"]) -> tuple[Float[np.ndarray, " s"], float]:
    """Pareto-smoothed importance weights of log ratios, and k̂; infinite where nothing is finite."""
    fine = np.isfinite(ratios)
    if fine.sum() < 10:
        return np.full(len(ratios), 1 / len(ratios)), math.inf
    logs, khat = quietly("arviz").psislw(np.where(fine, ratios, ratios[fine].min() - 100.0))
    weights = np.exp(np.asarray(logs))
    return weights / weights.sum(), float(khat)


def _power(weights: Float[np.ndarray, " s"], exponent: float) -> Float[np.ndarray, " s"]:
    flat = np.where(weights > 0, weights, 1.0) ** exponent * (weights > 0)
    return flat / flat.sum()


def corrected(sampler: Sampler, rounds: int = ROUNDS, least: int = 1) -> Corrected:
    """Rounds until the weights are good, at least and at most so many in all."""
    found = sampler.weighed() if sampler.rounds else sampler.round()
    while sampler.rounds < least or (sampler.rounds < rounds and not (found.khat <= TRUSTED and found.ess >= ENOUGH)):
        found = sampler.round()
    return found
