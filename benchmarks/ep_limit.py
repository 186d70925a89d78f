"""How many global latents EP is the right default for: EP and SFVI at their defaults as the number of global latents grows.

    python benchmarks/ep_limit.py [gaussian-10 logistic-120 ...]        # writes into docs/results/panel.md

A regression over six silos of 200 rows, with p coefficients that all silos share and an intercept and a slope of each silo's
own. Gaussian with known variances, its posterior has a closed form; logistic, with the scale of the silos' effects global too,
it is judged by NUTS on the pooled rows in double precision. Seconds are of the process on its core, so that other work on the
machine does not count. The first seed compiles; the others tell the time of a whole fit with its verdict and, where that asks
for one, the correction.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import fedbayes as fb
from fedbayes.primitives import gaussian

PAGE = Path(__file__).parent.parent / "docs" / "results" / "panel.md"
SIZES = (10, 20, 40, 60, 80, 120)
CHECKS = (120,)
"""Global latents of the logistic model."""
SEEDS = (0, 1)
METHODS: dict[str, Any] = {"EP": fb.EP, "SFVI": fb.SFVI}
SILOS, ROWS, PRIOR, BETWEEN = 6, 200, 1.0, 0.5


class Task(NamedTuple):
    """A model, its silos, and the mean and standard deviation of each global latent on the real line."""

    population: Callable[[], Any]
    silo: Callable[[Any, Any], None]
    silos: dict[str, Any]
    truth: Callable[[], tuple[np.ndarray, np.ndarray]]


def rows(p: int, *, binary: bool) -> dict[str, Any]:
    """Covariates with neighbours that are correlated by ½, and what was observed."""
    random = np.random.default_rng(p)
    w = PRIOR * random.normal(size=p) / np.sqrt(p)
    found = {}
    for number in range(SILOS):
        x = random.normal(size=(ROWS, p))
        for column in range(1, p):
            x[:, column] = 0.5 * x[:, column - 1] + np.sqrt(0.75) * x[:, column]
        own = BETWEEN * random.normal(size=2)
        predictor = x @ w + own[0] + own[1] * x[:, 0]
        y = random.random(ROWS) < 1 / (1 + np.exp(-predictor)) if binary else predictor + random.normal(size=ROWS)
        found[f"silo {number}"] = {"x": np.float32(x), "y": np.float32(y)}
    return found


def gaussian_task(n: int) -> Task:
    """y = x w + a_j + b_j x_1 + e with known variances; n coefficients."""
    silos = rows(n, binary=False)

    def population() -> Any:
        return numpyro.sample("w", dist.Normal(0.0, PRIOR).expand([n]).to_event(1))

    def silo(w: Any, data: Any) -> None:
        own = numpyro.sample("own", dist.Normal(0.0, BETWEEN).expand([2]).to_event(1))
        location = data["x"] @ w + own[0] + own[1] * data["x"][:, 0]
        numpyro.sample("y", dist.Normal(location, 1.0), obs=data["y"])

    def truth() -> tuple[np.ndarray, np.ndarray]:
        precision, linear = np.eye(n) / PRIOR**2, np.zeros(n)
        for data in silos.values():
            x, y = np.asarray(data["x"], float), np.asarray(data["y"], float)
            z = np.stack([np.ones(ROWS), x[:, 0]], axis=1)
            inverse = np.linalg.inv(np.eye(ROWS) + BETWEEN**2 * z @ z.T)
            precision, linear = precision + x.T @ inverse @ x, linear + x.T @ inverse @ y
        covariance = np.linalg.inv(precision)
        return covariance @ linear, np.sqrt(np.diag(covariance))

    return Task(population, silo, silos, truth)


def logistic_task(n: int) -> Task:
    """Logistic, and the scale of a_j and b_j is a latent; n − 1 coefficients."""
    silos = rows(n - 1, binary=True)

    def population() -> Any:
        w = numpyro.sample("w", dist.Normal(0.0, PRIOR).expand([n - 1]).to_event(1))
        return w, numpyro.sample("between", dist.LogNormal(-1.0, 0.5))

    def silo(population: Any, data: Any) -> None:
        w, between = population
        own = numpyro.sample("own", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        location = data["x"] @ w + between * (own[0] + own[1] * data["x"][:, 0])
        numpyro.sample("y", dist.Bernoulli(logits=location), obs=data["y"])

    def pooled(x: Any, y: Any) -> None:
        w, between = population()
        own = numpyro.sample("own", dist.Normal(0.0, 1.0).expand([SILOS, 2]).to_event(2))
        location = x @ w + between * (own[:, :1] + own[:, 1:] * x[:, :, 0])
        numpyro.sample("y", dist.Bernoulli(logits=location).to_event(2), obs=y)

    def truth() -> tuple[np.ndarray, np.ndarray]:
        with jax.enable_x64(True):
            x, y = (jnp.stack([jnp.asarray(data[name], float) for data in silos.values()]) for name in ("x", "y"))
            sampler = MCMC(
                NUTS(pooled), num_warmup=500, num_samples=2000, num_chains=2, chain_method="sequential", progress_bar=False
            )
            sampler.run(jax.random.key(0), x, y)
            draws = {name: np.asarray(value) for name, value in sampler.get_samples().items()}
        z = np.column_stack([draws["w"], np.log(draws["between"])])
        return z.mean(axis=0), z.std(axis=0)

    return Task(population, silo, silos, truth)


def judged(fit: fb.SiloFit, mean: np.ndarray, sd: np.ndarray) -> tuple[float, float]:
    """The worst mean in standard deviations, and the worst ratio of standard deviations."""
    if fit.corrected is None:
        found, spread = np.asarray(fit.shared.eta.mean), np.sqrt(np.diag(gaussian.covariance(fit.shared.eta)))
    else:
        found, spread = fit.corrected.mean(axis=0), fit.corrected.std(axis=0)
    ratios = spread / sd
    return float(np.abs((found - mean) / sd).max()), float(ratios[np.abs(np.log(ratios)).argmax()])


def line(name: str, n: int, method: str, task: Task, truth: tuple[np.ndarray, np.ndarray]) -> str:
    """A row of the table: a method on a model, over the seeds."""
    algorithm = METHODS[method](task.population, task.silo)
    seconds, rounds, words, means, ratios = [], [], [], [], []
    for seed in SEEDS:
        began = time.process_time()
        fit = fb.simulate(algorithm, task.silos, seed=seed)
        seconds.append(time.process_time() - began)
        mean, ratio = judged(fit, *truth)
        means.append(mean)
        ratios.append(ratio)
        rounds.append(fit.result["rounds"])
        words.append(fit.result["verdict"]["verdict"] + ", corrected" * (fit.corrected is not None))
    said = "; ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    counts = str(min(rounds)) if len(set(rounds)) == 1 else f"{min(rounds)}–{max(rounds)}"
    cells = [common.spread(means), common.spread(ratios), said, counts, common.spread(seconds[1:], 1), f"{seconds[0]:.0f}"]
    return f"| {name} | {n} | {method} | {' | '.join(cells)} |"


def main() -> int:
    """Run both methods at each size and write the table."""
    jax.config.update("jax_enable_compilation_cache", False)
    tasks = [("gaussian", n, gaussian_task) for n in SIZES] + [("logistic", n, logistic_task) for n in CHECKS]
    lines = [
        "|  |  |  | worst mean, sd | worst sd ratio | verdicts | rounds | seconds | first fit, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, n, make in tasks:
        if sys.argv[1:] and f"{name}-{n}" not in sys.argv[1:]:
            lines += [f"| {name} | {n} | {method} |{f' {common.MISSING} |' * 6}" for method in METHODS]
            continue
        task = make(n)
        truth = task.truth()
        for method in METHODS:
            lines.append(line(name, n, method, task, truth))
            print(lines[-1], flush=True)
    common.put(PAGE, "limit", "\n".join(lines))
    return 0


if __name__ == "__main__":
    common.command(main)
