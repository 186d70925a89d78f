"""Temperature scaling (Guo et al. 2017), for any algorithm that predicts labels: each client calibrates on rows of its own.

    T_i = argmax_T Σ_validation log 1/S Σ_s p(y | outputs_s / T) + log N(log T | 0, 1)

A share of a client's training rows, always the same ones, takes no part in its training; on them its temperature is found after
each round, and after `adapt`. With few rows the prior of log T keeps it near 1. No prediction changes its most probable label
where it has one draw. The messages are those of the algorithm inside: the temperature stays with the client. It is that of the
client's last round, found with the broadcast of that round; `adapt` finds it with the present one.

Reference:
    Guo, Pleiss, Sun, Weinberger. On calibration of modern neural networks. ICML 2017.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, NetworkAlgorithm, setting
from fedbayes.errors import UserError
from fedbayes.models import Model
from fedbayes.models.beliefs import Beliefs
from fedbayes.models.predictive import is_numeric
from fedbayes.primitives.training import shuffle

LARGEST = math.log(20.0)
"""Of |log T|."""
GRID = 33
"""Places that are tried at once."""
TIMES = 4
"""How often, each time between the neighbours of the best place before."""


class Local(NamedTuple):
    """What the algorithm inside keeps, and the client's temperature."""

    inner: Any
    log_temperature: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Tempered(NetworkAlgorithm[Any, Local, Any, Any]):
    """An algorithm whose clients scale their predictions by a temperature found on validation rows of their own.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> algorithm = Tempered(fb.FedPer(fb.network("mlp", clients)))
    >>> fb.simulate(algorithm, clients, rounds=1, cohort=5)
    Fit(Tempered FedPer, 1 rounds on digits)
    """

    model: Model = dataclasses.field(init=False, repr=False)
    """That of the algorithm inside."""
    algorithm: NetworkAlgorithm[Any, Any, Any, Any]
    """The algorithm inside."""
    share: float = setting(0.2, above=0, below=1, which="is a share of a client's rows")
    """Share of a client's training rows that calibrate instead of train."""

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, NetworkAlgorithm):
            raise UserError(
                f"the algorithm inside is {self.algorithm!r}, but it is one with its network, such as fb.FedPer(model)"
            )
        object.__setattr__(self, "model", self.algorithm.model)
        super().__post_init__()
        if is_numeric(self.model.likelihood):
            raise UserError(f"a temperature scales the logits of labels, but {self.model} predicts numbers")

    @property
    def title(self) -> str:
        """Both names."""
        return f"Tempered {self.algorithm.title}"

    @property
    def up_type(self) -> type[Any]:
        """That of the algorithm inside, whose messages these are."""
        return self.algorithm.up_type

    @property
    def has_global(self) -> bool:
        """As inside."""
        return self.algorithm.has_global

    def metrics(self, server: Any) -> dict[str, Float[Array, ""]]:
        """Those of the algorithm inside."""
        return self.algorithm.metrics(server)

    def init_server(self, key: PRNGKeyArray) -> Any:
        """As inside."""
        return self.algorithm.init_server(key)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """As inside, with T = 1."""
        return Local(self.algorithm.init_local(key, data), jnp.float32(0))

    def broadcast(self, key: PRNGKeyArray, server: Any) -> Any:
        """As inside."""
        return self.algorithm.broadcast(key, server)

    def client(self, key: PRNGKeyArray, down: Any, local: Local, data: Data) -> tuple[Any, Local]:
        """A round on the rows that train, then the temperature on the others."""
        train, validation = self._split(data)
        up, inner = self.algorithm.client(key, down, local.inner, train)
        return up, Local(inner, self._temperature(key, down, inner, validation))

    def server(self, key: PRNGKeyArray, server: Any, down: Any, up: Any) -> Any:
        """As inside."""
        return self.algorithm.server(key, server, down, up)

    def adapt(self, key: PRNGKeyArray, down: Any, local: Local, data: Data) -> Local:
        """`adapt` on the rows that train, then the temperature on the others."""
        train, validation = self._split(data)
        inner = self.algorithm.adapt(key, down, local.inner, train)
        return Local(inner, self._temperature(key, down, inner, validation))

    def predict(self, key: PRNGKeyArray, down: Any, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of the logits, divided by T."""
        return self.algorithm.predict(key, down, local.inner, x) / jnp.exp(local.log_temperature)

    def beliefs(self, down: Any, local: Local) -> Beliefs:
        """As inside."""
        return self.algorithm.beliefs(down, local.inner)

    def with_beliefs(self, down: Any, local: Local, beliefs: Beliefs) -> tuple[Any, Local]:
        """As inside, at the same temperature."""
        down, inner = self.algorithm.with_beliefs(down, local.inner, beliefs)
        return down, local._replace(inner=inner)

    def _split(self, data: Data) -> tuple[Data, Data]:
        """Rows that train, in front as elsewhere, and the others; which is which is the same in each round."""
        order = shuffle(jax.random.key(0), data)
        count = jnp.sum(data.mask)
        few = jnp.floor(self.share * count.astype(jnp.float32)).astype(count.dtype)
        place = jnp.arange(len(order))
        train = Data(data.x[order], data.y[order], place < count - few)
        return train, train._replace(mask=(place >= count - few) & (place < count))

    def _temperature(self, key: PRNGKeyArray, down: Any, inner: Any, data: Data) -> Float[Array, ""]:
        outputs = self.algorithm.predict(key, down, inner, data.x)

        def loss(log_temperature: Float[Array, ""]) -> Float[Array, ""]:
            each = self.model.likelihood.log_prob(outputs / jnp.exp(log_temperature), data.y)
            mixture = jax.nn.logsumexp(each, axis=0) - math.log(outputs.shape[0])
            return log_temperature**2 / 2 - jnp.sum(jnp.where(data.mask, mixture, 0.0))

        def look(number: Any, best: Float[Array, ""]) -> Float[Array, ""]:
            reach = LARGEST * (2 / (GRID - 1)) ** number.astype(jnp.float32)
            places = best + reach * jnp.linspace(-1.0, 1.0, GRID)
            return places[jnp.argmin(jax.vmap(loss)(places))]

        return jax.lax.fori_loop(0, TIMES, look, jnp.float32(0))
