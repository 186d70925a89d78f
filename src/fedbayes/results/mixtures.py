"""Mixtures of multivariate t and normal densities: proposals of an importance sampler, drawn from and fitted in float64."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln, logsumexp

DEGREES = 5.0
"""Degrees of freedom of fitted components."""
REACH = 6.0
"""Deviations of the points, by the root of the dimension, beyond which a surrogate's top is not believed."""
TAIL = 0.15
"""The share of points that are a skewed coordinate's tail."""
STEPS = 30
"""Of expectation maximisation."""

Matrix = Float[np.ndarray, "n n"]
Points = Float[np.ndarray, "s n"]


class Component(NamedTuple):
    """A t density with this many degrees of freedom, or a normal one where they are infinite."""

    share: float
    mean: Float[np.ndarray, " n"]
    root: Matrix
    """The Cholesky factor of its scale matrix."""
    degrees: float

    def log_density(self, z: Points) -> Float[np.ndarray, " s"]:
        """log density at each point."""
        n = len(self.mean)
        square = np.sum(np.linalg.solve(self.root, (z - self.mean).T) ** 2, axis=0)
        volume = np.sum(np.log(np.diagonal(self.root)))
        if math.isinf(self.degrees):
            return -0.5 * square - volume - n * math.log(2 * math.pi) / 2
        constant = gammaln((self.degrees + n) / 2) - gammaln(self.degrees / 2) - n * math.log(self.degrees * math.pi) / 2
        return constant - volume - (self.degrees + n) / 2 * np.log1p(square / self.degrees)

    def draw(self, random: np.random.Generator, count: int) -> Points:
        """Draws from it."""
        noise = random.normal(size=(count, len(self.mean)))
        if not math.isinf(self.degrees):
            noise *= np.sqrt(self.degrees / random.chisquare(self.degrees, size=(count, 1)))
        return self.mean + noise @ self.root.T


Mixture = list[Component]


def log_density(mixture: Mixture, z: Points) -> Float[np.ndarray, " s"]:
    """log Σ_k share_k density_k at each point."""
    return logsumexp([math.log(one.share) + one.log_density(z) for one in mixture], axis=0)


def draw(mixture: Mixture, random: np.random.Generator, count: int) -> Points:
    """Draws, of each component as many as its share says, in the components' order."""
    edges = np.round(np.cumsum([0.0, *(one.share for one in mixture)]) * count).astype(int)
    return np.concatenate([one.draw(random, int(n)) for one, n in zip(mixture, np.diff(edges), strict=True)])


def scaled(mixture: Mixture, share: float) -> Mixture:
    """The mixture with all shares times this one."""
    return [one._replace(share=share * one.share) for one in mixture]


def fitted(z: Points, weights: Float[np.ndarray, " s"], most: int) -> Mixture:
    """At most so many t components for weighted points, by expectation maximisation.

    They start as quantiles along the direction in which the points are least normal: along a funnel, from neck to mouth.
    """
    n, effective = z.shape[1], 1 / np.sum(weights**2)
    count = int(np.clip(effective / (8 * n + 8), 1, most))
    mean = weights @ z
    whole = _covariance(z, weights, mean)
    root = _root(whole)
    white = np.linalg.solve(root, (z - mean).T).T
    # The axes of the latents themselves, and those of the whitened points.
    lines = np.concatenate([white, (z - mean) / np.sqrt(np.diagonal(whole))], axis=1)
    skew, tail = weights @ lines**3, weights @ lines**4 - 3
    line = lines[:, np.argmax(skew**2 + tail**2 / 4)]
    order = np.argsort(line)
    level = np.empty(len(z))
    level[order] = np.cumsum(weights[order])
    member = np.eye(count)[np.minimum((level * count).astype(int), count - 1)]
    pull = 1.0 * n / effective  # towards one covariance for all, where a component has few points
    u = np.ones((len(z), count))
    components: Mixture = []
    for step in range(STEPS if count > 1 else 8):
        parts = weights[:, None] * member
        shares = np.maximum(parts.sum(axis=0), 1e-6)
        components = []
        for k in range(count):
            scaled = parts[:, k] * u[:, k]
            centre = scaled @ z / scaled.sum() if scaled.sum() > 0 else mean
            away = z - centre
            own = (away * scaled[:, None]).T @ away / shares[k]
            strength = pull / (shares[k] + pull)
            own = (1 - strength) * own + strength * whole / count ** (2 / n)
            components.append(Component(float(shares[k] / shares.sum()), centre, _root(own), DEGREES))
        if step == STEPS - 1:
            break
        logs = np.stack([math.log(one.share) + one.log_density(z) for one in components], axis=1)
        member = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
        square = np.stack([np.sum(np.linalg.solve(one.root, (z - one.mean).T) ** 2, axis=0) for one in components], axis=1)
        u = (DEGREES + n) / (DEGREES + square)
    return components


def tails(z: Points, weights: Float[np.ndarray, " s"], most: int) -> Mixture:
    """Components for the long tails of the most skewed coordinates, farther out and longer than the points there.

    A scale that may be 0 has such a tail in its logarithm, and while it is 0 the others are as they please.
    """
    mean = weights @ z
    whole = _covariance(z, weights, mean)
    sd = np.sqrt(np.diagonal(whole))
    skew = weights @ ((z - mean) / sd) ** 3
    found: Mixture = []
    for column in np.argsort(-np.abs(skew))[:most]:
        sign = math.copysign(1.0, skew[column])
        if abs(skew[column]) < 0.5:
            break
        order = np.argsort(-sign * z[:, column])
        kept = order[np.cumsum(weights[order]) < TAIL]
        share = weights[kept] / weights[kept].sum() if weights[kept].sum() > 0 else weights[kept]
        if len(kept) < 5 or 1 / np.sum(share**2) < 5:
            continue
        centre = share @ z[kept]
        pull = len(sd) / (len(sd) + 1 / np.sum(share**2))
        own = (1 - pull) * _covariance(z[kept], share, centre) + pull * whole
        spread = math.sqrt(own[column, column])
        stretch = np.ones(len(sd))
        stretch[column] = 2.0
        centre[column] += sign * spread
        found.append(Component(1.0, centre, _root(own * np.outer(stretch, stretch)), DEGREES))
    return scaled(found, 1 / max(len(found), 1))


def surrogate(z: Points, log_p: Float[np.ndarray, " s"], weights: Float[np.ndarray, " s"]) -> Component | None:
    """A t component at the top of the quadratic that fits log p best, which may lie far from all points; None if there is none.

    It is what Newton's method would do next, without a derivative.
    """
    n = z.shape[1]
    rows, columns = np.triu_indices(n)
    terms = 1 + n + len(rows)
    kept = np.isfinite(log_p) & (weights > 0)
    if 1 / np.sum(weights**2) < 1.5 * terms or kept.sum() < 2 * terms:
        return None
    mean = weights @ z
    root = _root(_covariance(z, weights, mean))
    white = np.linalg.solve(root, (z[kept] - mean).T).T
    design = np.concatenate([np.ones((len(white), 1)), white, white[:, rows] * white[:, columns]], axis=1)
    scale = np.sqrt(weights[kept])[:, None]
    found = np.linalg.lstsq(design * scale, (log_p[kept] - log_p[kept].max()) * scale[:, 0], rcond=None)[0]
    curvature = np.zeros((n, n))
    curvature[rows, columns] = -found[1 + n :]
    curvature += curvature.T
    values, vectors = np.linalg.eigh(curvature)
    if values.max() <= 0:
        return None
    values = np.maximum(values, 0.02)  # no wider than some 7 deviations of the points, also where it bends up
    top = vectors @ ((vectors.T @ found[1 : 1 + n]) / values)
    far = np.sqrt(np.sum(top**2))
    reach = REACH * math.sqrt(n)
    top = top * min(1.0, reach / far) if far > 0 else top
    return Component(1.0, mean + root @ top, _root(root @ (vectors / values @ vectors.T) @ root.T), DEGREES)


def _covariance(z: Points, weights: Float[np.ndarray, " s"], mean: Float[np.ndarray, " n"]) -> Matrix:
    away = z - mean
    found = (away * weights[:, None]).T @ away
    return found + 1e-8 * np.diag(np.diagonal(found)) + 1e-30 * np.eye(len(mean))


def _root(matrix: Matrix) -> Matrix:
    """The Cholesky factor of a covariance; where rounding leaves that indefinite, of one with a little more on its diagonal.

    >>> _root(np.ones((2, 2))).round(3).tolist()
    [[1.0, 0.0], [1.0, 0.0]]
    """
    for more in (0.0, *np.logspace(-12, 0, 7)):
        with contextlib.suppress(np.linalg.LinAlgError):
            return np.linalg.cholesky(matrix + more * np.diag(np.diagonal(matrix)))
    return np.diag(np.sqrt(np.diagonal(matrix)))
