"""FedHB with the Mixture prior (Kim and Hospedales 2023, section 3.2 and Appendix C).

    μ_j ~ N(0, I) for j = 1 … K,   θ_i ~ 1/K Σ_j N(μ_j, σ² I),   q(μ_j) = r_j,   q_i(θ_i) = m_i            (20, 21)
    client:  minimise −log p(D_i | m_i) − log Σ_j exp(−‖m_i − r_j‖²/2σ²)                           (22)
    server:  c_ij ∝ exp(−‖m_i − r_j‖²/2σ²),   r_j = Σ_i c_ij m_i / (σ² + Σ_i c_ij)                   (24), one step of EM
    gate:    g(x; β), the same network with K outputs, learns j* = argmin_j ‖m_i − r_j‖ from x; β is averaged (Algorithm 4)
    predict: Σ_j g_j(x) p(y | x, r_j)                                                              (82)
    adapt:   (22) on the client's rows, body and head                                              (84, 85)

c_ij is computed on the client, so that the server needs only sums: K d numbers of c_ij (m_i − r_j), K of c_ij, d of β, the
loss, and with learnt=True four numbers from which σ² is learnt (primitives/apart.py, all weights as one group). Clients train
under the σ² that was given, as prototypes follow clients slowly under a narrow one; `adapt` uses the learnt one. Sums are N
times the mean over the clients of the round.

Prototypes start alike and clients' rounds start at their mean. Where clients come in kinds, give start="best", noise=None,
balance=0.3 and learnt=True: prototypes start at random, each client's round starts at the one that fits its rows best, and for
half the run one that has more than its share of clients gets dearer: else the first that is better has them all. Clients with
rows then find their kind, while those without may be predicted for less well (docs/results/fedhb-kinds.md). A prediction is S
draws; one between two prototypes mixes their distributions, so that the gate's shares are exact. With `.paper` shares are
rounded to 1/S, and heads, the gate's too, stay at their random start.

The prior of the prototypes is flat by default. Under N(0, I), as printed, each round draws them to 0 by σ²/(σ² + Σ_i c_ij), and
clients that take a few steps a round do not make up for it: after 60 rounds with 20 clients the weights of a network had .6 of
their length. Also as printed, (24) moves a component that hardly any client chooses to the zero network, where none ever will.
Here the prior of a component that has less than one client pulls it to where it was, and after `patience` such rounds in a row
it starts again beside the component that has most clients.

Reference:
    Kim, Hospedales. A hierarchical Bayesian approach to federated learning. 2023.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, fact, setting
from fedbayes.errors import UserError
from fedbayes.models import Categorical, Model, Normal
from fedbayes.models.model import network_outputs
from fedbayes.primitives import apart, curvature
from fedbayes.primitives.apart import Squares
from fedbayes.primitives.several import blended, by_shares, overlaps, random_starts
from fedbayes.primitives.training import Training, descend, drawn, fit, masked_mean, mean_loss, rows, tuning


class Server(NamedTuple):
    """The prototypes r (K of each array), the gate's body β, both heads; for how many rounds each was idle; bound and round."""

    r: Params
    beta: Params
    head: Params
    gate_head: Params
    idle: Int[Array, " K"]
    bound: Float[Array, ""] | None
    round: Int[Array, ""]
    sigma2: Float[Array, ""] | None = None
    price: Float[Array, " K"] | None = None


class Local(NamedTuple):
    """The client's m after `adapt`, body and head; nothing while training."""

    m: Params | None


class Down(NamedTuple):
    """The prototypes, the gate, the fixed heads, and this round's step size."""

    r: Params
    beta: Params
    head: Params
    gate_head: Params
    lr: Float[Array, ""]
    sigma2: Float[Array, ""] | None = None
    price: Float[Array, " K"] | None = None


class Up(NamedTuple):
    """c_ij (m_i − r_j), c_ij, the gate's body, the training loss and with `elbo` the client's term (22) of the bound."""

    moved: Mean[Params]
    c: Mean[Float[Array, " K"]]
    beta: Mean[Params]
    loss: Mean[Float[Array, ""]]
    objective: Mean[Float[Array, ""] | None]
    apart: Mean[Squares | None] = None


@dataclasses.dataclass(frozen=True)
class FedHBMixture(NetworkAlgorithm[Server, Local, Down, Up]):
    """K prototypes of a network; each client belongs near one of them, and a gate tells from a row which.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedHBMixture(mlp((64,), Categorical(10)), K=5).sigma2
    0.1
    """

    published: ClassVar[Mapping[str, Any]] = {
        "head": ("head",),
        "exact": False,
        "train": Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9),
    }

    K: int = setting(2, least=1)
    """Prototypes."""
    sigma2: float = setting(0.1, above=0)
    """σ², the variance of a client's weights around its prototype; where it is learnt, at the start."""
    learnt: bool = False
    """With True, σ² is learnt from two sums a round."""
    balance: float = setting(0.0, least=0)
    """With start="best": how much dearer a prototype that everybody chose gets in a round, in nats a row; for half the run."""
    head: tuple[str, ...] = ()
    """Paths of the part that is not trained, in the network and in the gate; with none, everything is."""
    head_scale: float = 1.0
    """The head at its start is multiplied by this."""
    start: Literal["centre", "best"] = setting("centre", "best")
    """Where a client's round starts: at the mean of the prototypes, or at the one that fits its rows best, as `adapt` does."""
    noise: float | None = setting(0.1, least=0)
    """Prototypes start alike but for noise of this length, in units of σ; with None each at random."""
    shrink: bool = False
    """Whether prototypes have the paper's prior N(0, I), which draws them to 0; else a flat one."""
    patience: int = setting(10, least=1)
    """Rounds with less than one client after which a prototype starts again."""
    elbo: bool = False
    """With True, clients also report their term of the bound, which takes one more pass over their rows."""
    draws: int = setting(20, least=1)
    """Draws of a prediction, divided among prototypes as the gate says."""
    exact: bool = True
    """With True, a draw between two prototypes mixes them, so that the gate's shares are exact; else they are rounded."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    gate_rows: int = setting(100, least=1)
    """Rows that a client draws for the gate in a round: all of them have the same label, so a few will do."""
    train_gate: Training = Training(epochs=1, batch=50, momentum=0.9)
    """Training on those, with the round's step size."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Personalisation in `adapt`."""
    gate: Model | None = None
    """The gating network, with K outputs; by default the network itself with another head, in units of its own."""
    N: int | None = fact("clients")
    """N, the clients that may take part; by default those of the run."""
    length: int | None = fact("rounds", needed_by="balance")
    """Length of the run, over the first half of which prototypes are balanced."""

    def init_server(self, key: PRNGKeyArray) -> Server:
        """One network plus noise for the prototypes, another one for the gate."""
        for_gate, for_noise = jax.random.split(jax.random.fold_in(key, 1))
        head, body = trees.frozen(self.model.init(key), self.head, self.head_scale)
        if self.noise is None:
            r = trees.split(random_starts(self.model, key, self.K), self.head)[1]
        else:
            r = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.K, *leaf.shape)), body)
            r = self._noisy(for_noise, r) if self.K > 1 else r
        gate_head, beta = self._init_gate(for_gate)
        bound = jnp.float32(0) if self.elbo else None
        sigma2 = jnp.float32(self.sigma2) if self.learnt else None
        price = jnp.zeros(self.K) if self._priced else None
        return Server(r, beta, head, gate_head, jnp.zeros(self.K, jnp.int32), bound, jnp.int32(0), sigma2, price)

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing."""
        return Local(None)

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """The prototypes, the gate, the heads and the round's step size."""
        lr = self.train.lr_of(server.round + 1)
        return Down(server.r, server.beta, server.head, server.gate_head, lr, server.sigma2, server.price)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on (22), then the E-step, and the gate."""
        best = self.start == "best"
        start = self._best(down, data, down.price) if best else jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), down.r)
        m_i, loss = self._fit(start, self.sigma2, down.r, down.head, self.train, down.lr, key, data)
        distance, sigma2 = squared_distances(m_i, down.r), self.sigma2
        c, label = jax.nn.softmax(-distance / (2 * sigma2)), jnp.argmin(distance)
        beta, for_gate = down.beta, jax.random.fold_in(key, np.uint32(0xFFFFFFFE))
        if self.K > 1:

            def G(beta: Params, key: PRNGKeyArray, batch: Data) -> Float[Array, ""]:
                return self._gate_loss(beta, down, label, batch)

            some = drawn(for_gate, data, self.gate_rows)
            beta, _ = descend(self._gating, G, down.beta, self.train_gate, down.lr, for_gate, some)
        moved = jax.tree.map(lambda m, r: c.reshape((-1,) + (1,) * m.ndim) * (m[None] - r), m_i, down.r)
        objective = None
        if self.elbo:
            nll = rows(data) * mean_loss(self.model, trees.merge(m_i, down.head), data)
            objective = nll - jax.nn.logsumexp(-distance / (2 * sigma2))
        if down.sigma2 is None:
            return Up(moved, c, beta, loss, objective), local
        model = dataclasses.replace(self.model, apply=lambda m, x: self.model.apply(trees.merge(m, down.head), x))
        F = curvature.diagonal(model, m_i, jax.random.fold_in(key, 0xFFFFFFFD), data)
        v, way = jax.tree.map(lambda _: down.sigma2, F), apart.way(self.train, down.lr, data, self.sigma2)
        nearest = jax.tree.map(lambda m, r: m - r[label], m_i, down.r)
        slope = jax.grad(lambda m: mean_loss(self.model, trees.merge(m, down.head), data))(start)
        way = apart.measured(way, nearest, slope, F, rows(data))
        sent = apart.squares(nearest, F, v, rows(data), way, by_weight=False)
        sums = Squares(*(jax.tree.reduce(jnp.add, part) for part in sent))
        return Up(moved, c, beta, loss, objective, sums._replace(step=jnp.sum(c * distance))), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """The M-step (24), and the gates' mean."""
        count = self._clients() * up.c  # Σ_i c_ij
        rare = count < 1
        kept = jnp.where(self.shrink | rare, count / (count + self.sigma2), 1.0)

        def component(old: Array, moved: Array) -> Array:
            along = (-1,) + (1,) * (old.ndim - 1)
            mean = old + moved / jnp.maximum(up.c, 1e-30).reshape(along)  # Σ_i c_ij m_i / Σ_i c_ij
            prior = jnp.where(rare.reshape(along), old, 0.0)
            return prior + kept.reshape(along) * (jnp.where(up.c.reshape(along) > 0, mean, old) - prior)

        r = jax.tree.map(component, server.r, up.moved)
        sigma2 = server.sigma2
        if sigma2 is not None:
            sigma2 = self._learnt(sigma2, server.r, r, count, up)
        price = server.price
        if price is not None:  # a prototype that more than its share of clients chose gets dearer, another one cheaper
            price = price + self.balance * (up.c - 1 / self.K)
            price = jnp.where(server.round + 1 < self._until, price - jnp.min(price), 0.0)
        idle = jnp.where(rare, server.idle + 1, 0)
        most = jnp.argmax(count)
        again = (idle >= self.patience) & (jnp.arange(self.K) != most)
        beside = self._noisy(key, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[most], leaf.shape), r))
        r = jax.tree.map(lambda leaf, new: jnp.where(again.reshape((-1,) + (1,) * (leaf.ndim - 1)), new, leaf), r, beside)
        bound = None if up.objective is None else -(self._clients() * up.objective + self._kl(server))
        idle = jnp.where(again, 0, idle)
        return Server(r, up.beta, server.head, server.gate_head, idle, bound, server.round + 1, sigma2, price)

    def metrics(self, server: Server) -> dict[str, Float[Array, ""]]:
        """The bound of the last round, where clients report their terms of it."""
        return {} if server.bound is None else {"bound": server.bound}

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Equation 84, from the best prototype; the head's weights have the prior N(head, σ² I)."""
        start = self._best(down, data)  # a mean of prototypes that lie apart is no good network
        heads = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (self.K, *leaf.shape)), down.head)
        whole = trees.merge(start, down.head)
        sigma2 = self.sigma2 if down.sigma2 is None else down.sigma2
        return Local(self._fit(whole, sigma2, trees.merge(down.r, heads), None, self.tune, self.tune.lr_of(1), key, data)[0])

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """One draw of the client's own m (85), or draws of the prototypes in the gate's shares (82) where it has none."""
        if local.m is not None:
            return self.model.apply(local.m, x)[None]
        outputs = jax.vmap(lambda r: self.model.apply(trees.merge(r, down.head), x))(down.r)
        if self.K == 1:
            return outputs
        shares = self.gate_shares(down, x)
        if self.exact:
            return blended(self.model.likelihood, outputs, overlaps(shares, self.draws))
        return jnp.take_along_axis(outputs, by_shares(shares, self.draws)[:, :, None], axis=0)

    def gate_shares(self, down: Down, x: Shaped[Array, "n ..."]) -> Float[Array, "n K"]:
        """g(x; β)."""
        return jax.nn.softmax(self._gating.apply(trees.merge(down.beta, down.gate_head), x), axis=1)

    def _noisy(self, key: PRNGKeyArray, r: Params) -> Params:
        d = sum(leaf[0].size for leaf in jax.tree.leaves(r))
        scale = (0.1 if self.noise is None else self.noise) * math.sqrt(self.sigma2 / d)
        return jax.tree.map(lambda leaf, noise: leaf + scale * noise, r, trees.normal_like(key, r))

    def _clients(self) -> int:
        if self.N is None:
            raise UserError("N is not set: FedHB's server counts the clients that may take part; give N")
        return self.N

    def _fit(
        self,
        start: Params,
        sigma2: Any,
        r: Params,
        fixed: Any,
        training: Training,
        lr: Float[Array, ""],
        key: PRNGKeyArray,
        data: Data,
    ) -> tuple[Params, Float[Array, ""]]:
        """(22) over |D_i|, by minibatches; a client of so few rows that the pull would overshoot takes smaller steps."""
        n = jnp.maximum(rows(data), 1)
        if training.optimiser == "sgd":
            lr = jnp.minimum(lr, (1 + training.momentum) * sigma2 * n)  # half of what is stable

        def apart(m: Params) -> Float[Array, ""]:
            return -jax.nn.logsumexp(-squared_distances(m, r) / (2 * sigma2)) / n

        return fit(self.model, start, training, key, data, lr, fixed, apart)

    def _learnt(self, old: Array, before: Params, r: Params, count: Float[Array, " K"], up: Up) -> Float[Array, ""]:
        """σ² after a round, as in apart.py: all weights of all prototypes are one group."""
        assert up.apart is not None
        N, d = self._clients(), sum(leaf[0].size for leaf in jax.tree.leaves(r))
        steps = jax.tree.map(lambda new, old: jnp.sum((new - old).reshape(self.K, -1) ** 2, axis=1), r, before)
        scatter = jnp.maximum(N * up.apart.step - jnp.sum(count * jax.tree.reduce(jnp.add, steps)), 0.0)
        free = max(N - self.K, 1)  # clients that are left when each prototype has taken one
        return apart.variance(old, up.apart._replace(step=scatter / free), float(d), free, self.sigma2)[0]

    @property
    def _priced(self) -> bool:
        return self.start == "best" and self.balance > 0 and self.K > 1

    @property
    def _until(self) -> int:
        """The round from which prototypes cost the same."""
        return (self.length or 0) // 2

    def _best(self, down: Down, data: Data, price: Float[Array, " K"] | None = None) -> Params:
        """The prototype that fits the client's rows best."""
        losses = jax.lax.map(lambda r: mean_loss(self.model, trees.merge(r, down.head), data), down.r)
        losses = losses if price is None else losses + price
        return jax.tree.map(lambda leaf: leaf[jnp.argmin(losses)], down.r)

    @property
    def _gating(self) -> Model:
        """The gate. A network for numbers also gives their noise, in their units: of that, the features under a dense layer."""
        model = self.gate or self.model
        if self.gate is not None or not isinstance(model.likelihood, Normal) or model.features is None:
            return model
        features = model.features

        def init(key: PRNGKeyArray) -> Params:
            return {name: leaf for name, leaf in model.init(key).items() if name != "log_scale"}

        def apply(params: Params, x: Shaped[Array, "n ..."]) -> Float[Array, "n K"]:
            return features(params, x) @ params["head"]["kernel"] + params["head"]["bias"][None]

        return Model(init, apply, Categorical(max(2, self.K)))

    def _init_gate(self, key: PRNGKeyArray) -> tuple[Params, Params]:
        """The gate's head and body: the network's, its last axis of outputs cut or repeated to K."""
        if self.gate is not None or self.K == 1:
            return trees.split(self._gating.init(key), self.head, whole=True)
        path, k = self.head or ("head",), network_outputs(self.model.likelihood)
        draws = [self._gating.init(one) for one in jax.random.split(key, -(-self.K // k))]
        known = any(name.startswith(path) for name in trees.named(draws[0]))
        heads = [trees.split(draw, path, whole=True)[0] for draw in draws] if known else []
        if not known or any(leaf.shape[-1:] != (k,) for leaf in jax.tree.leaves(heads)) or "log_scale" in draws[0]:
            raise UserError(
                f"the network has no last layer under {', '.join(path)} that could have {self.K} outputs; give gate=Model"
            )
        wide = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1)[..., : self.K], *heads)
        return trees.split(trees.merge(wide, trees.split(draws[0], path, whole=True)[1]), self.head)

    def _gate_loss(self, beta: Params, down: Down, label: Int[Array, ""], batch: Data) -> Float[Array, ""]:
        """−log g_j*(x; β), over the rows of the batch."""
        outputs = self._gating.apply(trees.merge(beta, down.gate_head), batch.x)
        if outputs.shape[1] != self.K:
            raise UserError(f"the gate gives {outputs.shape[1]} numbers per row for {self.K} prototypes; give gate=Model")
        return masked_mean(-jax.nn.log_softmax(outputs, axis=1)[:, label], batch.mask)

    def _kl(self, server: Server) -> Float[Array, ""]:
        """KL(q(φ) ‖ p(φ)), equation 71, up to a constant."""
        if not self.shrink:
            return jnp.float32(0)
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda leaf: jnp.sum(leaf**2), server.r)) / 2


def squared_distances(m: Params, r: Params) -> Float[Array, " K"]:
    """‖m − r_j‖² for each j."""
    # One by one: a CPU sums to K numbers at once many times slower than K times to one.
    K = jax.tree.leaves(r)[0].shape[0]
    return jnp.stack([trees.squared_distance(m, jax.tree.map(lambda leaf, j=j: leaf[j], r)) for j in range(K)])
