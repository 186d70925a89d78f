"""FedPA: federated posterior averaging (Al-Shedivat et al. 2021, Algorithms 1 to 4).

Were each client's posterior a Gaussian N(μ_i, Σ_i), the product of all would have its mode where Σ_i Σ_i⁻¹ (w − μ_i) = 0, while
the mean of the μ_i, which FedAvg goes to, is elsewhere. So a client samples its posterior and sends that gradient:

    client:  w_i ← w, epochs of SGD with a constant step; after a burn-in, sample x_t is the mean of the iterates of an epoch
             Δ_i = Σ̂⁻¹ (w − x̄),   Σ̂ = α I + (1 − α) S,   α = 1/(1 + (l − 1)ρ),   S the l samples' covariance
    server:  SGD with momentum on Σ_i n_i Δ_i / Σ_i n_i          (uniform=True: on the plain mean)

Σ̂/α = I + ρ Σ_t (x_t − x̄)(x_t − x̄)ᵀ grows by one outer product a sample, so by Sherman and Morrison Δ_i takes O(l² d) time and
O(l d) memory and no matrix: `shrunken_solve`. In the first rounds w is far from any mode and clients send w − w_i as in FedAvg,
w_i being where they end. With one sample, or ρ = 0, Σ̂ = I.

Reference:
    Al-Shedivat, Gillenwater, Xing, Rostamizadeh. Federated learning via posterior averaging: a new perspective and practical
    algorithms. ICLR 2021.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedbayes.algorithm import Data, Mean, Params, Sum, setting
from fedbayes.errors import UserError
from fedbayes.primitives.averaging import FineTuning, Local
from fedbayes.primitives.optimisers import Optimiser, ServerStep, move
from fedbayes.primitives.training import Training, local_steps, mean_loss, rows, tuning


class Server(NamedTuple):
    """The model, the momentum of the server's steps, and the number of rounds behind them."""

    params: Params
    momentum: Any
    round: Int[Array, ""]


class Down(NamedTuple):
    """The model, this round's step size, and whether clients sample or do as in FedAvg."""

    params: Params
    lr: Float[Array, ""]
    sampling: Bool[Array, ""]


class Up(NamedTuple):
    """Δ_i, how many rows the client has, and its training loss."""

    delta: Mean[Params]
    weight: Sum[Float[Array, ""]]
    loss: Mean[Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class FedPA(FineTuning[Server, Down, Up]):
    """Clients sample their posteriors; the server steps towards the mode of the product.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedPA(mlp((64,), Categorical(10))).samples
    4
    """

    train: Training = Training(epochs=5, batch=20, lr=0.02, momentum=0.9)
    """A client's round; each epoch after the burn-in is a sample."""
    burn_in_epochs: int = 1
    """Epochs of a round before the first sample."""
    burn_in_rounds: int | None = None
    """Rounds of FedAvg before the first with samples; by default a quarter of the run."""
    rho: float = setting(0.01, least=0, which="weighs a covariance")
    """ρ: how much the samples' covariance counts against the identity."""
    server_lr: float = 0.5
    """Step size of the server."""
    server_momentum: float = 0.9
    """Momentum of the server."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Fine-tuning of the whole model in `adapt`."""
    uniform: bool = False
    """Whether every client counts the same, instead of by its rows."""
    server_optimiser: Optimiser = "sgd"
    """Optimiser of the server, any of Optax's by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.server_step()
        if self.burn_in_epochs < 0 or self.samples < 1:
            raise UserError(
                f"burn_in_epochs is {self.burn_in_epochs} of {self.train.epochs} epochs, but each sample is an epoch after "
                "them; leave at least one"
            )

    def planned(self, rounds: int, **facts: Any) -> FedPA:
        """The algorithm for a run, with a burn-in of a quarter of its rounds where none is given.

        >>> from fedbayes.models import Categorical, mlp
        >>> FedPA(mlp((64,), Categorical(10))).planned(40).burn_in_rounds
        10
        """
        found = super().planned(rounds, **facts)
        return dataclasses.replace(found, burn_in_rounds=round(rounds / 4)) if self.burn_in_rounds is None else found

    def server_step(self) -> ServerStep:
        """The server's step."""
        return ServerStep(self.server_optimiser, self.server_lr, self.server_momentum)

    @property
    def samples(self) -> int:
        """l, the samples of a client's round."""
        return self.train.epochs - self.burn_in_epochs

    def init_server(self, key: PRNGKeyArray) -> Server:
        """w at random."""
        params = self.model.init(key)
        return Server(params, self.server_step().init(params), jnp.int32(0))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """w, the round's step size, and whether the burn-in is over."""
        return Down(server.params, self.train.lr_of(server.round + 1), server.round >= self._burn_in())

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w, then Δ."""
        end, samples, loss = self._sample(down, key, data)
        flat, unravel = ravel_pytree(down.params)
        plain = ravel_pytree(end)[0] - flat
        delta = jnp.where(down.sampling, shrunken_solve(samples, self.rho), -plain)
        return Up(unravel(delta), jnp.float32(1) if self.uniform else rows(data), loss), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """A step of SGD with momentum along the mean Δ."""
        params, momentum = self.server_step().against(server.params, server.momentum, up.delta)
        return Server(params, momentum, server.round + 1)

    def _burn_in(self) -> int:
        if self.burn_in_rounds is not None:
            return self.burn_in_rounds
        raise UserError("burn_in_rounds is not set and the run has no length; give one, or call algorithm.planned(rounds)")

    def _sample(self, down: Down, key: PRNGKeyArray, data: Data) -> tuple[Params, Float[Array, "l d"], Float[Array, ""]]:
        """Where SGD ends; its iterates less w, averaged over each epoch after the burn-in; and the mean loss."""
        optimiser = self.train.build(down.lr, self.model)
        batch_size = min(self.train.batch, data.mask.shape[0])
        steps = jnp.maximum((jnp.sum(data.mask) + batch_size - 1) // batch_size, 1)  # in an epoch

        def step(carry: Any, key: PRNGKeyArray, batch: Data) -> Any:
            params, state, sums, total, number = carry
            value, gradient = jax.value_and_grad(lambda w: mean_loss(self.model, w, batch))(params)
            params, state = move(optimiser, params, gradient, state)
            epoch = number // steps - self.burn_in_epochs
            # Steps of the burn-in have nowhere to go; a negative index would count from the end.
            place = jnp.where(epoch < 0, self.samples, epoch)
            moved = jax.tree.map(jnp.subtract, params, down.params)  # small numbers lose less when they are summed
            sums = jax.tree.map(lambda leaf, one: leaf.at[place].add(one, mode="drop"), sums, moved)
            return params, state, sums, total + value, number + 1

        sums = jax.tree.map(lambda leaf: jnp.zeros((self.samples, *leaf.shape), leaf.dtype), down.params)
        start = (down.params, optimiser.init(down.params), sums, jnp.float32(0), jnp.int32(0))
        end, _, sums, total, number = local_steps(step, start, key, data, self.train.batch, self.train.epochs)
        samples = jax.vmap(lambda one: ravel_pytree(one)[0])(sums) / steps.astype(jnp.float32)
        return end, samples, total / jnp.maximum(number, 1).astype(jnp.float32)


def shrunken_solve(samples: Float[Array, "l d"], rho: float) -> Float[Array, " d"]:
    """−Σ̂⁻¹ x̄ for samples as rows, without a matrix.

    Sample t adds γ u uᵀ to Σ̂/α, where u = x_t − x̄ of those before and γ = ρ(t − 1)/t. With v = (Σ̂/α)⁻¹ u from before,

        (Σ̂/α)⁻¹ loses γ v vᵀ/(1 + γ u·v),   and   Δ̃ = −(Σ̂/α)⁻¹ x̄   loses   v/t (1 + γ t u·Δ̃)/(1 + γ u·v)

    >>> print(shrunken_solve(jnp.array([[2.0], [4.0]]), rho=1.0))  # α = 1/2 and S = 2, so Σ̂ = 3/2
    [-2.]
    """
    count, _ = samples.shape

    def add(number: Any, carry: Any) -> Any:
        directions, scales, mean, delta = carry
        t = (number + 1).astype(samples.dtype)
        gamma = rho * (t - 1) / t
        u = samples[number] - mean
        v = u - (scales * (directions @ u)) @ directions  # those that are still to come are zeros
        grown = 1 + gamma * (u @ v)
        delta = delta - v / t * ((1 + gamma * t * (u @ delta)) / grown)
        return directions.at[number].set(v), scales.at[number].set(gamma / grown), mean + u / t, delta

    start = (jnp.zeros_like(samples), jnp.zeros(count, samples.dtype), samples[0], -samples[0])
    return (1 + (count - 1) * rho) * jax.lax.fori_loop(1, count, add, start)[3]
