"""Models of the panel with published data; see panel_models.py."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from panel_model import Data, Model, joined, reals

from fedbayes.errors import UserError

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


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
