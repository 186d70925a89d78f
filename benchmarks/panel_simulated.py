"""Models of the panel with simulated data; see panel_models.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from panel_model import Data, Model, joined, reals

# 6. Correlated intercepts and slopes


def correlated_slopes() -> Model:
    """An intercept and a slope for each of 44 groups, correlated, with an LKJ prior; groups by index in five silos."""
    random = np.random.default_rng(6)
    scale, correlation = np.array([1.0, 0.5]), -0.4
    root = np.linalg.cholesky(np.array([[1.0, correlation], [correlation, 1.0]])) * scale[:, None]
    silos = {}
    for place, groups in enumerate((4, 6, 8, 10, 16)):
        group = np.repeat(np.arange(groups), random.integers(4, 13, groups)).astype(np.int32)
        effects = np.array([1.0, -0.5]) + random.standard_normal((groups, 2)) @ root.T
        x = random.standard_normal(len(group))
        y = effects[group, 0] + effects[group, 1] * x + 0.8 * random.standard_normal(len(group))
        x, y = reals(x, y)
        silos[f"site {place + 1}"] = {"x": x, "y": y, "group": group, "groups": groups}

    def population() -> Any:
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
        correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        return mean, scale[:, None] * correlation, sigma

    def silo(population: Any, data: Data) -> None:
        mean, root, sigma = population
        with numpyro.plate("groups", data["groups"]):
            effects = numpyro.sample("effects", dist.MultivariateNormal(mean, scale_tril=root))
        here = effects[data["group"]]
        with numpyro.plate("rows", len(data["y"])):
            numpyro.sample("y", dist.Normal(here[:, 0] + here[:, 1] * data["x"], sigma), obs=data["y"])

    def pooled(data: Data) -> None:
        silo(population(), data)

    together = joined(silos, ("groups",), {"group": "groups"})
    title = "correlated slopes, LKJ"
    return Model("correlated_slopes", title, population, silo, silos, pooled, together, ("effects",))


# 7. Counts with crossed effects


def crossed_counts() -> Model:
    """Counts of ten species on plots: species are in all silos, so their effects and their scale are global."""
    random = np.random.default_rng(7)
    species_effects = 0.8 * random.standard_normal(10)
    silos = {}
    for name, plots in (("north", 6), ("east", 8), ("south", 10), ("west", 14)):
        plot, species = np.repeat(np.arange(plots), 10).astype(np.int32), np.tile(np.arange(10), plots).astype(np.int32)
        x, effects = random.standard_normal(plots), 0.5 * random.standard_normal(plots)
        mean = np.exp(1.0 + 0.4 * x[plot] + species_effects[species] + effects[plot])
        count = random.negative_binomial(2.0, 2.0 / (2.0 + mean)).astype(np.int32)
        silos[name] = {"x": x.astype(np.float32), "plot": plot, "species": species, "count": count, "plots": plots}

    def population() -> Any:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        between_species = numpyro.sample("between_species", dist.HalfNormal(1.0))
        species = numpyro.sample("species", dist.Normal(0.0, between_species).expand([10]).to_event(1))
        between_plots = numpyro.sample("between_plots", dist.HalfNormal(1.0))
        concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
        return intercept, slope, species, between_plots, concentration

    def silo(population: Any, data: Data) -> None:
        intercept, slope, species, between_plots, concentration = population
        with numpyro.plate("plots", data["plots"]):
            plot = numpyro.sample("plot", dist.Normal(0.0, between_plots))
        log_mean = intercept + (slope * data["x"] + plot)[data["plot"]] + species[data["species"]]
        with numpyro.plate("rows", len(data["count"])):
            numpyro.sample("count", dist.NegativeBinomial2(jnp.exp(log_mean), concentration), obs=data["count"])

    def pooled(data: Data) -> None:
        silo(population(), data)

    together = joined(silos, ("plots",), {"plot": "plots"})
    title = "negative binomial, crossed effects"
    return Model("crossed_counts", title, population, silo, silos, pooled, together, ("plot",))


# 8. Twenty small logistic silos


def small_silos() -> Model:
    """An intercept and a slope for each of twenty silos of 6 to 20 rows."""
    random = np.random.default_rng(8)
    silos = {}
    for place in range(20):
        rows = int(random.integers(6, 21))
        effects = np.array([-0.5, 1.0]) + np.array([0.8, 0.5]) * random.standard_normal(2)
        x = random.standard_normal(rows)
        y = random.random(rows) < 1 / (1 + np.exp(-effects[0] - effects[1] * x))
        silos[f"practice {place + 1}"] = {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    def population() -> Any:
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
        return mean, scale

    def silo(population: Any, data: Data) -> None:
        effects = numpyro.sample("effects", dist.Normal(*population).to_event(1))
        with numpyro.plate("rows", len(data["y"])):
            numpyro.sample("y", dist.Bernoulli(logits=effects[0] + effects[1] * data["x"]), obs=data["y"])

    def pooled(data: Data) -> None:
        given = population()
        with numpyro.plate("silos", data["silos"]):
            effects = numpyro.sample("effects", dist.Normal(*given).to_event(1))
        here = effects[data["silo"]]
        with numpyro.plate("rows", len(data["y"])):
            numpyro.sample("y", dist.Bernoulli(logits=here[:, 0] + here[:, 1] * data["x"]), obs=data["y"])

    title = "twenty small logistic silos"
    return Model("small_silos", title, population, silo, silos, pooled, joined(silos), ("effects",))


# 9. Blood pressure


def blood_pressure() -> Model:
    """Systolic pressure in mmHg, priors in these units; clinics by index in four regions."""
    random = np.random.default_rng(9)
    silos = {}
    for name, clinics, rows in (("A", 5, 60), ("B", 8, 140), ("C", 10, 90), ("D", 15, 260)):
        clinic = random.integers(clinics, size=rows).astype(np.int32)
        age, treated = random.uniform(30, 80, rows).round(), random.integers(2, size=rows)
        level = 118 + 6 * random.standard_normal(clinics)
        pressure = level[clinic] + 0.5 * (age - 50) - 8 * treated + 14 * random.standard_normal(rows)
        age, treated, pressure = reals(age, treated, pressure.round())
        silos[name] = {"age": age, "treated": treated, "pressure": pressure, "clinic": clinic, "clinics": clinics}

    def population() -> Any:
        mean = numpyro.sample("mean", dist.Normal(120.0, 20.0))
        per_year = numpyro.sample("per_year", dist.Normal(0.0, 2.0))
        treatment = numpyro.sample("treatment", dist.Normal(0.0, 10.0))
        between = numpyro.sample("between", dist.HalfNormal(10.0))
        within = numpyro.sample("within", dist.HalfNormal(20.0))
        return mean, per_year, treatment, between, within

    def silo(population: Any, data: Data) -> None:
        mean, per_year, treatment, between, within = population
        with numpyro.plate("clinics", data["clinics"]):
            level = numpyro.sample("level", dist.Normal(mean, between))
        expected = level[data["clinic"]] + per_year * (data["age"] - 50) + treatment * data["treated"]
        with numpyro.plate("patients", len(data["pressure"])):
            numpyro.sample("pressure", dist.Normal(expected, within), obs=data["pressure"])

    def pooled(data: Data) -> None:
        silo(population(), data)

    together = joined(silos, ("clinics",), {"clinic": "clinics"})
    title = "blood pressure in mmHg"
    return Model("blood_pressure", title, population, silo, silos, pooled, together, ("level",))


# 10. Nested Gaussian with its exact answer


def nested_gaussian() -> Model:
    """y = mu + h_j + b_jd + e with known variances: the posterior of mu is Gaussian and has a closed form."""
    random = np.random.default_rng(10)
    prior_sd, sd_h, sd_b, sd_e = 10.0, 0.8, 0.6, 1.0
    silos, precision, shift = {}, 1 / prior_sd**2, 0.0
    for place, doctors in enumerate((2, 3, 4, 6, 8)):
        doctor = np.repeat(np.arange(doctors), random.integers(2, 9, doctors)).astype(np.int32)
        h, b = sd_h * random.standard_normal(), sd_b * random.standard_normal(doctors)
        y = (3.0 + h + b[doctor] + sd_e * random.standard_normal(len(doctor))).astype(np.float32)
        silos[f"hospital {place + 1}"] = {"y": y, "doctor": doctor, "doctors": doctors}
        covariance = sd_h**2 + sd_b**2 * (doctor[:, None] == doctor) + sd_e**2 * np.eye(len(y))
        weights = np.linalg.solve(covariance, np.ones(len(y)))
        precision, shift = precision + weights.sum(), shift + weights @ y.astype(float)

    def population() -> Any:
        return numpyro.sample("mu", dist.Normal(0.0, prior_sd))

    def silo(mu: Any, data: Data) -> None:
        h = numpyro.sample("h", dist.Normal(0.0, sd_h))
        with numpyro.plate("doctors", data["doctors"]):
            b = numpyro.sample("b", dist.Normal(0.0, sd_b))
        with numpyro.plate("patients", len(data["y"])):
            numpyro.sample("y", dist.Normal(mu + h + b[data["doctor"]], sd_e), obs=data["y"])

    def pooled(data: Data) -> None:
        mu = population()
        with numpyro.plate("hospitals", data["silos"]):
            h = numpyro.sample("h", dist.Normal(0.0, sd_h))
        with numpyro.plate("doctors", data["doctors"]):
            b = numpyro.sample("b", dist.Normal(0.0, sd_b))
        with numpyro.plate("patients", len(data["y"])):
            numpyro.sample("y", dist.Normal(mu + h[data["silo"]] + b[data["doctor"]], sd_e), obs=data["y"])

    together = joined(silos, ("doctors",), {"doctor": "doctors"})
    exact = {"mu": (float(shift / precision), float(precision**-0.5))}
    return Model("nested_gaussian", "nested Gaussian, exact", population, silo, silos, pooled, together, exact=exact)


# 11. Survival


def survival() -> Model:
    """Weibull times with censoring and a frailty that the patients of a centre share; ten centres, each a silo."""
    random = np.random.default_rng(11)
    silos = {}
    for place, rows in enumerate((25, 30, 35, 40, 50, 60, 70, 80, 100, 120)):
        columns = [random.integers(2, size=rows), random.standard_normal(rows), random.integers(2, size=rows)]
        x = np.stack(columns, axis=1).astype(np.float32)
        log_rate = -1.0 + x @ np.array([0.5, 0.3, -0.6]) + 0.4 * random.standard_normal()
        time = (random.exponential(size=rows) / np.exp(log_rate)) ** (1 / 1.4)
        end = np.minimum(random.exponential(4.0, rows), 5.0)
        observed = np.minimum(time, end).clip(1e-3).astype(np.float32)
        silos[f"centre {place + 1}"] = {"x": x, "time": observed, "died": (time <= end).astype(np.int32)}

    def population() -> Any:
        shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        between = numpyro.sample("between", dist.HalfNormal(1.0))
        return shape, intercept, effects, between

    def likelihood(shape: Any, log_rate: Any, data: Data) -> None:
        # Hazard rate shape t^(shape - 1): a death has the density, a censored time the chance to survive it.
        times = dist.Weibull(jnp.exp(-log_rate / shape), shape)
        with numpyro.plate("patients", len(data["time"])):
            numpyro.sample("time", times.mask(data["died"] == 1), obs=data["time"])
            survived = -jnp.exp(log_rate) * data["time"] ** shape
            numpyro.factor("censored", jnp.where(data["died"] == 1, 0.0, survived))

    def silo(population: Any, data: Data) -> None:
        shape, intercept, effects, between = population
        frailty = numpyro.sample("frailty", dist.Normal(0.0, between))
        likelihood(shape, intercept + frailty + data["x"] @ effects, data)

    def pooled(data: Data) -> None:
        shape, intercept, effects, between = population()
        with numpyro.plate("centres", data["silos"]):
            frailty = numpyro.sample("frailty", dist.Normal(0.0, between))
        likelihood(shape, intercept + frailty[data["silo"]] + data["x"] @ effects, data)

    title = "Weibull survival, censored, frailty"
    return Model("survival", title, population, silo, silos, pooled, joined(silos), ("frailty",))


# 12. Horseshoe


def horseshoe() -> Model:
    """A regression with a regularised horseshoe prior (Piironen and Vehtari 2017) on ten coefficients; four silos."""
    random = np.random.default_rng(12)
    count = 10
    truth = np.array([1.5, -1.0, 0.5, 0.2, 0, 0, 0, 0, 0, 0])
    silos = {}
    for name, rows in (("north", 20), ("east", 30), ("south", 40), ("west", 60)):
        x = random.standard_normal((rows, count)) + 0.5 * random.standard_normal((rows, 1))
        y = 0.5 + x @ truth + random.standard_normal(rows)
        x, y = reals(x, y)
        silos[name] = {"x": x, "y": y}

    def population() -> Any:
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
        slab = numpyro.sample("slab", dist.InverseGamma(2.0, 4.0))
        lam = numpyro.sample("lambda", dist.HalfCauchy(1.0).expand([count]).to_event(1))
        regularised = lam * jnp.sqrt(slab / (slab + tau**2 * lam**2))
        beta = numpyro.sample("beta", dist.Normal(0.0, tau * regularised).to_event(1))
        return intercept, beta, sigma

    def silo(population: Any, data: Data) -> None:
        intercept, beta, sigma = population
        with numpyro.plate("rows", len(data["y"])):
            numpyro.sample("y", dist.Normal(intercept + data["x"] @ beta, sigma), obs=data["y"])

    def pooled(data: Data) -> None:
        silo(population(), data)

    heavy = ("lambda", "slab", "tau")
    title = "regression, horseshoe prior"
    return Model("horseshoe", title, population, silo, silos, pooled, joined(silos), ("beta",), heavy=heavy, target_accept=0.99)


# 13. Varying intercepts


def radon() -> Model:
    """Varying intercepts with a[county], as most mixed models are written: 85 counties in five silos."""
    random = np.random.default_rng(13)
    silos = {}
    for place, counties in enumerate((9, 12, 16, 20, 28)):
        sizes = 1 + random.negative_binomial(0.8, 0.8 / 10.8, counties)
        county = np.repeat(np.arange(counties), sizes).astype(np.int32)
        a = 1.5 + 0.33 * random.standard_normal(counties)
        floor = random.random(len(county)) < 0.17
        y = a[county] - 0.7 * floor + 0.75 * random.standard_normal(len(county))
        floor, y = reals(floor, y)
        silos[f"region {place + 1}"] = {"floor": floor, "log_radon": y, "county": county, "counties": counties}

    def population() -> Any:
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        sigma_a = numpyro.sample("sigma_a", dist.HalfCauchy(2.5))
        b = numpyro.sample("b", dist.Normal(0.0, 5.0))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
        return mu, sigma_a, b, sigma

    def silo(population: Any, data: Data) -> None:
        mu, sigma_a, b, sigma = population
        with numpyro.plate("counties", data["counties"]):
            a = numpyro.sample("a", dist.Normal(mu, sigma_a))
        with numpyro.plate("houses", len(data["log_radon"])):
            mean = a[data["county"]] + b * data["floor"]
            numpyro.sample("log_radon", dist.Normal(mean, sigma), obs=data["log_radon"])

    def pooled(data: Data) -> None:
        silo(population(), data)

    together = joined(silos, ("counties",), {"county": "counties"})
    return Model("radon", "varying intercepts, a[county]", population, silo, silos, pooled, together, ("a",))


# 14. Many silos


def many_silos() -> Model:
    """Rare events in 29 silos: ten logistic coefficients a silo, their means and scales global, some scales near 0."""
    random = np.random.default_rng(14)
    mean = np.array([-3.95, 0.6, -0.5, 0.4, 0.3, -0.3, 0.2, 0.0, 0.0, 0.8])
    scale = np.array([0.6, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05, 0.0, 0.0, 0.5])
    silos = {}
    for place in range(29):
        x = np.concatenate([np.ones((500, 1)), random.standard_normal((500, 9))], axis=1)
        effects = mean + scale * random.standard_normal(10)
        y = random.random(500) < 1 / (1 + np.exp(-x @ effects))
        silos[f"bank {place + 1}"] = {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    def population() -> Any:
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0).expand([10]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([10]).to_event(1))
        return mean, scale

    def silo(population: Any, data: Data) -> None:
        effects = numpyro.sample("effects", dist.Normal(*population).to_event(1))
        with numpyro.plate("rows", len(data["y"])):
            numpyro.sample("y", dist.Bernoulli(logits=data["x"] @ effects), obs=data["y"])

    def pooled(data: Data) -> None:
        given = population()
        with numpyro.plate("silos", data["silos"]):
            effects = numpyro.sample("effects", dist.Normal(*given).to_event(1))
        with numpyro.plate("rows", len(data["y"])):
            logits = jnp.einsum("jnk,jk->jn", data["x"].reshape(data["silos"], -1, 10), effects).reshape(-1)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=data["y"])

    note = "posteriors of scales that touch 0 are not Gaussian on the log scale"
    return Model(
        "many_silos", "29 silos, 20 global latents", population, silo, silos, pooled, joined(silos), ("effects",), note=note
    )
