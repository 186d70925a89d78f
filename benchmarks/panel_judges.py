"""NUTS on pooled rows, the judge of every method of the panel.

    FEDBAYES_DATA=<folder> python benchmarks/panel_judges.py [MODEL ...]

Four chains in double precision, each warmed up for 1000 iterations, are continued until the Monte Carlo error of every global
latent's mean and standard deviation, on the real line, is below `ERROR` posterior standard deviations. Means and standard
deviations are kept in benchmarks/panel_judges.json; a model that has changed is sampled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import arviz as az
import jax
import jax.monitoring
import numpy as np
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_median
from panel_models import MODELS, Model, load

from fedbayes.files import write
from fedbayes.models.structured import numbers

FOLDER = Path(__file__).parent.parent / "runs" / "panel"
JUDGES = Path(__file__).with_name("panel_judges.json")
CHAINS, WARMUP, BLOCK, MOST = 4, 1000, 3000, 60_000
ERROR = 0.02
"""Largest Monte Carlo error of a judge's mean and standard deviation, in standard deviations."""
COMPILING = ("/jax/core/compile/",)


Moments = dict[str, tuple[float, float]]
"""Mean and standard deviation of each number."""


class Judge(NamedTuple):
    """The pooled posterior of a model's global latents."""

    real: Moments
    """On the real line."""
    own: Moments
    """On the latents' own scale."""
    facts: dict[str, Any]
    """Seconds, effective sample sizes, r-hat, divergences."""


class Sampled(NamedTuple):
    """Draws of NUTS on the pooled rows."""

    draws: dict[str, np.ndarray]
    """Of each global latent, all chains after each other."""
    facts: dict[str, Any]


@functools.cache
def _compiled() -> list[float]:
    """Seconds that JAX has spent on tracing and compiling in this process, as they come."""
    spent: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(COMPILING):
            spent.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return spent


class Stopwatch:
    """Seconds of a block, and how many of them JAX traced and compiled.

    Programs that compile in several threads at once count each on its own, so that `compiling` can exceed `seconds`.
    """

    def __enter__(self) -> Stopwatch:
        self._before = sum(_compiled())
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.compiling = sum(_compiled()) - self._before


def same(model: Model, facts: dict[str, Any]) -> bool:
    """Whether a judge is of this model: of the same rows, and the same log density at a point."""
    return facts["rows"] == rows_of(model) and bool(np.isclose(facts["density"], density(model), rtol=1e-4))


def rows_of(model: Model) -> str:
    """A digest of the silos' data."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(model.silos):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


def density(model: Model) -> float:
    """The log density of the global latents and of one silo's at a point of the real line."""
    structured, data = model.structured, next(iter(model.silos.values()))
    z = jax.numpy.linspace(-0.3, 0.4, structured.size())
    local = {plate: jax.numpy.full(size, 0.2) for plate, size in structured.blocks(data).items()}
    terms = structured.log_silo({}, z, local, data).values()
    return float(structured.log_population({}, z) + sum(jax.numpy.sum(term) for term in terms))


def on_real_line(model: Model, draws: dict[str, Any]) -> dict[str, np.ndarray]:
    """Each global latent without its constraint: log for a positive one, the partial correlation's arctanh for LKJ's factor."""
    latents = model.structured.global_latents()
    with np.errstate(divide="ignore"):
        return {one.name: np.asarray(one.transform.inv(np.asarray(draws[one.name]))) for one in latents}


def errors(chains: dict[str, np.ndarray]) -> tuple[float, float, float, float]:
    """Worst Monte Carlo error of a mean and of an sd in sds, least effective sample size, largest r-hat; (chain, draw, …)."""
    worst_mean, worst_sd, least, r_hat = 0.0, 0.0, np.inf, 0.0
    for value in chains.values():
        for place in np.ndindex(value.shape[2:]):
            one = value[(..., *place)]
            sd = one.std()
            if sd < 1e-9:
                continue
            worst_mean = max(worst_mean, float(az.mcse(one, method="mean")) / sd)
            worst_sd = max(worst_sd, float(az.mcse(one, method="sd")) / sd)
            least = min(least, float(az.ess(one, method="bulk")))
            r_hat = max(r_hat, float(split_gelman_rubin(one)))
    return float(worst_mean), float(worst_sd), float(least), r_hat


def sample(model: Model, chains: int, warmup: int, block: int, error: float | None, seed: int = 0) -> Sampled:
    """NUTS on the pooled rows, one chain after the other; with `error`, continued until the Monte Carlo error is below it."""
    names = [one.name for one in model.structured.global_latents()]
    kernel = NUTS(
        lambda: model.judge(model.together),
        target_accept_prob=model.target_accept,
        init_strategy=init_to_median(num_samples=15),
    )
    options = {"num_chains": chains, "chain_method": "sequential", "progress_bar": False}
    sampler = MCMC(kernel, num_warmup=warmup, num_samples=block, **options)
    with Stopwatch() as warming:
        sampler.warmup(jax.random.key(seed))
        state = jax.block_until_ready(sampler.post_warmup_state)
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    divergent, steps, seconds, compiling = 0, [], warming.seconds, warming.compiling
    while True:
        with Stopwatch() as sampling:
            sampler.post_warmup_state = state
            sampler.run(state.rng_key, extra_fields=("diverging", "num_steps"))
            state = jax.block_until_ready(sampler.last_state)
        draws, extra = sampler.get_samples(group_by_chain=True), sampler.get_extra_fields()
        for name in names:
            found[name].append(np.asarray(draws[name]))
        divergent += int(extra["diverging"].sum())
        steps.append(float(extra["num_steps"].mean()))
        seconds, compiling = seconds + sampling.seconds, compiling + sampling.compiling
        whole = {name: np.concatenate(value, axis=1) for name, value in found.items()}
        of_mean, of_sd, ess, r_hat = errors(on_real_line(model, whole))
        length = whole[names[0]].shape[1]
        print(f"{model.name}: {chains} × {length} draws, {seconds:.0f} s ({compiling:.0f} compiling), ", end="")
        print(
            f"error of means {of_mean:.3f}, of sds {of_sd:.3f}, ESS {ess:.0f}, r-hat {r_hat:.3f}, {divergent} divergent",
            flush=True,
        )
        if error is None or (max(of_mean, of_sd) < error and r_hat < 1.01) or length >= MOST:
            break
        # As many as should be enough, in one go: every block is compiled anew.
        needed = 1.2 * length * max(1.5, (max(of_mean, of_sd) / error) ** 2)
        sampler.num_samples = int(min(max(needed - length, block), 5 * block))
    facts = {
        "model": model.name,
        "rows": rows_of(model),
        "density": density(model),
        "chains": chains,
        "warmup": warmup,
        "draws": length,
        "seconds": seconds - compiling,
        "compiling": compiling,
        "error_mean": of_mean,
        "error_sd": of_sd,
        "ess": ess,
        "r_hat": r_hat,
        "divergent": divergent,
        "steps": float(np.mean(steps)),
        "double": double_precision(),
    }
    return Sampled({name: value.reshape(-1, *value.shape[2:]) for name, value in whole.items()}, facts)


def double_precision() -> bool:
    """Whether JAX computes in double precision in this process."""
    return bool(jax.numpy.zeros(()).dtype == np.float64)


def moments(draws: dict[str, Any]) -> Moments:
    """Mean and standard deviation of each number."""
    return {label: (float(value.mean()), float(value.std())) for label, value in numbers(draws)}


def known() -> dict[str, Judge]:
    """The judges that have been sampled, by model."""
    stored = json.loads(JUDGES.read_text()) if JUDGES.exists() else {}
    return {name: Judge(one["real"], one["own"], one["facts"]) for name, one in stored.items()}


def judge(model: Model) -> Judge:
    """The judge of a model from the file, or sampled now, for which JAX must be in double precision."""
    found = known().get(model.name)
    if found is not None and same(model, found.facts):
        return found
    if not double_precision():
        raise SystemExit(f"there is no judge for {model.name} yet; run benchmarks/panel_judges.py {model.name}")
    sampled = sample(model, CHAINS, WARMUP, BLOCK, ERROR)
    found = Judge(moments(on_real_line(model, sampled.draws)), moments(sampled.draws), sampled.facts)
    every = {name: one._asdict() for name, one in {**known(), model.name: found}.items()}
    write(JUDGES, (json.dumps(every, indent=1) + "\n").encode())
    return found


def main() -> int:
    """Sample the judges that are missing, and print what they say."""
    jax.config.update("jax_enable_x64", True)
    for name in sys.argv[1:] or MODELS:
        model = load(name)
        found = judge(model)
        print(json.dumps(found.facts))
        for scale, numbers_of in (("own scale", found.own), ("real line", found.real)):
            for label, (mean, sd) in numbers_of.items():
                print(f"    {scale:12}{label:24}{mean:10.3f}{sd:10.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
