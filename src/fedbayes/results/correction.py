"""What a Gaussian q(Z_G) cannot represent, mended: weighted draws of Z_G from the federated evidence.

    points   z_s ~ a mixture: q, and t densities around it that are wider          first round
    weights  w_s = p(z_s) Π_j p(y_j | z_s) / Σ_r N_r/N proposal_r(z_s)              from all rounds so far
    next     mixtures of t densities fitted to the weighted points, and so on       while k̂ or the effective size is poor,
             in several coordinates, also in normal scores of skewed marginals       (coordinates.py)

Where q is a product of factors (EP, PVI), draws of g = p(Z_G) Π_j t_j(Z_G), the prior itself times the silos' factors, are the
second proposal: a good one where silos' factors fit, however far from a Gaussian the prior is. Its constant comes from bridge
sampling (Meng and Wong 1996) between its draws and the points before, which reach into tails that g may lack. The rest is
adaptive multiple importance sampling (Cornuet et al. 2012) with Pareto-smoothed weights (Vehtari et al. 2024). A round
asks each silo for two numbers a point, of which the server needs the sums (algorithms/evidence.py). Nothing here knows who asks
the silos: a simulation does, or the coordinator of a deployment.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from fedbayes.algorithms.evidence import POINTS, Told
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian, tilted
from fedbayes.primitives.evidence import FLOOR
from fedbayes.results import mixtures
from fedbayes.results.coordinates import Frame, Line, Skewed
from fedbayes.results.mixtures import Component, Mixture, Points
from fedbayes.trees import quietly

ROUNDS = 4
"""Evidence rounds of a correction; up to twice as many where the weights are reliable and only too few."""
MOST = 40
"""Global latents up to which a correction is tried."""
ENOUGH = 1000
"""Effective draws from which on no further round is asked for."""
EQUAL = 1e-3
"""A range of log weights below which they are equal: a tail fitted to what is left of rounding says nothing."""
LEAST = 100
"""Effective draws below which weighted draws are not believed."""
TAKEN, EACH = 400, 40
"""Effective draws from which on they take q's place, at least and for each latent, up to `ENOUGH`: with fewer, the tails of
many latents are a few points."""
TRUSTED = 0.7
"""k̂ up to which weights are believed."""
MIXED = 1.05
"""The r-hat up to which chains at the server are."""
TRIALS = 4
"""Runs of chains at the server, at most, until they have mixed."""
COMPONENTS, TAILS = 4, 10
"""Components of a mixture, and latents whose tails have one of their own, at most."""
SHARE = 0.15
"""The share of a round's points that any coordinates have, at least."""
LINE = Line()

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

    @property
    def enough(self) -> bool:
        """Whether they can take q's place."""
        return self.reliable and self.ess >= min(max(TAKEN, EACH * np.shape(self.z)[1]), ENOUGH)

    def resampled(self, count: int, seed: int = 0) -> Points:
        """Draws of equal weight, by systematic resampling, in random order."""
        random = np.random.default_rng([seed, 1])
        places = (random.random() + np.arange(count)) / count
        chosen = np.searchsorted(np.cumsum(self.weights), places).clip(max=len(self.weights) - 1)
        return random.permutation(self.z[chosen])


class Proposal(NamedTuple):
    """Where the points of a round come from: mixtures, each in coordinates of its own, with shares that sum to 1 in all."""

    parts: list[tuple[Frame, Mixture]]


class Tilted(NamedTuple):
    """Draws from the prior times the silos' factors (primitives/tilted.py), log Π_j t_j at points, and whether chains mixed."""

    z: Points
    log_factors: Density
    mixed: bool

    @classmethod
    def of(cls, structured: Structured, q: gaussian.Global, factors: gaussian.Natural, seed: int) -> Tilted:
        """From NUTS at the server."""
        near, mixed = None, False
        for trial in range(TRIALS):  # nobody is asked, so chains that have not mixed go on from where they are
            found = tilted.draws(structured, POINTS, jax.random.fold_in(jax.random.key(seed), trial), q, factors, near)
            mixed = bool(found.health.rhat < MIXED) and bool(found.health.ess > LEAST)
            if mixed or not bool(np.isfinite(found.z).all()):
                break
            near = found.z
        mean, root = np.asarray(q.mean, float), np.asarray(gaussian.root(q), float)
        shift, precision = (np.asarray(part, float) for part in factors)

        def log_factors(z: Points) -> Float[np.ndarray, " s"]:
            u = np.linalg.solve(root, (z - mean).T).T
            return u @ shift - np.einsum("si,ij,sj->s", u, precision, u) / 2

        return cls(np.asarray(found.z, float), log_factors, mixed and bool(np.isfinite(found.z).all()))


class Sampler:
    """Adaptive importance sampling of Z_G, a round at a time.

    Args:
        q: q(Z_G), around which the first points lie.
        log_prior: log p(Z_G) on the real line.
        ask: What silos tell.
        seed: Of the points.
        points: Points of a round.
        frame: Other coordinates of the model, in which proposals are fitted too.
    """

    def __init__(
        self, q: gaussian.Global, log_prior: Density, ask: Ask, seed: int = 0, points: int = POINTS, frame: Frame | None = None
    ) -> None:
        self.q, self.log_prior, self.ask, self.seed, self.points, self.frame = q, log_prior, ask, seed, points, frame
        mean, root = np.asarray(q.mean, float), np.asarray(gaussian.root(q), float)
        self.normal = Component(1.0, mean, root, math.inf)
        self.proposals: list[Proposal | Tilted] = []
        self.counts: list[int] = []
        self.z: Points = np.zeros((0, len(mean)))
        self.seen: dict[int, tuple[Points, Float[np.ndarray, " s"]]] = {}
        self.log_p = self.prior = self.difference = np.zeros(0)
        self.told: list[Told] = []

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return len(self.proposals)

    def round(self) -> Corrected:
        """One more evidence round, from q at first and then from mixtures fitted to the weighted points."""
        random = np.random.default_rng([self.seed, self.rounds])
        proposal = self._next() if self.rounds else self._first(random)
        return self._asked(self._draw(proposal, random), proposal)

    def from_factors(self, draws: Tilted) -> Corrected:
        """One more evidence round, about draws of p Π_j t_j."""
        if not self.rounds:
            self.round()
        return self._asked(draws.z, draws)

    def _asked(self, z: Points, proposal: Proposal | Tilted) -> Corrected:
        # Points cross as the silos' numbers, and are what they are after that.
        z = z.astype(np.asarray(self.q.mean).dtype).astype(float)
        self.proposals.append(proposal)
        self.counts.append(len(z))
        told, prior = self.ask(z, self.rounds), np.asarray(self.log_prior(z), float)
        with np.errstate(invalid="ignore"):
            log_p = np.asarray(told.evidence, float) + prior
        log_p = np.where(np.isfinite(log_p) & (np.asarray(told.evidence) > FLOOR / 10), log_p, -np.inf)
        self.told.append(told)
        self.z = np.concatenate([self.z, z])
        self.log_p, self.prior = np.concatenate([self.log_p, log_p]), np.concatenate([self.prior, prior])
        self.difference = np.concatenate([self.difference, np.asarray(told.difference, float)])
        return self.weighed()

    def of_q(self) -> tuple[Points, Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
        """The points that q itself gave, their log importance ratios, and the difference between halves."""
        first = self.proposals[0]
        assert isinstance(first, Proposal)
        count = round(first.parts[0][1][0].share * self.points)
        z = self.z[:count]
        return z, self.log_p[:count] - self.normal.log_density(z), self.difference[:count]

    def weighed(self) -> Corrected:
        """All points so far, with their weights."""
        ratios = self.log_p - self._log_mixture()
        weights, khat = smoothed(ratios)
        halves = tuple(smoothed(ratios + sign * self.difference / 2)[0] for sign in (1, -1))
        ess = float(1 / np.sum(weights**2))
        return Corrected(self.z, weights, khat, ess, self.rounds, self._sent(self.rounds), halves)  # type: ignore[arg-type]

    def _log_mixture(self) -> Float[np.ndarray, " s"]:
        """The log density of all proposals together, each with its share of the points."""
        plain = [place for place, one in enumerate(self.proposals) if isinstance(one, Proposal)]
        shares = np.log(np.array(self.counts) / sum(self.counts))
        found = np.logaddexp.reduce([shares[place] + self._log_density(self.proposals[place]) for place in plain])  # type: ignore[arg-type]
        ends = np.cumsum([0, *self.counts])
        for place, one in enumerate(self.proposals):
            if isinstance(one, Tilted):
                with np.errstate(invalid="ignore"):
                    log_g = np.nan_to_num(self.prior + one.log_factors(self.z), nan=-np.inf, posinf=-np.inf)
                own = slice(ends[place], ends[place + 1])
                others = np.ones(len(self.z), bool)
                others[own] = False
                total = np.log(sum(self.counts[at] for at in plain) / sum(self.counts))
                ratio = log_g - (found - total)
                weights, _ = smoothed(ratio[others])
                if 1 / np.sum(weights**2) < LEAST:  # too little in common for a constant: g's draws stand alone
                    return np.where(others, np.inf, log_g)
                found = np.logaddexp(found, shares[place] + log_g - bridge(ratio[others], ratio[own]))
        return found

    def _sent(self, rounds: int) -> int:
        return rounds * (2 * self.points + 4) * np.asarray(self.q.mean).dtype.itemsize

    def _draw(self, proposal: Proposal, random: np.random.Generator) -> Points:
        edges = np.cumsum([0.0, *(sum(one.share for one in mixture) for _, mixture in proposal.parts)])
        counts = np.diff(np.round(edges / edges[-1] * self.points).astype(int))
        parts = zip(proposal.parts, counts, strict=True)
        found = np.concatenate([frame.back(mixtures.draw(_whole(one), random, int(count))) for (frame, one), count in parts])
        return np.where(np.isfinite(found), found, 0.0)

    def _log_density(self, proposal: Proposal) -> Float[np.ndarray, " s"]:
        parts = [(self._seen(frame), mixture) for frame, mixture in proposal.parts]
        return np.logaddexp.reduce([mixtures.log_density(mixture, x) + slope for (x, slope), mixture in parts])

    def _seen(self, frame: Frame) -> tuple[Points, Float[np.ndarray, " s"]]:
        """All points in other coordinates, and log |dx/dz|."""
        x, slope = self.seen.get(id(frame), (self.z[:0], np.zeros(0)))
        if len(x) < len(self.z):
            new, bend = frame.to(self.z[len(x) :])
            fine = np.isfinite(new).all(axis=1) & np.isfinite(bend)
            x = np.concatenate([x, np.where(fine[:, None], new, 0.0)])
            slope = np.concatenate([slope, np.where(fine, bend, -np.inf)])
            self.seen[id(frame)] = (x, slope)
        return x, slope

    def _first(self, random: np.random.Generator) -> Proposal:
        mean, root = self.normal.mean, self.normal.root
        wider = [Component(0.35, mean, 1.2 * root, 5.0), Component(0.15, mean, 2.0 * root, 3.0)]
        half = [self.normal._replace(share=0.5)]
        if self.frame is None:
            return Proposal([(LINE, [*half, *wider])])
        x, _ = self.frame.to(self.normal.draw(random, self.points))
        x = x[np.isfinite(x).all(axis=1)]
        framed = mixtures.fitted(x, np.full(len(x), 1 / len(x)), 1)
        return Proposal([(LINE, [*half, *mixtures.scaled(wider, 0.5)]), (self.frame, mixtures.scaled(framed, 0.25))])

    def _next(self) -> Proposal:
        """Mixtures for the points so far; where few have all of the weight, for flatter weights w^β."""
        now, n = self.weighed(), self.z.shape[1]
        wanted = min(max(100, 20 * n), 0.25 * len(self.z))
        weights = _flatter(now.weights, wanted)
        far = now.ess < LEAST  # q is far from the posterior, or much narrower
        flat = _flatter(now.weights, max(wanted, (n + 1) * (n + 2))) if far else weights

        def of(points: Points, log_p: Float[np.ndarray, " s"]) -> Mixture:
            found = mixtures.fitted(points, weights, COMPONENTS)
            if far and (top := mixtures.surrogate(points, log_p, flat)) is not None:
                found = [top._replace(share=0.6), *mixtures.scaled(found, 0.4)]
            whole = mixtures.fitted(points, weights, 1)[0]
            wide = whole._replace(share=1.0, root=1.5 * whole.root, degrees=3.0)
            rest = [*mixtures.scaled(mixtures.tails(points, weights, TAILS), 0.2), wide._replace(share=0.1)]
            return [*mixtures.scaled(found, 1 - sum(one.share for one in rest)), *rest]

        parts: list[tuple[Frame, Mixture]] = []
        for frame in (LINE, self.frame) if self.frame else (LINE,):
            skewed = Skewed.of(self._seen(frame)[0], weights, frame)
            for one in (frame, skewed) if skewed else (frame,):
                x, slope = self._seen(one)
                inside = np.isfinite(slope)
                parts.append((one, of(x, np.where(inside, self.log_p - np.where(inside, slope, 0.0), -np.inf))))
        # Which coordinates suit the points better.
        logs = np.stack([self._log_density(Proposal([part])) for part in parts])
        shares = np.full(len(parts), 1 / len(parts))
        for _ in range(10):
            member = np.exp(logs - logs.max(axis=0)) * shares[:, None]  # those of the line are finite
            shares = np.maximum(member / member.sum(axis=0) @ weights, SHARE)
            shares /= shares.sum()
        return Proposal(
            [(frame, mixtures.scaled(mixture, share)) for (frame, mixture), share in zip(parts, shares, strict=True)]
        )


def bridge(of_f: Float[np.ndarray, " s"], of_g: Float[np.ndarray, " r"], steps: int = 50) -> float:
    """The log constant of a density g by bridge sampling, from log g / f at draws of f and at draws of g.

    >>> random = np.random.default_rng(0)
    >>> log_ratio = lambda z: np.log(3 / 2) - z**2 / 8 + z**2 / 2  # f = N(0, 1), g = 3 N(0, 4)
    >>> found = bridge(log_ratio(random.normal(size=4000)), log_ratio(2 * random.normal(size=1000)))
    >>> bool(abs(found - np.log(3)) < 0.05)
    True
    """
    share_f, share_g = np.log(np.array([len(of_f), len(of_g)]) / (len(of_f) + len(of_g)))
    constant = float(np.median(of_g))
    for _ in range(steps):
        mixed_f, mixed_g = (np.logaddexp(share_g + one, share_f + constant) for one in (of_f, of_g))
        over_f = np.logaddexp.reduce(of_f - mixed_f) - np.log(len(of_f))
        constant = float(over_f - np.logaddexp.reduce(-mixed_g) + np.log(len(of_g)))
    return constant


def _whole(mixture: Mixture) -> Mixture:
    return mixtures.scaled(mixture, 1 / sum(one.share for one in mixture))


def _flatter(weights: Float[np.ndarray, " s"], wanted: float) -> Float[np.ndarray, " s"]:
    """w^β with the largest β up to 1 for which so many draws are effective."""
    if 1 / np.sum(weights**2) >= wanted:
        return weights
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        flat = _power(weights, middle)
        low, high = (middle, high) if 1 / np.sum(flat**2) >= wanted else (low, middle)
    return _power(weights, low)


def smoothed(ratios: Float[np.ndarray, " s"]) -> tuple[Float[np.ndarray, " s"], float]:
    """Pareto-smoothed importance weights of log ratios, and k̂; infinite where nothing is finite."""
    fine = np.isfinite(ratios)
    if fine.sum() < 10:
        return np.full(len(ratios), 1 / len(ratios)), math.inf
    if fine.all() and np.ptp(ratios) < EQUAL:
        return np.full(len(ratios), 1 / len(ratios)), 0.0
    logs, khat = quietly("arviz").psislw(np.where(fine, ratios, ratios[fine].min() - 100.0))
    weights = np.exp(np.asarray(logs))
    return weights / weights.sum(), float(khat)


def _power(weights: Float[np.ndarray, " s"], exponent: float) -> Float[np.ndarray, " s"]:
    flat = np.where(weights > 0, weights, 1.0) ** exponent * (weights > 0)
    return flat / flat.sum()


def corrected(sampler: Sampler, rounds: int = ROUNDS, least: int = 1) -> Corrected:
    """Rounds until the weights are good, at least and at most so many; twice as many where they are reliable but too few."""
    found = sampler.weighed() if sampler.rounds else sampler.round()

    def go_on() -> bool:
        if sampler.rounds < rounds:
            return not (found.khat <= TRUSTED and found.ess >= ENOUGH)
        return sampler.rounds < 2 * rounds and found.reliable and not found.enough

    while sampler.rounds < least or go_on():
        found = sampler.round()
    return found


def mended(sampler: Sampler, draws: Callable[[], Tilted] | None, rounds: int = ROUNDS) -> Corrected | None:
    """Weighted draws from the silos' factors, if they can be believed, and else by adaptive rounds, if latents are few.

    Factors are Gaussian: where a scale touches 0 they lack the tail of its logarithm, and weights cannot tell of points that
    are missing. So a round with points in the tails follows, unless no more rounds are allowed.
    """
    if draws is not None and (found := draws()).mixed:
        by_factors = sampler.from_factors(found)
        if by_factors.enough and sampler.rounds < rounds:
            by_factors = sampler.round()
        if by_factors.enough:
            return by_factors
    return corrected(sampler, rounds, least=min(2, rounds)) if np.size(sampler.q.mean) <= MOST else None
