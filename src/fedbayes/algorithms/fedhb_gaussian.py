"""Hierarchical Bayes with Gaussian q_i: the states and settings of FedHB-NIW, and its form="gaussian".

    q_i(θ_i) = N(m_i, s_i²),   q(φ): m0 and a variance σ² for each array of the network (or each weight)
    client:  minimise −log p(D_i | m_i) + ½ Σ_k E[Σ⁻¹]_k (m_i − m0)²_k,   s_i² = 1/(F_i + E[Σ⁻¹])
    server:  m0 = mean of the m_i,   σ² from Σ(m_i − m0)², Σ s_i² and two more sums (primitives/apart.py)
    predict: S draws from t_ν(m0, T0 σ² (1 + 1/l)), or from q_i after `adapt`
    adapt:   (17) under N(m0, σ² (1 + 1/l)), then q_i = N(m_i, T s_i²)

F_i is the diagonal of the Gauss–Newton matrix of the client's rows (primitives/curvature.py). T, 0 or 1, is chosen by the
federation with the step size and length of `adapt`. T0 is one of `apart.HEATS`: every tenth round clients score rows of theirs
under draws around m0, and send five numbers; where draws of all weights of a network are mere noise, it is 0. With start="mean"
a round starts at m0 and is taken under σ0²: under σ², m0 would follow clients slowly. With start="last" clients keep m_i, go on
from it under σ² and have a personal posterior: exact for linear models, while networks that went on apart have a poor mean.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, fact, setting
from fedbayes.errors import UserError
from fedbayes.primitives import apart, curvature
from fedbayes.primitives.apart import Apart, Squares
from fedbayes.primitives.training import Training, mean_loss, rows

PULL = 0.02
"""The strength of a client's prior, as FedProx's μ counts it, where σ0 is not given."""
EVERY = 10
"""Gaussian: once in so many rounds clients score the draws around m0."""
DRAWS = 10
"""Gaussian: networks that a prediction averages where `draws` is not given."""


class Server(NamedTuple):
    """q(φ): m0 and V0 of the body, Σ0 of each array; the fixed head, the bound of the last round, and the rounds so far."""

    m0: Params
    V0: Params | None
    Sigma0: Params | None
    head: Params
    bound: Float[Array, ""] | None
    round: Int[Array, ""]
    apart: Apart | None = None
    heat: Float[Array, ""] | None = None


class Local(NamedTuple):
    """The client's m after `adapt`, body and head, and of the Gaussian form T s²; with start="last" also while training."""

    m: Params | None
    s2: Params | None = None
    own: Bool[Array, ""] | None = None
    """True once a client that keeps them has some."""


class Down(NamedTuple):
    """m0, V0, the fixed head, and this round's step size."""

    m0: Params
    V0: Params | None
    head: Params
    lr: Float[Array, ""]
    apart: Apart | None = None
    heat: Float[Array, ""] | None = None
    turn: Bool[Array, ""] | None = None


class Up(NamedTuple):
    """The client's step δ_i = m_i − m0, its square, its training loss, and with `elbo` its term (5) of the bound."""

    delta: Mean[Params]
    square: Mean[Params | None]
    loss: Mean[Float[Array, ""]]
    objective: Mean[Float[Array, ""] | None]
    apart: Mean[Squares | None] = None
    heats: Mean[Float[Array, " heats"] | None] = None


@dataclasses.dataclass(frozen=True)
class Hierarchical(NetworkAlgorithm[Server, Local, Down, Up]):
    """Clients' networks around a shared one; the settings of both forms, and rounds of the Gaussian one."""

    form: Literal["spike", "gaussian"] = setting("spike", "gaussian")
    """q_i: the paper's spike at m_i with columns dropped, or a Gaussian around m_i whose prior is learnt by array."""
    pool: Literal["array", "weight"] = setting("array", "weight")
    """Gaussian: what has a variance of its own."""
    start: Literal["mean", "last"] = setting("mean", "last")
    """Gaussian: where a client's round starts: at m0, or at its last m_i, which it then keeps."""
    temperature: float = setting(1.0, least=0, choose=(0.0, 0.0, 1.0))
    """Gaussian: multiplies s_i² in `adapt`; 0 predicts with m_i alone."""
    head: tuple[str, ...] = ()
    """Paths of the part that is not trained; with none, everything is."""
    head_scale: float = 1.0
    """The head at its start is multiplied by this."""
    sigma0: float | None = setting(None, above=0, which="is a standard deviation")
    """σ0, the deviation of a weight that a client sees where clients agree; of the head's weights in `adapt` too. By default
    `PULL` times the rows of a client have the strength of the prior: σ0² = 1/(PULL |D|/N)."""
    prior: Literal["coordinate", "literal", "fixed"] = setting("coordinate", "literal", "fixed")
    """The prior of Σ: weight by weight, as printed, or none."""
    elbo: bool = False
    """With True, clients also report their term of the bound, which takes one more pass over their rows."""
    draws: int | None = setting(None, least=0)
    """S, networks that a prediction averages (19); 0 predicts with the mode, m0 or the client's m. By default 0, or 10 of the
    Gaussian form."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    N: int | None = fact("clients")
    """N, the clients that may take part; by default those of the run."""
    D: int | None = fact("rows")
    """|D|, the rows of all clients; by default those of the run."""

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing, or with start="last" no m yet."""
        if self.start == "mean":
            return Local(None)
        nothing = trees.zeros(self.model.init(key))
        return Local(nothing, nothing, jnp.bool_(False))

    @property
    def choices(self) -> dict[str, tuple[float, ...]]:
        """Those of `adapt`; T of the Gaussian form alone."""
        return {name: grid for name, grid in super().choices.items() if name != "temperature" or self.form == "gaussian"}

    @abc.abstractmethod
    def student_t(self, key: PRNGKeyArray, down: Down) -> Params:
        """A draw of a new client's body."""

    @abc.abstractmethod
    def _fit(
        self,
        start: Params,
        m0: Params,
        fixed: Params,
        precision: Params,
        training: Training,
        lr: Float[Array, ""],
        key: PRNGKeyArray,
        data: Data,
    ) -> tuple[Params, Float[Array, ""]]:
        """m_i under a prior around m0, and the training loss."""

    @abc.abstractmethod
    def _precision(self, down: Down) -> Params:
        """E[Σ⁻¹], or what stands for it, of each weight."""

    def _gaussian_client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """m_i under N(m0, σ²), and s_i² from the curvature of the client's rows at m_i."""
        assert down.apart is not None
        start, under, precision = down.m0, self._precision(down), self._precision(down)
        if self.start == "last":
            start = trees.choose(local.own, trees.frozen(local.m, self.head, 1.0)[1], down.m0)
        else:  # under σ² itself m0 would move slowly where clients agree, and as slowly as EM does
            under = jax.tree.map(lambda t: jnp.full_like(t, 1 / self.scale0**2), precision)
        m_i, loss = self._fit(start, down.m0, down.head, under, self.train, down.lr, key, data)
        F = self._curvature(key, m_i, down.head, data)
        s2 = jax.tree.map(lambda f, t: 1 / (f + t), F, precision)
        delta = jax.tree.map(jnp.subtract, m_i, down.m0)
        objective = self._nll(m_i, down, data) + apart.divergence(precision, delta, s2) if self.elbo else None
        way = apart.END
        if self.start == "mean":
            slope = jax.grad(lambda m: mean_loss(self.model, trees.merge(m, down.head), data))(down.m0)
            way = apart.way(self.train, down.lr, data, self.scale0**2)
            way = apart.measured(way, delta, slope, F, rows(data))
        sent = apart.squares(delta, F, jax.tree.map(lambda t: 1 / t, precision), rows(data), way, self._by_weight)
        if self.start == "last":  # m0's variance σ²/l reaches m_i where the client's rows leave room
            more = jax.tree.map(lambda s, v, n: s + s**2 / (v * n), s2, down.apart.variance, down.apart.clients)
            local = Local(trees.merge(m_i, down.head), trees.merge(more, trees.zeros(down.head)), jnp.bool_(True))

        def draw(key: PRNGKeyArray, heat: Float[Array, ""]) -> Params:
            return trees.merge(self.student_t(key, down._replace(heat=heat)), down.head)

        heats = apart.heat_scores(self.model, draw, jax.random.fold_in(key, 0xFFFFFFFC), data, down.turn)
        return Up(delta, None, loss, objective, sent, heats), local

    def _gaussian_server(self, server: Server, down: Down, up: Up) -> Server:
        """m0 is the mean of the m_i; σ² by apart.py."""
        m0, N = jax.tree.map(jnp.add, server.m0, up.delta), self._clients()
        assert server.apart is not None and up.apart is not None  # noqa: PT018
        assert down.turn is not None and up.heats is not None and server.heat is not None  # noqa: PT018
        learnt = apart.next(server.apart, up.delta, up.apart, self.scale0, N, self._by_weight, self.prior != "fixed")
        bound = None if up.objective is None else -N * up.objective
        heat = jnp.where(down.turn, jnp.asarray(apart.HEATS)[jnp.argmax(up.heats)], server.heat)
        return Server(m0, None, None, server.head, bound, server.round + 1, learnt, heat)

    def _nll(self, m_i: Params, down: Down, data: Data) -> Float[Array, ""]:
        return rows(data) * mean_loss(self.model, trees.merge(m_i, down.head), data)

    def _curvature(self, key: PRNGKeyArray, m: Params, fixed: Params, data: Data) -> Params:
        """F, what the client's rows say of each weight."""
        model = dataclasses.replace(self.model, apply=lambda m, x: self.model.apply(trees.merge(m, fixed), x))
        return curvature.diagonal(model, m, jax.random.fold_in(key, 0xFFFFFFFD), data)

    @property
    def _draws(self) -> int:
        if self.draws is not None:
            return self.draws
        return DRAWS if self.form == "gaussian" else 0

    @property
    def _by_weight(self) -> bool:
        return self.pool == "weight"

    @property
    def scale0(self) -> float:
        """σ0 as given, or from the rows of a client."""
        if self.sigma0 is not None:
            return self.sigma0
        if self.D is None:
            raise UserError(
                "sigma0 and D are not set: the prior's width follows from the rows of all clients; give one of them"
            )
        return math.sqrt(self._clients() / (PULL * self.D))

    def _clients(self) -> int:
        if self.N is None:
            raise UserError("N is not set: FedHB's server counts the clients that may take part; give N")
        return self.N
