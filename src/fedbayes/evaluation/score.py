"""Evaluation from one additive statistic.

A client's `Score` is a sum over its test rows; scores of clients add up. Accuracy, log score, Brier score, ECE, MCE, entropy
and mutual information (or, for a numeric target, RMSE, log score, interval calibration and its parts of variance) all follow
from it, pooled over rows or client by client, so a deployment that may only sum evaluates in the same way.

S draws of the likelihood's parameters make a mixture, p(y) = 1/S Σ_s p(y | draw_s). Its entropy is the total uncertainty, the
mean entropy of its components the aleatoric part, the difference (the mutual information) the epistemic part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from fedbayes.algorithm import Data
from fedbayes.models import Likelihood
from fedbayes.models.predictive import distribution_function, is_numeric, moments, probabilities, uncertainty

INTERVAL = 0.9  # of a numeric target's distribution: the central interval whose coverage is counted
BINS = 15  # of confidence, for ECE and MCE; of the predictive distribution function, for a numeric target


class Score(NamedTuple):
    """Sums over test rows. For labels the error is 0 or 1; for numbers it is squared."""

    rows: Float[Array | np.ndarray, "*clients"]
    error: Float[Array | np.ndarray, "*clients"]
    log_score: Float[Array | np.ndarray, "*clients"]
    brier: Float[Array | np.ndarray, "*clients"]  # for numbers: CRPS of a normal with the same moments
    total: Float[Array | np.ndarray, "*clients"]  # predictive entropy; for numbers: variance
    epistemic: Float[Array | np.ndarray, "*clients"]  # mutual information; for numbers: variance of the mean
    bin_rows: Float[Array | np.ndarray, "*clients bins"]
    bin_confidence: Float[Array | np.ndarray, "*clients bins"]
    bin_hits: Float[Array | np.ndarray, "*clients bins"]  # right labels; for numbers: rows inside the central 90 % interval


SHAPES = ((),) * 6 + ((BINS,),) * 3  # of the fields of one client's `Score`


def score(likelihood: Likelihood, draws: Float[Array, "s n k"], y: Shaped[Array, " n"], mask: Bool[Array, " n"]) -> Score:
    """The score of S draws of the likelihood's parameters on rows `y`.

    >>> from fedbayes.models import Categorical
    >>> sure = jnp.array([[[9.0, 0.0], [0.0, 9.0]]])
    >>> float(score(Categorical(2), sure, jnp.array([0, 0]), jnp.array([True, True])).error)
    1.0
    """
    function = _numbers if is_numeric(likelihood) else _labels
    log_draws = likelihood.log_prob(draws, y)
    log_score = jax.nn.logsumexp(log_draws, axis=0) - np.float32(np.log(draws.shape[0]))
    error, brier, total, epistemic, place, confidence, hits = function(likelihood, draws, y)
    weight = mask.astype(jnp.float32)

    sums = (jnp.sum(jnp.where(mask, values, 0.0)) for values in (error, log_score, brier, total, epistemic))
    chosen = jax.nn.one_hot(place, BINS) * weight[:, None]
    bins = (jnp.sum(part, axis=0) for part in (chosen, chosen * confidence[:, None], chosen * hits[:, None]))
    return Score(jnp.sum(weight), *sums, *bins)


def _labels(likelihood: Likelihood, draws: Array, y: Array) -> tuple[Array, ...]:
    each = probabilities(likelihood, draws)
    mixture = jnp.mean(each, axis=0)
    confidence, guess = jnp.max(mixture, axis=-1), jnp.argmax(mixture, axis=-1)
    hits = (guess == y.astype(guess.dtype)).astype(jnp.float32)
    truth = jax.nn.one_hot(y.astype(jnp.int32), mixture.shape[-1])
    total, _, epistemic = uncertainty(likelihood, draws)
    # Bins (0, 1/15], (1/15, 2/15], …: a confidence on an edge belongs to the bin below it.
    place = jnp.clip(jnp.ceil(confidence * BINS).astype(jnp.int32) - 1, 0, BINS - 1)
    return 1 - hits, jnp.sum((mixture - truth) ** 2, axis=-1), total, epistemic, place, confidence, hits


def _numbers(likelihood: Likelihood, draws: Array, y: Array) -> tuple[Array, ...]:
    y = y.astype(jnp.float32)
    mean, total, epistemic = moments(likelihood, draws)
    deviation = jnp.sqrt(total)
    z = (y - mean) / deviation
    density, below = jax.scipy.stats.norm.pdf(z), jax.scipy.stats.norm.cdf(z)
    crps = deviation * (z * (2 * below - 1) + 2 * density - np.float32(1 / np.sqrt(np.pi)))
    level = jnp.mean(distribution_function(likelihood, draws, y[None]), axis=0)
    place = jnp.clip(jnp.floor(level * BINS).astype(jnp.int32), 0, BINS - 1)
    within = (jnp.abs(level - 0.5) <= INTERVAL / 2).astype(jnp.float32)
    return (y - mean) ** 2, crps, total, epistemic, place, level, within


def about_numbers(figures: dict[str, dict[str, Any]]) -> bool:
    """Whether figures by mode and group, as a result has them, are those of a numeric target."""
    return any("rmse" in group for groups in figures.values() for group in groups.values())


def metrics(score: Score, numeric: bool) -> dict[str, np.ndarray]:
    """The figures that follow from a score; with leading axes, one figure for each entry. No rows give NaN.

    ECE = Σ_b n_b/n |accuracy_b − confidence_b| and MCE is its largest gap. For numbers `calibration_error` is the mean gap
    between the share of rows below the predictive quantiles 1/15, …, 14/15 and those levels, and `coverage` the share of rows
    inside the central 90 % interval.
    """
    score = Score(*(np.asarray(value, np.float64) for value in score))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = {name: getattr(score, name) / score.rows for name in ("error", "log_score", "brier", "total", "epistemic")}
        share = score.bin_rows / score.rows[..., None]
        if numeric:
            gaps = np.abs(np.cumsum(share, axis=-1)[..., :-1] - np.arange(1, BINS) / BINS)
            found = {"rmse": np.sqrt(mean["error"]), "log_score": mean["log_score"], "crps": mean["brier"]}
            found |= {"calibration_error": gaps.mean(axis=-1), "coverage": score.bin_hits.sum(axis=-1) / score.rows}
            found |= {"variance": mean["total"]}
            return found | {"epistemic_variance": mean["epistemic"]}
        filled = score.bin_rows > 0
        gaps = np.where(filled, np.abs(score.bin_hits - score.bin_confidence) / np.where(filled, score.bin_rows, 1), 0)
        ece, mce = (np.where(score.rows > 0, gap, np.nan) for gap in (np.sum(share * gaps, axis=-1), gaps.max(axis=-1)))
        found = {"accuracy": 1 - mean["error"], "log_score": mean["log_score"], "brier": mean["brier"], "ece": ece, "mce": mce}
        return found | {"entropy": mean["total"], "mutual_information": mean["epistemic"]}


def pooled(scores: Score, members: np.ndarray | None = None) -> Score:
    """The score of some clients together, by default of all."""
    chosen = slice(None) if members is None else members
    return Score(*(np.asarray(value)[chosen].sum(axis=0, dtype=np.float64) for value in scores))


def answered(score: Score, share: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The accuracy over each share of the rows, the surest first; rows of one bin of confidence are in any order.

    >>> rows, hits = np.eye(BINS)[-1] * 6 + np.eye(BINS)[7] * 4, np.eye(BINS)[-1] * 6 + np.eye(BINS)[7] * 2
    >>> answered(Score(*np.zeros(6), rows, 0.9 * rows, hits), np.array([0.3, 0.6, 1.0])).tolist()
    [1.0, 1.0, 0.8]
    """
    rows, hits = (np.concatenate([[0.0], np.cumsum(part[::-1])]) for part in (score.bin_rows, score.bin_hits))
    return np.interp(share * rows[-1], rows, hits) / (share * rows[-1])


def kept(score: Score, accuracy: float) -> float:
    """The largest share of rows that can be answered, the surest first, with this accuracy (see `answered`).

    >>> rows, hits = np.eye(BINS)[-1] * 6 + np.eye(BINS)[7] * 4, np.eye(BINS)[-1] * 6 + np.eye(BINS)[7] * 2
    >>> [round(kept(Score(*np.zeros(6), rows, 0.9 * rows, hits), level), 3) for level in (0.7, 0.9)]
    [1.0, 0.75]
    """
    rows, hits = (np.asarray(part, np.float64)[::-1] for part in (score.bin_rows, score.bin_hits))
    all_rows, all_hits = (np.concatenate([[0.0], np.cumsum(part)]) for part in (rows, hits))
    last = np.flatnonzero(all_hits >= accuracy * all_rows - 1e-9)[-1]
    spare = all_hits[last] - accuracy * all_rows[last]  # right answers to spare, which the next bin uses up
    more = 0.0 if last == len(rows) else rows[last] * max(spare, 0.0) / (accuracy * rows[last] - hits[last])
    return float((all_rows[last] + more) / all_rows[-1])


SHOWN = {False: ("accuracy", "log_score", "ece"), True: ("rmse", "log_score", "calibration_error")}
"""The main figures, for labels and for numbers."""
HIGHER_IS_BETTER = {"accuracy", "log_score"}


def summary(scores: Score, numeric: bool) -> dict[str, dict[str, float]]:
    """Each figure over clients (the first axis of `scores`): pooled over rows, mean over clients, spread, worst tenth.

    `spread` is the standard deviation over clients, `worst_tenth` the mean over the tenth of clients where the figure is worst.
    Clients without test rows do not count.
    """
    present = np.asarray(scores.rows) > 0
    if not present.any():
        return {}
    chosen = Score(*(np.asarray(value)[present] for value in scores))
    over_rows = metrics(pooled(chosen), numeric)
    found = {}
    for name, values in metrics(chosen, numeric).items():
        ordered = np.sort(values) if name in HIGHER_IS_BETTER else -np.sort(-values)
        found[name] = {
            "rows": float(over_rows[name]),
            "clients": float(values.mean()),
            "spread": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
            "worst_tenth": float(ordered[: -(-len(ordered) // 10)].mean()),
        }
    return found


def blockwise(predict: Callable[[Any], Float[Array, "s n k"]], likelihood: Likelihood, data: Data, block: int) -> Score:
    """The score of `predict` on rows in blocks, as many as the client has: padding costs nothing, memory is one block's."""
    length = data.mask.shape[0]
    block = min(block, length)
    pad = -length % block
    padded = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, pad)] + [(0, 0)] * (leaf.ndim - 1)), data) if pad else data

    def one(number: Any, done: Score) -> Score:
        x, y, mask = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, number * block, block), padded)
        return jax.tree.map(jnp.add, done, score(likelihood, predict(x), y, mask))

    start = Score(*(jnp.zeros(shape) for shape in SHAPES))
    blocks = (jnp.sum(data.mask) + block - 1) // block
    return jax.lax.fori_loop(0, blocks, one, start)
