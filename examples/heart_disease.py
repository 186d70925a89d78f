"""Heart disease in four hospitals, with missing measurements in the model. Run: fedbayes fit examples/heart_disease.py.

    logit P(disease) = intercept_j + effects · covariates + angina_effect · angina,    intercept_j ~ Normal(mean, between).

The data is UCI Heart Disease (Janosi, Steinbrunn, Pfisterer and Detrano; CC BY 4.0): 920 patients of Cleveland, Hungary,
Switzerland and the VA in Long Beach, and disease is num > 0. It is read from heart_disease_uci/heart_disease_4hospitals.csv in
the folder that FEDBAYES_DATA names. Age, sex and chest pain without symptoms are always known. Resting pressure, cholesterol,
heart rate, ST depression and angina in exercise have gaps; a pressure or a cholesterol of 0 is one, so that no patient in
Switzerland has a cholesterol. Left out are ca, thal and slope, which are rarely recorded outside Cleveland, fasting sugar, of
which Switzerland lacks most, and the resting ECG, which the hospitals code unlike each other.

A missing measurement is a latent of its patient, from Normal(level_j, spread), where a hospital's level_j varies around the
population's level; missing angina is a yes or a no, and is summed out. This takes gaps to be at random within a hospital, and
measurements to be normal and independent there: rough for ST depression, which is zero for many.
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

from fedbayes.errors import UserError

_FILE = pathlib.Path("heart_disease_uci", "heart_disease_4hospitals.csv")
_MEASURED = ["trestbps", "chol", "thalach", "oldpeak"]
# Round numbers of the scales' usual ranges, in mm Hg, mg/dl, beats a minute and mm. No hospital sees the others' rows, so the
# mean and the deviation of all rows are not to be had.
_CENTRE, _UNIT = np.array([130.0, 240.0, 140.0, 1.0]), np.array([20.0, 50.0, 25.0, 1.0])


def population():
    return {
        "effects": numpyro.sample("effects", dist.Normal(0.0, 1.5).expand([7]).to_event(1)),
        "angina_effect": numpyro.sample("angina_effect", dist.Normal(0.0, 1.5)),
        "mean": numpyro.sample("mean", dist.Normal(0.0, 2.0)),
        "between": numpyro.sample("between", dist.HalfNormal(1.0)),
        "level": numpyro.sample("level", dist.Normal(0.0, 1.0).expand([4]).to_event(1)),
        "spread": numpyro.sample("spread", dist.HalfNormal(2.0).expand([4]).to_event(1)),
        "angina_level": numpyro.sample("angina_level", dist.Normal(0.0, 1.5)),
    }


def silo(population, data):
    intercept = numpyro.sample("intercept", dist.Normal(population["mean"], population["between"]))
    # Hospitals' levels lie half a unit apart by assumption: four hospitals say little about such a spread.
    level = numpyro.sample("hospital_level", dist.Normal(population["level"], 0.5).to_event(1))
    angina_level = numpyro.sample("hospital_angina_level", dist.Normal(population["angina_level"], 0.5))
    known, angina_known = data["measured_known"] == 1, data["angina_known"] == 1

    with numpyro.plate("patients", len(data["disease"])):
        # A latent for every measurement, on the standard scale, so that all patients are alike. Where the measurement is known
        # its latent is not used and stays standard normal; the known value has its own density below.
        standard = numpyro.sample("standard", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        distribution = dist.Normal(level, population["spread"]).expand(known.shape).mask(known).to_event(1)
        numpyro.sample("measured", distribution, obs=data["measured"])
        numpyro.sample("angina", dist.Bernoulli(logits=angina_level).mask(angina_known), obs=data["angina"])

        measured = jnp.where(known, data["measured"], level + population["spread"] * standard)
        logits = intercept + jnp.concatenate([data["complete"], measured], axis=1) @ population["effects"]
        with_angina = jnp.where(angina_known, data["angina"], jax.nn.sigmoid(angina_level))
        without, given = jax.nn.sigmoid(logits), jax.nn.sigmoid(logits + population["angina_effect"])
        numpyro.sample("disease", dist.Bernoulli(probs=with_angina * given + (1 - with_angina) * without), obs=data["disease"])


def silos():
    folder = os.environ.get("FEDBAYES_DATA")
    path = pathlib.Path(folder or "", _FILE).expanduser()
    if not folder or not path.is_file():
        now = f"is {folder}, which has no {_FILE}" if folder else "is not set"
        raise UserError(f"FEDBAYES_DATA {now}; set it to the folder that has {_FILE} (UCI Heart Disease, four hospitals)")
    table = pd.read_csv(path)
    table[["trestbps", "chol"]] = table[["trestbps", "chol"]].replace(0.0, np.nan)
    return {str(hospital): _silo(rows) for hospital, rows in table.groupby("hospital", sort=False)}


def _silo(rows):
    measured = (rows[_MEASURED].to_numpy() - _CENTRE) / _UNIT
    complete = np.stack([(rows["age"] - 55) / 10, rows["sex"], rows["cp"] == 4], axis=1)
    return {
        "complete": complete.astype(np.float32),
        # A gap is filled with 0 and never read: a NaN would spoil the gradient even where it is masked.
        "measured": np.nan_to_num(measured).astype(np.float32),
        "measured_known": (~np.isnan(measured)).astype(np.int32),
        "angina": rows["exang"].fillna(0).to_numpy(np.float32),
        "angina_known": rows["exang"].notna().to_numpy(np.int32),
        "disease": (rows["num"] > 0).to_numpy(np.int32),
    }
