"""How far clients' weights lie apart: the variance σ² of θ_i ~ N(μ, σ²), learnt from sums.

    q_i = N(m_i, s_i²), s² = 1/(F + 1/σ²), F what the rows say of the weight; δ_i = m_i − m the client's step in the round
    E (δ_i − mean δ)² = a² (σ² + 1/F),    a = (1 − (1 − t H/(n k))^k) F/H,   H = F + 1/σ0²
    σ² ← (ν0 σ0² + γ e)/(ν0 + γ),    e = (Σ_i (δ_i − mean δ)²/(N − 1) − mean a²/F) / mean a²,    γ = (N − 1) w
    q(μ) = N(m, σ²/(N w)),   w = 1 − mean s²/σ²

where sums and means are also over the weights of a group: an array of the network, or each weight for itself. a is the part of
the way to its own optimum that a client of n rows goes in a round of k steps of length t in all under a prior of variance σ0².
A client that reaches the mode under σ² has a = w, and then the estimate is that of restricted maximum likelihood, as EM and
MacKay (1992) have it. One that takes a step or two has not gone far, and neither clients that hardly moved nor the noise a²/F
of their few rows are taken for agreement or for disagreement: σ² neither collapses, as it does with point estimates, nor grows
with the length of a round. Where rows say nothing, F = 0, it is σ0². N w is the number of clients that the mean is worth: with
normal rows Var μ is exact. Summed over arrays, a client sends its network and four numbers for each array.

Reference:
    MacKay. Bayesian interpolation. Neural Computation 1992.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import Data
from fedbayes.models import Model
from fedbayes.primitives.training import Training, drawn, mixture_score, rows
from fedbayes.trees import Params

NU0 = 0.5
"""ν0: σ0² counts as much as so many weights of one client, and decides only where clients say nothing."""
LEAST = 3.0
"""Degrees of freedom of Student's t, at least, so that it has a variance."""
MOST = 2.0
"""A round changes σ² by at most this factor: in the first ones clients are far from where they end."""

HEATS = (0.0, 0.01, 0.1, 0.3, 1.0)
"""What the variances of draws around the mean may be multiplied by."""
HEATED, HEATED_DRAWS = 16, 8
"""Rows and draws by which a client scores them."""


class Apart(NamedTuple):
    """σ² of each array, one number or one for each weight; n and the degrees of freedom of σ²'s posterior, likewise."""

    variance: Params
    clients: Params
    degrees: Params


def start(params: Params, sigma0: float, N: int, by_weight: bool) -> Apart:
    """Before the first round: σ0², as if it were known."""

    def full(value: float) -> Params:
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape if by_weight else (), value, jnp.float32), params)

    return Apart(full(sigma0**2), full(float(N)), full(LEAST))


def pooled(tree: Params, by_weight: bool) -> Params:
    """What a client sends of squares: their sum over an array, or all of them.

    >>> pooled({"w": jnp.array([1.0, 2.0])}, by_weight=False)["w"].item()
    3.0
    """
    return tree if by_weight else jax.tree.map(jnp.sum, tree)


class Squares(NamedTuple):
    """Of one client δ², s², a² and a²/F, pooled; of a round their means over clients."""

    step: Params
    width: Params
    gone: Params
    noise: Params


class Way(NamedTuple):
    """The steps of a round and t, their length together; `pull` is the variance of the prior that they were taken under."""

    steps: Any
    t: Any
    pull: Any


END = Way(1.0, jnp.inf, None)
"""To the mode, under the prior of variance σ²."""


def way(training: Training, lr: Float[Array, ""], data: Data, pull: float) -> Way:
    """A round of SGD, each step as long as it comes to by the end of the round; of other optimisers, to the end."""
    if training.optimiser != "sgd":
        return END._replace(pull=pull)
    steps = jnp.ceil(rows(data) / min(training.batch, data.mask.shape[0])) * training.passes(data)
    beta = training.momentum
    return Way(jnp.maximum(steps, 1.0), lr / (1 - beta) * (steps - beta * (1 - beta**steps) / (1 - beta)), pull)


def measured(of: Way, delta: Params, gradient: Params, F: Params, n: Float[Array, ""]) -> Way:
    """The steps as they were found to be: shorter where gradients were clipped, going by the first gradient (of the mean)."""
    if of.t is jnp.inf:
        return of

    def expected(gradient: Array, F: Array) -> Float[Array, ""]:
        h = (F + 1 / of.pull) / jnp.maximum(n, 1)
        return jnp.sum(gradient**2 * (1 - jnp.maximum(1 - of.t / of.steps * h, 0.0) ** of.steps) / h)

    found = jax.tree.reduce(jnp.add, jax.tree.map(lambda d, g: -jnp.sum(d * g), delta, gradient))
    whole = jax.tree.reduce(jnp.add, jax.tree.map(expected, gradient, F))
    return of._replace(t=of.t * jnp.clip(found / jnp.maximum(whole, 1e-30), 0.02, 1.0))


def squares(delta: Params, F: Params, variance: Params, n: Float[Array, ""], of: Way, by_weight: bool) -> Squares:
    """What a client sends beside its step δ."""

    def one(delta: Array, F: Array, v: Array) -> tuple[Array, Array, Array, Array]:
        H = F + 1 / (v if of.pull is None else of.pull)
        left = jnp.maximum(1 - of.t / of.steps * H / jnp.maximum(n, 1), 0.0) ** of.steps
        share = (1 - left) / H  # a/F
        return delta**2, 1 / (F + 1 / v), (share * F) ** 2, share**2 * F

    four = jax.tree.map(one, delta, F, variance)
    return Squares(*(pooled(jax.tree.map(lambda _, all, k=k: all[k], delta, four), by_weight) for k in range(4)))


def next(apart: Apart, delta: Params, of: Squares, sigma0: float, N: int, by_weight: bool, learnt: bool = True) -> Apart:
    """σ² after a round, from the means over clients of δ and of what they sent beside it."""
    centre = pooled(jax.tree.map(jnp.square, delta), by_weight)

    def one(old: Array, centre: Array, leaf: Array, *of: Array) -> tuple[Array, Array, Array]:
        size = 1.0 if by_weight else float(leaf.size)
        scatter = jnp.maximum(of[0] - centre, 0.0) * (N / max(N - 1, 1))
        new, w = variance(old, Squares(scatter, *of[1:]), size, N - 1, sigma0**2)
        return new if learnt else old, jnp.maximum(N * w, 1.0), jnp.maximum(NU0 + (N - 1) * size * w, LEAST)

    found = jax.tree.map(one, apart.variance, centre, delta, *of)
    parts = (jax.tree.map(lambda _, three, place=place: three[place], apart.variance, found) for place in range(3))
    return Apart(*parts)


def variance(old: Array, of: Squares, size: float, clients: float, first: float) -> tuple[Array, Array]:
    """σ² after a round and w, from the scatter of the steps and the means over clients of the other sums over a group.

    >>> one = Squares(jnp.float32(3.0), jnp.float32(0.0), jnp.float32(1.0), jnp.float32(1.0))  # a = 1, F = 1
    >>> [round(float(found), 3) for found in variance(jnp.float32(1.5), one, 1.0, 1e6, 1.0)]
    [2.0, 1.0]
    """
    w = jnp.clip(1 - of.width / (size * old), 0.0, 1.0)
    found = jnp.maximum(of.step - of.noise, 0.0) / jnp.maximum(of.gone, 1e-30)
    gamma = clients * size * w
    new = (NU0 * first + gamma * jnp.minimum(found, old * MOST)) / (NU0 + gamma)
    return jnp.clip(new, old / MOST, old * MOST), w


def divergence(precision: Params, delta: Params, s2: Params) -> Float[Array, ""]:
    """KL(N(m_i, s²) ‖ N(m0, σ²)), from 1/σ² and m_i − m0.

    >>> float(divergence(jnp.float32(1.0), jnp.float32(2.0), jnp.float32(1.0)))
    2.0
    """
    terms = jax.tree.map(lambda t, d, s: jnp.sum(t * (d**2 + s) - 1 - jnp.log(t * s)) / 2, precision, delta, s2)
    return jax.tree.reduce(jnp.add, terms)


def spread(apart: Apart, like: Params) -> Params:
    """The variance of a client that nobody has seen, σ² (1 + 1/n), for every weight."""
    total = jax.tree.map(lambda v, n: v * (1 + 1 / n), apart.variance, apart.clients)
    return jax.tree.map(lambda leaf, v: jnp.broadcast_to(v, leaf.shape), like, total)


def with_spread(apart: Apart, total: Params) -> Apart:
    """The same with another variance of an unseen client, weight by weight: the inverse of `spread`.

    >>> one = Apart(jnp.float32(1.0), jnp.float32(4.0), jnp.float32(3.0))
    >>> spread(with_spread(one, jnp.array([2.0, 3.0])), jnp.zeros(2)).tolist()
    [2.0, 3.0]
    """
    return apart._replace(variance=jax.tree.map(lambda t, n: t / (1 + 1 / n), total, apart.clients))


def heat_scores(
    model: Model,
    draw: Callable[[PRNGKeyArray, Float[Array, ""]], Params],
    key: PRNGKeyArray,
    data: Data,
    turn: Bool[Array, ""] | None,
) -> Float[Array, " heats"]:
    """Log scores of some rows under draws whose variances are multiplied by each of `HEATS`; 0 out of turn."""
    for_rows, for_draws = jax.random.split(key)
    some, keys = drawn(for_rows, data, HEATED), jax.random.split(for_draws, HEATED_DRAWS)

    def score(heat: Float[Array, ""]) -> Float[Array, ""]:
        return mixture_score(model, lambda key: draw(key, heat), keys, some)

    return jax.lax.cond(turn, lambda: jax.lax.map(score, jnp.asarray(HEATS)), lambda: jnp.zeros(len(HEATS)))


def deviations(apart: Apart) -> dict[str, Float[Array, ""]]:
    """σ of each array by its path, the root mean square where it has one for each weight."""
    return {path: jnp.sqrt(jnp.mean(leaf)) for path, leaf in trees.named(apart.variance).items()}
