"""Laplace's approximation of the posterior of a network's last layer under a Gaussian prior.

    log p(z | rows) = Σ_rows log p(y | f(z)) − ½ Σ (z − μ)² / v + const        f(z): the outputs of all rows
    p(z | rows) ≈ N(ẑ, T (JᵀWJ + diag(1/v))⁻¹)        ẑ the mode, J = ∂f/∂z, W the Fisher information of a row's outputs

All of it is computed in units of the prior's standard deviation, z = μ + √v u. There the prior is N(0, I), the precision is
H = I + √v JᵀWJ √v, and its eigenvalues are at least 1, so conjugate gradients solve with it for a head of any size and no
matrix is formed:

    mode:  Newton steps u ← u − t H⁻¹ ∇, t halved until the density rises
    draws: δ = H⁻¹ (√v Jᵀ A ξ₁ + ξ₂) with A Aᵀ = W and ξ₁, ξ₂ standard normal has covariance H⁻¹;  z = ẑ + √T √v δ

Exact for a normal likelihood with outputs that are affine in z. Where they are affine and the likelihood is categorical,
Bernoulli or Poisson, the density is log-concave and H is its Hessian, so the mode is the maximum. μ, v and T may be traced;
v = 0 leaves μ as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Bool, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.models import Categorical, Likelihood, Normal
from fedbayes.primitives import small
from fedbayes.trees import Params

NEWTON, HALVINGS = 50, 12
"""Newton steps, and halvings of a step's length, at most."""
CONVERGED = 1e-7
"""∇ᵀ H⁻¹ ∇ at the mode: the squared distance from the maximum in posterior standard deviations."""
ITERATIONS, TOLERANCE, ROUGH = 300, 1e-6, 1e-2
"""Conjugate-gradient iterations at most, and the residual relative to the right-hand side at which they end: of a draw, and of
the direction of a Newton step, which the next one mends."""


@dataclasses.dataclass(frozen=True)
class Head:
    """The rows of a client as a function of its last layer z, and the prior N(mean, variance) of z.

    >>> x, y = jnp.array([[1.0], [2.0]]), jnp.array([2.0, 4.0])
    >>> head = Head(lambda z: x @ z["w"], Normal(1.0), y, y > 0, {"w": jnp.zeros((1, 1))}, {"w": jnp.ones((1, 1))})
    >>> round(float(mode(head)["w"][0, 0]), 4)  # Σxy / (Σx² + 1)
    1.6667
    """

    outputs: Callable[[Params], Float[Array, "n k"]]
    """From z to the likelihood's parameters of every row."""
    likelihood: Likelihood
    y: Shaped[Array, " n"]
    mask: Bool[Array, " n"]
    """Rows whose mask is False do not exist; their outputs must still be finite."""
    mean: Params
    """μ."""
    variance: Params
    """v, a tree like `mean` whose leaves may also be scalars; may be traced."""

    def at(self, u: Params) -> Params:
        """z = μ + √v u."""
        return jax.tree.map(lambda mean, v, u: mean + jnp.sqrt(v) * u, self.mean, self.variance, u)

    def units(self, z: Params) -> Params:
        """u with z = μ + √v u; 0 where v is 0."""

        def unit(mean: Array, v: Array, z: Array) -> Array:
            return jnp.where(v > 0, (z - mean) / jnp.sqrt(jnp.where(v > 0, v, 1.0)), 0.0)

        return jax.tree.map(unit, self.mean, self.variance, z)


class Precision(NamedTuple):
    """H at one point, in units of the prior."""

    product: Callable[[Params], Params]
    """u → H u."""
    noise: Callable[[Float[Array, "n k"]], Params]
    """ξ → √v Jᵀ A ξ."""


def log_posterior(head: Head, z: Params) -> Float[Array, ""]:
    """Σ_rows log p(y | f(z)) − ½ Σ (z − μ)² / v."""
    return -_loss(head, head.units(z))


def mode(head: Head, near: Params | None = None) -> Params:
    """ẑ by Newton steps, from μ or from weights that are `near`."""

    def loss(u: Params) -> Float[Array, ""]:
        return _loss(head, u)

    def step(carry: Any) -> Any:
        u, value, _, number = carry
        gradient = jax.grad(loss)(u)
        direction = _solve(precision(head, head.at(u)), gradient, ROUGH)
        decrement = _dot(gradient, direction)

        def moved(t: Float[Array, ""]) -> Params:
            return jax.tree.map(lambda u, d: u - t * d, u, direction)

        def too_long(carry: Any) -> Any:
            t, halvings = carry
            # Rounding errors of the value are larger than the last steps' gains, so these are let through.
            enough = value - 1e-4 * t * decrement + 1e-6 * (1 + jnp.abs(value))
            return (halvings < HALVINGS) & ~(loss(moved(t)) <= enough)

        t, halvings = jax.lax.while_loop(too_long, lambda carry: (carry[0] / 2, carry[1] + 1), (jnp.float32(1), jnp.int32(0)))
        t = jnp.where(halvings < HALVINGS, t, 0.0)
        u = moved(t)
        return u, loss(u), jnp.where(t > 0, decrement, 0.0), number + 1

    def goes_on(carry: Any) -> Any:
        return (carry[2] > CONVERGED) & (carry[3] < NEWTON)

    start = jax.tree.map(jnp.zeros_like, head.mean) if near is None else head.units(near)
    u, *_ = jax.lax.while_loop(goes_on, step, (start, loss(start), jnp.float32(jnp.inf), jnp.int32(0)))
    return head.at(u)


def draws(key: PRNGKeyArray, head: Head, z: Params, count: int, temperature: float | Float[Array, ""] = 1.0) -> Params:
    """So many draws from N(z, T H⁻¹), H at z, stacked along a first axis; T = 0 gives z itself."""
    H, shape = precision(head, z), jax.eval_shape(head.outputs, z).shape

    def one(key: PRNGKeyArray) -> Params:
        for_rows, for_prior = jax.random.split(key)
        right = jax.tree.map(jnp.add, H.noise(jax.random.normal(for_rows, shape)), trees.normal_like(for_prior, z))
        delta = _solve(H, right, TOLERANCE)
        return jax.tree.map(lambda z, v, d: z + jnp.sqrt(temperature * v) * d, z, head.variance, delta)

    return jax.vmap(one)(jax.random.split(key, count))


def precision(head: Head, z: Params) -> Precision:
    """H = I + √v JᵀWJ √v at z."""
    outputs, J = jax.linearize(head.outputs, z)
    transpose = jax.linear_transpose(J, z)
    root, transposed = fisher_root(head.likelihood, outputs, head.y)

    def scaled(z: Params) -> Params:
        return jax.tree.map(lambda z, v: jnp.sqrt(v) * z, z, head.variance)

    def noise(xi: Float[Array, "n k"]) -> Params:
        return scaled(transpose(jnp.where(head.mask[:, None], root(xi), 0.0))[0])

    return Precision(lambda u: jax.tree.map(jnp.add, u, noise(transposed(J(scaled(u))))), noise)


Rows = Callable[[Float[Array, "n k"]], Float[Array, "n k"]]


def fisher_root(likelihood: Likelihood, outputs: Float[Array, "n k"], y: Shaped[Array, " n"]) -> tuple[Rows, Rows]:
    """A and Aᵀ of every row as functions, A Aᵀ = W.

    W is the Fisher information where it is known in closed form; else the curvature of −log p(y), which for one output of a
    Bernoulli or a Poisson likelihood is the same.

    >>> root, transposed = fisher_root(Categorical(2), jnp.zeros((1, 2)), jnp.array([0]))
    >>> root(transposed(jnp.array([[1.0, 0.0]]))).round(3).tolist()  # diag(p) − p pᵀ
    [[0.25, -0.25]]
    """
    if isinstance(likelihood, Categorical):  # A = diag(√p) − p √pᵀ, of which no matrix is formed
        p = jax.nn.softmax(outputs, axis=1)
        q = jnp.sqrt(p)
        return (
            lambda noise: q * noise - p * jnp.sum(q * noise, axis=1, keepdims=True),
            lambda values: q * (values - jnp.sum(p * values, axis=1, keepdims=True)),
        )
    if isinstance(likelihood, Normal):
        if likelihood.scale is None:  # 1/σ² of the mean and 2 of log σ
            diagonal = jnp.concatenate([jnp.exp(-outputs[:, 1:]), jnp.full_like(outputs[:, :1], jnp.sqrt(2.0))], axis=1)
        else:
            diagonal = jnp.full_like(outputs, 1 / likelihood.scale)
        return lambda noise: diagonal * noise, lambda values: diagonal * values

    def surprise(outputs: Float[Array, " k"], y: Shaped[Array, ""]) -> Float[Array, ""]:
        return -likelihood.log_prob(outputs[None], y[None])[0]

    A = jax.vmap(small.semidefinite_root)(jax.vmap(jax.hessian(surprise))(outputs, y))
    return (
        lambda noise: jnp.einsum("nij,nj->ni", A, noise),
        lambda values: jnp.einsum("nij,ni->nj", A, values),
    )


def _loss(head: Head, u: Params) -> Float[Array, ""]:
    fit = jnp.where(head.mask, head.likelihood.log_prob(head.outputs(head.at(u)), head.y), 0.0)
    return _dot(u, u) / 2 - jnp.sum(fit)


def _solve(H: Precision, right: Params, tolerance: float) -> Params:
    found: Params = cg(H.product, right, tol=tolerance, maxiter=ITERATIONS)[0]
    return found


def _dot(one: Params, other: Params) -> Float[Array, ""]:
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), one, other))
