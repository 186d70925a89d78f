"""How far a fit can be relied on: one structure for every model and method, which result.json keeps.

    verdict   good, not converged, family too small, Monte Carlo noise, or not checked
    reasons   why, a sentence each
    next      what to do next
    checks    the numbers that it was judged by

The silos' evidence gives weighted draws of the posterior of Z_G (correction.py), and what a user reads, means and standard
deviations, is compared between them and q. Where q misses something and the weighted draws are good, they take q's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from fedbayes.primitives import gaussian
from fedbayes.primitives.sampling import STUCK
from fedbayes.results.coordinates import Frame
from fedbayes.results.correction import LEAST, MOST, Ask, Corrected, Density, Sampler, Tilted, mended, smoothed
from fedbayes.results.mixtures import Points

GOOD, NOT_CONVERGED, TOO_SMALL, NOISE, NOT_CHECKED = (
    "good",
    "not converged",
    "family too small",
    "Monte Carlo noise",
    "not checked",
)
VERDICTS = (GOOD, NOT_CONVERGED, TOO_SMALL, NOISE, NOT_CHECKED)
LARGEST = 200
"""Global latents up to which their draws are weighed."""
SHIFT, RATIO = 0.25, 1.25
"""A mean that is off by more standard deviations, or a standard deviation by more than this factor, is warned of."""
ASK = 0.1
"""An error, in either, from which on a correction is worth its rounds."""
HEAVY, EVEN = 0.5, 0.95
"""k̂ of q's draws above which their weights have no variance, so that they understate the tails that q lacks; and the effective
share from which on weights are so even that k̂ says nothing."""
NOISY = 0.2
"""Monte Carlo noise, in standard deviations, that is warned of."""
JAGGED = 1.0
"""How far weights by either half of the silos' draws may differ, in units of their mean, before they say too little."""
OWN = 0.05
"""The share of silos' own latents that may be off by .3 standard deviations or 30 % before it is said."""
RHAT, SKEW, KURTOSIS, DIVERGENT = 1.1, 1.0, 3.0, 0.01
"""Of chains and tilted marginals, where that is all there is to judge by."""

NAMED = 3
"""Numbers that a sentence names, at most."""
REAL = " on the real line"
"""After the name of a constrained latent, its unconstrained coordinate (`structured_fit.global_numbers`)."""

Correct = Literal["auto"] | bool


class Case(NamedTuple):
    """What a verdict is about: q(Z_G), what can be asked about it, and what the training says of itself."""

    q: gaussian.Global
    log_prior: Density
    ask: Ask
    numbers: Callable[[Points], Mapping[str, np.ndarray]]
    """From Z_G on the real line to the numbers that a user reads, by name."""
    bounds: Sequence[float]
    """The bound over windows of rounds; empty where a method has none."""
    health: Mapping[str, Any]
    """What the algorithm says of itself (`StructuredAlgorithm.health`)."""
    why_not: str
    """Why silos cannot be asked, if so."""
    samples: bool
    """Whether silos keep draws of their own latents, and no q(Z_L | Z_G) is relied on."""
    seed: int = 0
    frame: Frame | None = None
    """Coordinates of Z_G in which proposals are fitted too."""
    tilted: Callable[[], Tilted] | None = None
    """Draws from the prior times the silos' factors, where q is a product of them."""


class Assessed(NamedTuple):
    """A verdict, and the draws that take q's place, if any."""

    verdict: dict[str, Any]
    corrected: Corrected | None


def assess(case: Case, correct: Correct = "auto") -> Assessed:
    """Judge a fit by one evidence round, with more of them where a correction is worth it (`auto`) or asked for."""
    n = int(np.size(case.q.mean))
    why = case.why_not or ("there is no global latent" if n == 0 else "")
    if n > LARGEST:
        why = f"{n} global latents are too many to weigh draws of them; up to {LARGEST} are checked"
    if why:
        return Assessed(_unchecked(case, why), None)
    sampler = Sampler(case.q, case.log_prior, case.ask, case.seed, frame=case.frame)
    found = sampler.round()
    checks = _of_q(sampler) | {"reference": _described(found), **_own(case, sampler)}
    apart = compared(case, sampler, found)
    light = checks["ess"] < EVEN and (checks["khat"] is None or checks["khat"] > HEAVY)
    close = found.reliable and apart["error"] <= ASK and not light
    wanted = correct is True or (correct == "auto" and not close)
    better = mended(sampler, case.tilted) if wanted else None
    if better is not None:
        found = better
        apart = compared(case, sampler, found)
        checks["reference"] = _described(found)
    checks |= {name: value for name, value in apart.items() if name != "error"}
    usable = found.reliable if correct is True else found.enough and not _blurred(apart)
    taken = found if better is not None and usable else None
    return Assessed(_verdict(case, checks, apart, found, taken, tried=wanted), taken)


def compared(case: Case, sampler: Sampler, reference: Corrected) -> dict[str, Any]:
    """The worst difference between q and weighted draws: of a mean in standard deviations, of a standard deviation as a factor.

    `noise` is what the silos' own Monte Carlo draws make of it, `error` the worst of both differences, and `bent` names the
    numbers whose weighted draws are skewed where q is Gaussian.
    """
    random = np.random.default_rng([case.seed, 99])
    own, right = case.numbers(sampler.normal.draw(random, 4000)), case.numbers(reference.z)
    worst: dict[str, Any] = {"shift": 0.0, "shift_of": None, "ratio": 1.0, "ratio_of": None, "noise": 0.0, "bent": []}
    for name, values in right.items():
        of_q, values = _bounded(np.asarray(own[name], float), np.asarray(values, float), reference.weights)
        mean, sd = moments(values, reference.weights)
        if not (math.isfinite(mean) and math.isfinite(sd)) or sd <= 1e-6 * abs(mean) + 1e-30:
            continue
        shift, ratio = abs(of_q.mean() - mean) / sd, float(of_q.std() / sd)
        if shift > worst["shift"]:
            worst |= {"shift": float(shift), "shift_of": name}
        if abs(math.log(max(ratio, 1e-12))) > abs(math.log(worst["ratio"])):
            worst |= {"ratio": max(ratio, 1e-12), "ratio_of": name}
        one, other = (moments(values, half) for half in reference.halves)
        noise = max(abs(one[0] - other[0]) / sd, abs(math.log(max(one[1], 1e-30) / max(other[1], 1e-30)))) / 2
        worst["noise"] = float(max(worst["noise"], noise))
        if f"{name}{REAL}" not in right and abs(_skewness(values, reference.weights)) > SKEW:
            worst["bent"].append(name.removesuffix(REAL))
    first, second = reference.halves
    jagged = float(np.std(first - second) * len(first)) if len(first) else 0.0
    return worst | {"error": max(worst["shift"], abs(math.log(worst["ratio"]))), "jagged": jagged}


def _blurred(apart: dict[str, Any]) -> bool:
    """Whether the silos' Monte Carlo error hides how far q is off: then weighted draws are no better than q's."""
    noise = apart["noise"]
    return noise > NOISY or apart["jagged"] > JAGGED or (noise > ASK and apart["error"] < 2 * noise)


def _bounded(of_q: np.ndarray, values: np.ndarray, weights: Float[np.ndarray, " s"]) -> tuple[np.ndarray, np.ndarray]:
    """Both cut off far out, by quantiles of the weighted draws: a scale with a heavy prior has no moments."""
    kept = (weights > 0) & np.isfinite(values)
    order = np.argsort(values[kept])
    level = np.cumsum(weights[kept][order])
    low, middle, high = (
        values[kept][order][min(np.searchsorted(level, at * level[-1]), kept.sum() - 1)] for at in (0.002, 0.5, 0.998)
    )
    one, other = (np.clip(np.nan_to_num(each), 2 * low - middle, 2 * high - middle) for each in (of_q, values))
    return one, other


def moments(values: np.ndarray, weights: Float[np.ndarray, " s"]) -> tuple[float, float]:
    """Weighted mean and standard deviation; draws without weight may be anything."""
    kept = weights > 0
    values, weights = np.asarray(values, float)[kept], weights[kept]
    mean = float(weights @ values)
    return mean, math.sqrt(max(float(weights @ (values - mean) ** 2), 0.0))


def _skewness(values: np.ndarray, weights: Float[np.ndarray, " s"]) -> float:
    mean, sd = moments(values, weights)
    return float(weights @ ((values - mean) / sd) ** 3)


def rise(bounds: Sequence[float]) -> tuple[float, float] | None:
    """By how much the bound rose over the last tenth of the windows, and the standard error of that; None for few windows.

    >>> rise([0.0] * 40), rise([float(one) for one in range(40)])[0]
    ((0.0, 0.0), 4.0)
    """
    width = max(2, len(bounds) // 10)
    used = np.array(bounds[-max(6, 3 * width) :], float)
    if len(used) < 5:
        return None
    place = np.arange(len(used)) - (len(used) - 1) / 2
    slope = float(place @ used / (place @ place))
    left = used - used.mean() - slope * place
    return slope * width, float(width * np.sqrt(left @ left / (len(used) - 2) / (place @ place)))


def _of_q(sampler: Sampler) -> dict[str, Any]:
    """k̂ of q's draws, its error and its worst over repetitions, and their effective share."""
    _, ratios, difference = sampler.of_q()
    weights, khat = smoothed(ratios)
    half = len(ratios) // 2
    again = [smoothed(ratios + sign * difference / 2)[1] for sign in (1, -1)]
    again += [smoothed(part)[1] for part in (ratios[:half], ratios[half:])]
    known = [one for one in again if math.isfinite(one)]
    error = float(np.std([khat, *known])) if known and math.isfinite(khat) else math.inf
    share = float(1 / np.sum(weights**2) / len(weights)) if math.isfinite(khat) else 0.0
    return {"khat": number(khat), "khat_error": number(error), "khat_worst": number(max([khat, *again])), "ess": share}


def _described(found: Corrected) -> dict[str, Any]:
    sizes = {"points": len(found.z), "rounds": found.rounds, "bytes": found.bytes}
    return {"khat": number(found.khat), "ess": found.ess, **sizes}


def _own(case: Case, sampler: Sampler) -> dict[str, Any]:
    if case.samples:
        return {}
    told = sampler.told[0]
    return {"own": {name: int(getattr(told, name)) for name in ("latents", "moved", "scaled")}}


def _training(case: Case) -> tuple[list[str], dict[str, Any]]:
    """Why the training is not done, if so."""
    reasons, checks = [], dict[str, Any]()
    rose = rise(case.bounds)
    if rose is not None:
        checks["rise"] = rose[0]
        if rose[0] > max(0.1, 3 * rose[1]):
            reasons.append(f"the bound still rose by {rose[0]:.2g} over the last tenth of the rounds")
    health = case.health
    if health.get("converged") is False:
        moved = f", by {health['moved']:.2f} sd in the last rounds" if "moved" in health else ""
        reasons.append(f"q still moves{moved}")
    if stuck := _stuck(health):
        reasons.append(f"the chains of silo {', '.join(map(repr, stuck))} do not move, so that its data is left out")
    elif health.get("rhat", 1.0) > RHAT:
        reasons.append(f"chains in the silos disagree (r-hat {health['rhat']:.2f})")
    elif health.get("unmixed"):
        reasons.append(f"chains disagree in {health['unmixed']:.0f} of the silos (r-hat above {RHAT})")
    return reasons, checks


def _stuck(health: Mapping[str, Any]) -> list[str]:
    """Silos whose chains do not move, as far as silos are known here."""
    return [name for name, one in health.get("silos", {}).items() if one.get("moving", 1.0) < STUCK]


def _chains(case: Case) -> tuple[list[str], list[str]]:
    """What chains say of Monte Carlo noise, and of marginals that are not Gaussian."""
    health, noise, shape = case.health, [], []
    if health.get("noise", 0.0) > NOISY:
        noise.append(f"q has a Monte Carlo error of {health['noise']:.2f} sd")
    if health.get("divergences", 0) > DIVERGENT * health.get("draws", math.inf):
        noise.append(f"{health['divergences']:.0f} of {health['draws']:.0f} transitions in the silos diverged")
    if health.get("ess", math.inf) < LEAST:
        noise.append(f"a silo has an effective sample size of {health['ess']:.0f}")
    if abs(health.get("skew", 0.0)) > SKEW or abs(health.get("kurtosis", 0.0)) > KURTOSIS:
        found = f"skewness {health.get('skew', 0.0):.1f}, excess kurtosis {health.get('kurtosis', 0.0):.1f}"
        shape.append(f"a silo's marginal of the global latents is not Gaussian ({found})")
    return noise, shape


def _verdict(
    case: Case, checks: dict[str, Any], apart: dict[str, Any], reference: Corrected, taken: Corrected | None, *, tried: bool
) -> dict[str, Any]:
    unfinished, more = _training(case)
    noisy, shape = _chains(case)
    checks |= more | {"corrected": taken is not None, "health": dict(case.health)}
    reasons: list[str] = []
    large = apart["shift"] > SHIFT or max(apart["ratio"], 1 / apart["ratio"]) > RATIO
    differs = _differs(apart) if apart["error"] > ASK and reference.reliable else []
    if _blurred(apart) and reference.reliable:
        told = case.samples and taken is None and not (unfinished or noisy or shape)  # chains are fine and stand for themselves
        word = GOOD if told else NOISE
        moved = f"that moves a number by {apart['noise']:.2f} sd and weights by {apart['jagged']:.1f} times their mean"
        reasons = [f"the silos' evidence has a Monte Carlo error {moved}"]
    elif taken is not None or (reference.reliable and not large):
        word, reasons = GOOD, differs
    elif reference.reliable:
        word = NOT_CONVERGED if unfinished else (NOISE if noisy else TOO_SMALL)
        reasons = [*differs, *(unfinished or noisy or shape)]
    else:
        word = NOT_CONVERGED if unfinished else (NOISE if noisy else TOO_SMALL)
        said = f"k̂ {reference.khat:.2f}, {reference.ess:.0f} effective draws of {len(reference.z)}"
        after = f" after {reference.rounds} evidence rounds" if reference.rounds > 1 else ""
        reasons = [f"the importance weights of draws of Z_G cannot be trusted{after} ({said})", *(unfinished or noisy or shape)]
    if word == GOOD and case.health.get("rhat", 1.0) > RHAT:
        word, reasons = NOT_CONVERGED, [*unfinished, *differs]
    own = checks.get("own", {})
    off = max(own.get("moved", 0), own.get("scaled", 0))
    local = "not checked" if not own else (TOO_SMALL if off > OWN * own["latents"] else GOOD)
    if local == TOO_SMALL:
        reasons = [*reasons, f"{off} of the silos' {own['latents']} own latents are off by 0.3 sd or 30 % under q(Z_L | Z_G)"]
    following = _next(word, case, taken, tried=tried, local=local)
    return {"verdict": word, "local": local, "reasons": reasons, "next": following, "checks": checks}


def _differs(apart: dict[str, Any]) -> list[str]:
    found = []
    if apart["shift"] > ASK:
        found.append(f"q's mean of {apart['shift_of']} is off by {apart['shift']:.2f} sd")
    if abs(math.log(apart["ratio"])) > ASK:
        found.append(f"q's sd of {apart['ratio_of']} is {apart['ratio']:.2f} of the right one")
    if bent := apart["bent"]:
        more = f" and {len(bent) - NAMED} more" if len(bent) > NAMED else ""
        found.append(f"not Gaussian{REAL}: {', '.join(bent[:NAMED])}{more}")
    return found


def _unchecked(case: Case, why: str) -> dict[str, Any]:
    """By what the training says of itself alone."""
    unfinished, checks = _training(case)
    noisy, shape = _chains(case)
    checks |= {"khat": None, "ess": None, "corrected": False, "health": dict(case.health)}
    sampled = "rhat" in case.health
    word = NOT_CONVERGED if unfinished else NOISE if noisy else TOO_SMALL if shape else GOOD if sampled else NOT_CHECKED
    reasons = [*unfinished, *noisy, *shape, f"importance weights are not available: {why}"]
    return {"verdict": word, "local": "not checked", "reasons": reasons, "next": _next(word, case, None), "checks": checks}


def _next(word: str, case: Case, taken: Corrected | None, *, tried: bool = False, local: str = GOOD) -> str:
    n = int(np.size(case.q.mean))
    if stuck := _stuck(case.health):
        return f"check that the log density of silo {stuck[0]!r} and its gradient are finite, and the scale of its data"
    if word == NOT_CONVERGED:
        return "fit for more rounds"
    if word == NOISE:
        return "use more draws: more of the chains, or fit.correct(inner=64) for the evidence"
    if word == NOT_CHECKED:
        return "fit a second method or a richer family, and compare"
    if word == TOO_SMALL:
        if not tried and (n <= MOST or case.tilted is not None):
            return "correct it: fit.correct()"
        return "use a richer family (Family(moving_scale=True, bound=10)), EP, or another parametrisation of the model"
    if taken is not None:
        return "use it: draws and posterior are corrected"
    if local == TOO_SMALL:
        return "use what silos share; for their own latents use a richer family (Family(moving_scale=True, bound=10))"
    return "use it"


def number(value: float) -> float | None:
    """A number as result.json has it: None where it is not finite."""
    return float(value) if math.isfinite(value) else None


__all__ = ["GOOD", "VERDICTS", "Assessed", "Case", "Correct", "assess", "compared", "moments", "number", "rise"]
