"""FedBE: the server samples models around the clients', and distils all of them into one (Chen and Chao 2021, Algorithm 1).

    client:   w_i ← w, then E epochs of SGD on F_i(w_i), as in FedAvg
    server:   w̄ = Σ_i n_i w_i / Σ_i n_i,   s² = Σ_i n_i (w_i − w̄)² / Σ_i n_i,   w⁽ᵐ⁾ ~ N(w̄, diag s²), m = 1 … M
              p̂(x) = the mean of softmax f(x; ·) over the teachers: w̄, the M samples and the clients' models
              w ← w̄, then SGD on KL(p̂(x) ‖ softmax f(x; w)) over the server's unlabelled rows
    Dirichlet: w⁽ᵐ⁾ = Σ_i γ_i n_i w_i / Σ_i γ_i n_i with γ ~ Dir(α, …, α), in place of the Gaussian

The clients' models are teachers one by one, so **the server sees each of them**: they are stacked, not summed. With `swa` the
distilled model is, as in the paper, an average (stochastic weight averaging): the step falls to 0.4 of itself over a cycle of
steps and starts again, and the models at the cycles' ends are averaged. The unlabelled rows are part of the server's state.

Reference:
    Chen, Chao. FedBE: making Bayesian model ensemble applicable to federated learning. ICLR 2021.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, Params, Stack, setting
from fedbayes.data.unlabelled import Unlabelled
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Model
from fedbayes.primitives.averaging import Down, FineTuning, Local
from fedbayes.primitives.training import Training, fit, in_blocks, local_steps, masked_mean, rows, tuning

FALL = 0.4
"""The last step of a cycle, as a share of the first."""


class Server(NamedTuple):
    """The model, the unlabelled rows, and the number of rounds behind it."""

    params: Params
    x: Shaped[Array, "u ..."]
    round: Int[Array, ""]


class Up(NamedTuple):
    """The client's model and how many rows it has, both seen by the server; and its training loss."""

    params: Stack[Params]
    n: Stack[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class FedBE(FineTuning[Server, Down, Up]):
    """Averaging, then distillation of an ensemble of sampled models on rows that the server has.

    >>> import numpy as np
    >>> from fedbayes.models import mlp
    >>> FedBE(mlp((4,), Categorical(2)), unlabelled=Unlabelled(np.zeros((9, 4), np.float32))).samples
    10
    """

    model: Model
    """The network and its likelihood, a categorical one; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    unlabelled: Unlabelled | None = None
    """The server's rows; there must be some."""
    samples: int = setting(10, least=0)
    """M, models that the server samples."""
    posterior: Literal["gaussian", "dirichlet"] = setting("gaussian", "dirichlet")
    """What it samples them from."""
    alpha: float = setting(1.0, above=0)
    """α of the Dirichlet distribution."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    distil: Training = Training(epochs=20, batch=128, lr=0.001, momentum=0.9)
    """Distillation on the server."""
    swa: bool = True
    """Whether the distilled model is the mean over cycles of steps, or where the steps end."""
    cycle: int = setting(25, least=1)
    """Steps in a cycle of `swa`."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """w at random, and the unlabelled rows, which so are data of the server's program and not constants inside it."""
        if self.unlabelled is None:
            raise UserError(
                "FedBE distils on rows that the server has, but was given none; give unlabelled=Unlabelled(x), or --unlabelled "
                "DATA on the command line"
            )
        if not isinstance(self.model.likelihood, Categorical):
            raise UserError(
                f"FedBE averages probabilities of classes, but the model has {self.model.likelihood}; use Categorical"
            )
        w, x = self.model.init(key), jnp.asarray(self.unlabelled.x)
        try:
            jax.eval_shape(self.model.apply, w, x)
        except (TypeError, ValueError) as problem:
            raise UserError(
                f"the server's rows have the shape {x.shape[1:]}, but not the model's; give rows like the clients'"
            ) from problem
        return Server(w, x, jnp.int32(0))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """w and the round's step size."""
        return Down(server.params, self.train.lr_of(server.round + 1))

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w."""
        params, loss = fit(self.model, down.params, self.train, key, data, down.lr)
        return Up(params, rows(data), loss), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """Sample teachers, let them label the rows, and distil."""
        for_samples, for_steps = jax.random.split(key)
        average = mean_of(up.params, up.n)
        labels = self.labels(for_samples, average, up, server.x)
        return Server(self._distilled(for_steps, average, server.x, labels), server.x, server.round + 1)

    def labels(self, key: PRNGKeyArray, average: Params, up: Up, x: Shaped[Array, "u ..."]) -> Float[Array, "u k"]:
        """p̂: what the teachers say on average. One teacher is in memory at a time, and besides it the clients' models."""

        def says(teacher: Params) -> Float[Array, "u k"]:
            return in_blocks(lambda w, rows: jax.nn.softmax(self.model.apply(w, rows)), teacher, x)

        def sampled(key: PRNGKeyArray) -> Float[Array, "u k"]:
            return says(self.sample(key, average, up))

        total, teachers = says(average), 1 + self.samples + up.n.shape[0]
        for function, given in ((sampled, jax.random.split(key, self.samples)), (says, up.params)):
            if jax.tree.leaves(given)[0].shape[0]:
                add = lambda total, one, function=function: (total + function(one), None)  # noqa: E731
                total, _ = jax.lax.scan(add, total, given)
        return total / teachers

    def sample(self, key: PRNGKeyArray, average: Params, up: Up) -> Params:
        """w⁽ᵐ⁾."""
        if self.posterior == "dirichlet":
            return mean_of(up.params, up.n * jax.random.dirichlet(key, jnp.full(up.n.shape, self.alpha)))
        squares = jax.tree.map(lambda leaf, mean: (leaf - mean[None]) ** 2, up.params, average)
        noise = trees.normal_like(key, average)
        return jax.tree.map(lambda w, s2, z: w + jnp.sqrt(s2) * z, average, mean_of(squares, up.n), noise)

    def _distilled(self, key: PRNGKeyArray, w: Params, x: Shaped[Array, "u ..."], labels: Float[Array, "u k"]) -> Params:
        # With a step of 1: the cycle's is multiplied in afterwards, where Optax would put it too.
        optimiser = self.distil.build(jnp.float32(1), self.model)
        # Minibatches of places instead of rows: labels are known for each place.
        places = jnp.arange(x.shape[0])
        data = Data(places, places, jnp.ones(x.shape[0], bool))

        def kl(w: Params, batch: Data) -> Float[Array, ""]:
            log_p = jax.nn.log_softmax(self.model.apply(w, x[batch.x]), axis=1)
            target = labels[batch.x]
            return masked_mean(jnp.sum(target * (jnp.log(jnp.maximum(target, 1e-30)) - log_p), axis=1), batch.mask)

        def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
            w, state, mean, number = carry
            phase = (number % self.cycle + 1).astype(jnp.float32) / self.cycle
            lr = self.distil.lr_of(1) * (1 - (1 - FALL) * phase if self.swa else 1.0)
            with trees.other_peoples_code():
                updates, state = optimiser.update(jax.grad(kl)(w, batch), state, w)
            w = jax.tree.map(lambda leaf, update: leaf + lr * update, w, updates)
            number = number + 1
            cycles = number // self.cycle
            kept = jnp.where(number % self.cycle == 0, 1 / jnp.maximum(cycles, 1).astype(jnp.float32), 0.0)
            return w, state, jax.tree.map(lambda old, new: old + kept * (new - old), mean, w), number

        start = (w, optimiser.init(w), w, jnp.int32(0))
        w, _, mean, number = local_steps(step, start, key, data, self.distil.batch, self.distil.passes(data))
        averaged = jnp.bool_(self.swa) & (number >= self.cycle)  # a run of less than a cycle has no mean
        return jax.tree.map(lambda one, other: jnp.where(averaged, one, other), mean, w)


def mean_of(params: Params, n: Float[Array, " clients"]) -> Params:
    """Σ_i n_i w_i / Σ_i n_i of stacked models; the plain mean where there are no rows."""
    weights = jnp.where(jnp.sum(n) > 0, n, 1.0)
    weights = weights / jnp.sum(weights)
    return jax.tree.map(lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1), params)
