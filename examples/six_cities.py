"""Wheezing of children from seven to ten: a logistic mixed model over two silos. Run: fedbayes fit examples/six_cities.py.

    logit P(wheeze) = beta_0 + beta_1 smoke + beta_2 age + beta_3 smoke × age + b_i,    b_i ~ Normal(0, exp(-omega)),

with age in years from nine and smoke for a mother who smokes. What the children share is beta and omega; the intercept b_i of a
child stays in its silo. The data is the published table of 537 children in Ohio of the Six Cities study (Fitzmaurice and Laird,
1993, Biometrika 80). The model and the split into 300 and 237 children are those of the SFVI paper, section S3.1.

NUTS on all children: beta is -3.16 ± 0.22, 0.46 ± 0.29, -0.22 ± 0.09 and 0.10 ± 0.14, omega is -0.79 ± 0.09.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

# How many children wheeze at which of the ages seven, eight, nine and ten, from no, no, no, no by no, no, no, yes to all yes.
_MOTHER_DOES_NOT_SMOKE = (237, 10, 15, 4, 16, 2, 7, 3, 24, 3, 3, 2, 6, 2, 5, 11)
_MOTHER_SMOKES = (118, 6, 8, 2, 11, 1, 6, 4, 7, 3, 3, 1, 4, 2, 4, 7)
_AGES = np.array([-2.0, -1.0, 0.0, 1.0], np.float32)


def population():
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([4]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0.0, 10.0))
    return beta, omega


def silo(population, data):
    beta, omega = population
    smoke = data["smoke"][:, None]
    with numpyro.plate("children", len(data["smoke"])):
        b = numpyro.sample("b", dist.Normal(0.0, jnp.exp(-omega)))
        logits = beta[0] + beta[1] * smoke + beta[2] * _AGES + beta[3] * smoke * _AGES + b[:, None]
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=data["wheeze"])


def silos():
    patterns = np.array(list(itertools.product((0, 1), repeat=4)), np.int32)
    wheeze = np.concatenate([patterns.repeat(_MOTHER_DOES_NOT_SMOKE, axis=0), patterns.repeat(_MOTHER_SMOKES, axis=0)])
    smoke = np.repeat(np.array([0.0, 1.0], np.float32), [sum(_MOTHER_DOES_NOT_SMOKE), sum(_MOTHER_SMOKES)])
    order = np.random.default_rng(0).permutation(len(smoke))
    parts = {"first": order[:300], "second": order[300:]}
    return {name: {"wheeze": wheeze[rows], "smoke": smoke[rows]} for name, rows in parts.items()}
