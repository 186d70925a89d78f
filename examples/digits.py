"""Which digit an image shows, where each silo has its own mixture of digits. Run: fedbayes fit examples/digits.py.

    W_pc ~ Normal(0, 1),   m_c ~ Normal(0, 1),   tau ~ HalfNormal(3)                            shared
    b = m + tau eps,       eps_c ~ Normal(0, 1), which is b_c ~ Normal(m_c, tau)                of each silo
    P(digit = c) = softmax(W x + b)_c

with x the pixels from 0 to 1. What a digit looks like is the same everywhere, how often it comes is not: a silo's own part is
an intercept for each digit. The posterior is mean-field.

The images are the 8 by 8 digits of scikit-learn, with the clients of the quickstart: 20 with three digits each, of which 5 do
not train.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedbayes
from fedbayes.evaluation.score import score, summary
from fedbayes.models import Categorical

FAMILY = fedbayes.Family.mean_field(start=0.05)


def population():
    W = numpyro.sample("W", dist.Normal(0.0, 1.0).expand([64, 10]).to_event(2))
    m = numpyro.sample("m", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(3.0))
    return W, m, tau


def silo(population, data):
    W, m, tau = population
    eps = numpyro.sample("eps", dist.Normal(0.0, 1.0).expand([10]).to_event(1))
    with numpyro.plate("rows", len(data["x"])):
        logits = numpyro.deterministic("logits", data["x"] @ W + (m + tau * eps))
        numpyro.sample("y", dist.Categorical(logits=logits), obs=data["y"])


def clients():
    return fedbayes.data.load("digits", partition="labels:3", clients=20, hold_out=5)


def rows(whole, name, part="train"):
    x, y = whole.rows(name, part)
    if part == "train":  # silos of the same size, within three rows, share one program
        least = int(whole.train_counts.min())
        x, y = x[:least], y[:least]
    return {"x": x.astype(np.float32) / 16, "y": y}


def silos():
    whole = clients()
    return {str(name): rows(whole, str(name)) for name in whole.names[~whole.unseen]}


def scores(fit, draws=200):
    """What a silo's intercepts are worth: drawn from what is shared, fitted while training, and fitted by a newcomer."""
    whole = clients()
    most = int(whole.test_counts.max())
    seen, new = whole.names[~whole.unseen], whole.names[whole.unseen]
    grown = fit
    for name in new:
        grown = grown.adapt(str(name), rows(whole, str(name)))
    z, eps = fit.draws(draws), jax.random.normal(jax.random.key(0), (draws, 10))

    def scored(names, predict):
        found = []
        for name in map(str, names):
            test = rows(whole, name, "test")
            padded = np.pad(test["x"], ((0, most - len(test["x"])), (0, 0)))  # one shape, one program
            logits = predict(name, {"x": padded, "y": None})["logits"][:, : len(test["y"])]
            found.append(score(Categorical(10), logits, jnp.asarray(test["y"]), jnp.ones(len(test["y"]), bool)))
        return summary(jax.tree.map(lambda *each: np.stack(each), *found), numeric=False)

    def shared(name, data):
        return {"logits": jnp.einsum("np,spc->snc", data["x"], z["W"]) + (z["m"] + z["tau"][:, None] * eps)[:, None]}

    return {
        "global": {"participating": scored(seen, shared), "unseen": scored(new, shared)},
        "personal": {"participating": scored(seen, fit.predictive)},
        "adapted": {"unseen": scored(new, grown.predictive)},
    }


algorithm = fedbayes.SFVI(population, silo, family=FAMILY, lr=0.02)
rounds = 1000
