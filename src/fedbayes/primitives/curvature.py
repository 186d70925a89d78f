"""The diagonal of the Gauss–Newton matrix of a client's rows: how sharply they determine each weight.

    F = Σ_rows diag(JᵀWJ),   J = ∂outputs/∂θ,   W = A Aᵀ the Fisher information of a row's outputs
      ≈ Σ_rows (Jᵀ A ξ)²,    ξ random signs, one set for each row

For a row of one output, or of several that no weight shares, the estimate is exact; else it is unbiased, and its errors average
out over rows. It costs a gradient for each row, of at most `MOST` rows, whose sum is scaled to all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Params
from fedbayes.models import Model
from fedbayes.primitives.laplace import fisher_root
from fedbayes.primitives.training import drawn, rows

MOST = 64
"""Rows that are looked at, at most."""
BLOCK = 16
"""Rows whose gradients are in memory at once."""


def diagonal(model: Model, params: Params, key: PRNGKeyArray, data: Data) -> Params:
    """F at `params`, a tree like it.

    >>> from fedbayes.models import Normal, from_functions
    >>> model = from_functions(lambda key: {"w": jnp.zeros(2)}, lambda p, x: (x @ p["w"])[:, None], Normal(0.5), shape=(2,))
    >>> data = Data(jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.zeros(2), jnp.ones(2, bool))
    >>> diagonal(model, model.init(jax.random.key(0)), jax.random.key(0), data)["w"].tolist()  # Σ x² / .5²
    [40.0, 16.0]
    """
    for_rows, for_signs = jax.random.split(key)
    some = drawn(for_rows, data, MOST)
    signs = jax.random.rademacher(for_signs, (MOST, model.likelihood.outputs), jnp.float32)

    def of_row(x: Shaped[Array, " ..."], y: Shaped[Array, ""], sign: Float[Array, " k"]) -> Params:
        outputs, transposed = jax.vjp(lambda params: model.apply(params, x[None]), params)
        root, _ = fisher_root(model.likelihood, outputs, y[None])
        return transposed(root(sign[None]))[0]

    def block(total: Params, part: Any) -> tuple[Params, None]:
        (x, y, mask), sign = part
        gradients = jax.vmap(of_row)(x, y, sign)

        def added(total: Array, gradient: Array) -> Array:
            exists = mask.reshape(-1, *(1,) * (gradient.ndim - 1))
            return total + jnp.sum(jnp.where(exists, gradient**2, 0.0), axis=0)

        return jax.tree.map(added, total, gradients), None

    blocks = jax.tree.map(lambda leaf: leaf.reshape(MOST // BLOCK, BLOCK, *leaf.shape[1:]), (some, signs))
    found, _ = jax.lax.scan(block, jax.tree.map(jnp.zeros_like, params), blocks)
    scale = rows(data) / jnp.maximum(rows(some), 1)
    return jax.tree.map(lambda leaf: scale * leaf, found)
