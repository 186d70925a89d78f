"""Which digit an image shows: multinomial regression with learned prior scales. Run: fedbayes fit examples/multinomial.py.

    W_cp ~ Normal(0, sigma_W),   b_c ~ Normal(0, sigma_b),   P(digit = c) = softmax(W x + b)_c,

with x the pixels from 0 to 1. The model is that of the SFVI paper, section S3.2. Silos share W and b and have no latents of
their own; the scales sigma_W and sigma_b are parameters, which are fitted and have no posterior: empirical Bayes. The posterior
of the weights is mean-field.

The images are MNIST, 25 silos of 200 at random, where FEDBAYES_DATA names a folder with mnist_writers/mnist_writers.npz, and
else the 8 by 8 digits of scikit-learn, 25 silos of 71.
"""

import os
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

import fedbayes

_MNIST = Path(os.environ.get("FEDBAYES_DATA", "")) / "mnist_writers" / "mnist_writers.npz"
_PIXELS = 784 if _MNIST.is_file() else 64


def population():
    sigma_W = numpyro.param("sigma_W", 1.0, constraint=constraints.positive)
    sigma_b = numpyro.param("sigma_b", 1.0, constraint=constraints.positive)
    W = numpyro.sample("W", dist.Normal(0.0, sigma_W).expand([_PIXELS, 10]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0.0, sigma_b).expand([10]).to_event(1))
    return W, b


def silo(population, data):
    W, b = population
    # A number "batch" in the data takes a fresh subsample of so many rows in each step.
    with numpyro.plate("rows", len(data["y"]), subsample_size=data.get("batch")) as rows:
        logits = numpyro.deterministic("logits", data["x"][rows] @ W + b)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=data["y"][rows])


def silos():
    x, y = _images()
    count = min(200, len(y) // 25)
    parts = np.random.default_rng(0).permutation(len(y))[: 25 * count].reshape(25, count)
    return {f"silo {number}": {"x": x[rows], "y": y[rows]} for number, rows in enumerate(parts)}


def _images():
    if _MNIST.is_file():
        with np.load(_MNIST) as arrays:
            return arrays["x_train"].reshape(-1, 784).astype(np.float32) / 255, arrays["y_train"].astype(np.int32)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)


algorithm = fedbayes.SFVI(population, silo, family=fedbayes.Family.mean_field(start=0.05))
rounds = 2000
