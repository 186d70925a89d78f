"""How far clients differ in how common each class is: the width τ of a prior N(0, τ² I) of what a client adds to all outputs.

    p(y_i | τ) = ∫ Π_rows p(y | f + b) N(b; 0, τ² I) db     f: the shared model's outputs, b: a number for each class
    p(τ | clients) ∝ p(τ) Π_i p(y_i | τ)                     over `WIDTHS`; p(τ) is uniform in τ (Gelman 2006), so that few
                                                             clients, whom the shared model fits, do not make τ small

b has as many numbers as there are classes, so that the integral is close to Laplace's approximation of it, and clients that
trained the shared model can tell τ, where a choice by newcomers would need many of them. Every `EVERY` rounds they send
log p(y_i | τ), a few numbers, as a sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedbayes.primitives import small

WIDTHS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""τ that are weighed."""
EVERY = 5
"""Rounds from one sum to the next."""
LAST = 5
"""About so many sums are averaged, the last ones: the shared model moves on."""
STEPS, LONGEST = 6, 2.0
"""Newton steps towards the mode of b, and the longest of each in any class."""


def evidence(outputs: Float[Array, "n k"], y: Int[Array, " n"], mask: Bool[Array, " n"]) -> Float[Array, " widths"]:
    """log p(y | τ) for each width.

    >>> y = jnp.arange(60) % 3
    >>> alike, other = evidence(jnp.zeros((60, 3)), y, y >= 0), evidence(jnp.zeros((60, 3)), 0 * y, y >= 0)
    >>> WIDTHS[int(alike.argmax())], WIDTHS[int(other.argmax())]
    (0.1, 3.2)
    """
    observed = jax.nn.one_hot(y, outputs.shape[1], dtype=outputs.dtype)

    def moments(b: Float[Array, " k"]) -> tuple[Float[Array, "n k"], Float[Array, "k k"]]:
        p = jnp.where(mask[:, None], jax.nn.softmax(outputs + b[None]), 0.0)
        return p, jnp.diag(jnp.sum(p, axis=0)) - p.T @ p

    def of(square: Float[Array, ""]) -> Float[Array, ""]:
        identity = jnp.eye(outputs.shape[1], dtype=outputs.dtype)

        def step(_: Any, b: Float[Array, " k"]) -> Float[Array, " k"]:
            p, H = moments(b)
            gradient = jnp.sum(jnp.where(mask[:, None], observed, 0.0) - p, axis=0) - b / square
            root = small.cholesky(H + identity / square)
            return b + jnp.clip(small.solve_upper(root.T, small.solve_lower(root, gradient)), -LONGEST, LONGEST)

        b = jax.lax.fori_loop(0, STEPS, step, jnp.zeros_like(outputs[0]))
        logs = jnp.sum(jax.nn.log_softmax(outputs + b[None]) * observed, axis=1)
        volume = jnp.sum(jnp.log(jnp.diagonal(small.cholesky(identity + square * moments(b)[1]))))
        return jnp.sum(jnp.where(mask, logs, 0.0)) - jnp.sum(b**2) / (2 * square) - volume

    return jax.vmap(of)(jnp.asarray(np.square(WIDTHS), outputs.dtype))


def nothing(*_: Any) -> Float[Array, " widths"]:
    """What is sent in other rounds."""
    return jnp.zeros(len(WIDTHS))


def due(round: Int[Array, ""]) -> Bool[Array, ""]:
    """Whether clients send their sum in the round after so many."""
    return (round + 1) % EVERY == 0


def after(total: Float[Array, " widths"], round: Int[Array, ""], told: Float[Array, " widths"]) -> Float[Array, " widths"]:
    """The average of the last sums after the round that followed so many."""
    share = jnp.maximum(1 / jnp.maximum((round + 1) // EVERY, 1), 1 / LAST)
    return jnp.where(due(round), total + share * (told - total), total)


def square(total: Float[Array, " widths"]) -> Float[Array, ""]:
    """E[τ² | clients].

    >>> round(float(square(jnp.array([0.0, 0.0, 50.0, 0.0, 0.0, 0.0]))), 4)
    0.16
    """
    widths = jnp.asarray(WIDTHS, total.dtype)  # a grid of even logarithms: uniform in τ is a weight of τ
    return jax.nn.softmax(total + jnp.log(widths)) @ widths**2
