"""How long EP takes beside NUTS on the pooled rows, for the same least effective sample size of the global latents.

    FEDBAYES_DATA=<folder> python benchmarks/ep_speed.py [MODEL ...]        # writes into docs/results/panel.md

Both run once to compile and then with other seeds, one after the other in one process. A Monte Carlo error of s posterior
standard deviations counts as 1 / s² effective draws: EP's is the error of q that it stopped at. NUTS has 500 warm-up steps and
its draws' time is scaled to that size; of chains in turn and side by side the faster one counts. EP's time is that of `fb.fit`
as a whole, with its verdict and, where it asks for one, the correction.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import common
import jax
import jax.monitoring
import numpy as np
from numpyro.infer import MCMC, NUTS, init_to_median
from panel_judges import Stopwatch, errors, on_real_line
from panel_models import Model, load

import fedbayes as fb

PAGE = Path(__file__).parent.parent / "docs" / "results" / "panel.md"
MODELS = ("six_cities", "radon")
SEEDS = (1, 2, 3)
WARMUP, DRAWS, CHAINS = 500, 1000, 4


def nuts(model: Model, seed: int, method: str) -> tuple[float, float, float]:
    """Seconds of the warm-up, seconds of a draw of all chains, and effective draws for each of these."""
    kernel = NUTS(lambda: model.judge(model.together), init_strategy=init_to_median(num_samples=15))
    sampler = SAMPLERS.setdefault(
        (model.name, method),
        MCMC(kernel, num_warmup=WARMUP, num_samples=DRAWS, num_chains=CHAINS, chain_method=method, progress_bar=False),
    )
    began = time.perf_counter()
    sampler.warmup(jax.random.key(seed))
    jax.block_until_ready(sampler.post_warmup_state)
    warm = time.perf_counter()
    sampler.run(jax.random.key(seed + 100))
    jax.block_until_ready(sampler.last_state)
    done = time.perf_counter()
    draws = sampler.get_samples(group_by_chain=True)
    flat = {one.name: draws[one.name] for one in model.structured.global_latents()}
    return warm - began, (done - warm) / DRAWS, errors(on_real_line(model, flat))[2] / DRAWS


SAMPLERS: dict[tuple[str, str], Any] = {}
COMPILED: list[str] = []
"""Programs that were compiled, not found in memory."""


def ep(model: Model, seed: int) -> tuple[float, float, float, int]:
    """Seconds of a fit, of these tracing and compiling, the error of q, and how many programs were compiled."""
    before = len(COMPILED)
    with Stopwatch() as watch:
        fit = fb.fit(model.population, model.silo, model.silos, seed=seed)
    return watch.seconds, watch.compiling, fit.result["verdict"]["checks"]["health"]["noise"], len(COMPILED) - before


def main() -> int:
    """Time the models and write the table."""
    jax.config.update("jax_enable_compilation_cache", False)
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: COMPILED.append(name) if name == event else None
    )
    lines = [
        "| model | effective draws | NUTS, s | EP, s | ratio | first fit, s | compiling, s | programs compiled by later fits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sys.argv[1:] or MODELS:
        model = load(name)
        first = ep(model, 0)
        for method in ("sequential", "vectorized"):
            nuts(model, 0, method)
        sizes, pooled, federated, programs = [], [], [], 0
        for seed in SEEDS:
            seconds, _, noise, compiled = ep(model, seed)
            size = noise**-2
            times = [
                warm + size / each * draw for warm, draw, each in (nuts(model, seed, m) for m in ("sequential", "vectorized"))
            ]
            sizes.append(size)
            pooled.append(min(times))
            federated.append(seconds)
            programs += compiled
        ratios = list(np.array(federated) / np.array(pooled))
        cells = [f"{np.mean(sizes):.0f}", *(common.spread(list(values), 1) for values in (pooled, federated, ratios))]
        lines.append(f"| {model.title} | {' | '.join(cells)} | {first[0]:.0f} | {first[1]:.0f} | {programs} |")
        print(lines[-1], flush=True)
    common.put(PAGE, "speed", "\n".join(lines))
    return 0


if __name__ == "__main__":
    common.command(main)
