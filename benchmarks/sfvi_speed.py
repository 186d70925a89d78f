"""SFVI over two silos beside NumPyro's SVI on pooled data: the same model, family and number of steps, in turns in one run.

    python benchmarks/sfvi_speed.py

Both are compiled before they are timed. Prints the ratio of the times, the median of several turns with its spread.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO

import fedbayes as fb
from fedbayes.engine import silos as engine
from fedbayes.engine.silo_data import plan

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import six_cities as model

STEPS, TURNS = 1000, 15


def pooled(data):
    model.silo(model.population(), data)


def guide(data):
    """The structured Gaussian of SFVI, section 3.1, with the same parameters."""
    n, children = 5, data["smoke"].shape[0]
    mean, log_scale = numpyro.param("mean", jnp.zeros(n)), numpyro.param("log_scale", jnp.full(n, jnp.log(0.1)))
    lower = jnp.tril(numpyro.param("lower", jnp.zeros((n, n))), -1) + jnp.eye(n)
    normal = dist.MultivariateNormal(mean, scale_tril=jnp.exp(log_scale)[:, None] * lower)
    z = numpyro.sample("z", normal, infer={"is_auxiliary": True})
    numpyro.sample("beta", dist.Delta(z[:4], event_dim=1))
    numpyro.sample("omega", dist.Delta(z[4]))
    own_mean, own_scale = numpyro.param("own_mean", jnp.zeros(children)), numpyro.param("own_scale", jnp.full(children, -2.3))
    C = numpyro.param("C", jnp.zeros((children, n)))
    with numpyro.plate("children", children):
        numpyro.sample("b", dist.Normal(own_mean + C @ (z - mean), jnp.exp(own_scale)))


def main():
    data = model.silos()
    whole = {key: jnp.concatenate([jnp.asarray(part[key]) for part in data.values()]) for key in ("wheeze", "smoke")}
    svi = SVI(pooled, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    state = svi.init(jax.random.key(0), whole)
    theirs = jax.jit(lambda state: jax.lax.scan(lambda state, _: svi.update(state, whole), state, length=STEPS))
    algorithm = plan(fb.SFVI(model.population, model.silo, decay=1.0), data, STEPS)
    simulation = engine.SiloSimulation(algorithm, data)
    simulation._pace = STEPS
    ours = lambda: list(simulation.advance(STEPS))  # noqa: E731
    jax.block_until_ready(theirs(state))
    ours()
    simulation._pace = STEPS
    times = {"fedbayes": [], "numpyro": []}
    for _ in range(TURNS):
        began = time.perf_counter()
        ours()
        times["fedbayes"].append(time.perf_counter() - began)
        simulation._pace = STEPS
        began = time.perf_counter()
        jax.block_until_ready(theirs(state))
        times["numpyro"].append(time.perf_counter() - began)
    for name, seconds in times.items():
        print(f"{name}: {STEPS / np.median(seconds):,.0f} steps a second")
    ratio = np.array(times["fedbayes"]) / np.array(times["numpyro"])
    print(f"ratio {np.median(ratio):.2f} (quartiles {np.quantile(ratio, 0.25):.2f} to {np.quantile(ratio, 0.75):.2f})")


if __name__ == "__main__":
    main()
