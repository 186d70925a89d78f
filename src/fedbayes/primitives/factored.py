"""What PVI and EP share: q(Z_G) as a product of a Gaussian factor for the prior and one for each silo.

    q(Z_G) = t_0(Z_G) Π_j t_j(Z_G);    silo: cavity q / t_j, a Gaussian q_j, Δ_j = (q_j / q)^ρ;    server: q ← q Π_j Δ_j

Factors are kept in standardised coordinates u with Z_G = μ + L u, where q = N(μ, L Lᵀ) is N(0, I). Raw units, collinear
coefficients and wide priors then cost no digits in single precision. When q moves, a factor is written anew.

A factor may have a negative precision, q may not: the server takes 1, ½, ¼ … of a round's change, whichever is the first
that leaves q proper, and says so with the next broadcast, so that the silos' factors and q stay one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbayes.algorithm import AnyStructured
from fedbayes.errors import UserError
from fedbayes.primitives import gaussian, small
from fedbayes.primitives.gaussian import Global, Natural

HALVINGS = 10
PARTS = (1.0, 0.9999, 0.999, 0.99, 0.9, 0.5, 0.0)
"""Of a silo's factor, which are tried to be divided out of q."""


def flat(n: int) -> Natural:
    """The factor 1."""
    return Natural(jnp.zeros(n), jnp.zeros((n, n)))


def standard(n: int) -> Natural:
    """N(0, I): q in its own coordinates."""
    return Natural(jnp.zeros(n), jnp.eye(n))


def times(one: Natural, other: Natural) -> Natural:
    """The product of two factors."""
    return jax.tree.map(jnp.add, one, other)


def power(factor: Natural, exponent: Float[Array, ""] | float) -> Natural:
    """A power of a factor."""
    return jax.tree.map(lambda leaf: leaf * exponent, factor)


def over(one: Natural, other: Natural) -> Natural:
    """The quotient of two factors."""
    return jax.tree.map(jnp.subtract, one, other)


def rewritten(factor: Natural, old: Global, new: Global) -> Natural:
    """A factor in the coordinates of q = `old`, written in those of `new`."""
    root = gaussian.root(old)
    T = small.solve_lower(root, gaussian.root(new))
    a = small.solve_lower(root, new.mean - old.mean)
    precision = T.T @ factor.precision @ T
    return Natural(T.T @ (factor.shift - factor.precision @ a), (precision + precision.T) / 2)


def standardised(q: Global, z: Float[Array, " n"]) -> Float[Array, " n"]:
    """u of a Z_G."""
    return small.solve_lower(gaussian.root(q), z - q.mean)


def multiplied(q: Global, change: Natural) -> Global:
    """q times a factor in q's coordinates."""
    by = gaussian.from_natural(times(standard(q.mean.size), change))
    root = gaussian.root(q)
    return gaussian.from_root(q.mean + root @ by.mean, root @ gaussian.root(by))


def proper_part(q: Natural, change: Natural) -> Float[Array, ""]:
    """The first of 1, ½, ¼ … 0 for which q · change^part has a covariance."""
    parts = jnp.asarray([*(0.5**power for power in range(HALVINGS)), 0.0])
    roots = jax.vmap(lambda part: small.cholesky(times(q, power(change, part)).precision))(parts)
    # Not just positive: a precision that falls to nothing in one round is noise.
    large = jax.vmap(lambda root: jnp.min(jnp.diagonal(root), initial=1.0) > 0.1)(roots)
    return parts[jnp.argmax(jnp.isfinite(roots).all(axis=(1, 2)) & large | (parts == 0))]


def cavity(factor: Natural) -> Natural:
    """q / t_j in q's coordinates; where others leave no information, or less, as much of t_j stays as makes it proper."""
    whole = standard(factor.shift.size)
    parts = jnp.asarray(PARTS)
    roots = jax.vmap(lambda part: small.cholesky(over(whole, power(factor, part)).precision))(parts)
    return over(whole, power(factor, parts[jnp.argmax(jnp.isfinite(roots).all(axis=(1, 2)))]))


def arrived(local: Any, down: Any) -> Natural:
    """t_j as the server has it, in the coordinates of the q that has arrived.

    `local` has q as last received, t_j before its last change, that change and its round; `down` q and what was accepted.
    """
    taken = times(local.factor, power(local.change, down.accepted[local.round]))
    return rewritten(taken, local.q, down.shared.eta)


def check(algorithm: AnyStructured, name: str) -> None:
    """Refuse θ, and a run whose number of rounds is not known."""
    if theta := algorithm.structured.theta(algorithm.example):
        raise UserError(f"{name} has no θ, but the model has {', '.join(theta)}; give it a prior, or use SFVI")
    if algorithm.rounds is None:
        raise UserError("rounds is not set; call algorithm.planned(rounds) first")
