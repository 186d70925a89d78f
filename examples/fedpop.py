"""Networks with a shared body and a head for each silo: FedPop, fully Bayesian. Run: fedbayes fit examples/fedpop.py.

    W1_pk ~ Normal(0, 1),   beta_kc ~ Normal(0, 1),   tau ~ HalfNormal(1)                       shared
    W2 = beta + tau eps,    eps_kc ~ Normal(0, 1), which is W2_kc ~ Normal(beta_kc, tau)        of each silo
    P(digit = c) = softmax(W2 relu(W1 x))_c

with x the pixels from 0 to 1 and 64 hidden units without biases. FedPop (Kotelevskii and others, 2022) has a body that all
silos share and a head for each with a learned population prior, and estimates what is shared by a point. The SFVI paper,
section 4.1, fits a fully Bayesian version of it, whose priors it does not give; this reading puts standard normals on the body
and on the mean of the heads, and a half-normal on their spread. The posterior is mean-field.

The images are MNIST where FEDBAYES_DATA names a folder with mnist_writers/mnist_writers.npz, and else the 8 by 8 digits of
scikit-learn. There are 10 silos of equal size; 90 % of a silo's images show one digit, its own, the rest the other nine alike.
"""

import os
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedbayes

_MNIST = Path(os.environ.get("FEDBAYES_DATA", "")) / "mnist_writers" / "mnist_writers.npz"
_PIXELS = 784 if _MNIST.is_file() else 64
_HIDDEN = 64


def population():
    W1 = numpyro.sample("W1", dist.Normal(0.0, 1.0).expand([_PIXELS, _HIDDEN]).to_event(2))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([_HIDDEN, 10]).to_event(2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    return W1, beta, tau


def silo(population, data):
    W1, beta, tau = population
    eps = numpyro.sample("eps", dist.Normal(0.0, 1.0).expand([_HIDDEN, 10]).to_event(2))
    # A number "batch" in the data takes a fresh subsample of so many rows in each step.
    with numpyro.plate("rows", len(data["y"]), subsample_size=data.get("batch")) as rows:
        hidden = jax.nn.relu(data["x"][rows] @ W1)
        logits = numpyro.deterministic("logits", hidden @ (beta + tau * eps))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=data["y"][rows])


def silos():
    x, y = _images()
    parts = _mostly_one_digit(y, 10)
    batch = {"batch": 32} if len(parts[0]) > 1000 else {}
    return {f"silo {number}": {"x": x[rows], "y": y[rows], **batch} for number, rows in enumerate(parts)}


def _mostly_one_digit(y, count, seed=0):
    """Rows of `count` silos: silo j has 90 % of digit j mod 10. As large as the rarest digit allows; the rest is not used."""
    random = np.random.default_rng(seed)
    left = [random.permutation(np.flatnonzero(y == digit)) for digit in range(10)]
    size = min(map(len, left)) * 10 // count
    own = round(0.9 * size)
    each, over = divmod(size - own, 9)
    found = []
    for number in range(count):
        share = np.full(10, each)
        share[(number + 1 + np.arange(over)) % 10] += 1
        share[number % 10] = own
        found.append(np.concatenate([rows[:n] for rows, n in zip(left, share, strict=True)]))
        left = [rows[n:] for rows, n in zip(left, share, strict=True)]
    return found


def _images():
    if _MNIST.is_file():
        with np.load(_MNIST) as arrays:
            return arrays["x_train"].reshape(-1, 784).astype(np.float32) / 255, arrays["y_train"].astype(np.int32)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)


algorithm = fedbayes.SFVI(population, silo, family=fedbayes.Family.mean_field(start=0.05, jitter=0.1))
rounds = 1000
