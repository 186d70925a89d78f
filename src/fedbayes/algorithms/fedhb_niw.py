"""FedHB with the Normal-Inverse-Wishart prior (Kim and Hospedales 2023, section 3.1 and Appendix B).

    θ_i ~ N(μ, Σ) for each client,   μ | Σ ~ N(0, Σ/λ0),   Σ ~ IW(Σ0, ν0)                             (13, 14)
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

**Two forms of q_i.** form="spike", the default, is the paper's, as above. It is the form for networks: with 5 rows of new
clients of the digits the Gaussian form was .064 nats behind it. form="gaussian" learns the variances of the prior array by
array and gives q_i a width: it is for clients that differ in some layers only, for linear models, and for clients that keep a
personal posterior. Its equations are in fedhb_gaussian.py, its results in docs/results/fedhb-kinds.md.

Reference:
    Kim, Hospedales. A hierarchical Bayesian approach to federated learning. 2023.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from fedbayes import trees
from fedbayes.algorithm import Data, Params, setting
from fedbayes.algorithms.fedhb_gaussian import EVERY, Down, Hierarchical, Local, Server, Up
from fedbayes.errors import UserError
from fedbayes.models.beliefs import Beliefs, Marginals
from fedbayes.primitives import apart
from fedbayes.primitives.spikes import (
    Prior,
    descend_under,
    divergence,
    divergence_of_phi,
    drop_columns,
    equation_18,
    population,
)
from fedbayes.primitives.training import Training, rows, tuning


@dataclasses.dataclass(frozen=True)
class FedHBNIW(Hierarchical):
    """Every client's network is a Gaussian perturbation of a shared one; how far they lie apart is learnt weight by weight.

    >>> from fedbayes.models import Categorical, mlp
    >>> FedHBNIW(mlp((64,), Categorical(10)), sigma0=0.05).p
    0.999
    """

    published: ClassVar[Mapping[str, Any]] = {
        "head": ("head",),
        "sigma0": 0.1,
        "train": Training(epochs=1, batch=50, lr=0.1, decay_at=(0.5, 0.75), momentum=0.9),
    }

    p: float = setting(0.999, above=0, most=1, which="is the share of columns that are kept")
    """Share of columns that are kept: 1 − p is the dropout. It also multiplies m0 in each round."""
    epsilon: float = setting(1e-4, least=0)
    """ε, the width of the spikes of q_i."""
    lambda0: float = setting(0.0, least=0)
    """λ0, how many clients of all-zero weights the prior counts for; 0 is a flat prior for the mean. The paper has 1, which the
    literal prior has to be given too."""
    empirical: bool = False
    """Whether Σ0 is learnt, one for each array of the network, by a step of EM a round."""
    tune: Training = tuning(epochs=5, batch=50, lr=0.001, momentum=0.9)
    """Personalisation in `adapt`."""

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
        if self.form == "spike" and (self.start, self.pool) != ("mean", "array"):
            raise UserError("start and pool are for the Gaussian form, but form is spike; give form='gaussian' too")
        if self.form == "gaussian" and (self.empirical or self.prior == "literal"):
            raise UserError("the Gaussian form learns its prior; give prior='coordinate' or 'fixed', and not empirical")
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

    def broadcast(self, key: PRNGKeyArray, server: Server) -> Down:
        """q(φ), the head and the round's step size."""
        turn = None if server.heat is None else server.round % EVERY == EVERY // 2
        return Down(server.m0, server.V0, server.head, self.train.lr_of(server.round + 1), server.apart, server.heat, turn)

    def client(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> tuple[Up, Local]:
        """Local epochs on (17), from m0."""
        if self.form == "gaussian":
            return self._gaussian_client(key, down, local, data)
        m_i, loss = self._fit(down.m0, down.m0, down.head, self._precision(down), self.train, down.lr, key, data)
        delta, objective = jax.tree.map(jnp.subtract, m_i, down.m0), None
        if self.elbo:  # (5): −log p(D_i | m_i) + E[KL(q_i ‖ p(θ_i | φ))], up to a constant
            objective = self._nll(m_i, down, data)
            objective += divergence(down.V0, down.m0, delta, self._prior(down.m0).n0, self.p, self.epsilon)
        return Up(delta, jax.tree.map(jnp.square, delta), loss, objective), local

    def server(self, key: PRNGKeyArray, server: Server, down: Down, up: Up) -> Server:
        """Equation 18."""
        if self.form == "gaussian":
            return self._gaussian_server(server, down, up)
        N, of = self._clients(), self._prior(server.m0)
        m0, parts = equation_18(server.m0, up.delta, up.square, N, self.p, self.lambda0, self.epsilon)
        Sigma0, V0, bound = server.Sigma0, server.V0, None
        if self.empirical:  # EM: Σ0 = ν0 / mean E[Σ⁻¹]
            Sigma0 = jax.tree.map(lambda s, one: of.nu0 / jnp.mean((N + of.nu0) / (one + s)), parts, Sigma0)
        if self.prior != "fixed":
            V0 = jax.tree.map(lambda s, one: of.n0 / (N + of.nu0) * (one + s), parts, Sigma0)
        if up.objective is not None:
            of_phi = divergence_of_phi(server.V0, server.m0, server.Sigma0, of.n0, of.nu0, self.lambda0)
            bound = -(N * up.objective + of_phi)
        return Server(m0, V0, Sigma0, server.head, bound, server.round + 1)

    def metrics(self, server: Server) -> dict[str, Float[Array, ""]]:
        """The bound of the last round, where clients report their terms of it."""
        return {} if server.bound is None else {"bound": server.bound}

    def adapt(self, key: PRNGKeyArray, down: Down, local: Local, data: Data) -> Local:
        """Equation 46, from m0; the head's weights have the prior N(head, σ0²). Gaussian: then s²."""
        start, gaussian = trees.merge(down.m0, down.head), self.form == "gaussian"
        of_head = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1 / self.scale0**2, leaf.dtype), down.head)
        body = jax.tree.map(lambda v: 1 / v, self._width(down)) if gaussian else self._precision(down)
        precision, nothing = trees.merge(body, of_head), jax.tree.map(lambda _: None, start)
        m, _ = self._fit(start, start, nothing, precision, self.tune, self.tune.lr_of(1), key, data)
        if not gaussian:
            return Local(m)
        F = self._curvature(key, m, nothing, data)
        s2 = jax.tree.map(lambda f, t: self.temperature / (f + t), F, precision)
        return Local(m, s2, None if self.start == "mean" else jnp.bool_(True))

    def predict(self, key: PRNGKeyArray, down: Down, local: Local, x: Shaped[Array, "n ..."]) -> Float[Array, "s n k"]:
        """Draws of q_i, or Student-t draws around m0 for a client that has none (19)."""
        if self._draws == 0 or (local.m is not None and local.s2 is None and self.p == 1):
            return self.model.apply(self._mode(down, local), x)[None]

        def one(key: PRNGKeyArray) -> Params:
            if local.m is not None and local.s2 is None:
                return drop_columns(key, local.m, self.p)
            if local.m is not None and local.own is None:
                return trees.normal_around(key, local.m, local.s2)
            newcomer = trees.merge(self.student_t(key, down), down.head)
            if local.m is None:
                return newcomer
            return trees.choose(local.own, trees.normal_around(key, local.m, local.s2), newcomer)

        return jax.lax.map(lambda key: self.model.apply(one(key), x), jax.random.split(key, self._draws))

    def student_t(self, key: PRNGKeyArray, down: Down) -> Params:
        """A draw of a new client's body (19): weights have their own variances a posteriori, or share one (literal)."""
        if down.apart is not None:
            degrees = None if self.prior == "fixed" else down.apart.degrees
            return population(key, down.m0, self._width(down), self._shares(down)[1], degrees)
        degrees = None if self.prior == "fixed" else self._prior(down.m0).degrees
        return population(key, down.m0, down.V0, self._shares(down)[1], degrees, one=self.prior == "literal")

    @property
    def deterministic(self) -> FedHBNIW | None:
        """Without dropped columns."""
        return None if self.p == 1 or self.form == "gaussian" else dataclasses.replace(self, p=1.0)

    def beliefs(self, down: Down, local: Local) -> Beliefs:
        """The prior of body and head in `adapt`; a Gaussian q_i; a newcomer's Student-t (19), by its scales, if drawn."""
        whole, of_head = trees.merge(down.m0, down.head), jax.tree.map(lambda leaf: jnp.full_like(leaf, self.scale0), down.head)
        width = self._width(down)
        prior, t = (jax.tree.map(lambda v, share=share: jnp.sqrt(share * v), width) for share in self._shares(down))
        q = Marginals(whole, trees.merge(t, trees.zeros(down.head)))
        if local.s2 is not None:
            own = Marginals(local.m, jax.tree.map(jnp.sqrt, local.s2))
            q = own if local.own is None else trees.choose(local.own, own, q)
        drawn = self._draws > 0 and (local.m is None or local.s2 is not None)
        return Beliefs(q if drawn else None, Marginals(whole, trees.merge(prior, of_head)))

    def with_beliefs(self, down: Down, local: Local, beliefs: Beliefs) -> tuple[Down, Local]:
        """Another m0 and V0 or σ², another Gaussian q_i; the head's prior is fixed."""
        share, of_t = self._shares(down)
        if beliefs.prior is not None:
            down = self._holding(down, beliefs.prior, share)
        q = beliefs.posterior
        if q is None:
            return down, local
        if local.s2 is None or local.own is not None:
            newcomers = self._holding(down, q, of_t)
            newcomers = newcomers if down.heat is None else newcomers._replace(heat=jnp.float32(1))
            down = newcomers if local.own is None else trees.choose(local.own, down, newcomers)
        return down, local if local.s2 is None else local._replace(m=q.mean, s2=jax.tree.map(jnp.square, q.deviation))

    def _holding(self, down: Down, found: Marginals, share: Any) -> Down:
        """Another m0, and the V0 or σ² with these deviations."""
        m0, scale = (trees.frozen(part, self.head, 1.0)[1] for part in found)
        if down.apart is not None:
            return down._replace(m0=m0, apart=apart.with_spread(down.apart, jax.tree.map(jnp.square, scale)))
        return down._replace(m0=m0, V0=jax.tree.map(lambda s: s**2 / share, scale))

    def _mode(self, down: Down, local: Local) -> Params:
        """The client's m, or m0, with the head."""
        whole = trees.merge(down.m0, down.head)
        if local.m is None:
            return whole
        return local.m if local.own is None else trees.choose(local.own, local.m, whole)

    def _width(self, down: Down) -> Params:
        """V0, or the variance of an unseen client."""
        return down.V0 if down.apart is None else apart.spread(down.apart, down.m0)

    def _shares(self, down: Down) -> tuple[Any, Any]:
        """The prior's variance and the squared scale of the Student-t (19), as shares of `_width`."""
        if down.heat is not None:
            return 1.0, down.heat
        of = self._prior(down.m0)
        return 1 / of.pull, (of.l0 + 1) / (of.l0 * of.degrees)

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
