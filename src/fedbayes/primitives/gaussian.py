"""Closed forms for Gaussian families: the structured Gaussian of SFVI (section 3.1), by reparametrisation and by density.

    Z_G     = μ_G + σ_G ⊙ (L_G ε_G)
    Z_L|Z_G = μ̄ + C (Z_G − μ_G) + σ(Z_G) ⊙ (L ε_L),      log σ(Z_G) = log σ̄ + D (Z_G − μ_G)

L are unit lower-triangular. The paper has D = 0; with it the local scale moves with Z_G as the local mean does. Local latents
come in blocks that are independent given Z_G, each with its own μ̄, σ̄, L, C and D.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from fedbayes import trees
from fedbayes.models.beliefs import Marginals
from fedbayes.primitives import small

STEPS = 50
"""Of the barycentre's fixed point; it gains a digit or so in each."""


class Global(NamedTuple):
    """q(Z_G). Without `lower` it is mean-field."""

    mean: Float[Array, " n"]
    log_scale: Float[Array, " n"]
    lower: Float[Array, "n n"] | None


class Local(NamedTuple):
    """q(Z_L | Z_G) of one plate's blocks. None stands for what is zero."""

    mean: Float[Array, "blocks d"]
    log_scale: Float[Array, "blocks d"]
    lower: Float[Array, "blocks d d"] | None
    C: Float[Array, "blocks d n"] | None
    D: Float[Array, "blocks d n"] | None


def init_global(n: int, *, full: bool) -> Global:
    """N(0, I)."""
    return Global(jnp.zeros(n), jnp.zeros(n), jnp.zeros((n, n)) if full else None)


def init_local(blocks: int, d: int, n: int, *, dense: bool, coupled: bool, moving_scale: bool) -> Local:
    """N(0, I) whatever its n parents are; with `dense`, L may grow, with `coupled`, C, with `moving_scale`, D."""
    zeros = jnp.zeros((blocks, d, n)) if coupled or moving_scale else None
    lower = jnp.zeros((blocks, d, d)) if dense and d > 1 else None
    nought = jnp.zeros((blocks, d))
    return Local(nought, nought, lower, zeros if coupled else None, zeros if moving_scale else None)


def global_units(q: Global) -> Global:
    """The unit of each parameter of q(Z_G): a standard deviation for means, 1 for what has no unit."""
    root = jnp.ones(()) if q.lower is None else jnp.sqrt(1 + jnp.sum(jnp.tril(q.lower, -1) ** 2, axis=1))
    return jax.tree.map(jnp.ones_like, q)._replace(mean=jnp.exp(q.log_scale) * root)


def local_units(q: Local, above: Float[Array, " n"]) -> Local:
    """The unit of each parameter of q(Z_L | parents), whose standard deviations are `above`."""
    scale, ones = jnp.exp(q.log_scale), jax.tree.map(jnp.ones_like, q)
    per_parent = jnp.broadcast_to(1 / above, (*scale.shape, above.size))
    C, D = None if q.C is None else scale[..., None] * per_parent, None if q.D is None else per_parent
    return ones._replace(mean=scale, C=C, D=D)


def draw_global(q: Global, noise: Float[Array, " n"]) -> Float[Array, " n"]:
    """Z_G from ε_G."""
    mixed = noise if q.lower is None else noise + _apply(jnp.tril(q.lower, -1), noise)
    return q.mean + jnp.exp(q.log_scale) * mixed


def log_global(q: Global, z: Float[Array, " n"]) -> Float[Array, ""]:
    """log q(Z_G)."""
    noise = (z - q.mean) * jnp.exp(-q.log_scale)
    if q.lower is not None:
        noise = small.solve_lower(_unit(q.lower), noise)
    return -0.5 * jnp.sum(noise**2) - jnp.sum(q.log_scale) - z.size * math.log(2 * math.pi) / 2


def draw_local(q: Local, noise: Float[Array, "blocks d"], offset: Float[Array, " n"]) -> Float[Array, "blocks d"]:
    """Z_L from ε_L; `offset` is Z_G − μ_G."""
    mixed = noise if q.lower is None else noise + jnp.einsum("bij,bj->bi", jnp.tril(q.lower, -1), noise)
    mean, log_scale = _conditional(q, offset)
    return mean + jnp.exp(log_scale) * mixed


def log_local(q: Local, z: Float[Array, "blocks d"], offset: Float[Array, " n"]) -> Float[Array, " blocks"]:
    """log q(Z_L | Z_G) of each block."""
    mean, log_scale = _conditional(q, offset)
    noise = (z - mean) * jnp.exp(-log_scale)
    if q.lower is not None:
        noise = jax.vmap(small.solve_lower)(_unit(q.lower), noise)
    return -0.5 * jnp.sum(noise**2, axis=1) - jnp.sum(log_scale, axis=1) - z.shape[1] * math.log(2 * math.pi) / 2


def root(q: Global) -> Float[Array, "n n"]:
    """σ_G ⊙ L_G, the Cholesky root of Σ_GG."""
    return jnp.exp(q.log_scale)[:, None] * (jnp.eye(q.mean.size) if q.lower is None else _unit(q.lower))


def covariance(q: Global) -> Float[Array, "n n"]:
    """Σ_GG."""
    return root(q) @ root(q).T


def recentre(q: Local, shift: Float[Array, " n"]) -> Local:
    """The same q(Z_L | Z_G), written with a μ_G that has moved by `shift`."""
    mean, log_scale = _conditional(q, shift)
    return q._replace(mean=mean, log_scale=log_scale)


class Natural(NamedTuple):
    """A Gaussian factor exp(shiftᵀ z − ½ zᵀ precision z), or a product of some; the precision may be negative."""

    shift: Float[Array, " n"]
    precision: Float[Array, "n n"]


def natural(q: Global) -> Natural:
    """q(Z_G) in natural parameters."""
    inverse = small.inverse_root(root(q))
    precision = inverse.T @ inverse
    return Natural(precision @ q.mean, precision)


def from_moments(mean: Float[Array, " n"], covariance: Float[Array, "n n"]) -> Global:
    """N(mean, covariance), with a full covariance."""
    return from_root(mean, small.cholesky(covariance))


def from_root(mean: Float[Array, " n"], root: Float[Array, "n n"]) -> Global:
    """The Gaussian with this mean and this Cholesky root of its covariance."""
    scale = jnp.diagonal(root)
    return Global(mean, jnp.log(scale), jnp.tril(root / scale[:, None], -1))


def from_natural(factor: Natural) -> Global:
    """The Gaussian with these natural parameters; not finite where the precision is not positive."""
    covariance = small.inverse(factor.precision)
    return from_moments(covariance @ factor.shift, covariance)


def log_factor(factor: Natural, z: Float[Array, " n"]) -> Float[Array, ""]:
    """log of the factor, up to its constant."""
    return factor.shift @ z - 0.5 * z @ factor.precision @ z


def barycentre(mean: Float[Array, " n"], covariances: Float[Array, "j n n"]) -> Global:
    """The Wasserstein barycentre of Gaussians with this mean together: the fixed point of Σ = J⁻¹ Σ_j (Σ^½ Σ_j Σ^½)^½.

    Roots are by eigenvectors (Álvarez-Esteban et al. 2016 for the iteration): OTT-JAX's, by Newton–Schulz in single precision,
    gives 0 for a standard deviation that is a hundredth of another's.
    """

    def root(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
        values, vectors = jnp.linalg.eigh(matrix)
        return vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :] @ vectors.T

    def step(_: Any, covariance: Float[Array, "n n"]) -> Float[Array, "n n"]:
        values, vectors = jnp.linalg.eigh(covariance)
        scale = jnp.sqrt(jnp.maximum(values, jnp.finfo(values.dtype).tiny))[None, :]
        half, inverse = vectors * scale @ vectors.T, vectors / scale @ vectors.T
        middle = inverse @ jnp.mean(jax.vmap(lambda one: root(half @ one @ half))(covariances), axis=0)
        return middle @ middle.T

    return from_moments(mean, jax.lax.fori_loop(0, STEPS, step, jnp.mean(covariances, axis=0)))


def _conditional(q: Local, offset: Float[Array, " n"]) -> tuple[Float[Array, "blocks d"], Float[Array, "blocks d"]]:
    mean = q.mean if q.C is None else q.mean + _apply(q.C, offset)
    return mean, q.log_scale if q.D is None else q.log_scale + _apply(q.D, offset)


def _apply(matrix: Float[Array, "*b n"], vector: Float[Array, " n"]) -> Float[Array, " *b"]:
    """A matrix times a vector as a sum, which XLA fuses with what is around it; a call for so small a product costs more."""
    return jnp.sum(matrix * jnp.broadcast_to(vector, matrix.shape), axis=-1)


def _unit(lower: Float[Array, "*b d d"]) -> Float[Array, "*b d d"]:
    return jnp.tril(lower, -1) + jnp.broadcast_to(jnp.eye(lower.shape[-1]), lower.shape)


class MeanField(NamedTuple):
    """A Gaussian over a network's weights, each on its own: means and ρ, with σ = log(1 + e^ρ)."""

    mean: Any
    rho: Any


def marginals(q: MeanField) -> Marginals:
    """Means and standard deviations."""
    return Marginals(q.mean, jax.tree.map(deviation, q.rho))


def mean_field(marginals: Marginals) -> MeanField:
    """The Gaussian with these marginals.

    >>> round(float(marginals(mean_field(Marginals(jnp.ones(1), jnp.full(1, 0.5)))).deviation[0]), 6)
    0.5
    """
    return MeanField(marginals.mean, jax.tree.map(rho_of, marginals.deviation))


@jax.custom_jvp
def deviation(rho: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """σ = log(1 + e^ρ), to single precision, in a fifth of the time of `jax.nn.softplus` on a CPU, whose log1p is slow.

    log(1 + u) = 2 artanh(u / (2 + u)), by its series, with u = e^−|ρ|.

    >>> [round(float(deviation(jnp.float32(rho))), 4) for rho in (-200.0, 0.0, 3.0)]
    [0.0, 0.6931, 3.0486]
    """
    u = jnp.exp(-jnp.abs(rho))
    s = u / (2 + u)  # at most 1/3, so eight terms are enough
    return jnp.maximum(rho, 0.0) + 2 * s * jnp.polyval(jnp.array([1 / odd for odd in range(15, 0, -2)], rho.dtype), s * s)


@deviation.defjvp
def _slope_of_deviation(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (rho,) = primals
    u = jnp.exp(-jnp.abs(rho))  # the same as in `deviation`, so that it is computed once
    return deviation(rho), jnp.where(rho > 0, 1.0, u) / (1 + u) * tangents[0]


def rho_of(sigma: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """ρ from σ; a σ of 0 gives a ρ whose deviation is 1e-37.

    >>> round(float(deviation(rho_of(jnp.float32(0.25)))), 6)
    0.25
    """
    sigma = jnp.maximum(sigma, 1e-37)
    return sigma + jnp.log(-jnp.expm1(-sigma))


def draw(key: PRNGKeyArray, q: MeanField, pool: Float[Array, " m"] | None = None) -> Any:
    """Weights μ + σ ε.

    With a pool of standard normal numbers, more than there are weights, ε is a window of it at a random place, with new random
    signs for each row and each column of a matrix. Over draws from one pool P, Σ a_dk ε_dk then has mean 0 and variance
    Σ a_dk² P_dk² in every direction a; magnitudes come back, at other weights. It takes a fraction of the time of new noise.
    """
    noise = trees.normal_like(key, q.mean) if pool is None else window(key, pool, q.mean)
    return jax.tree.map(lambda mean, rho, e: mean + deviation(rho) * e, q.mean, q.rho, noise)


def window(key: PRNGKeyArray, pool: Float[Array, " m"], like: Any) -> Any:
    """Noise for each weight from a pool; see `draw`."""
    leaves, structure = jax.tree.flatten(like)
    shapes = [(leaf.size // columns, columns) for leaf in leaves for columns in [leaf.shape[-1] if leaf.ndim > 1 else 1]]
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    place = jax.random.randint(key, (), 0, pool.size - int(starts[-1]) + 1)
    signs = jax.random.rademacher(jax.random.fold_in(key, 1), (sum(map(sum, shapes)),), jnp.float32)
    of_rows_and_columns = jnp.split(signs, np.cumsum([side for shape in shapes for side in shape])[:-1].tolist())

    def signed(number: int, leaf: Array) -> Array:
        rows, columns = of_rows_and_columns[2 * number : 2 * number + 2]
        part = jax.lax.dynamic_slice(pool, (place + int(starts[number]),), (leaf.size,)).reshape(shapes[number])
        return (part * rows[:, None] * columns[None, :]).reshape(leaf.shape)

    return jax.tree.unflatten(structure, [signed(number, leaf) for number, leaf in enumerate(leaves)])


class Prior(NamedTuple):
    """What KL(· ‖ p) needs of p, computed once for many steps."""

    mean: Any
    sigma: Any


def prior(p: MeanField) -> Prior:
    """`p` as a prior."""
    return Prior(p.mean, jax.tree.map(deviation, p.rho))


def kl(q: MeanField, p: MeanField | Prior) -> Float[Array, ""]:
    """KL(q ‖ p), summed over all weights. Where q is p its slopes are 0 to the last digit, so that Adam has nothing to enlarge.

    >>> q, p = MeanField(jnp.ones(1), jnp.zeros(1)), MeanField(jnp.zeros(1), jnp.zeros(1))
    >>> round(float(kl(q, p) * math.log(2) ** 2 * 2), 4)  # the means are 1 apart, and σ = log 2 in both
    1.0
    """
    held = prior(p) if isinstance(p, MeanField) else p

    def term(mean: Array, rho: Array, mean_p: Array, sigma_p: Array) -> Array:
        return kl_diagonal(mean, deviation(rho), mean_p, sigma_p)

    return jax.tree.reduce(jnp.add, jax.tree.map(term, q.mean, q.rho, *held))


def kl_diagonal(
    mean_q: Float[Array, "*n"], sigma_q: Float[Array, "*n"], mean_p: Float[Array, "*n"], sigma_p: Float[Array, "*n"]
) -> Float[Array, ""]:
    """KL(N(mean_q, sigma_q²) ‖ N(mean_p, sigma_p²)), summed over all elements."""
    ratio = sigma_q / sigma_p
    return jnp.sum((ratio**2 + ((mean_q - mean_p) / sigma_p) ** 2 - 1) / 2 - jnp.log(ratio))
