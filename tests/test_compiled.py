"""A second fit of the same shapes compiles nothing, whatever its seed is."""

import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedbayes as fb
from fedbayes.algorithms.evidence import Evidence
from fedbayes.engine.silo_data import plan, read

EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compiled():
    """The programs that are compiled meanwhile."""
    found = []

    def listener(name, *_, **__):
        if name == EVENT:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def population():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    return numpyro.sample("effects", dist.Normal(0.0, scale).expand([2]).to_event(1))


def silo(effects, data):
    own = numpyro.sample("own", dist.Normal(0.0, 0.5))
    numpyro.sample("y", dist.Normal(effects[data["group"]] + own, 1.0), obs=data["y"])


def rows(count, seed):
    random = np.random.default_rng(seed)
    return {"y": random.normal(size=count).astype(np.float32), "group": (np.arange(count) % 2).astype(np.int32)}


SILOS = {"a": rows(4, 0), "b": rows(6, 1), "c": rows(6, 2)}  # of different lengths, so that silos are padded
METHODS = {
    "EP": (fb.EP(population, silo, draws=20, most=40, chains=2), 2),  # fb.fit's method, and draws from its factors
    "SFVI": (fb.SFVI(population, silo), 20),  # adaptive evidence rounds, more or fewer by the seed
}


def test_silos_are_read_again_without_compiling():
    algorithm = METHODS["EP"][0]
    with compiled() as first:
        read(SILOS, algorithm)
    with compiled() as later:
        read(SILOS, algorithm)
    assert first
    assert not later


@pytest.mark.parametrize("method", [pytest.param("EP", marks=pytest.mark.slow), "SFVI"])
def test_later_fits_compile_nothing(method):
    algorithm, rounds = METHODS[method]

    def fit(seed, correct):
        return fb.simulate(algorithm, SILOS, rounds, seed=seed, correct=correct)

    with compiled() as first:
        fit(0, False)
        fit(0, True)
    with compiled() as later:
        fit(1, False)
        fit(2, True)
    assert first
    assert not later


def correlated(effects, data):
    with numpyro.plate("units", len(data["y"])):
        pair = numpyro.sample("pair", dist.Normal(effects, 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(pair.sum(axis=-1), 1.0), obs=data["y"])


@pytest.mark.parametrize("asked", [False, True], ids=["training", "evidence"])
@pytest.mark.parametrize("method", [fb.EP, fb.PVI, fb.SFVI, fb.SFVIAvg])
def test_silos_side_by_side_call_no_lapack(method, asked):
    """Two batched calls in a pool of two threads wait for each other for ever (`primitives/small.py`)."""
    data = {"y": jnp.zeros(4)}
    algorithm = plan(method(population, correlated), {"a": data, "b": data}, 3)
    algorithm = Evidence(algorithm) if asked else algorithm
    key = jax.random.key(0)
    local, down = algorithm.init_local(key, data), algorithm.broadcast(key, algorithm.init_server(key))

    def clients(keys, locals):
        return jax.vmap(lambda key, local: algorithm.client(key, down, local, data))(keys, locals)

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), local)
    assert "lapack" not in jax.jit(clients).lower(jax.random.split(key), stacked).as_text()
