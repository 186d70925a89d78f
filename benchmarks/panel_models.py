"""The models of the panel: hierarchical models as a statistician would write them, over silos, and pooled for NUTS.

    FEDBAYES_DATA=<folder> python benchmarks/panel_models.py     # check that both forms of each model have the same density

Each model is written as in a textbook, with latents in their natural (mostly centred) form and groups indexed by row, with
nothing done for the sake of fedbayes. `pooled` is the same joint density as one NumPyro model over all rows, in which a site of
a silo is a site of the same name, the silos' values one after the other. NUTS samples `standardised` sites as location plus
scale times a standard normal, which changes its geometry and not the posterior. Simulated data has a fixed seed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam, Reparam
from numpyro.infer.util import log_density

from fedbayes.errors import UserError
from fedbayes.models.sites import on_real_line
from fedbayes.models.structured import Structured

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
Data = dict[str, Any]


class Whitened(Reparam):
    """A multivariate normal as its location plus its Cholesky factor times standard normals."""

    def __call__(self, name: str, fn: Any, obs: Any) -> tuple[None, Any]:
        """The site's value, from standard normals of its shape."""
        fn, expand, _ = self._unwrap(fn)
        standard = numpyro.sample(f"{name}_standard", dist.Normal(jnp.zeros((*expand, *fn.event_shape)), 1.0).to_event(1))
        return None, fn.loc + jnp.einsum("...ij,...j->...i", fn.scale_tril, standard)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model over silos, and the same one over pooled rows."""

    name: str
    title: str
    population: Callable[[], Any]
    silo: Callable[[Any, Any], None]
    silos: dict[str, Data]
    pooled: Callable[[Any], None]
    """All silos in one NumPyro model, as one would write it with the rows in one place."""
    together: Any
    """What `pooled` reads."""
    standardised: tuple[str, ...] = ()
    """Sites that NUTS samples on their standard scale."""
    exact: dict[str, tuple[float, float]] | None = None
    """Mean and standard deviation of each global latent, where there is a closed form."""
    heavy: tuple[str, ...] = ()
    """Global latents without a mean or a variance on their own scale, which are compared on the log scale only."""
    note: str = ""
    target_accept: float = 0.95
    """Of NUTS on the pooled rows."""

    @property
    def structured(self) -> Structured:
        """The model as fedbayes has it."""
        return Structured(self.population, self.silo)

    def standardising(self, site: Any) -> Reparam | None:
        """How NUTS samples a site, for `handlers.reparam`."""
        if site["name"] not in self.standardised:
            return None
        fn = site["fn"]
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        return Whitened() if isinstance(fn, dist.MultivariateNormal) else LocScaleReparam(0)

    def judge(self, data: Any) -> None:
        """`pooled` in the parametrisation in which NUTS samples it; the global latents are sites of the same names."""
        with handlers.reparam(config=self.standardising):
            self.pooled(data)

    @property
    def global_names(self) -> list[str]:
        """The global latents and what the population calls deterministic."""
        return self.structured.global_names()

    @property
    def positive(self) -> set[str]:
        """The global latents that are positive, which are compared on the log scale."""
        found = handlers.trace(handlers.seed(self.population, 0)).get_trace()
        return {name for name, site in found.items() if site["type"] == "sample" and _is_positive(site["fn"].support)}


def _is_positive(support: Any) -> bool:
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support in (dist.constraints.positive, dist.constraints.nonnegative)


def joined(silos: dict[str, Data], counts: tuple[str, ...] = (), index: dict[str, str] | None = None) -> Data:
    """The rows of all silos after each other: `counts` are added up, and an index moves on by the count that it names.

    "silo" has each row's silo as a number, for the first array's rows.
    """
    index = index or {}
    parts: dict[str, list[Any]] = {}
    before = dict.fromkeys(counts, 0)
    for place, data in enumerate(silos.values()):
        rows = 0
        for key, value in data.items():
            if key not in counts:
                parts.setdefault(key, []).append(np.atleast_1d(value) + (before[index[key]] if key in index else 0))
                rows = rows or len(parts[key][-1])
        parts.setdefault("silo", []).append(np.full(rows, place, np.int32))
        for key in counts:
            before[key] += data[key]
    return {**{key: np.concatenate(value) for key, value in parts.items()}, **before, "silos": len(silos)}


def table_of(*path: str) -> pd.DataFrame:
    """A table from the folder that FEDBAYES_DATA names."""
    folder = os.environ.get("FEDBAYES_DATA")
    file = pathlib.Path(folder or "", *path).expanduser()
    if not folder or not file.is_file():
        raise UserError(f"FEDBAYES_DATA is {folder or 'not set'}; set it to the folder that has {pathlib.Path(*path)}")
    return pd.read_csv(file)


def example(name: str) -> Any:
    """A model file of examples/."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def reals(*values: Any) -> tuple[Any, ...]:
    """Arrays in single precision."""
    return tuple(np.asarray(value, np.float32) for value in values)


# 1. Six Cities


def six_cities() -> Model:
    """A logistic mixed model: 537 children, four ages, two silos."""
    file = example("six_cities")
    silos = file.silos()

    def pooled(data: Data) -> None:
        file.silo(file.population(), data)

    return Model(
        "six_cities", "Six Cities", file.population, file.silo, silos, pooled, joined(silos), ("b",), target_accept=0.9
    )


# 2. Eight schools


def eight_schools() -> Model:
    """The standardised form of examples/eight_schools.py: a silo is one number."""
    file = example("eight_schools")
    silos = file.silos()

    def pooled(data: Data) -> None:
        mu, tau = file.population()
        with numpyro.plate("schools", 8):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(mu + tau * z, data["sigma"]), obs=data["y"])

    return Model("eight_schools", "eight schools", file.population, file.silo, silos, pooled, joined(silos))


# 3. Heart disease


def heart_disease() -> Model:
    """Missing covariates as latents, four hospitals."""
    file = example("heart_disease")
    silos = file.silos()

    def pooled(data: Data) -> None:
        population = file.population()
        at = data["silo"]
        with numpyro.plate("hospitals", 4):
            intercept = numpyro.sample("intercept", dist.Normal(population["mean"], population["between"]))
            level = numpyro.sample("hospital_level", dist.Normal(population["level"], 0.5).to_event(1))
            angina_level = numpyro.sample("hospital_angina_level", dist.Normal(population["angina_level"], 0.5))
        known, angina_known = data["measured_known"] == 1, data["angina_known"] == 1
        with numpyro.plate("patients", len(data["disease"])):
            standard = numpyro.sample("standard", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
            numpyro.sample(
                "measured", dist.Normal(level[at], population["spread"]).mask(known).to_event(1), obs=data["measured"]
            )
            numpyro.sample("angina", dist.Bernoulli(logits=angina_level[at]).mask(angina_known), obs=data["angina"])
            measured = jnp.where(known, data["measured"], level[at] + population["spread"] * standard)
            logits = intercept[at] + jnp.concatenate([data["complete"], measured], axis=1) @ population["effects"]
            share = jnp.where(angina_known, data["angina"], jax.nn.sigmoid(angina_level[at]))
            without, given = jax.nn.sigmoid(logits), jax.nn.sigmoid(logits + population["angina_effect"])
            numpyro.sample("disease", dist.Bernoulli(probs=share * given + (1 - share) * without), obs=data["disease"])

    return Model(
        "heart_disease",
        "heart disease, missing covariates",
        file.population,
        file.silo,
        silos,
        pooled,
        joined(silos),
        ("intercept",),
        target_accept=0.9,
    )


# 4. Nurses in wards in hospitals


def nurses() -> Model:
    """Stress of 1000 nurses: wards by index in a hospital, 25 hospitals, each a silo."""
    table = table_of("nurses", "nurses.csv")
    names = ["age", "gender", "experien", "wardtype", "hospsize"]
    scaled = table.assign(age=(table["age"] - 40) / 10, experien=(table["experien"] - 15) / 10)
    silos = {}
    for hospital, rows in scaled.groupby("hospital"):
        ward, labels = pd.factorize(rows["wardtype"], sort=True)
        x, y = reals(rows[names], rows["stress"])
        silos[f"hospital {hospital}"] = {"x": x, "stress": y, "ward": ward.astype(np.int32), "wards": len(labels)}

    def population() -> Any:
        intercept = numpyro.sample("intercept", dist.Normal(5.0, 2.0))
        effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        between_hospitals = numpyro.sample("between_hospitals", dist.HalfNormal(1.0))
        between_wards = numpyro.sample("between_wards", dist.HalfNormal(1.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        return intercept, effects, between_hospitals, between_wards, sigma

    def silo(population: Any, data: Data) -> None:
        intercept, effects, between_hospitals, between_wards, sigma = population
        hospital = numpyro.sample("hospital", dist.Normal(0.0, between_hospitals))
        with numpyro.plate("wards", data["wards"]):
            ward = numpyro.sample("ward", dist.Normal(0.0, between_wards))
        mean = intercept + data["x"] @ effects + hospital + ward[data["ward"]]
        with numpyro.plate("nurses", len(data["stress"])):
            numpyro.sample("stress", dist.Normal(mean, sigma), obs=data["stress"])

    def pooled(data: Data) -> None:
        intercept, effects, between_hospitals, between_wards, sigma = population()
        with numpyro.plate("hospitals", data["silos"]):
            hospital = numpyro.sample("hospital", dist.Normal(0.0, between_hospitals))
        with numpyro.plate("wards", data["wards"]):
            ward = numpyro.sample("ward", dist.Normal(0.0, between_wards))
        mean = intercept + data["x"] @ effects + hospital[data["silo"]] + ward[data["ward"]]
        with numpyro.plate("nurses", len(data["stress"])):
            numpyro.sample("stress", dist.Normal(mean, sigma), obs=data["stress"])

    together = joined(silos, ("wards",), {"ward": "wards"})
    return Model("nurses", "nurses in wards", population, silo, silos, pooled, together, ("hospital", "ward"))


# 5. Trauma


def trauma() -> Model:
    """Mortality of 371 patients in three hospitals."""
    table = table_of("trauma", "trauma.csv")
    columns = [table["sex"], (table["age"] - 35) / 20, (table["ISS"] - 35) / 15, (table["GCS"] - 10) / 5]
    x, y = np.stack(columns, axis=1).astype(np.float32), table["mortality"].to_numpy(np.int32)
    at = table["hospital"].to_numpy()
    silos = {f"hospital {one}": {"x": x[at == one], "died": y[at == one]} for one in (1, 2, 3)}

    def population() -> Any:
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.5))
        between = numpyro.sample("between", dist.HalfNormal(1.0))
        effects = numpyro.sample("effects", dist.Normal(0.0, 2.5).expand([4]).to_event(1))
        return mean, between, effects

    def silo(population: Any, data: Data) -> None:
        mean, between, effects = population
        intercept = numpyro.sample("intercept", dist.Normal(mean, between))
        with numpyro.plate("patients", len(data["died"])):
            numpyro.sample("died", dist.Bernoulli(logits=intercept + data["x"] @ effects), obs=data["died"])

    def pooled(data: Data) -> None:
        mean, between, effects = population()
        with numpyro.plate("hospitals", data["silos"]):
            intercept = numpyro.sample("intercept", dist.Normal(mean, between))
        with numpyro.plate("patients", len(data["died"])):
            numpyro.sample("died", dist.Bernoulli(logits=intercept[data["silo"]] + data["x"] @ effects), obs=data["died"])

    return Model("trauma", "trauma, three hospitals", population, silo, silos, pooled, joined(silos), ("intercept",))


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


MODELS: dict[str, Callable[[], Model]] = {
    make.__name__: make
    for make in (
        six_cities,
        eight_schools,
        heart_disease,
        nurses,
        trauma,
        correlated_slopes,
        crossed_counts,
        small_silos,
        blood_pressure,
        nested_gaussian,
        survival,
        horseshoe,
        radon,
        many_silos,
    )
}


@functools.cache
def load(name: str) -> Model:
    """A model of the panel by its name."""
    if name not in MODELS:
        raise UserError(f"there is no model {name!r} in the panel; it has {', '.join(MODELS)}")
    return MODELS[name]()


def check(model: Model, points: int = 3, seed: int = 0) -> float:
    """The largest difference between the silos' summed log density and the pooled one at random points."""
    structured, random = model.structured, np.random.default_rng(seed)
    latents = structured.global_latents()
    theta: Data = {}
    worst = 0.0
    for _ in range(points):
        z = jnp.asarray(0.3 * random.standard_normal(structured.size()))
        total = structured.log_population(theta, z)
        values = {name: structured.global_values(theta, z)[name] for name in (latent.name for latent in latents)}
        real = on_real_line(latents, {"": z[None]})
        jacobians: Any = sum(
            jnp.sum(latent.transform.log_abs_det_jacobian(real[latent.name], values[latent.name])) for latent in latents
        )
        parts: dict[str, list[Any]] = {}
        for data in model.silos.values():
            blocks = structured.blocks(data)
            local = {plate: jnp.asarray(0.3 * random.standard_normal(size)) for plate, size in blocks.items()}
            total = total + sum(jnp.sum(term) for term in structured.log_silo(theta, z, local, data).values())
            of_silo = structured.local_latents(data)
            for name, value in on_real_line(of_silo, local).items():
                outside = next(one.plate.name == "" for one in of_silo if one.name == name)
                parts.setdefault(name, []).append(value[None] if outside else value)
        values |= {name: jnp.concatenate(value) for name, value in parts.items()}
        pooled = log_density(model.pooled, (model.together,), {}, values)[0] + jacobians
        if not (math.isfinite(total) and math.isfinite(pooled)):
            return math.inf
        worst = max(worst, abs(float(total - pooled)) / max(1.0, abs(float(pooled))))
    return worst


def main() -> int:
    """Check every model."""
    jax.config.update("jax_enable_x64", True)
    failed = 0
    for name in sys.argv[1:] or MODELS:
        model = load(name)
        error, rows = check(model), [model.structured.rows(data) for data in model.silos.values()]
        failed += not error < 1e-6
        print(f"{name:20} {len(rows):2} silos of {min(rows)} to {max(rows)} rows, {model.structured.size():2} global ", end="")
        print(f"latents; difference of log densities, relative: {error:.1e}{'' if error < 1e-6 else '   <-- not the same'}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
