"""Networks whose weights are Gaussian, each on its own: where they start, how they predict, how their loss is estimated.

Two estimates of E_q log p(y | x, w) are the same in the mean. One draws w = μ + σ ε, one network for all rows. The other, local
reparametrisation (Kingma, Salimans and Welling 2015), draws what a dense layer gives: for w_dk ~ N(μ_dk, σ_dk²), each on its
own, Σ_d x_d w_dk ~ N(Σ_d x_d μ_dk, Σ_d x_d² σ_dk²), anew for each row. It takes one number per row and output, not one per
weight, and its gradients vary less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Params
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.primitives import gaussian
from fedbayes.primitives.gaussian import MeanField
from fedbayes.primitives.optimisers import move
from fedbayes.primitives.training import Training, local_steps, masked_mean


def init(model: Model, key: PRNGKeyArray, rho: float, spread: float | None = None) -> MeanField:
    """Means as the network starts, or N(0, spread²); all deviations log(1 + e^ρ). For ρ = −200 they are 0.

    >>> from fedbayes.models import Categorical, linear
    >>> jax.tree.map(jnp.shape, init(linear((4,), Categorical(3)), jax.random.key(0), rho=-3.0).rho)
    {'head': {'bias': (3,), 'kernel': (4, 3)}}
    """
    mean = model.init(key)
    if spread is not None:
        mean = jax.tree.map(lambda noise: spread * noise, trees.normal_like(key, mean))
    return MeanField(mean, jax.tree.map(lambda leaf: jnp.full(leaf.shape, rho), mean))


def check(rho: float, kl: float, *trainings: Training) -> None:
    """Refuse settings under which a Gaussian network's numbers mean nothing."""
    if kl and rho < LEAST:
        raise UserError(f"rho is {rho}, so that deviations vanish and a divergence has no meaning; give at least {LEAST:g}")
    if any(training.decays for training in trainings):
        raise UserError("weight_decay pulls deviations too, where the prior's divergence does its work; leave it 0")


def predict(model: Model, key: PRNGKeyArray, q: MeanField, x: Shaped[Array, "n ..."], draws: int) -> Float[Array, "s n k"]:
    """Outputs of so many networks drawn from q."""
    return jax.lax.map(lambda key: model.apply(gaussian.draw(key, q), x), jax.random.split(key, draws))


def loss(
    model: Model,
    key: PRNGKeyArray,
    q: MeanField,
    batch: Data,
    pool: Float[Array, " m"] | None = None,
    draws: int = 1,
    *,
    local: bool = False,
) -> Float[Array, ""]:
    """−1/n Σ log p(y | x, w) over the rows that exist, in the mean over draws of w, whose noise may be from a pool."""

    def one(key: PRNGKeyArray) -> Float[Array, ""]:
        outputs = locally(model.apply, key, q, batch.x) if local else model.apply(gaussian.draw(key, q, pool), batch.x)
        return masked_mean(-model.likelihood.log_prob(outputs, batch.y), batch.mask)

    return one(key) if draws == 1 else jnp.mean(jax.vmap(one)(jax.random.split(key, draws)))


Fit = Callable[[MeanField, PRNGKeyArray, Float[Array, " m"] | None, Data], Float[Array, ""]]
Divergence = Callable[[MeanField, MeanField], Float[Array, ""]]


def follow(
    model: Model,
    fit: Fit,
    pull: Divergence | None,
    divergence: Divergence | None,
    q: MeanField,
    w: MeanField,
    training: Training,
    lr: Float[Array, ""],
    key: PRNGKeyArray,
    data: Data,
    steps: int = 1,
    drawn: MeanField | None = None,
) -> tuple[MeanField, MeanField, Float[Array, ""]]:
    """For each minibatch `steps` steps of q on fit(q, key, pool, minibatch) + pull(q, w), then one of w on divergence(q, w).

    So w follows q; without a divergence it stays. Each has its own optimiser. The pool, for a large network, is noise for the
    draws of all steps, new in each call, and enough for q, or for `drawn` where `fit` draws more than what moves. Returns both
    and the mean of `fit`.
    """
    optimiser = training.build(lr, model)
    pool = noise_pool(key, (q if drawn is None else drawn).mean)

    def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
        q, w, of_q, of_w, total, count = carry

        def Q(q: MeanField, key: PRNGKeyArray) -> tuple[Float[Array, ""], Float[Array, ""]]:
            value = fit(q, key, pool, batch)
            return value if pull is None else value + pull(q, w), value

        def inner(number: Any, inner: Any) -> Any:
            q, of_q, _ = inner
            (_, value), gradient = jax.value_and_grad(Q, has_aux=True)(q, jax.random.fold_in(key, number))
            return *move(optimiser, q, gradient, of_q), value

        q, of_q, value = jax.lax.fori_loop(0, steps, inner, (q, of_q, jnp.float32(0)))
        if divergence is not None:
            w, of_w = move(optimiser, w, jax.grad(divergence, 1)(q, w), of_w)
        return q, w, of_q, of_w, total + value, count + 1

    start = (q, w, optimiser.init(q), optimiser.init(w), jnp.float32(0), jnp.float32(0))
    q, w, _, _, total, count = local_steps(step, start, key, data, training.batch, training.passes(data))
    return q, w, total / jnp.maximum(count, 1)


def noise_pool(key: PRNGKeyArray, like: Params) -> Float[Array, " m"] | None:
    """Noise for the draws of all steps of a round; None where there are few weights."""
    count = sum(leaf.size for leaf in jax.tree.leaves(like))
    if count < LARGE:
        return None
    return jax.random.normal(jax.random.fold_in(key, np.uint32(0xFFFFFFFF)), (count + max(LARGE, count // 8),))


LEAST = -40.0
"""Of ρ under a divergence: below it 1/σ² leaves single precision."""
LARGE = 20_000
"""Weights from which on noise comes from a pool, and least places of its windows, so that what a weight sees over many steps
has variance 1 to a hundredth. A small network's noise costs little anyway."""


class _Weights(NamedTuple):
    """Weights on the way to where they are used: not yet drawn, and the key for it."""

    mean: Array
    sigma: Array
    key: PRNGKeyArray

    def drawn(self) -> Array:
        return self.mean + self.sigma * jax.random.normal(self.key, self.mean.shape)


def locally(
    apply: Callable[[Params, Array], Array], key: PRNGKeyArray, q: MeanField, x: Shaped[Array, "n ..."]
) -> Float[Array, "n k"]:
    """The outputs of `apply` with local reparametrisation of each dense layer, found in the program that JAX makes of it.

    A dense layer is a product of weights, used nowhere else, with one vector for each row of x. Other weights, biases and
    convolutions among them, are drawn once for all rows. What a row gives must not depend on other rows, as it would with
    statistics of a batch.

    >>> q = MeanField(jnp.ones((2, 1)), jnp.full((2, 1), -200.0))  # no deviation
    >>> locally(lambda w, x: x @ w, jax.random.key(0), q, jnp.ones((3, 2))).ravel().tolist()
    [2.0, 2.0, 2.0]
    """
    closed, shape = jax.make_jaxpr(apply, return_shape=True)(q.mean, x)
    dense = _dense_products(apply, q, x)
    means, rhos = jax.tree.leaves(q.mean), jax.tree.leaves(q.rho)
    weights = [
        _Weights(mean, gaussian.deviation(rho), jax.random.fold_in(key, place))
        for place, (mean, rho) in enumerate(zip(means, rhos, strict=True))
    ]
    outputs = _run(closed.jaxpr, closed.consts, [*weights, x], dense.__getitem__)
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def _dense_products(apply: Any, q: MeanField, x: Any) -> list[bool]:
    """Of the products with weights, in order, whether each is a dense layer: with one more row of x it has one more vector."""
    found = []
    for n in (len(x), len(x) + 1):
        sizes: list[int | None] = []

        def run(q: MeanField, x: Any, sizes: list[int | None] = sizes) -> Any:
            closed = jax.make_jaxpr(apply)(q.mean, x)
            key = jax.random.key(0)
            weights = [_Weights(mean, mean, key) for mean in jax.tree.leaves(q.mean)]
            return _run(closed.jaxpr, closed.consts, [*weights, x], lambda number: False, sizes)

        try:
            jax.eval_shape(run, q, jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype))
        except TypeError:  # a program for so many rows alone, whose rows depend on each other
            sizes.clear()
        found.append(sizes)
    one, other = found
    if len(one) != len(other):
        return [False] * len(one)
    n = len(x)
    return [(a, b) == (n, n + 1) for a, b in zip(one, other, strict=True)]


_MOVES = ("reshape", "transpose", "squeeze", "convert_element_type")
"""What leaves each weight in one place."""


def _run(
    jaxpr: core.Jaxpr, consts: list[Any], inputs: list[Any], dense: Callable[[int], bool], sizes: list[int | None] | None = None
) -> list[Any]:
    """Evaluate a program some of whose inputs are weights not yet drawn; `dense` tells of its products by their number.

    `sizes` gets, for each product with weights, how many vectors they meet, or None where it is no product with vectors.
    """
    sizes = [] if sizes is None else sizes
    used = Counter(id(var) for eqn in jaxpr.eqns for var in eqn.invars) + Counter(id(var) for var in jaxpr.outvars)
    known: dict[int, Any] = {}

    def keep(variables: Any, values: Any) -> None:
        for variable, value in zip(variables, values, strict=True):
            tied = isinstance(value, _Weights) and used[id(variable)] > 1
            known[id(variable)] = value.drawn() if tied else value

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else known[id(variable)]

    keep(jaxpr.constvars, consts)
    keep(jaxpr.invars, inputs)
    for eqn in jaxpr.eqns:
        values = [read(variable) for variable in eqn.invars]
        if not any(isinstance(value, _Weights) for value in values):
            keep(eqn.outvars, _bind(eqn, values))
        elif eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            keep(eqn.outvars, _run(inner.jaxpr, inner.consts, values, dense, sizes))
        elif _moves(eqn):
            (weights,) = values
            mean, sigma = (_bind(eqn, [part])[0] for part in weights[:2])
            keep(eqn.outvars, [_Weights(mean, sigma, weights.key)])
        else:
            if eqn.primitive.name == "dot_general":
                sizes.append(_vectors(eqn, values))
                if dense(len(sizes) - 1):
                    keep(eqn.outvars, [_product(eqn, values)])
                    continue
            keep(eqn.outvars, _bind(eqn, [value.drawn() if isinstance(value, _Weights) else value for value in values]))
    return [value.drawn() if isinstance(value := read(variable), _Weights) else value for variable in jaxpr.outvars]


def _bind(eqn: core.JaxprEqn, values: list[Any]) -> list[Any]:
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def _moves(eqn: core.JaxprEqn) -> bool:
    """Whether an operation leaves each weight what it is, in one place."""
    return eqn.primitive.name in _MOVES and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)  # type: ignore[attr-defined]


def _vectors(eqn: core.JaxprEqn, values: list[Any]) -> int | None:
    """How many vectors a product of weights is with."""
    if sum(isinstance(value, _Weights) for value in values) != 1:
        return None
    contracted, batched = eqn.params["dimension_numbers"]
    place = 1 - next(place for place, value in enumerate(values) if isinstance(value, _Weights))
    free = [size for axis, size in enumerate(values[place].shape) if axis not in contracted[place]]
    return free[0] if len(free) == 1 and not any(batched) else None


def _product(eqn: core.JaxprEqn, values: list[Any]) -> Array:
    place = next(place for place, value in enumerate(values) if isinstance(value, _Weights))
    weights = values[place]
    with_means = [value.mean if isinstance(value, _Weights) else value for value in values]
    with_squares = [value.sigma**2 if isinstance(value, _Weights) else value**2 for value in values]
    mean, variance = _bind(eqn, with_means)[0], _bind(eqn, with_squares)[0]
    deviation = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)  # finite slopes at 0
    if place == 1:  # rows come first
        return mean + deviation * jax.random.normal(weights.key, mean.shape)
    noise = jax.random.normal(weights.key, (mean.shape[-1], *mean.shape[:-1]))  # so that padding rows change no other's noise
    return mean + deviation * jnp.moveaxis(noise, 0, -1)
