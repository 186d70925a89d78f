"""What is done today where rows cannot be pooled: consensus Monte Carlo, and study-by-study fits with a meta-analysis.

Both need one message from each silo, and both run NUTS there in double precision: 1000 iterations of warm-up, 2000 draws.

Consensus Monte Carlo (Scott et al. 2016): a silo samples p(Z_G)^(1/J) p(y_j, Z_L | Z_G) and sends its draws of Z_G; draw s of
the result is (Σ_j W_j)⁻¹ Σ_j W_j Z_G^(j, s) with W_j the inverse of silo j's sample covariance, all on the real line. It is
exact where every silo's likelihood of Z_G is Gaussian.

Meta-analysis: a silo fits the model to its own rows, with the whole prior, and sends estimates with their standard errors, on
the real line. Each number is pooled on its own with a random effect of the silo (DerSimonian and Laird 1986). A latent that a
silo knows hardly better than the prior is not reported by it. Where a location varies between silos, a silo reports its
own (`STUDIES`), and the scale of that variation is the random effect's, a point estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_value
from panel_models import Data, Model

from fedbayes.models.sites import on_real_line, run
from fedbayes.trees import Form, put_together, take_apart

WARMUP, DRAWS = 1000, 2000
ATTEMPTS, MIXED = 3, 1.1
"""Runs of a chain, at most, and the split r-hat below which one is kept."""
UNKNOWN = 0.8
"""A silo reports a latent if its posterior sd is below this share of the prior's."""

Draws = dict[str, np.ndarray]


class Study(NamedTuple):
    """What a silo reports in place of a population's location, and the scale that its variation between silos is."""

    reports: Callable[[Draws, Data], dict[str, Any]]
    """Draws of a location from a silo's own fit, or an estimate and its standard error, by the global latent's name."""
    between: dict[str, str]
    """The latent that is the standard deviation between silos, and of which location."""


STUDIES = {
    "eight_schools": Study(lambda draws, data: {"mu": (data["y"], data["sigma"])}, {"tau": "mu"}),
    "heart_disease": Study(
        lambda draws, data: {
            "mean": draws["intercept"],
            "level": draws["hospital_level"],
            "angina_level": draws["hospital_angina_level"],
        },
        {"between": "mean"},
    ),
    "nurses": Study(
        lambda draws, data: {"intercept": draws["intercept"] + draws["hospital"]}, {"between_hospitals": "intercept"}
    ),
    "trauma": Study(lambda draws, data: {"mean": draws["intercept"]}, {"between": "mean"}),
    "small_silos": Study(lambda draws, data: {"mean": draws["effects"]}, {"scale": "mean"}),
    "nested_gaussian": Study(lambda draws, data: {"mu": draws["mu"] + draws["h"]}, {}),
    "survival": Study(lambda draws, data: {"intercept": draws["intercept"] + draws["frailty"]}, {"between": "intercept"}),
    "many_silos": Study(lambda draws, data: {"mean": draws["effects"]}, {"scale": "mean"}),
}


class Silos:
    """NUTS in each silo, on p(Z_G)^power p(y_j, Z_L | Z_G); silos of one shape share a program."""

    def __init__(self, model: Model, power: float, seed: int) -> None:
        self.model, self.power, self.seed = model, power, seed
        self._programs: dict[Any, Callable[..., Any]] = {}
        keys = jax.random.split(jax.random.key(seed), 4000)
        self.prior = np.asarray(jax.vmap(model.structured.prior_draw)(keys))

    def draws(self) -> list[Draws]:
        """Draws of each silo: Z_G is on the real line, and sites have their names."""
        found = []
        for place, data in enumerate(self.model.silos.values()):
            form, arrays = take_apart(data)
            program = self._programs.setdefault(form, jax.jit(self._sampler(form)))
            for attempt in range(ATTEMPTS):  # a chain that is stuck or drifts is run anew, as an analyst would
                key = jax.random.fold_in(jax.random.key(self.seed), place + attempt * len(self.model.silos))
                draws = {name: np.asarray(value) for name, value in program(key, arrays).items()}
                if np.all(split_gelman_rubin(draws["Z_G"][None].astype(float)) < MIXED):
                    break
            found.append(draws)
        return found

    def _sampler(self, form: Form) -> Callable[..., Any]:
        structured = self.model.structured
        latents, start = structured.global_latents(), np.median(self.prior[:15], axis=0)

        def program(arrays: Any) -> None:
            z = numpyro.sample("Z_G", dist.ImproperUniform(dist.constraints.real, (), (structured.size(),)))
            numpyro.factor("prior", self.power * structured.log_population({}, z))
            population, sites = run(structured.population, (), real=on_real_line(latents, {"": z[None]}))
            for latent in latents:
                numpyro.deterministic(latent.name, sites[latent.name]["value"])
            with handlers.reparam(config=self.model.standardising):
                structured.silo(population, put_together(form, arrays))

        def sample(key: Any, arrays: Any) -> Any:
            kernel = NUTS(
                program,
                dense_mass=[("Z_G",)],
                target_accept_prob=self.model.target_accept,
                init_strategy=init_to_value(values={"Z_G": jnp.asarray(start)}),
            )
            sampler = MCMC(kernel, num_warmup=WARMUP, num_samples=DRAWS, progress_bar=False)
            sampler.run(key, arrays)
            return sampler.get_samples()

        return sample


def consensus(model: Model, seed: int) -> tuple[Draws, int]:
    """Consensus Monte Carlo: draws of the global latents, and the bytes that a silo sends."""
    parts = [silo["Z_G"].astype(float) for silo in Silos(model, 1 / len(model.silos), seed).draws()]
    weights = [np.linalg.inv(np.atleast_2d(np.cov(part, rowvar=False))) for part in parts]
    weighted = np.sum([part @ weight for part, weight in zip(parts, weights, strict=True)], axis=0)
    return constrained(model, np.linalg.solve(np.sum(weights, axis=0), weighted.T).T), 4 * parts[0].size


def meta_analysis(model: Model, seed: int, draws: int = 4000) -> tuple[Draws, int]:
    """Study-by-study fits: draws from the normal distributions of what was pooled, NaN where nothing could be, and bytes.

    A scale between silos is a point estimate, on its own scale: its draws are all alike.
    """
    study = STUDIES.get(model.name, Study(lambda draws, data: {}, {}))
    silos = Silos(model, 1.0, seed)
    latents = model.structured.global_latents()
    widths = np.cumsum([0, *(latent.width for latent in latents)])
    places = {latent.name: slice(start, end) for latent, start, end in zip(latents, widths[:-1], widths[1:], strict=True)}
    estimates, errors = np.zeros((2, len(model.silos), int(widths[-1])))
    reported = np.zeros(int(widths[-1]), bool)
    for silo, data, estimate, error in zip(silos.draws(), model.silos.values(), estimates, errors, strict=True):
        estimate[:], error[:] = silo["Z_G"].mean(axis=0), silo["Z_G"].std(axis=0)
        for name, report in study.reports(silo, data).items():
            direct = isinstance(report, tuple)
            estimate[places[name]] = report[0] if direct else report.mean(axis=0)
            error[places[name]] = report[1] if direct else report.std(axis=0)
            reported[places[name]] = True
    known = (errors < UNKNOWN * silos.prior.std(axis=0)) | reported
    random = np.random.default_rng(seed)
    z, tau = np.full((2, draws, int(widths[-1])), np.nan)
    for place in range(int(widths[-1])):
        if (used := known[:, place]).any():
            mean, error, spread = random_effects(estimates[used, place], errors[used, place])
            z[:, place], tau[:, place] = mean + error * random.standard_normal(draws), spread
    found = constrained(model, z)
    for scale, location in study.between.items():
        found[scale] = tau[:, places[location]].reshape(draws, *found[location].shape[1:])
    return found, 4 * 2 * int(widths[-1])


def random_effects(estimates: np.ndarray, errors: np.ndarray) -> tuple[float, float, float]:
    """Mean, its standard error and τ of DerSimonian and Laird.

    >>> y, sigma = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    >>> [round(value, 2) for value in random_effects(y, sigma)]
    [7.69, 4.07, 0.0]
    """
    weights = 1 / errors**2
    mean = np.sum(weights * estimates) / weights.sum()
    excess = np.sum(weights * (estimates - mean) ** 2) - (len(estimates) - 1)
    spread = weights.sum() - np.sum(weights**2) / weights.sum()
    variance = max(0.0, float(excess / spread)) if spread > 1e-12 else 0.0
    weights = 1 / (errors**2 + variance)
    return float(np.sum(weights * estimates) / weights.sum()), float(weights.sum() ** -0.5), variance**0.5


def constrained(model: Model, z: np.ndarray) -> Draws:
    """The global latents as their sites have them, from the real line; NaN stays NaN."""
    structured = model.structured
    values = jax.vmap(lambda one: structured.global_values({}, one))(jnp.asarray(z))
    return {latent.name: np.asarray(values[latent.name]) for latent in structured.global_latents()}
