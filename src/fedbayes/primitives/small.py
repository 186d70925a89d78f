"""Factorisations of small matrices in plain array operations.

Batched LAPACK calls of jaxlib wait for tasks of the thread pool that they themselves run in. Two of them side by side, as in
silos that are sampled together, can wait for each other for ever; these cannot, and for some tens of rows they are as fast.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

UNROLLED = 4
"""Rows up to which a loop is written out."""


def cholesky(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The lower factor of a symmetric matrix; not finite where it is not positive.

    >>> cholesky(jnp.array([[4.0, 2.0], [2.0, 5.0]])).tolist()
    [[2.0, 0.0], [1.0, 2.0]]
    """
    rows = jnp.arange(len(matrix))

    def column(j: Array, root: Float[Array, "n n"]) -> Float[Array, "n n"]:
        left = matrix[:, j] - root @ root[j]
        return root.at[:, j].set(jnp.where(rows >= j, left / jnp.sqrt(left[j]), 0.0))

    return jax.lax.fori_loop(0, len(matrix), column, jnp.zeros_like(matrix))


def semidefinite_root(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """A lower factor of a symmetric matrix that may be singular; directions without positive curvature are left out.

    >>> semidefinite_root(jnp.array([[4.0, 2.0], [2.0, 1.0]])).tolist()
    [[2.0, 0.0], [1.0, 0.0]]
    """
    rows, least = jnp.arange(len(matrix)), 1e-7 * jnp.max(jnp.abs(matrix))

    def column(j: Array, root: Float[Array, "n n"]) -> Float[Array, "n n"]:
        left = matrix[:, j] - root @ root[j]
        found = left / jnp.sqrt(jnp.where(left[j] > least, left[j], 1.0))
        return root.at[:, j].set(jnp.where((rows >= j) & (left[j] > least), found, 0.0))

    return jax.lax.fori_loop(0, len(matrix), column, jnp.zeros_like(matrix))


def solve_lower(root: Float[Array, "n n"], right: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """L⁻¹ b of a lower triangular L.

    >>> solve_lower(jnp.array([[2.0, 0.0], [1.0, 4.0]]), jnp.array([2.0, 9.0])).tolist()
    [1.0, 2.0]
    """

    def row(i: Any, found: Array) -> Array:
        return found.at[i].set((right[i] - jnp.tensordot(root[i], found, 1)) / root[i, i])

    return jax.lax.fori_loop(0, len(root), row, jnp.zeros_like(right), unroll=len(root) <= UNROLLED)


def solve_upper(root: Float[Array, "n n"], right: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """U⁻¹ b of an upper triangular U.

    >>> solve_upper(jnp.array([[2.0, 1.0], [0.0, 4.0]]), jnp.array([4.0, 8.0])).tolist()
    [1.0, 2.0]
    """
    return solve_lower(root[::-1, ::-1], right[::-1])[::-1]


def inverse_root(root: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """L⁻¹."""
    return solve_lower(root, jnp.eye(len(root), dtype=root.dtype))


def inverse(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a positive matrix; not finite where it is not positive."""
    left = inverse_root(cholesky(matrix))
    return left.T @ left


RIDGE = 1e-5
"""The part of its diagonal that is added to a covariance, so that single precision can invert one that is nearly singular."""


def ridged_inverse(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The inverse of a covariance, to within `RIDGE`."""
    return inverse(matrix + RIDGE * jnp.diag(jnp.diagonal(matrix)))
