"""FedHB with the Normal-Inverse-Wishart prior (Kim and Hospedales 2023, section 3.1 and Appendix B).

    θ_i ~ N(μ, Σ) for each client,   μ | Σ ~ N(0, Σ/λ0),   Σ ~ IW(Σ0, ν0)                             (13, 14)
    q_i(θ_i) = N(m_i, s_i²),   q(φ): m0 and a variance σ² for each array of the network (or each weight)
    client:  minimise −log p(D_i | m_i) + ½ Σ_k E[Σ⁻¹]_k (m_i − m0)²_k,   s_i² = 1/(F_i + E[Σ⁻¹])          (17)
    server:  m0 = mean of the m_i,   σ² from Σ(m_i − m0)², Σ s_i² and two more sums (primitives/apart.py)
    predict: S draws from t_ν(m0, T0 σ² (1 + 1/l)), or from q_i after `adapt`                          (19)
    adapt:   (17) under N(m0, σ² (1 + 1/l)), then q_i = N(m_i, T s_i²)

F_i is the diagonal of the Gauss–Newton matrix of the client's rows (primitives/curvature.py). T, 0 or 1, is chosen by the
federation with the step size and length of `adapt`. T0 is one of `HEATS`: every tenth round clients score rows of theirs under
draws around m0, and send five numbers; where draws of all weights of a network are mere noise, it is 0. With start="mean" a
round starts at m0 and is taken under σ0²: under σ², m0 would follow clients slowly. With start="last" clients keep m_i, go on
from it under σ² and have a personal posterior: exact for linear models, while networks that went on apart have a poor mean.

**form="spike"**, as in `.paper`, is what was published:

    q(μ, Σ) = N(μ; m0, Σ/l0) IW(Σ; V0, n0) with V0 diagonal,   q_i(θ_i) = m_i with columns dropped, p kept       (15, 16)
    client:  minimise −log p(D_i | m̃_i) + p/2 Σ_k E[Σ⁻¹]_k (m_i − m0)²_k                              (17)
    server:  m0 = p/(N + λ0) Σ m_i,   V0 = n0/(N + ν0) (Σ0 + Nε² + λ0 m0² + Σ ρ_i),
             ρ_i = p (m_i − m0)² + (1 − p) m0²                                                     (18), the diagonal
    predict: S draws from t_ν(m0, (l0 + 1)/l0 V0/ν), with draws=0 the mode                              (19)
    adapt:   (17) on the client's rows, body and head; then draws of m with columns dropped        (46, 12)

Sums over clients are N times the mean over those of the round. Clients send δ_i = m_i − m0 and δ_i²; ε enters V0 and the bound.

**Its prior**: "coordinate" is the model weight by weight: ν0 = 3, l0 = N + λ0, n0 = N + 3, E[Σ⁻¹] = n0/V0, Σ0 = (N + 3) σ0².
"literal" is as printed, with λ0 = 1: Σ0 = 1, ν0 = d + 2, n0 = |D| + d + 2, (n0 + d + 1)/V0 from the mode of q(Σ); it grows with
the number d of weights until clients hardly move. "fixed" keeps E[Σ⁻¹] = 1/σ0²; with p = 1 and λ0 = 0 it is FedProx (`uniform`)
of μ = 1/(σ0² |D_i|). The part of a pull that is too stiff for an explicit step is applied as a proximal step.

Reference:
    Kim, Hospedales. A hierarchical Bayesian approach to federated learning. 2023.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Mean, NetworkAlgorithm, Params, fact, setting
from fedbayes.errors import UserError
from fedbayes.primitives import apart, curvature
from fedbayes.primitives.apart import Apart, Squares
from fedbayes.primitives.spikes import (
    Prior,
    descend_under,
    divergence,
    divergence_of_phi,
    drop_columns,
    equation_18,
    population,
    student_t_like,
)
from fedbayes.primitives.training import Training, drawn, mean_loss, mixture_score, rows, tuning

PULL = 0.02
"""The strength of a client's prior, as FedProx's μ counts it, where σ0 is not given."""
HEATS = (0.0, 0.01, 0.1, 0.3, 1.0)
"""What the variances of draws around m0 may be multiplied by."""
EVERY, HEATED, HEATED_DRAWS = 10, 16, 8
"""Once in so many rounds clients score them, by so many rows and draws."""


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
    """The client's m and s² after `adapt`, body and head; while training nothing, or with start="last" those of the body."""

    m: Params | None
    s2: Params | None = None
    own: Bool[Array, ""] | None = None
    """Whether a client that keeps them has any."""


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
class FedHBNIW(NetworkAlgorithm[Server, Local, Down, Up]):
    """Every client's network is a Gaussian perturbation of a shared one; how far they lie apart is learnt weight by weight.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedHBNIW(mlp((64,), Categorical(10)), sigma0=0.05).p
    0.999
    """

    published: ClassVar[Mapping[str, Any]] = {
        "form": "spike",
        "draws": 0,
        "head": ("head",),
        "sigma0": 0.1,
        "train": Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9),
    }

    form: Literal["gaussian", "spike"] = setting("gaussian", "spike")
    """q_i: a Gaussian around m_i, or the paper's spike at m_i with columns dropped."""
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
    p: float = setting(0.999, above=0, most=1, which="is the share of columns that are kept")
    """Share of columns that are kept: 1 − p is the dropout. It also multiplies m0 in each round."""
    epsilon: float = setting(1e-4, least=0)
    """ε, the width of the spikes of q_i."""
    sigma0: float | None = setting(None, above=0, which="is a standard deviation")
    """σ0, the deviation of a weight that a client sees where clients agree; of the head's weights in `adapt` too. By default
    `PULL` times the rows of a client have the strength of the prior: σ0² = 1/(PULL |D|/N)."""
    lambda0: float = setting(0.0, least=0)
    """λ0, how many clients of all-zero weights the prior counts for; 0 is a flat prior for the mean. The paper has 1, which the
    literal prior has to be given too."""
    prior: Literal["coordinate", "literal", "fixed"] = setting("coordinate", "literal", "fixed")
    """The prior of Σ: weight by weight, as printed, or none."""
    empirical: bool = False
    """Whether Σ0 is learnt, one for each array of the network, by a step of EM a round."""
    elbo: bool = False
    """Whether clients also report their term of the bound, at the price of one more look at their rows."""
    draws: int = setting(10, least=0)
    """S, networks that a prediction averages (19); 0 predicts with the mode, m0 or the client's m."""
    train: Training = Training(epochs=1, batch=50, lr=0.1, momentum=0.9)
    """A client's round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Personalisation in `adapt`."""
    N: int | None = fact("clients")
    """N, the clients that may take part; by default those of the run."""
    D: int | None = fact("rows")
    """|D|, the rows of all clients; by default those of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior == "literal":
            warnings.warn(
                "the literal prior pulls harder the more weights a network has, until clients hardly move; "
                "prior='coordinate' does not depend on their number",
                stacklevel=3,
            )
        if self.empirical and not self.epsilon > 0:
            raise UserError("epsilon is 0, but a prior that is learnt needs a width that it does not fall below; use 1e-4")
        if (self.empirical or self.prior == "literal") and "adam" in (self.train.optimiser, self.tune.optimiser):
            raise UserError("this prior takes implicit steps after those of SGD, but the optimiser is adam; use sgd")
        if self.empirical and self.prior != "coordinate":
            raise UserError(f"Σ0 is learnt for the coordinate prior, but prior is {self.prior}; leave out one of the two")

    def init_server(self, key: PRNGKeyArray) -> Server:
        """m0 and the head at random; V0 such that a client sees Σ0 alone."""
        head, m0 = trees.frozen(self.model.init(key), self.head, self.head_scale)
        bound = jnp.float32(0) if self.elbo else None
        if self.form == "gaussian":
            learnt = apart.start(m0, self.scale0, self._clients(), self._by_weight)
            return Server(m0, None, None, head, bound, jnp.int32(0), learnt, jnp.float32(0))
        at_start = 1.0 if self.prior == "literal" else (self._clients() + 3) * self.scale0**2
        Sigma0 = jax.tree.map(lambda leaf: jnp.float32(at_start), m0)
        of = self._prior(m0)
        V0 = jax.tree.map(lambda leaf, one: jnp.full(leaf.shape, of.n0 / (self._clients() + of.nu0) * one), m0, Sigma0)
        return Server(m0, V0, Sigma0, head, bound, jnp.int32(0))

    def init_local(self, key: PRNGKeyArray, data: Data) -> Local:
        """Nothing, or with start="last" no m yet."""
        if self.start == "mean":
            return Local(None)
        nothing = trees.zeros(trees.frozen(self.model.init(key), self.head, self.head_scale)[1])
        return Local(nothing, nothing, jnp.bool_(False))

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """q(φ), the head and the round's step size."""
        turn = None if server.heat is None else server.round % EVERY == EVERY // 2
        return Down(server.m0, server.V0, server.head, self.train.lr_of(server.round + 1), server.apart, server.heat, turn)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on (17), from m0."""
        if self.form == "gaussian":
            return self._gaussian_client(key, down, local, data)
        m_i, loss = self._fit(down.m0, down.m0, down.head, self._precision(down), self.train, down.lr, key, data)
        delta = jax.tree.map(jnp.subtract, m_i, down.m0)
        objective = None
        if self.elbo:  # (5): −log p(D_i | m_i) + E[KL(q_i ‖ p(θ_i | φ))], up to a constant
            nll = rows(data) * mean_loss(self.model, trees.merge(m_i, down.head), data)
            objective = nll + divergence(down.V0, down.m0, delta, self._prior(down.m0).n0, self.p, self.epsilon)
        return Up(delta, jax.tree.map(jnp.square, delta), loss, objective), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """Equation 18."""
        if self.form == "gaussian":
            return self._gaussian_server(server, down, up)
        N, p, of = self._clients(), self.p, self._prior(server.m0)

        m0, parts = equation_18(server.m0, up.delta, up.square, N, p, self.lambda0, self.epsilon)
        Sigma0 = server.Sigma0
        if self.empirical:  # EM: Σ0 = ν0 / mean E[Σ⁻¹]
            Sigma0 = jax.tree.map(lambda s, one: of.nu0 / jnp.mean((N + of.nu0) / (one + s)), parts, Sigma0)
        V0 = server.V0
        if self.prior != "fixed":
            V0 = jax.tree.map(lambda s, one: of.n0 / (N + of.nu0) * (one + s), parts, Sigma0)
        bound = (
            None
            if up.objective is None
            else -(N * up.objective + divergence_of_phi(server.V0, server.m0, server.Sigma0, of.n0, of.nu0, self.lambda0))
        )
        return Server(m0, V0, Sigma0, server.head, bound, server.round + 1)

    def metrics(self, server: Server) -> dict[str, Float[Array, ""]]:
        """The bound of the last round, where clients report their terms of it."""
        return {} if server.bound is None else {"bound": server.bound}

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Equation 46, from m0; the head's weights have the prior N(head, σ0²). Gaussian: then s²."""
        start = trees.merge(down.m0, down.head)
        of_head = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1 / self.scale0**2, leaf.dtype), down.head)
        precision = self._precision(down)
        if down.apart is not None:  # nor is m0 known
            precision = jax.tree.map(lambda v: 1 / v, apart.spread(down.apart, down.m0))
        precision = trees.merge(precision, of_head)
        nothing = jax.tree.map(lambda _: None, start)
        m, _ = self._fit(start, start, nothing, precision, self.tune, self.tune.lr_of(1), key, data)
        if self.form == "spike":
            return Local(m)
        s2 = jax.tree.map(lambda f, t: 1 / (f + t), self._curvature(key, m, nothing, data), precision)
        own = None if self.start == "mean" else jnp.bool_(True)
        return Local(m, jax.tree.map(lambda leaf: self.temperature * leaf, s2), own)

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of q_i, or Student-t draws around m0 for a client that has none (19)."""
        spike = self.form == "spike"
        if self.draws == 0 or (spike and local.m is not None and self.p == 1):
            m = down.m0 if local.m is None else local.m
            m = m if local.own is None or local.m is None else trees.choose(local.own, local.m, down.m0)
            return self.model.apply(trees.merge(m, down.head), x)[None]

        def one(key: PRNGKeyArray) -> Params:
            if local.m is None:
                return self.student_t(key, down)
            if spike:
                return drop_columns(key, local.m, self.p)
            drawn = jax.tree.map(lambda m, s2, e: m + jnp.sqrt(s2) * e, local.m, local.s2, trees.normal_like(key, local.m))
            return drawn if local.own is None else trees.choose(local.own, drawn, self.student_t(key, down))

        keys = jax.random.split(key, self.draws)
        return jax.lax.map(lambda key: self.model.apply(trees.merge(one(key), down.head), x), keys)

    def student_t(self, key: PRNGKeyArray, down: Down) -> Params:
        """A draw of a new client's body (19): weights have their own variances a posteriori, or share one (literal)."""
        of, normal = self._prior(down.m0), trees.normal_like(key, down.m0)
        if down.apart is not None:
            v, degrees = apart.spread(down.apart, down.m0), down.apart.degrees
            v = jax.tree.map(lambda v: down.heat * v, v)
            if self.prior == "fixed":
                return jax.tree.map(lambda m, v, e: m + jnp.sqrt(v) * e, down.m0, v, normal)
            noise = student_t_like(key, down.m0, degrees)
            return jax.tree.map(lambda m, v, e: m + jnp.sqrt(v) * e, down.m0, v, noise)
        return population(key, down.m0, down.V0, normal, of, self.prior)

    def _gaussian_client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """m_i under N(m0, σ²), and s_i² from the curvature of the client's rows at m_i."""
        start = trees.choose(local.own, local.m, down.m0) if self.start == "last" else down.m0
        precision = self._precision(down)
        under = precision
        if self.start == "mean":  # under σ² itself m0 would move slowly where clients agree, and as slowly as EM does
            under = jax.tree.map(lambda t: jnp.full_like(t, 1 / self.scale0**2), precision)
        m_i, loss = self._fit(start, down.m0, down.head, under, self.train, down.lr, key, data)
        F = self._curvature(key, m_i, down.head, data)
        s2 = jax.tree.map(lambda f, t: 1 / (f + t), F, precision)
        delta, objective = jax.tree.map(jnp.subtract, m_i, down.m0), None
        if self.elbo:
            nll = rows(data) * mean_loss(self.model, trees.merge(m_i, down.head), data)
            objective = nll + apart.divergence(precision, delta, s2)
        way = apart.way(self.train, down.lr, data, self.scale0**2) if self.start == "mean" else apart.END
        if self.start == "mean":
            slope = jax.grad(lambda m: mean_loss(self.model, trees.merge(m, down.head), data))(down.m0)
            way = apart.measured(way, delta, slope, F, rows(data))
        sent = apart.squares(delta, F, jax.tree.map(lambda t: 1 / t, precision), rows(data), way, self._by_weight)
        kept = local
        if self.start == "last" and down.apart is not None:  # m0's variance σ²/l reaches m_i where the client's rows leave room
            more = jax.tree.map(lambda s, v, n: s + s**2 / (v * n), s2, down.apart.variance, down.apart.clients)
            kept = Local(m_i, more, jnp.bool_(True))
        return Up(delta, None, loss, objective, sent, self._heats(key, down, data)), kept

    def _heats(self, key: PRNGKeyArray, down: Down, data: Data) -> Float[Array, " heats"]:
        """Log scores of some rows under draws around m0 whose variances are multiplied by each of `HEATS`; 0 out of turn."""
        for_rows, for_draws = jax.random.split(jax.random.fold_in(key, 0xFFFFFFFC))
        some, keys = drawn(for_rows, data, HEATED), jax.random.split(for_draws, HEATED_DRAWS)

        def score(heat: Float[Array, ""]) -> Float[Array, ""]:
            def draw(key: PRNGKeyArray) -> Params:
                return trees.merge(self.student_t(key, down._replace(heat=heat)), down.head)

            return mixture_score(self.model, draw, keys, some)

        return jax.lax.cond(down.turn, lambda: jax.lax.map(score, jnp.asarray(HEATS)), lambda: jnp.zeros(len(HEATS)))

    def _gaussian_server(self, server: Server, down: Down, up: Up) -> Server:
        """m0 is the mean of the m_i; σ² by apart.py."""
        assert server.apart is not None and up.apart is not None  # noqa: PT018
        assert server.heat is not None and up.heats is not None  # noqa: PT018
        m0 = jax.tree.map(jnp.add, server.m0, up.delta)
        learnt = apart.next(
            server.apart, up.delta, up.apart, self.scale0, self._clients(), self._by_weight, self.prior != "fixed"
        )
        bound = None if up.objective is None else -self._clients() * up.objective
        heat = jnp.where(jnp.asarray(down.turn), jnp.asarray(HEATS)[jnp.argmax(up.heats)], server.heat)
        return Server(m0, None, None, server.head, bound, server.round + 1, learnt, heat)

    def _curvature(self, key: PRNGKeyArray, m: Params, fixed: Params, data: Data) -> Params:
        """F, what the client's rows say of each weight."""
        model = dataclasses.replace(self.model, apply=lambda m, x: self.model.apply(trees.merge(m, fixed), x))
        return curvature.diagonal(model, m, jax.random.fold_in(key, 0xFFFFFFFD), data)

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

    def _prior(self, m0: Params) -> Prior:
        N = self._clients()
        if self.prior != "literal":
            return Prior(3, N + 3, N + self.lambda0, N + 3, N + 3)
        if self.D is None:
            raise UserError("D is not set: the literal prior counts the rows of all clients; give D")
        d = sum(leaf.size for leaf in jax.tree.leaves(m0))
        n0 = self.D + d + 2
        return Prior(d + 2, n0, self.D + self.lambda0, n0 + d + 1, self.D + 3)

    def _explicit(self, training: Training, lr: Float[Array, ""]) -> Float[Array, ""] | float:
        """How strong a pull may be and still be part of the gradient."""
        if self.prior == "literal" or self.empirical:
            return 0.0
        return (1 + training.momentum) / (2 * lr) if training.optimiser == "sgd" else jnp.inf

    def _precision(self, down: Down) -> Params:
        """E[Σ⁻¹], or what stands for it, of each weight."""
        if down.apart is not None:
            return jax.tree.map(lambda leaf, v: jnp.broadcast_to(1 / v, leaf.shape), down.m0, down.apart.variance)
        pull = self._prior(down.m0).pull
        return jax.tree.map(lambda V: pull / V, down.V0)

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
        """(17) over |D_i|, by minibatches; of the pull what is too strong for a gradient is an implicit step after each."""
        p = self.p if self.form == "spike" else 1.0
        strength = jax.tree.map(lambda one: p / jnp.maximum(rows(data), 1) * one, precision)
        most = self._explicit(training, lr)
        return descend_under(self.model, start, m0, fixed, strength, p, most, training, lr, key, data)
