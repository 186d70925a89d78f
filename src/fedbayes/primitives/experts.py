"""A Gaussian posterior of personal effects on a layer's outputs, as a product of a prior and one expert for each row.

    δ_ic = z_cᵀ u_i for each output c of row i,   z_c ~ N(0, I)          u: features in units of the prior's deviation
    q(z_c) ∝ N(z_c; 0, I) · Π_i exp(n_icᵀ z_c − ½ z_cᵀ diag(ν_i) z_c) · Π_{i labelled} exp(g_ic δ_ic − ½ λ_i (δ_ic − δ⁰_ic)²)
    precision of q(z_c), the same for all c:   A = I + diag(Σ_i ν_i) + Σ_i λ_i u_i u_iᵀ
    its mean:                                  A⁻¹ [Σ_i n_ic + Σ_i (g_ic + λ_i δ⁰_ic) u_i]

n and ν ≥ 0 are what a network says of a row; g and λ ≥ 0 are slope and curvature of the row's log-likelihood where the current
effect is δ⁰. Each row adds to the precision, so q contracts as rows come in. For a normal likelihood λ is 1/σ² and one step is
exact. For others each step is one of Newton's kind, δ⁰ ← uᵀ E[z]; where they end, E[z] is the mode, whatever λ is. With
classes λ = min(½, 2(1 − p_y)), which is at least the largest eigenvalue of diag(p) − ppᵀ: that is at most 2 max_c p_c(1 − p_c)
and never above ½ (Böhning's bound). One λ for all classes makes one matrix of all. For two classes it is the exact curvature at
p = ½ and near p_y = 1, elsewhere q is narrower than Laplace's approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from fedbayes.models import Categorical, Likelihood
from fedbayes.primitives import small


class Effects(NamedTuple):
    """q(z): a mean for each output, a root R of the covariance R Rᵀ, which outputs share, and log |det R|."""

    mean: Float[Array, "r k"]
    root: Float[Array, "r r"]
    logdet: Float[Array, ""]

    def draw(self, noise: Float[Array, "r k"]) -> Float[Array, "r k"]:
        """A draw of z from standard normal noise."""
        return self.mean + self.root @ noise

    def of(self, u: Float[Array, "n r"]) -> tuple[Float[Array, "n k"], Float[Array, " n"]]:
        """Mean and variance of the effects on rows' outputs."""
        return u @ self.mean, jnp.sum((u @ self.root) ** 2, axis=1)

    def divergence(self) -> Float[Array, ""]:
        """KL(q ‖ N(0, I)).

        >>> float(Effects(jnp.full((1, 1), 2.0), jnp.ones((1, 1)), jnp.float32(0)).divergence())
        2.0
        """
        size, outputs = self.mean.shape
        return jnp.sum(self.mean**2) / 2 + outputs * ((jnp.sum(self.root**2) - size) / 2 - self.logdet)

    def tempered(self, temperature: Any) -> Effects:
        """The same mean with the covariance multiplied."""
        root = jnp.sqrt(jnp.asarray(temperature, self.root.dtype))
        return Effects(self.mean, root * self.root, self.logdet + len(self.root) * jnp.log(root))


class Experts(NamedTuple):
    """What a network adds to the natural parameters of q(z), summed over rows."""

    natural: Float[Array, "r k"]
    precision: Float[Array, " r"]


class Labels(NamedTuple):
    """Labelled rows: the effect of δ on their likelihood."""

    outputs: Callable[[Float[Array, "n k"]], Float[Array, "n m"]]
    """From the effects to the likelihood's parameters."""
    likelihood: Likelihood
    y: Shaped[Array, " n"]
    mask: Bool[Array, " n"]
    """Rows that exist and have a label; the others must still give finite numbers."""


def product(u: Float[Array, "n r"], experts: Experts, labels: Labels, steps: Any, *, unroll: bool = False) -> Effects:
    """q(z) after so many steps of Newton's kind from the mean of the experts alone; `unroll` for gradients.

    >>> from fedbayes.models import Normal
    >>> u, y = jnp.array([[1.0], [2.0]]), jnp.array([2.0, 4.0])
    >>> labels = Labels(lambda delta: delta, Normal(1.0), y, y > 0)
    >>> q = product(u, Experts(jnp.zeros((1, 1)), jnp.zeros(1)), labels, 1)
    >>> round(float(q.mean[0, 0]), 4), round(float(q.root[0, 0] ** -2), 4)  # Σuy / (Σu² + 1), and Σu² + 1
    (1.6667, 6.0)
    """
    diagonal = 1 + experts.precision
    start = Effects(experts.natural / diagonal[:, None], jnp.diag(diagonal**-0.5), -jnp.sum(jnp.log(diagonal)) / 2)

    def step(mean: Float[Array, "r k"]) -> Effects:
        delta = u @ mean
        slope, curvature = terms(labels, delta)
        weighted = u * curvature[:, None]
        natural = experts.natural + u.T @ slope + weighted.T @ delta
        return solved(jnp.diag(diagonal) + u.T @ weighted, natural)

    if unroll:
        found = start
        for _ in range(steps):
            found = step(found.mean)
        return found
    return jax.lax.fori_loop(0, jnp.asarray(steps, jnp.int32), lambda _, found: step(found.mean), start)


def solved(A: Float[Array, "r r"], natural: Float[Array, "r k"]) -> Effects:
    """The Gaussian of a precision and a natural mean.

    Nothing is differentiated through the factorisation: R = R₀ (I + E), E = (I − R₀ᵀ A R₀)/2, where R₀ is held, is R₀ with the
    derivative of a root of A⁻¹, and tr E has that of log |det R|.
    """
    held = jax.lax.stop_gradient(small.inverse_root(small.cholesky(jax.lax.stop_gradient(A))).T)
    E = (jnp.eye(len(A), dtype=A.dtype) - held.T @ A @ held) / 2
    root = held + held @ E
    return Effects(root @ (root.T @ natural), root, jnp.sum(jnp.log(jnp.diagonal(held))) + jnp.trace(E))


def terms(labels: Labels, delta: Float[Array, "n k"]) -> tuple[Float[Array, "n k"], Float[Array, " n"]]:
    """Slope g and curvature λ of each row's log-likelihood in its effects; zeros where there is no label."""

    def fit(delta: Float[Array, "n k"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(labels.mask, labels.likelihood.log_prob(labels.outputs(delta), labels.y), 0.0))

    slope_of = jax.grad(fit)
    if isinstance(labels.likelihood, Categorical):
        surprise = -labels.likelihood.log_prob(labels.outputs(delta), labels.y)
        slope, curvature = slope_of(delta), jnp.minimum(0.5, -2 * jnp.expm1(-surprise))
    else:  # these have one output
        slope, second = jax.jvp(slope_of, (delta,), (jnp.ones_like(delta),))
        curvature = jnp.maximum(-jnp.sum(second, axis=1), 0.0)
    return slope, jnp.where(labels.mask, curvature, 0.0)
