"""Gaussians from a silo's draws: of Z_G with its Monte Carlo noise, and of Z_L given Z_G."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedbayes.primitives import gaussian, small
from fedbayes.primitives.gaussian import Global, Local, Natural
from fedbayes.primitives.sampling import BATCHES, Draws, draw_mask, mean_of, variance_of
from fedbayes.trees import finite


def conditionals(draws: Draws, q: Global) -> dict[str, Local]:
    """q(Z_L | Z_G) of each plate's blocks from draws: means by regression on Z_G and the silo's own latents, and scales that
    move with them."""
    u = draws.u.reshape(-1, draws.u.shape[-1])
    weight = jnp.tile(draw_mask(draws), draws.u.shape[0]).astype(u.dtype)
    total, n = jnp.maximum(jnp.sum(weight), 2.0), u.shape[1]
    to_offset = small.inverse_root(gaussian.root(q))  # u = this (Z_G − μ_G)
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.z.items()}

    def of_plate(value: Float[Array, "s blocks d"], parents: Float[Array, "s m"]) -> Local:
        m, d = parents.shape[1], value.shape[-1]
        design = jnp.concatenate([jnp.ones((len(parents), 1)), parents], axis=1) * weight[:, None]
        gram = design.T @ design
        gram = gram + jnp.diag(jnp.append(0.0, 1e-3 * jnp.diagonal(gram)[1:] + 1e-6))
        scale_of = jnp.sqrt(jnp.diagonal(gram))
        inverse = small.inverse(gram / jnp.outer(scale_of, scale_of)) / jnp.outer(scale_of, scale_of)

        def slopes(value: Float[Array, "s blocks d"]) -> tuple[Array, Array]:
            found = inverse @ jnp.einsum("si,sbd->ibd", design, value).reshape(m + 1, -1)
            found = found.reshape(m + 1, *value.shape[1:])
            return found[0], jnp.moveaxis(found[1:], 0, -1)

        mean, C = slopes(value)
        residual = value - mean[None] - jnp.einsum("bdn,sn->sbd", C, parents)
        variance = jnp.maximum(jnp.einsum("s,sbd->bd", weight, residual**2) / total, 1e-12)
        _, twice = slopes(jnp.log(residual**2 / variance[None] + 1e-6))
        D = twice / 2
        moving = jnp.clip(jnp.einsum("bdn,sn->sbd", D, parents), -3.0, 3.0)
        residual = residual * jnp.exp(-moving)
        covariance = jnp.einsum("s,sbi,sbj->bij", weight, residual, residual) / total
        floor = 1e-6 * jnp.einsum("bii->b", covariance) / d + 1e-12
        root = jax.vmap(small.cholesky)(covariance + floor[:, None, None] * jnp.eye(d)[None])
        scale = jnp.diagonal(root, axis1=1, axis2=2)
        lower = jnp.tril(root / scale[..., None], -1) if d > 1 else None
        C, D = (jnp.concatenate([part[..., :n] @ to_offset, part[..., n:]], axis=-1) for part in (C, D))
        return Local(mean, jnp.log(scale), lower, C, D)

    found = {"": of_plate(flat[""], u)} if "" in flat else {}
    below = jnp.concatenate([u, flat[""][:, 0] - found[""].mean], axis=1) if "" in flat else u
    return {name: found[""] if not name else of_plate(value, below) for name, value in flat.items()}


class Moments(NamedTuple):
    """Sums over draws, from which mean and covariance follow."""

    total: Float[Array, ""]
    u: Float[Array, " n"]
    g: Float[Array, " n"]
    uu: Float[Array, "n n"]
    ug: Float[Array, "n n"]
    gg: Float[Array, "n n"]


class Estimate(NamedTuple):
    """A Gaussian's natural parameters from draws, and the Monte Carlo variance of its mean and of log of its variances."""

    natural: Natural
    noise: Natural


def gaussian_of(draws: Draws) -> Estimate:
    """The Gaussian with the moments of Z_G, in natural parameters.

    E ∇ log p = 0 and E (u − m) ∇ log pᵀ = −I hold exactly for the density p that is sampled (Stein's identity), so both serve
    as control variates, with A = −Cov(u, ∇ log p) Var(∇ log p)⁻¹ of the draws:

        m = mean(u) + A mean(g),     C = A + mean((u − m) (u − m + A g)ᵀ)

    Of a Gaussian without local latents these have no Monte Carlo error at all; of a silo among J, they have that of what its
    local latents hide of its own information, a J-th of the whole, and not that of the whole precision.
    The bias of C⁻¹ is removed by a jackknife over parts of the chains, which also gives the noise.
    """
    kept = draw_mask(draws)
    centre, scale = mean_of(draws.u, kept), jnp.sqrt(variance_of(draws.u, kept))  # against cancellation in single precision
    u, gradient = (draws.u - centre[None, None]) / scale[None, None], draws.gradient * scale[None, None]
    parts = _batch_moments(draws._replace(u=u, gradient=gradient))

    def natural(moments: Moments) -> tuple[Natural, Natural]:
        """With control variates and without."""
        found = []
        for shift, precision in _natural(moments):
            precision = precision / jnp.outer(scale, scale)
            found.append(Natural(shift / scale + precision @ centre, precision))
        return found[0], found[1]

    total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), parts)
    both = natural(total), jax.vmap(lambda part: natural(jax.tree.map(jnp.subtract, total, part)))(parts)
    controlled = finite((both[0][0], both[1][0]))  # else there are too few draws, or digits
    whole, without = (jax.tree.map(lambda a, b: jnp.where(controlled, a, b), *one) for one in both)
    b = BATCHES * draws.u.shape[0]
    middle = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), without)
    corrected = jax.tree.map(lambda all, mean: b * all - (b - 1) * mean, whole, middle)
    noise = jax.tree.map(lambda leaf, mean: (b - 1) / b * jnp.sum((leaf - mean[None]) ** 2, axis=0), without, middle)
    proper = jnp.isfinite(small.cholesky(corrected.precision)).all()
    return Estimate(jax.tree.map(lambda a, b: jnp.where(proper, a, b), corrected, whole), noise)


def _batch_moments(draws: Draws) -> Moments:
    """Sums over each part of each chain."""
    most = draws.u.shape[1]
    part = jnp.minimum(jnp.arange(most) * BATCHES // jnp.maximum(draws.taken, 1), BATCHES)  # the last one is empty room
    member = (part[None, :] == jnp.arange(BATCHES)[:, None]) & draw_mask(draws)[None, :]
    member = member.astype(draws.u.dtype)

    def of_chain(u: Any, g: Any) -> Moments:
        return Moments(
            jnp.sum(member, axis=1),
            member @ u,
            member @ g,
            jnp.einsum("bs,si,sj->bij", member, u, u),
            jnp.einsum("bs,si,sj->bij", member, u, g),
            jnp.einsum("bs,si,sj->bij", member, g, g),
        )

    each = jax.vmap(of_chain)(draws.u, draws.gradient)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), each)


def _natural(moments: Moments) -> tuple[Natural, Natural]:
    count = jnp.maximum(moments.total, 2.0)
    u, g = moments.u / count, moments.g / count
    gg, ug = moments.gg / count - jnp.outer(g, g), moments.ug / count - jnp.outer(u, g)
    A = -ug @ small.ridged_inverse(gg)
    m = u + A @ g
    d = u - m
    direct = moments.uu / count - jnp.outer(u, u)
    C = A + direct + jnp.outer(d, d) + (ug + jnp.outer(d, g)) @ A.T
    precision, plain = small.ridged_inverse((C + C.T) / 2), small.ridged_inverse(direct)
    return Natural(precision @ m, precision), Natural(plain @ u, plain)
