"""What a network's outputs mean: the distribution of y given the numbers that the network gives for a row.

A likelihood turns k numbers per row into a NumPyro distribution with one batch element per row, so that draws of a network's
outputs become a predictive distribution, and gives the log-probability that training maximises.
"""

from __future__ import annotations

import abc
import dataclasses

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Shaped

from fedbayes.errors import UserError, nearest
from fedbayes.trees import other_peoples_code


class Likelihood(abc.ABC):
    """The distribution of y given the numbers that a network gives for a row."""

    @property
    @abc.abstractmethod
    def outputs(self) -> int:
        """How many numbers a model gives per row."""

    @abc.abstractmethod
    def distribution(self, parameters: Float[Array, "... k"]) -> dist.Distribution:
        """The distribution of y, with batch shape `parameters.shape[:-1]`."""

    def log_prob(self, parameters: Float[Array, "*s n k"], y: Shaped[Array, " n"]) -> Float[Array, "*s n"]:
        """log p(y_i | parameters_i) for each row, and for each draw where `parameters` has leading axes."""
        rows = jnp.broadcast_to(self._observed(y), parameters.shape[:-1])
        with other_peoples_code():
            value: Array = self.distribution(parameters).log_prob(rows)
        return value

    def _observed(self, y: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
        return y.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Categorical(Likelihood):
    """One of `classes` labels, from logits: p(y = c) = exp(a_c) / sum_j exp(a_j).

    >>> print(Categorical(4).log_prob(jnp.zeros((1, 4)), jnp.array([2])).round(3))  # log(1/4)
    [-1.386]
    """

    classes: int
    """How many labels there are; y is in 0 … classes − 1."""

    @property
    def outputs(self) -> int:
        """One logit per class."""
        return self.classes

    def distribution(self, parameters: Float[Array, "... k"]) -> dist.Distribution:
        """The categorical distribution of y."""
        return dist.Categorical(logits=parameters)

    def _observed(self, y: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
        return y.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Bernoulli(Likelihood):
    """A label 0 or 1, from one logit: p(y = 1) = 1 / (1 + exp(-a)).

    >>> print(Bernoulli().log_prob(jnp.zeros((2, 1)), jnp.array([0, 1])).round(3))
    [-0.693 -0.693]
    """

    @property
    def outputs(self) -> int:
        """One logit."""
        return 1

    def distribution(self, parameters: Float[Array, "... k"]) -> dist.Distribution:
        """The Bernoulli distribution of y."""
        return dist.Bernoulli(logits=parameters[..., 0])


@dataclasses.dataclass(frozen=True)
class Normal(Likelihood):
    """A real number, from its mean: y ~ N(a_0, scale²), or N(a_0, exp(a_1)²) where the scale is learned.

    >>> print(Normal().log_prob(jnp.zeros((1, 1)), jnp.array([0.0])).round(3))  # -log(2 pi) / 2
    [-0.919]
    >>> Normal(scale=None).outputs
    2
    """

    scale: float | None = 1.0
    """Standard deviation of the noise; None when it is learned with the network."""

    def __post_init__(self) -> None:
        if self.scale is not None and not self.scale > 0:
            raise UserError(f"the normal likelihood's scale is {self.scale}, but a standard deviation is above zero")

    @property
    def outputs(self) -> int:
        """The mean, and the logarithm of the scale where that is learned."""
        return 1 if self.scale is not None else 2

    def distribution(self, parameters: Float[Array, "... k"]) -> dist.Distribution:
        """The normal distribution of y."""
        mean = parameters[..., 0]
        scale = jnp.full_like(mean, self.scale) if self.scale is not None else jnp.exp(parameters[..., 1])
        return dist.Normal(mean, scale)


@dataclasses.dataclass(frozen=True)
class Poisson(Likelihood):
    """A count, from the logarithm of its rate: y ~ Poisson(exp(a)).

    >>> print(Poisson().log_prob(jnp.zeros((1, 1)), jnp.array([0])).round(3))  # -rate
    [-1.]
    """

    @property
    def outputs(self) -> int:
        """The logarithm of the rate."""
        return 1

    def distribution(self, parameters: Float[Array, "... k"]) -> dist.Distribution:
        """The Poisson distribution of y."""
        return dist.Poisson(jnp.exp(parameters[..., 0]))


def likelihood_named(name: str, classes: int | None = None) -> Likelihood:
    """The likelihood of that name; "normal" has a learned scale, "categorical" needs the number of classes.

    >>> likelihood_named("categorical", 10)
    Categorical(classes=10)
    """
    if name == "categorical":
        if classes is None:
            raise UserError('the likelihood "categorical" needs labels, but the target is a number; use normal or poisson')
        return Categorical(classes)
    if name == "bernoulli" and classes is not None and classes != 2:
        raise UserError(f'the likelihood "bernoulli" needs 2 classes, but the data has {classes}; use categorical')
    known: dict[str, Likelihood] = {"bernoulli": Bernoulli(), "normal": Normal(scale=None), "poisson": Poisson()}
    if name not in known:
        raise UserError(f'there is no likelihood "{name}"; {nearest(name, ["categorical", *known])}')
    return known[name]
