"""A certificate for a client that did not train: with probability 1 − δ its error is below a bound.

A new client's rows had no part in θ nor in the prior r(β). So for the rows S, n of them drawn independently from what the
client will see, and for any q(β) that may be made from the same rows, the PAC-Bayes-kl inequality holds (Seeger 2002, Maurer
2004):

    with probability ≥ 1 − δ over S:   kl(R̂(q) ‖ R(q)) ≤ (KL(q ‖ r) + log(2√n/δ)) / n

R(q) is the chance that a network with one draw β ~ q errs on a row to come (the Gibbs risk), R̂(q) the share of errors on S,
and kl(a ‖ b) the divergence of two coins; the bound is its inverse. R̂(q) is itself estimated, by m draws of β, one for each
row anew; its own upper bound, kl⁻¹(share, log(1/δ')/m n), takes a hundredth of δ.

Beside it stand two bounds that need no PAC-Bayes, for the averaged prediction: k errors on m rows that had no part in a model,
and Clopper and Pearson's limit, the p with P(Binomial(m, p) ≤ k) = δ. One is for the model from every other row, by its errors
on the rest. The other is for the shared model as it is, by its errors on all rows. Each of the three holds with probability
1 − δ, not all at once.

It says nothing of clients whose rows, or near copies of them, trained θ or chose a setting, and nothing of rows that come from
somewhere else.

References:
    Seeger. PAC-Bayesian generalisation error bounds for Gaussian process classification. JMLR 2002. — Maurer. A note on the
    PAC Bayesian theorem. 2004. — Langford, Caruana. (Not) bounding the true error. NIPS 2001, for the estimate of R̂(q). —
    Clopper, Pearson. The use of confidence or fiducial limits illustrated in the case of the binomial. Biometrika 1934.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import betaincinv

from fedbayes.algorithm import AnyNetwork, Data
from fedbayes.engine import keys
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.models.predictive import is_numeric, predictive, probabilities
from fedbayes.primitives.training import masked_mean

SAMPLING = 0.01  # share of δ for the estimate of R̂(q)


class Certificate(NamedTuple):
    """What is certified of one client, and what it rests on."""

    client: str
    rows: int
    """n, the labelled rows that it rests on."""
    delta: float
    """δ."""
    gibbs: float
    """R̂(q), the share of errors on those rows with a draw of β for each."""
    divergence: float
    """KL(q(β) ‖ r(β))."""
    bound: float
    """With probability 1 − δ, R(q) is at most this."""
    averaged: float
    """Share of errors on the same rows of the prediction that averages draws, which is the one to use."""
    half_rows: int
    """Rows left over where every other row makes q(β)."""
    half_wrong: int
    """Errors of the averaged prediction on those."""
    half_bound: float
    """With probability 1 − δ, the averaged prediction from half of the rows errs with at most this probability."""
    shared_wrong: int
    """Errors on all rows of the shared model, which does not adapt."""
    shared_bound: float
    """With probability 1 − δ, the shared model errs with at most this probability."""

    def __str__(self) -> str:
        vacuous = " (says nothing)" if self.says_nothing else ""
        return (
            f"{self.client}: error of one draw ≤ {self.bound:.3f}{vacuous} with probability {1 - self.delta:g}, "
            f"from {self.rows} rows with {self.gibbs:.3f} errors and KL {self.divergence:.2f}; "
            f"averaged prediction {self.averaged:.3f}. By Clopper–Pearson ≤ {self.half_bound:.3f} for the averaged prediction "
            f"from half of the rows, and ≤ {self.shared_bound:.3f} for the shared model"
        )

    @property
    def says_nothing(self) -> bool:
        """Whether the bound is 1, to three digits."""
        return self.bound >= 0.9995


def certify(simulation: Simulation, client: str, *, delta: float = 0.05, draws: int = 200) -> Certificate:
    """The certificate of a client that never trained, from its training rows, which have trained nothing.

    Args:
        simulation: A trained FedVI without a bias b_β, which no prior holds.
        client: Its name.
        delta: δ, the chance that the bound does not hold.
        draws: m, draws of β for each row.

    >>> import fedbayes as fb
    >>> clients = fb.data.load("digits", hold_out=4)
    >>> fit = fb.simulate(fb.FedVI(fb.network("mlp", clients), tau=1.0, bias=False), clients, rounds=3, cohort=5)
    >>> new = str(clients.names[clients.unseen][0])
    >>> found = certify(fit.simulation, new)
    >>> found.gibbs < found.bound <= 1
    True
    """
    data, down = simulation.data, simulation.down()
    place = data.index(client)
    check_certifiable(simulation.algorithm, down)
    if not data.unseen[place]:
        advice = "choose one that was held out (hold_out=…)"
        raise UserError(f"client {client!r} took part in training, so the shared model depends on its rows; {advice}")
    count = int(data.train_counts[place])
    padded = 1 << max(count - 1, 0).bit_length()  # so that clients of like size share a compiled program
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([place], padded))
    key = keys.fold(keys.of_round(simulation.seed, simulation.round), np.uint32(place))
    given = (simulation.algorithm, key, down, simulation.fresh, rows)
    return certify_rows(*given, client, delta=delta, draws=draws)


def certify_rows(
    algorithm: AnyNetwork, key: Any, down: Any, fresh: Any, rows: Data, client: str, *, delta: float = 0.05, draws: int = 200
) -> Certificate:
    """The certificate of somebody from labelled rows that had no part in training; `fresh` is a newcomer's local state."""
    check_certifiable(algorithm, down)
    if not 0 < delta < 1 or draws < 1:
        raise UserError(f"delta is {delta} and draws {draws}, but delta is a probability and there is at least one draw")
    count = int(rows.mask.sum())
    if count == 0:
        raise UserError(f"client {client!r} has no training rows, but a certificate rests on labelled rows; give it some")
    found = _risks(algorithm, draws, key, down, fresh, rows)
    errors, averaged, divergence, half, shared = (float(value) for value in found)
    return Certificate(
        client=client,
        rows=count,
        delta=delta,
        gibbs=errors,
        divergence=divergence,
        bound=bound(errors, divergence, count, draws, delta),
        averaged=averaged,
        half_rows=count // 2,
        half_wrong=round(half),
        half_bound=clopper_pearson(round(half), count // 2, delta),
        shared_wrong=round(shared),
        shared_bound=clopper_pearson(round(shared), count, delta),
    )


def check_certifiable(algorithm: AnyNetwork, down: Any) -> None:
    """Refuse a run of which no certificate holds."""
    algorithm.check_gibbs(down)
    if is_numeric(algorithm.likelihood):
        raise UserError("the target is a number, but a certificate bounds a share of errors; it needs labels")


def bound(errors: float, divergence: float, rows: int, draws: int, delta: float) -> float:
    """The bound on R(q), from a share of errors over so many rows with so many draws each."""
    sampled = kl_inverse(errors, math.log(1 / (SAMPLING * delta)) / (draws * rows))
    slack = (divergence + math.log(2 * math.sqrt(rows) / ((1 - SAMPLING) * delta))) / rows
    return kl_inverse(sampled, slack)


def clopper_pearson(errors: int, rows: int, delta: float) -> float:
    """The largest chance of an error under which so few errors in so many independent rows still have probability δ.

    >>> round(clopper_pearson(0, 10, 0.05), 4), round(1 - 0.05 ** (1 / 10), 4)
    (0.2589, 0.2589)
    >>> clopper_pearson(3, 3, 0.05), clopper_pearson(0, 0, 0.05)
    (1.0, 1.0)
    """
    return 1.0 if errors >= rows else float(betaincinv(errors + 1, rows - errors, 1 - delta))


def kl_inverse(share: float, slack: float) -> float:
    """The largest p with kl(share ‖ p) ≤ slack.

    >>> round(kl_inverse(0.0, 0.5), 4), round(1 - math.exp(-0.5), 4)
    (0.3935, 0.3935)
    """
    low, high = share, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _kl(share, middle) <= slack else (low, middle)
    return high


def _kl(a: float, b: float) -> float:
    """kl(a ‖ b) of two coins."""

    def term(a: float, b: float) -> float:
        return 0.0 if a == 0 else (math.inf if b == 0 else a * math.log(a / b))

    return term(a, b) + term(1 - a, 1 - b)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _risks(algorithm: AnyNetwork, draws: int, key: Any, down: Any, fresh: Any, rows: Data) -> Any:
    """Shares of errors with one draw a row and with draws averaged, KL(q ‖ r), and errors that Clopper–Pearson counts."""
    outputs, divergence = algorithm.gibbs(key, down, rows, draws)
    labels = rows.y.astype(jnp.int32)
    wrong = jnp.argmax(probabilities(algorithm.likelihood, outputs), axis=-1) != labels[None]

    def errors(local: Any) -> Any:
        likely = predictive(algorithm.likelihood, algorithm.predict(key, down, local, rows.x))
        return (jnp.argmax(likely, axis=-1) != labels).astype(jnp.float32)

    first = rows.mask & (jnp.cumsum(rows.mask) % 2 == 1)
    half = errors(algorithm.adapt(key, down, fresh, rows._replace(mask=first)))
    return (
        masked_mean(jnp.mean(wrong, axis=0), rows.mask),
        masked_mean(errors(algorithm.adapt(key, down, fresh, rows)), rows.mask),
        divergence,
        jnp.sum(jnp.where(rows.mask & ~first, half, 0.0)),
        jnp.sum(jnp.where(rows.mask, errors(fresh), 0.0)),
    )
