"""What NUTS says of the model files when all silos are pooled: `python benchmarks/references.py [NAME ...]`.

A federated fit of a model file is judged by these numbers. The silos are joined into one NumPyro model, each silo's sites under
its name, and sampled in double precision: two chains of 1500 draws after 1000 of warm-up. Heart disease needs FEDBAYES_DATA.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import time
import types
from collections.abc import Callable

import jax
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
NAMES = ("six_cities", "eight_schools", "hospitals", "heart_disease")


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pooled(module: types.ModuleType) -> Callable[[], None]:
    """One model with the population's sites by their own names and a silo's as silo/site."""
    silos = module.silos()

    def model() -> None:
        population = module.population()
        for name, data in silos.items():
            with handlers.scope(prefix=name, divider="/"):
                module.silo(population, data)

    return model


def reference(name: str, warmup: int = 1000, draws: int = 1500, seed: int = 0) -> None:
    module = load(name)
    sampler = MCMC(
        NUTS(pooled(module), target_accept_prob=0.9),
        num_warmup=warmup,
        num_samples=draws,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    started = time.perf_counter()
    sampler.run(jax.random.key(seed), extra_fields=("diverging", "num_steps"))
    seconds = time.perf_counter() - started
    extra, samples = sampler.get_extra_fields(), sampler.get_samples(group_by_chain=True)
    latents = {site: np.asarray(value) for site, value in samples.items()}
    r_hats = {site: float(np.max(split_gelman_rubin(value))) for site, value in latents.items()}
    worst = max(r_hats, key=r_hats.__getitem__)
    print(f"\n{name}: {seconds:.0f} s, {int(extra['diverging'].sum())} divergent of {2 * draws}, ", end="")
    print(f"{float(extra['num_steps'].mean()):.0f} steps a draw; the largest r-hat is {r_hats[worst]:.3f}, of {worst}")
    print(f"{'site':<20}{'mean':>10}{'sd':>10}{'r-hat':>10}{'effective':>12}")
    with handlers.seed(rng_seed=0):
        trace = handlers.trace(module.population).get_trace()
    for site in [name for name, message in trace.items() if message["type"] == "sample"]:
        values = latents[site].reshape(2, draws, -1)
        for place in range(values.shape[-1]):
            label = site if latents[site].ndim == 2 else f"{site}[{place}]"
            one = values[..., place]
            print(f"{label:<20}{one.mean():>10.3f}{one.std():>10.3f}", end="")
            print(f"{split_gelman_rubin(one):>10.3f}{effective_sample_size(one):>12.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(NAMES)}; all when there is none")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"{', '.join(unknown)} is none of {', '.join(NAMES)}")
    numpyro.enable_x64()
    for name in arguments.names or NAMES:
        reference(name)


if __name__ == "__main__":
    main()
