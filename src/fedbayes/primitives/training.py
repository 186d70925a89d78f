"""Local training: shuffled minibatches over padded rows, and gradient descent on them.

Padding changes no number. A row's place in the shuffle is drawn from the key and the row's own index, so a longer padding
draws the same order; steps that would hold padding alone are not taken; a batch's mask weighs its rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import checkify
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Lengths, Params, check_settings, fact, setting
from fedbayes.errors import UserError
from fedbayes.models import Model, Normal
from fedbayes.primitives import optimisers
from fedbayes.primitives.optimisers import Optimiser, move

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class Training:
    """Minibatch SGD on one client's rows, with a step size that may decay over the rounds of a run.

    >>> training = Training(lr=0.1, decay_at=(0.5, 0.75), rounds=100)
    >>> [round(float(training.lr_of(number)), 4) for number in (1, 50, 51, 76)]
    [0.1, 0.1, 0.01, 0.001]
    """

    epochs: int = setting(1, least=0)
    """Passes over the client's rows."""
    optimiser: Optimiser = "sgd"
    """Any of Optax's by name, such as adamw or adamw:b1=0.95; in Python also a GradientTransformation. Restarts each round."""
    batch: int = setting(50, least=1)
    """Rows in a minibatch; the last one of an epoch may hold fewer."""
    lr: float = setting(0.1, least=0)
    """Step size in the first round; a GradientTransformation has its own."""
    momentum: float = setting(0.0, least=0, below=1)
    """Of sgd, and of others that have one."""
    weight_decay: float | None = None
    """Times the parameters, added to the gradient; adamw and others that have a decay of their own apply it and its default."""
    clip: float | None = None
    """Largest norm of a gradient; by default 1 where the model learns its scale, and none elsewhere."""
    decay_at: tuple[float, ...] = ()
    """Fractions of the run after which the step size is multiplied by `decay`."""
    decay: float = 0.1
    """The multiplier at each of them."""
    steps: int = setting(0, least=0)
    """Minibatches, at least: a client with few rows makes more passes over them."""
    rounds: int | None = fact("rounds", needed_by="decay_at")
    """Length of the run that the fractions refer to; by default the rounds of the run."""

    def __post_init__(self) -> None:
        optimisers.check(self.optimiser)
        check_settings(self)
        if any(not isinstance(fraction, int | float) for fraction in self.decay_at):
            raise UserError(f"decay_at is {self.decay_at}, but it holds fractions of the run, such as 0.5")

    def lr_of(self, number: Any) -> Float[Array, ""]:
        """The step size of a round, counted from 1; `number` may be traced."""
        if not self.decay_at:
            return jnp.float32(self.lr)
        if self.rounds is None:
            raise UserError("the step size decays but the run has no length; call algorithm.planned(rounds) first")
        boundaries = jnp.array([round(fraction * self.rounds) for fraction in self.decay_at])
        passed = jnp.sum(jnp.asarray(number) > boundaries)
        return jnp.float32(self.lr) * jnp.float32(self.decay) ** passed.astype(jnp.float32)

    def passes(self, data: Data) -> Int[Array, ""] | int:
        """Epochs over a client's rows; as many more as `steps` asks for."""
        if isinstance(self.steps, int) and self.steps == 0:
            return self.epochs
        batch = min(self.batch, data.mask.shape[0])
        batches = jnp.maximum((jnp.sum(data.mask) + batch - 1) // batch, 1)
        return jnp.maximum(self.epochs, (jnp.asarray(self.steps, batches.dtype) + batches - 1) // batches)

    def build(self, lr: Float[Array, ""], model: Model) -> optax.GradientTransformation:
        """Optax's optimiser with these settings.

        Where a scale σ is learnt, gradients go with 1/σ² and one row far off can throw a client out; so they are clipped.
        """
        clip = self.clip if self.clip is not None else (1.0 if model.likelihood == Normal(scale=None) else 0.0)
        chain = [optax.clip_by_global_norm(clip)] if clip else []
        if self.weight_decay and "weight_decay" not in self._arguments:
            chain.append(optax.add_decayed_weights(self.weight_decay))
        chain.append(optimisers.build(self.optimiser, lr, **self._arguments))
        if self.decay_at and not isinstance(self.optimiser, str):
            chain.append(optax.scale(lr / self.lr))
        return optax.chain(*chain) if len(chain) > 1 else chain[0]

    @property
    def decays(self) -> bool:
        """Whether weights decay, by these settings or by the optimiser's default."""
        return bool(self._arguments.get("weight_decay", self.weight_decay))

    @property
    def _arguments(self) -> dict[str, Any]:
        return optimisers.arguments(self.optimiser, momentum=self.momentum or None, weight_decay=self.weight_decay)


TUNING = {"lr": (0.001, 0.0, 0.001, 0.003, 0.01, 0.03, 0.1), "steps": Lengths((10, 10, 50))}
"""Candidates for a client's own training in `adapt`: first ten gentle steps; a step size of 0 leaves the model as it is."""


def tuning(**settings: Any) -> Any:
    """A field for a client's own training in `adapt`, whose step size and length the federation may choose."""
    return setting(Training(**settings), choose=TUNING)


_checked = contextvars.ContextVar("_checked", default=False)


@contextlib.contextmanager
def checked_steps() -> Iterator[None]:
    """Put a check after each local step that is traced here; to be used inside `checkify.checkify`.

    Only the simulator's loop asks for it: a program with checks, even idle ones, takes JAX's slow way to the device.
    """
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def local_steps(
    step: Callable[[Carry, PRNGKeyArray, Data], Carry], carry: Carry, key: PRNGKeyArray, data: Data, batch: int, epochs: Any
) -> Carry:
    """Fold `step` over the minibatches of `epochs` shuffles of the client's rows.

    Without `vmap` the loop runs exactly as often as the client has batches; under `vmap` as often as the longest client of
    the group, and a client that is through keeps its carry.
    """
    data = jax.tree.map(jnp.asarray, data)
    length = data.mask.shape[0]
    batch = min(batch, length)
    rows = jnp.sum(data.mask)
    steps = (rows + batch - 1) // batch

    def epoch(number: Any, carry: Carry) -> Carry:
        epoch_key = jax.random.fold_in(key, number)
        steps_key = jax.random.fold_in(epoch_key, np.uint32(0xFFFFFFFF))  # what is drawn in a step is not the shuffle's
        ranks = jax.random.bits(epoch_key, (length,))
        order = jnp.argsort(jnp.where(data.mask, ranks, jnp.uint32(0xFFFFFFFF)), stable=True)
        order = jnp.pad(order, (0, -length % batch))

        def minibatch(place: Any, carry: Carry) -> Carry:
            chosen = jax.lax.dynamic_slice(order, (place * batch,), (batch,))
            mask = place * batch + jnp.arange(batch) < rows
            carry = step(carry, jax.random.fold_in(steps_key, place), Data(data.x[chosen], data.y[chosen], mask))
            if _checked.get():
                message = "local step {step} of epoch {epoch} left numbers that are not finite"
                checkify.check(trees.finite(carry), message, step=place + 1, epoch=number + 1)
            return carry

        return jax.lax.fori_loop(0, steps, minibatch, carry)

    return jax.lax.fori_loop(0, epochs, epoch, carry)


def descend(
    model: Model,
    loss: Callable[[Params, PRNGKeyArray, Data], Float[Array, ""]],
    params: Params,
    training: Training,
    lr: Float[Array, ""],
    key: PRNGKeyArray,
    data: Data,
    after: Callable[[Params], Params] | None = None,
) -> tuple[Params, Float[Array, ""]]:
    """Minimise `loss(params, key, minibatch)` by `training`; returns the parameters and the mean loss over the steps.

    `after` is applied to the parameters after each step, as the proximal map of what `loss` leaves out.
    """
    optimiser = training.build(lr, model)

    def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
        params, state, total, steps = carry
        value, gradient = jax.value_and_grad(loss)(params, key, batch)
        params, state = move(optimiser, params, gradient, state)
        return params if after is None else after(params), state, total + value, steps + 1

    start = (params, optimiser.init(params), jnp.float32(0), jnp.float32(0))
    params, _, total, steps = local_steps(step, start, key, data, training.batch, training.passes(data))
    return params, total / jnp.maximum(steps, 1)


def fit(
    model: Model,
    w: Params,
    training: Training,
    key: PRNGKeyArray,
    data: Data,
    lr: Float[Array, ""] | None = None,
    fixed: Params | None = None,
    also: Callable[[Params], Float[Array, ""]] | None = None,
) -> tuple[Params, Float[Array, ""]]:
    """Minimise F(w) + also(w), F the mean negative log-likelihood of w, under layers that are `fixed` where there are any.

    The step size is by default that of a first round. Returns the parameters and the mean loss over the steps.
    """

    def F(w: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        loss = mean_loss(model, w if fixed is None else trees.merge(w, fixed), batch)
        return loss if also is None else loss + also(w)

    return descend(model, F, w, training, training.lr_of(1) if lr is None else lr, key, data)


def pull(strength: float, w: Params) -> Callable[[Params], Float[Array, ""]]:
    """strength/2 ‖· − w‖², for `fit`."""
    return lambda w_i: strength / 2 * trees.squared_distance(w_i, w)


def drawn(key: PRNGKeyArray, data: Data, count: int) -> Data:
    """So many rows drawn with replacement; all of them where the client has no more."""
    size, places = jnp.sum(data.mask), jnp.arange(count)
    random = jnp.floor(jax.random.uniform(key, (count,)) * rows(data)).astype(places.dtype)
    few = size <= count
    chosen = jnp.clip(jnp.where(few, places, random), 0, data.mask.shape[0] - 1)
    return Data(data.x[chosen], data.y[chosen], jnp.where(few, places < size, True))


def halves(key: PRNGKeyArray, data: Data) -> tuple[Data, Data]:
    """The client's rows in two random halves, the second the larger one where they are odd; as masks, nothing is copied.

    >>> data = Data(jnp.zeros((9, 1)), jnp.zeros(9), jnp.arange(9) < 5)
    >>> [int(rows(half)) for half in halves(jax.random.key(0), data)]
    [2, 3]
    """
    place = jnp.argsort(shuffle(key, data))
    first = place < jnp.sum(data.mask) // 2
    return data._replace(mask=data.mask & first), data._replace(mask=data.mask & ~first)


def first_half(batch: Data) -> tuple[Data, Data]:
    """A minibatch in two, the second the larger one where its rows are odd; those that exist are in front of its padding."""
    first = jnp.arange(batch.mask.shape[0]) < jnp.sum(batch.mask) // 2
    return batch._replace(mask=batch.mask & first), batch._replace(mask=batch.mask & ~first)


def shuffle(key: PRNGKeyArray, data: Data) -> Int[Array, " n"]:
    """Indices of the client's rows in random order, then those of its padding, whose length changes nothing.

    >>> data = Data(jnp.zeros((5, 1)), jnp.zeros(5), jnp.arange(5) < 3)
    >>> sorted(shuffle(jax.random.key(0), data)[:3].tolist())
    [0, 1, 2]
    """
    ranks = jax.random.bits(key, data.mask.shape)
    return jnp.lexsort((ranks, ~data.mask))


def mean_loss(model: Model, params: Params, batch: Data) -> Float[Array, ""]:
    """The mean negative log-likelihood −1/n Σ log p(y | x, params) over the rows that exist."""
    return masked_mean(-model.likelihood.log_prob(model.apply(params, batch.x), batch.y), batch.mask)


def mixture_score(model: Model, draw: Callable[[PRNGKeyArray], Params], keys: PRNGKeyArray, data: Data) -> Float[Array, ""]:
    """The mean log score of the rows under the mixture of so many networks drawn, up to a constant."""
    log_p = model.likelihood.log_prob(jax.vmap(lambda key: model.apply(draw(key), data.x))(keys), data.y)
    return masked_mean(jax.nn.logsumexp(log_p, axis=0), data.mask)


def in_blocks(function: Callable[[Params, Array], Array], params: Params, x: Array) -> Array:
    """`function` row by row in blocks, so that memory is that of a block."""
    return jax.lax.map(lambda row: function(params, row[None])[0], x, batch_size=256)


def masked_mean(values: Float[Array, " n"], mask: Shaped[Array, " n"]) -> Float[Array, ""]:
    """The mean over the rows that exist; 0 where there are none."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1).astype(values.dtype)


def rows(data: Data) -> Float[Array, ""]:
    """How many rows the client has."""
    return jnp.sum(data.mask).astype(jnp.float32)


def unlabelled(y: Array) -> Array:
    """Labels that are missing: NaN, or for whole numbers the least there is. See `NetworkAlgorithm.labels_optional`.

    >>> labelled(unlabelled(jnp.array([1, 2]))).tolist(), labelled(jnp.array([1.0, jnp.nan])).tolist()
    ([False, False], [True, False])
    """
    return jnp.full_like(y, jnp.nan if jnp.issubdtype(y.dtype, jnp.floating) else jnp.iinfo(y.dtype).min)


def labelled(y: Array) -> Array:
    """Which rows have a label."""
    return ~jnp.isnan(y) if jnp.issubdtype(y.dtype, jnp.floating) else y != jnp.iinfo(y.dtype).min
