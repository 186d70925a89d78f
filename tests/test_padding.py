"""Silos of different sizes share one program: what is added counts nothing, and nothing is added where elements interact."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from hierarchy import DEVIATION, MEAN, partition, population, silo

import fedbayes as fb
from fedbayes.engine.silo_data import plan, read
from fedbayes.engine.silos import SiloSimulation
from fedbayes.trees import put_together

GENERATOR = np.random.default_rng(0)


def spread():
    return numpyro.sample("tau", dist.HalfNormal(1.0)), numpyro.sample("level", dist.Normal(0.0, 1.0))


def groups_by_index(spread, data):
    tau, level = spread
    own = numpyro.sample("own", dist.Normal(level, 1.0))
    with numpyro.plate("groups", data["count"]):
        effect = numpyro.sample("effect", dist.Normal(own, tau))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("rows", len(data["y"])):
        numpyro.sample("y", dist.Normal(effect[data["group"]], scale[data["group"]]), obs=data["y"])


def rows(count, groups):
    group = GENERATOR.integers(0, groups, count)
    return {"count": groups, "group": group, "y": np.float32(GENERATOR.normal(size=count))}


SILOS = {"a": rows(30, 4), "b": rows(21, 7), "c": rows(40, 3)}


def test_rows_and_units_that_were_added_change_no_term():
    algorithm = fb.EP(spread, groups_by_index)
    silos = read(SILOS, algorithm)
    assert len({form for form, _ in silos.parts}) == 1
    structured, simulation = algorithm.structured, SiloSimulation(plan(algorithm, silos, 3), silos)
    for name, part in zip(silos.names, silos.parts, strict=True):
        padded, own = put_together(*part), simulation.data(name)
        z_L = {
            group: jnp.float32(GENERATOR.normal(size=(count, width)))
            for group, (count, width) in structured.blocks(padded).items()
        }
        few = {group: z_L[group][:count] for group, (count, _) in structured.blocks(own).items()}
        longer, terms = (structured.log_silo({}, jnp.array([0.3, -0.2]), z, data) for z, data in ((z_L, padded), (few, own)))
        for group, values in terms.items():
            np.testing.assert_allclose(longer[group][: len(values)], values, rtol=1e-6)
        normal = np.sum(dist.Normal(0.0, 1.0).log_prob(z_L["groups"]), axis=1)
        count = SILOS[name]["count"]
        np.testing.assert_allclose(longer["groups"][count:], normal[count:], rtol=1e-6)


@pytest.mark.slow
def test_a_silos_state_has_its_own_sizes():
    algorithm = fb.EP(spread, groups_by_index)
    simulation = SiloSimulation(plan(algorithm, SILOS, 3), SILOS)
    for name, data in SILOS.items():
        own = simulation.own(name)
        assert own.chains.z["groups"].shape == (4, data["count"], 2)
        simulation.put(name, jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), own))
        np.testing.assert_array_equal(simulation.own(name).chains.u, own.chains.u + 1)
    assert simulation.own("a", padded=True).chains.z["groups"].shape == (4, 7, 2)


@pytest.mark.slow
def test_a_padded_fit_is_the_posterior():
    algorithm = fb.EP(population, silo)
    fit = fb.simulate(algorithm, partition(2, 7, 3))
    assert len(fit.simulation.groups) == 1
    assert float(abs(fit.shared.eta.mean[0] - MEAN)) < 0.05 * DEVIATION
    assert float(jnp.exp(fit.shared.eta.log_scale[0])) == pytest.approx(DEVIATION, rel=0.05)
    assert fit.local_posterior("s0", 100).posterior["effect"].sizes["units"] == 2
    assert fit.adapt("new", {"y": np.zeros(9, np.float32)}).local_posterior("s1", 100).posterior["effect"].sizes["units"] == 7


def less_its_mean(level, data):
    numpyro.sample("y", dist.Normal(level[1], 1.0).expand([len(data["y"])]), obs=data["y"] - data["y"].mean())


def by_its_length(level, data):
    numpyro.sample("y", dist.Normal(level[1], len(data["y"]) ** -0.5).expand([len(data["y"])]), obs=data["y"])


def with_a_walk(level, data):
    with numpyro.plate("rows", len(data["y"])):
        step = numpyro.sample("step", dist.Normal(level[1], 1.0))
    numpyro.sample("y", dist.Normal(jnp.cumsum(step[::-1]), 1.0), obs=data["y"])


@pytest.mark.parametrize("model", [less_its_mean, by_its_length, with_a_walk])
def test_nothing_is_added_where_elements_interact(model):
    algorithm = fb.EP(spread, model)
    parts = read({name: {"y": data["y"]} for name, data in SILOS.items()}, algorithm).parts
    assert len({form for form, _ in parts}) == 3


def test_a_number_that_is_no_size_stays_what_it_is():
    def trials(level, data):
        numpyro.sample("y", dist.Binomial(data["trials"], logits=level[1]).expand([len(data["y"])]), obs=data["y"])

    silos = {name: {"trials": n, "y": np.ones(n, int)} for name, n in (("a", 3), ("b", 5))}
    parts = read(silos, fb.EP(spread, trials)).parts
    assert [
        put_together(*part).data["trials"] if hasattr(put_together(*part), "data") else put_together(*part)["trials"]
        for part in parts
    ] == [3, 5]
