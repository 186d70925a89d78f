"""kNN-Per: a shared model beside what a client remembers of its own rows (Marfoq et al. 2022, Algorithm 1).

    p_i(y | x) = λ_i p_kNN(y | x) + (1 − λ_i) p(y | x, w)
    p_kNN(y | x) ∝ Σ_j 1{y = y_j} exp(−‖φ(x) − φ(x_j)‖ / scale)          over the k nearest (φ(x_j), y_j) of the client
    client:  w_i ← w, then E epochs of SGD on its own mean loss, as in FedAvg
    server:  w ← Σ_i n_i w_i / Σ_i n_i          (uniform=True: the plain mean)
    adapt:   remember (φ(x_j), y_j) of each training row;  λ_i on a grid of 0, 0.01 … 1, the best on held-out rows

φ is what the last layer of the shared network sees, ‖·‖ the Euclidean distance as in the paper's equation; the public code has
exp(−‖·‖² / dim φ). λ_i is chosen with a fifth of the rows held out and the others remembered, the least of the best; afterwards
all are remembered. A client of one row has λ = 0. Neighbours give each label at least ε = 1e-6, p_kNN ← (1 − cε) p_kNN + ε for
c labels, so that λ = 1 calls nothing impossible. What is remembered never leaves the client, nor does λ.

Reference:
    Marfoq, Neglia, Kameni, Vidal. Personalized federated learning through local memorization. ICML 2022.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes.algorithm import Data, Params, setting
from fedbayes.errors import UserError
from fedbayes.models import Bernoulli, Categorical, Model
from fedbayes.primitives.averaging import Averaging, Down, Server, Up
from fedbayes.primitives.training import Training, fit, in_blocks, masked_mean, shuffle

GRID = np.linspace(0, 1, 101, dtype=np.float32)
"""The values of λ that a client chooses from."""
LEAST = 1e-6
"""ε, what p_kNN gives a label at least."""
FAR = -1e30
"""A log-weight that is as good as none; −∞ would not be a number where there are no neighbours at all."""


class Datastore(NamedTuple):
    """Features and labels of a client's rows; those whose mask is False do not exist."""

    features: Float[Array, "m d"]
    y: Int[Array, " m"]
    mask: Bool[Array, " m"]


class Local(NamedTuple):
    """What the client remembers and its λ after `adapt`; nothing while training."""

    datastore: Datastore | None
    share: Float[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class KNNPer(Averaging[Local]):
    """Federated averaging; each client mixes in the labels of its own nearest rows.

    >>> from fedbayes.models import mlp
    >>> KNNPer(mlp((64,), Categorical(10))).k
    10
    """

    model: Model
    """The network and its likelihood, one of labels; on the command line linear, mlp, mlp:256,128, cnn or mobilenet."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    k: int = setting(10, least=1)
    """Neighbours of a row."""
    scale: float = setting(1.0, above=0, which="divides distances")
    """The distance at which a neighbour counts 1/e."""
    share: float | None = setting(None, least=0, most=1, which="is the share of the neighbours")
    """λ of every client; by default each chooses its own."""
    criterion: Literal["likelihood", "accuracy"] = setting("likelihood", "accuracy")
    """What is best on the held-out rows."""
    fold: int = setting(5, least=2)
    """One row in so many is held out for the choice."""
    capacity: int | None = setting(None, least=1)
    """Rows that a client remembers, random ones where it has more; by default all."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """w at random."""
        if not isinstance(self.model.likelihood, Categorical | Bernoulli):
            raise UserError(
                f"kNN-Per counts labels of neighbours, but the model has {self.model.likelihood}; use Categorical or Bernoulli"
            )
        if self.model.features is None:
            raise UserError(
                f"kNN-Per compares what the last layer of a network sees, but the model {self.model.name} has no features; "
                "give from_functions features and readout, or from_flax a Network of body and head"
            )
        return super().init_server(key)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None, None)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs from w."""
        params, loss = fit(self.model, down.params, self.train, key, data, down.lr)
        return Up(params, self.weight(data), loss), local

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Remember the rows and choose λ; w as it is."""
        capacity = data.mask.shape[0] if self.capacity is None else self.capacity
        order = shuffle(key, data)[:capacity]
        order = jnp.pad(order, (0, capacity - order.shape[0]))
        x, place = data.x[order], jnp.arange(capacity)
        mask = place < jnp.sum(data.mask)
        features = jnp.where(mask[:, None], in_blocks(self._features, down.params, x), 0.0)
        datastore = Datastore(features, jnp.where(mask, data.y[order].astype(jnp.int32), 0), mask)
        if self.share is not None:
            return Local(datastore, jnp.where(jnp.any(mask), jnp.float32(self.share), 0.0))
        # The rows are in random order, so the first of them may be held out; with the padding they are `most`.
        held, most = (jnp.sum(mask) + self.fold - 1) // self.fold, -(-capacity // self.fold)
        others = datastore._replace(mask=mask & (place >= held))
        log_kNN = self._neighbours(others, features[:most])
        log_w = self._shared(in_blocks(self.model.apply, down.params, x[:most]))
        y = datastore.y[:most, None]

        def merit(share: Float[Array, ""]) -> Float[Array, ""]:
            log_p = _mixture(share, log_kNN, log_w)
            hits = (jnp.argmax(log_p, axis=1, keepdims=True) == y).astype(jnp.float32)
            each = jnp.take_along_axis(log_p, y, axis=1) if self.criterion == "likelihood" else hits
            return masked_mean(each[:, 0], place[:most] < held)

        best = jnp.asarray(GRID)[jnp.argmax(jax.lax.map(merit, jnp.asarray(GRID)))]
        return Local(datastore, jnp.where(jnp.any(others.mask), best, 0.0))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw: logits of the mixture, or those of w where the client remembers nothing."""
        outputs = self.model.apply(down.params, x)
        if local.datastore is None or local.share is None:
            return outputs[None]
        log_kNN = self._neighbours(local.datastore, self._features(down.params, x))
        log_p = _mixture(local.share, log_kNN, self._shared(outputs))
        return (log_p if isinstance(self.model.likelihood, Categorical) else log_p[:, 1:] - log_p[:, :1])[None]

    def _features(self, params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n d"]:
        assert self.model.features is not None  # init_server has looked
        return self.model.features(params, x)

    def _shared(self, outputs: Float[Array, "n k"]) -> Float[Array, "n c"]:
        """log p(y | x, w) of each label."""
        if isinstance(self.model.likelihood, Bernoulli):
            outputs = jnp.concatenate([jnp.zeros_like(outputs), outputs], axis=1)
        return jax.nn.log_softmax(outputs, axis=1)

    def _neighbours(self, datastore: Datastore, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """log p_kNN(y | x) of each label."""
        keys, labels = datastore.features, max(2, self.model.likelihood.outputs)
        # Nearest by 2 a·b − ‖b‖² = ‖a‖² − ‖a − b‖², without n × m × d numbers; it cancels, so their distances are taken anew.
        closeness = 2 * jnp.matmul(features, keys.T, precision="highest") - jnp.sum(keys**2, axis=1)[None]
        _, nearest = jax.lax.top_k(jnp.where(datastore.mask[None], closeness, -jnp.inf), min(self.k, len(keys)))
        distances = jnp.sqrt(jnp.sum((features[:, None] - keys[nearest]) ** 2, axis=2))
        exists = datastore.mask[nearest]  # not all of them, where the client has fewer than k
        weights = jnp.where(exists, jax.nn.softmax(jnp.where(exists, -distances / self.scale, FAR), axis=1), 0.0)
        votes = jnp.sum(weights[:, :, None] * jax.nn.one_hot(datastore.y[nearest], labels), axis=1)
        return jnp.log((1 - labels * LEAST) * votes + LEAST)


def _mixture(share: Float[Array, ""], log_kNN: Float[Array, "n c"], log_w: Float[Array, "n c"]) -> Float[Array, "n c"]:
    return jnp.logaddexp(jnp.log(share) + log_kNN, jnp.log1p(-share) + log_w)
