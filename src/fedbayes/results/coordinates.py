"""Other coordinates of Z_G, in which an importance sampler's proposals fit better than on the real line itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import gammainc, gammaincc, gammainccinv, gammaincinv, gammaln, log_ndtr, ndtr, ndtri_exp

from fedbayes.algorithms.evidence import POINTS
from fedbayes.models import frames
from fedbayes.models.sites import Values
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian
from fedbayes.results.mixtures import Points

SKEWED = 0.08
"""Skewness by quantiles from which on a marginal is not taken for a normal one."""
SHAPES = np.geomspace(0.2, 50.0, 60)
EDGES = (0.05, 0.5, 0.95)
REACH = 36.0
"""Normal scores beyond which no latent is."""
FAR = 1e-100
"""A probability beyond which the tail's leading term stands for it."""


class Frame(Protocol):
    """Other coordinates of Z_G."""

    def to(self, z: Points) -> tuple[Points, Float[np.ndarray, " s"]]:
        """x for each z, and log |dx/dz|."""

    def back(self, x: Points) -> Points:
        """z for each x."""


class Line:
    """The real line as it is."""

    def to(self, z: Points) -> tuple[Points, Float[np.ndarray, " s"]]:
        """z itself."""
        return z, np.zeros(len(z))

    def back(self, x: Points) -> Points:
        """x itself."""
        return x


class Standardised:
    """Global latents by the location and the scale that the population draws them with."""

    def __init__(self, structured: Structured, theta: Values, dtype: Any) -> None:
        self.structured, self.theta, self.dtype = structured, theta, dtype

    @classmethod
    def of(cls, structured: Structured, theta: Values, q: gaussian.Global) -> Standardised | None:
        """The frame of a model; None where no latent is drawn with a location or a scale that others have."""
        frame = cls(structured, theta, q.mean.dtype)
        noise = np.random.default_rng(0).normal(size=(8, q.mean.size))
        x, _ = frame.to(noise)
        y, _ = frame.to(noise[::-1].copy())
        affine = frame.to(noise + 1.0)[0] - x
        fixed = np.allclose(x, y[::-1], equal_nan=True) and np.allclose(affine, affine[:1], rtol=1e-3, atol=1e-3)
        return None if fixed else frame

    def to(self, z: Points) -> tuple[Points, Float[np.ndarray, " s"]]:
        """x for each z, and log |dx/dz|."""
        x, slope = by_blocks(functools.partial(frames.standardised, self.structured, self.theta), z, self.dtype)
        return np.asarray(x, float), np.asarray(slope, float)

    def back(self, x: Points) -> Points:
        """z for each x."""
        return np.asarray(by_blocks(functools.partial(frames.placed, self.structured, self.theta), x, self.dtype), float)


class Skewed(NamedTuple):
    """Normal scores of each latent under a marginal of its own: a + b log G with G ~ Gamma(k), mirrored where b < 0.

    The logarithm of a scale that may be 0 has such a marginal: for a half-normal one exactly, with k = ½. A latent without a
    clear skewness has k = ∞, a normal marginal. For one that is neither, proposals in these coordinates still have its right
    quantiles.
    """

    a: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " n"]
    k: Float[np.ndarray, " n"]
    base: Frame
    """The coordinates whose marginals they are."""

    @classmethod
    def of(cls, z: Points, weights: Float[np.ndarray, " s"], base: Frame) -> Skewed | None:
        """By quantiles of weighted points; None where no latent is skewed.

        >>> half = np.abs(np.random.default_rng(0).normal(size=(4000, 1)))
        >>> found = Skewed.of(np.log(half), np.full(4000, 1 / 4000), Line())
        >>> bool(0.35 < found.k[0] < 0.7), bool(found.b[0] > 0)
        (True, True)
        """
        low, middle, high = (_quantile(z, weights, edge) for edge in EDGES)
        width = np.maximum(high - low, 1e-12)
        skew = (high + low - 2 * middle) / width
        table = np.log(gammaincinv(SHAPES[:, None], np.array(EDGES)))
        widths = table[:, 2] - table[:, 0]
        skews = (table[:, 2] + table[:, 0] - 2 * table[:, 1]) / widths  # below 0, nearer to it as k grows
        place = np.interp(-np.abs(skew), skews, np.arange(len(SHAPES)))
        k = np.exp(np.interp(place, np.arange(len(SHAPES)), np.log(SHAPES)))
        plain = np.abs(skew) < SKEWED
        if plain.all():
            return None
        edges = np.log(gammaincinv(k, np.array(EDGES)[:, None]))
        b = -np.sign(skew) * width / (edges[2] - edges[0])
        normal = width / (2 * 1.6448536)
        a = np.where(plain, middle, middle - b * edges[1])
        return cls(a, np.where(plain, normal, b), np.where(plain, math.inf, k), base)

    def to(self, z: Points) -> tuple[Points, Float[np.ndarray, " s"]]:
        """x for each z, and log |dx/dz|."""
        y, before = self.base.to(z)
        x = (y - self.a) / self.b
        slope = np.broadcast_to(-np.log(np.abs(self.b)), z.shape).copy()
        for column in np.flatnonzero(np.isfinite(self.k)):
            k, y = self.k[column], np.clip(x[:, column], -1e4, 1e3)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                t = np.exp(y)
                below, above = gammainc(k, t), gammaincc(k, t)
                log_below = np.where(below > FAR, np.log(below), k * y - gammaln(k + 1))
                log_above = np.where(above > FAR, np.log(above), (k - 1) * y - t - gammaln(k))
                score = np.where(
                    below < 0.5, ndtri_exp(np.minimum(log_below, -1e-300)), -ndtri_exp(np.minimum(log_above, -1e-300))
                )
                slope[:, column] += k * y - t - gammaln(k) + score**2 / 2 + math.log(2 * math.pi) / 2
            x[:, column] = score
        far = (np.abs(x) > REACH).any(axis=1)
        return np.where(far[:, None], 0.0, x * np.sign(self.b)), np.where(far, -np.inf, before + slope.sum(axis=1))

    def back(self, x: Points) -> Points:
        """z for each x."""
        y = np.clip(x, -REACH, REACH) * np.sign(self.b)
        for column in np.flatnonzero(np.isfinite(self.k)):
            k, score = self.k[column], y[:, column]
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                low = np.where(ndtr(score) > FAR, np.log(gammaincinv(k, ndtr(score))), (log_ndtr(score) + gammaln(k + 1)) / k)
                high = np.log(gammainccinv(k, ndtr(-score)))
            y[:, column] = np.where(score < 0, low, high)
        return self.base.back(self.a + self.b * y)


def _quantile(z: Points, weights: Float[np.ndarray, " s"], level: float) -> Float[np.ndarray, " n"]:
    order = np.argsort(z, axis=0)
    values, levels = np.take_along_axis(z, order, axis=0), np.cumsum(weights[order], axis=0)
    return np.array([np.interp(level, levels[:, i], values[:, i]) for i in range(z.shape[1])])


def by_blocks(function: Callable[[Array], Any], points: Points, dtype: Any) -> Any:
    """`function` of points, `POINTS` at a time with the last block filled up: one compiled shape for any number of points."""
    parts = []
    for start in range(0, len(points), POINTS):
        block = points[start : start + POINTS]
        full = np.concatenate([block, np.broadcast_to(block[-1], (POINTS - len(block), block.shape[1]))])
        found = jax.device_get(function(jnp.asarray(full, dtype)))
        parts.append(jax.tree.map(lambda leaf, count=len(block): leaf[:count], found))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
