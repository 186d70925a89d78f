"""Local training: shuffled minibatches over padded rows, and gradient descent on them.

Padding changes no number. A row's place in the shuffle is drawn from the key and the row's own index, so a longer padding
draws the same order; steps that would hold padding alone are not taken; a batch's mask weighs its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.experimental import checkify
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Params, Schedule
from fedbayes.models import Model

Carry = TypeVar("Carry")


@dataclasses.dataclass(frozen=True)
class Training:
    """Minibatch SGD on one client's rows."""

    epochs: int = 1
    """Passes over the client's rows."""
    batch: int = 50
    """Rows in a minibatch; the last one of an epoch may hold fewer."""
    schedule: Schedule = Schedule()
    """Step size over the rounds."""
    momentum: float = 0.0
    """Of SGD; starts at zero in each round."""
    weight_decay: float = 0.0
    """Added to the gradient, times the parameters."""

    def optimiser(self, lr: Float[Array, ""]) -> optax.GradientTransformation:
        """Optax's SGD with these settings."""
        sgd = optax.sgd(lr, momentum=self.momentum or None)
        return optax.chain(optax.add_decayed_weights(self.weight_decay), sgd) if self.weight_decay else sgd


def local_steps(
    step: Callable[[Carry, PRNGKeyArray, Data], Carry], carry: Carry, key: PRNGKeyArray, data: Data, batch: int, epochs: int
) -> Carry:
    """Fold `step` over the minibatches of `epochs` shuffles of the client's rows.

    Without `vmap` the loop runs exactly as often as the client has batches; under `vmap` as often as the longest client of
    the group, and a client that is through keeps its carry.
    """
    length = data.mask.shape[0]
    batch = min(batch, length)
    rows = jnp.sum(data.mask)
    steps = (rows + batch - 1) // batch

    def epoch(number: Any, carry: Carry) -> Carry:
        epoch_key = jax.random.fold_in(key, number)
        ranks = jax.random.bits(epoch_key, (length,))
        order = jnp.argsort(jnp.where(data.mask, ranks, jnp.uint32(0xFFFFFFFF)), stable=True)
        order = jnp.pad(order, (0, -length % batch))

        def minibatch(place: Any, carry: Carry) -> Carry:
            chosen = jax.lax.dynamic_slice(order, (place * batch,), (batch,))
            mask = place * batch + jnp.arange(batch) < rows
            carry = step(carry, jax.random.fold_in(epoch_key, place), Data(data.x[chosen], data.y[chosen], mask))
            # Costs nothing unless the simulator runs clients="loop", which turns it into an error that names the step.
            message = "local step {step} of epoch {epoch} left numbers that are not finite"
            checkify.debug_check(trees.finite(carry), message, step=place + 1, epoch=number + 1)
            return carry

        return jax.lax.fori_loop(0, steps, minibatch, carry)

    return jax.lax.fori_loop(0, epochs, epoch, carry)


def descend(
    loss: Callable[[Params, PRNGKeyArray, Data], Float[Array, ""]],
    params: Params,
    training: Training,
    lr: Float[Array, ""],
    key: PRNGKeyArray,
    data: Data,
) -> tuple[Params, Float[Array, ""]]:
    """Minimise `loss(params, key, minibatch)` by `training`; returns the parameters and the mean loss over the steps."""
    optimiser = training.optimiser(lr)

    def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
        params, state, total, steps = carry
        value, gradient = jax.value_and_grad(loss)(params, key, batch)
        updates, state = optimiser.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, total + value, steps + 1

    start = (params, optimiser.init(params), jnp.float32(0), jnp.float32(0))
    params, _, total, steps = local_steps(step, start, key, data, training.batch, training.epochs)
    return params, total / jnp.maximum(steps, 1)


def mean_loss(model: Model, params: Params, batch: Data) -> Float[Array, ""]:
    """The mean negative log-likelihood −1/n Σ log p(y | x, params) over the rows that exist."""
    return masked_mean(-model.likelihood.log_prob(model.apply(params, batch.x), batch.y), batch.mask)


def masked_mean(values: Float[Array, " n"], mask: Shaped[Array, " n"]) -> Float[Array, ""]:
    """The mean over the rows that exist; 0 where there are none."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1).astype(values.dtype)


def fine_tune(model: Model, training: Training, key: PRNGKeyArray, params: Params, data: Data) -> Params:
    """`params` after `training` on the client's mean loss: what FedAvg and FedBABU call personalisation."""

    def loss(params: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
        return mean_loss(model, params, batch)

    return descend(loss, params, training, training.schedule(1), key, data)[0]


def rows(data: Data) -> Float[Array, ""]:
    """How many rows the client has."""
    return jnp.sum(data.mask).astype(jnp.float32)
