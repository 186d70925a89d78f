"""The dependency structure that is found in a model: rows that read latents by index join the block of their group."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import assert_close, assert_same

import fedbayes as fb
from fedbayes.deploy.experiment import Experiment, SiteData
from fedbayes.deploy.site import Site
from fedbayes.engine.silo_data import plan
from fedbayes.engine.silos import SiloSimulation
from fedbayes.errors import UserError
from fedbayes.models.linked import Linked
from fedbayes.models.structured import Structured
from fedbayes.primitives import variational
from fedbayes.primitives.dependence import inseparable, linked
from fedbayes.primitives.variational import Family, Silo

GROUPS, EACH = 6, 4


def population():
    return numpyro.sample("mean", dist.Normal(0.0, 2.0)), numpyro.sample("spread", dist.HalfNormal(1.0))


def plated(shared, data):
    """Rows lie in their group's plate: (groups, rows of each)."""
    with numpyro.plate("groups", GROUPS, dim=-2):
        a = numpyro.sample("a", dist.Normal(*shared))
        with numpyro.plate("rows", EACH, dim=-1):
            numpyro.sample("y", dist.Normal(a, 0.5), obs=data["table"])


def indexed(shared, data):
    with numpyro.plate("groups", GROUPS):
        a = numpyro.sample("a", dist.Normal(*shared))
    numpyro.sample("y", dist.Normal(a[data["group"]], 0.5), obs=data["y"])


def in_rows(shared, data):
    """Rows have a plate of their own."""
    with numpyro.plate("groups", GROUPS):
        a = numpyro.sample("a", dist.Normal(*shared))
    with numpyro.plate("rows", data["y"].shape[0]):
        numpyro.sample("y", dist.Normal(a[data["group"]], 0.5), obs=data["y"])


def vector(shared, data):
    a = numpyro.sample("a", dist.Normal(*shared).expand([GROUPS]))
    numpyro.sample("y", dist.Normal(a[data["group"]], 0.5), obs=data["y"])


def event(shared, data):
    a = numpyro.sample("a", dist.Normal(*shared).expand([GROUPS]).to_event(1))
    numpyro.sample("y", dist.Normal(a[data["group"]], 0.5).to_event(1), obs=data["y"])


def one_hot(shared, data):
    a = numpyro.sample("a", dist.Normal(*shared).expand([GROUPS]))
    numpyro.sample("y", dist.Normal(jax.nn.one_hot(data["group"], GROUPS) @ a, 0.5), obs=data["y"])


INDEXED = {"indexed": indexed, "in_rows": in_rows, "vector": vector, "event": event, "one_hot": one_hot}


def rows_of(seed):
    random = np.random.default_rng(seed)
    table = (random.normal(1.0, 0.8, (GROUPS, 1)) + random.normal(0.0, 0.5, (GROUPS, EACH))).astype(np.float32)
    order = random.permutation(GROUPS * EACH)
    group = np.repeat(np.arange(GROUPS, dtype=np.int32), EACH)
    return {"table": table, "y": table.ravel()[order], "group": group[order]}


DATA = rows_of(0)


def blocks_of(silo):
    model = Structured(population, silo)
    data = linked(model, DATA)
    (name,) = model.blocks(data)
    return model, data, name


@pytest.mark.parametrize("silo", INDEXED.values(), ids=INDEXED)
def test_rows_by_index_have_the_blocks_of_the_same_model_with_plates(silo):
    model, data, name = blocks_of(silo)
    assert model.blocks(data) == {name: (GROUPS, 1)}
    z_G, z = jax.random.normal(jax.random.key(0), (2,)), jax.random.normal(jax.random.key(1), (GROUPS, 1))
    found = model.log_silo({}, z_G, {name: z}, data)
    expected = Structured(population, plated).log_silo({}, z_G, {"groups": z}, DATA)["groups"]
    np.testing.assert_allclose(found[name], expected, rtol=1e-5)
    assert all(not np.any(part) for other, part in found.items() if other != name)
    plain = model.log_silo({}, z_G, {name: z} if name in model.blocks(DATA) else {"": z.T}, DATA)
    np.testing.assert_allclose(sum(jnp.sum(part) for part in plain.values()), expected.sum(), rtol=1e-5)


@pytest.mark.parametrize("silo", [indexed, event])
def test_the_bound_of_several_draws_and_its_gradients_are_those_of_plates(silo):
    model, data, name = blocks_of(silo)
    family = Family(bound=4, moving_scale=True)

    def gradients(model, data, name):
        at = Silo(family, model, data)
        shared, eta = family.init_shared(jax.random.key(0), model, data), family.init_local(jax.random.key(0), model, data)
        noise_G, noise_L, _ = variational.chance(at, jax.random.key(2))
        value, for_shared, for_eta = jax.jit(lambda: variational.silo_gradient(at, shared, eta, noise_G, noise_L, {}))()
        return value, for_shared, for_eta[name]

    family.check_draws(model, data)
    assert_close(gradients(model, data, name), gradients(Structured(population, plated), DATA, "groups"), 1e-4)


def test_vectors_of_one_index_are_one_group_and_other_latents_stay_with_the_silo():
    def slopes(shared, data):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        both = numpyro.sample("both", dist.Normal(0.0, 1.0).expand([2]).to_event(1))  # every row reads both
        a = numpyro.sample("a", dist.Normal(*shared).expand([GROUPS]).to_event(1))
        b = numpyro.sample("b", dist.HalfNormal(1.0).expand([3, GROUPS]).to_event(2))
        mean = level + both.sum() + a[data["group"]] + b[:, data["group"]].sum(axis=0) * data["y"]
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=data["y"])

    model = Structured(population, slopes)
    data = linked(model, DATA)
    assert model.blocks(data) == {"": (1, 3), "a": (GROUPS, 4)}
    assert model.size() == 2
    key = jax.random.key(3)
    z = {name: jax.random.normal(key, shape) for name, shape in model.blocks(data).items()}
    found = model.log_silo({}, jnp.zeros(2), z, data)
    real = {"level": z[""][0, 0], "both": z[""][0, 1:], "a": z["a"][:, 0], "b": z["a"][:, 1:].T}
    expected = sum(jnp.sum(part) for part in model.elements({}, jnp.zeros(2), real, DATA).values())
    np.testing.assert_allclose(sum(jnp.sum(part) for part in found.values()), expected, rtol=1e-5)
    moved = model.log_silo({}, jnp.zeros(2), {**z, "a": z["a"].at[2].add(1.0)}, data)
    assert (np.flatnonzero(moved["a"] != found["a"]) == [2]).all()
    np.testing.assert_array_equal(moved[""], found[""])


def test_every_pair_of_elements_is_told_apart():
    def pair(one, other):
        def silo(shared, data):
            with numpyro.plate("groups", GROUPS):
                a = numpyro.sample("a", dist.Normal(*shared))
            mean = a[data["group"]].at[0].set(a[one] + a[other])
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=data["y"])

        return inseparable(Structured(population, silo), DATA)

    sentence = "y depends on latents of several elements of plate 'groups' at once"
    assert [pair(*both) for both in ((0, 2), (1, 3), (4, 5), (0, 5), (3, 3))] == [sentence] * 4 + [""]


def crossed(counties, years):
    def silo(shared, data):
        with numpyro.plate("county", counties):
            a = numpyro.sample("a", dist.Normal(*shared))
        with numpyro.plate("year", years):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(a[data["county"]] + b[data["year"]], 0.5), obs=data["y"])

    return silo


def crossing(seed, rows=30):
    random = np.random.default_rng(seed)
    return {"y": DATA["y"][:1].repeat(rows), **{name: random.integers(0, 4, rows) for name in ("county", "year")}}


def test_of_crossed_plates_the_smaller_is_drawn_with_the_silo():
    model = Structured(population, crossed(9, 4))
    data = linked(model, crossing(0))
    assert model.blocks(data) == {"county": (9, 1), "": (1, 4)}
    z = {"county": jnp.arange(9.0)[:, None], "": jnp.arange(4.0)[None]}
    real = {"a": jnp.arange(9.0), "b": jnp.arange(4.0)}
    found = model.log_silo({}, jnp.zeros(2), z, data)
    expected = sum(jnp.sum(part) for part in model.elements({}, jnp.zeros(2), real, data).values())
    np.testing.assert_allclose(sum(jnp.sum(part) for part in found.values()), expected, rtol=1e-5)
    moved = model.log_silo({}, jnp.zeros(2), {**z, "county": z["county"].at[3].add(1.0)}, data)
    assert [name for name in found if np.any(found[name] != moved[name])] == ["county"]


def test_large_crossed_plates_say_why_there_is_no_check():
    sentence = "y depends on latents of plates county and year at once"
    silo, data = crossed(80, 70), {"a": crossing(0), "b": crossing(1)}
    assert inseparable(Structured(population, silo), data["a"]) == sentence
    with pytest.raises(UserError, match=f"silo 'a': {sentence}, so draws cannot be weighed block by block; use bound=1"):
        fb.simulate(fb.SFVI(population, silo, family=Family(bound=2)), data, 2)
    fit = fb.simulate(fb.SFVI(population, silo), data, 3)
    assert fit.result["khat"] is None
    assert sentence in fit.result["verdict"]["reasons"][-1]
    assert "verdict: not checked" in str(fit)
    assert sentence in str(fit)


def test_silos_of_equal_shapes_share_a_program_whatever_their_indices():
    silos = {"s0": rows_of(1), "s1": rows_of(2)}
    algorithm = plan(fb.SFVI(population, indexed, family=Family(bound=3)), silos, 3)
    together, alone = (SiloSimulation(algorithm, silos, loop=loop) for loop in (False, True))
    assert len(together.groups) == 1
    assert isinstance(together.data("s1"), Linked)
    for simulation in (together, alone):
        list(simulation.advance(3))
    assert_close(together.state.shared, alone.state.shared, 1e-5)
    assert_close(together.own("s1").eta, alone.own("s1").eta, 1e-5)


def test_a_deployed_site_finds_the_structure_itself(tmp_path):
    silos = {"s0": rows_of(1), "s1": rows_of(2)}
    algorithm = plan(fb.SFVI(population, event, family=Family(bound=3)), silos, 2)
    simulation = SiloSimulation(algorithm, silos, loop=True)
    experiment = Experiment(algorithm, rows_of(5), lambda settings: SiteData(None), 2, 2)
    site = Site(experiment, 1, tmp_path, SiteData(silos["s1"]))
    up = site.train("run", 1, 0, simulation.down())
    list(simulation.advance(1))
    assert isinstance(site.data.train, Linked)
    states = site._states("run", 1, looking=True)
    assert_same(site._own(states), simulation.own("s1"))
    assert jax.tree.structure(up) == jax.tree.structure(jax.tree.map(lambda leaf: 0, experiment.up))
    fb.wire.check(fb.wire.manifest(algorithm, site.data.train))


@pytest.mark.slow
def test_groups_by_index_are_diagnosed_and_keep_their_posterior_for_new_rows():
    silos = {"s0": rows_of(1), "s1": rows_of(2)}
    fits = [
        fb.simulate(fb.SFVI(population, silo, lr=0.05, decay=1e-2, family=Family(moving_scale=True)), silos, 1500)
        for silo in (indexed, plated)
    ]
    found, expected = (fit.diagnose(500) for fit in fits)
    assert found == pytest.approx(expected, abs=1e-2)  # the same model, in which groups are a plate of rows
    assert found["ess"] > 0.8
    new = {"y": None, "group": np.array([0, 5], np.int32), "table": silos["s0"]["table"]}

    def predicts(shared, data):
        with numpyro.plate("groups", GROUPS):
            a = numpyro.sample("a", dist.Normal(*shared))
        with numpyro.plate("rows", data["group"].shape[0]):
            numpyro.sample("y", dist.Normal(a[data["group"]], 0.5), obs=data["y"])

    fit = fb.simulate(fb.SFVI(population, predicts, lr=0.05, decay=1e-2), silos, 1500)
    drawn = np.asarray(fit.predictive("s0", new, draws=4000)["y"])
    levels = np.asarray(fit.local_posterior("s0", 4000).posterior["a"][0])[:, [0, 5]]
    np.testing.assert_allclose(drawn.mean(axis=0), levels.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(drawn.std(axis=0), np.hypot(levels.std(axis=0), 0.5), rtol=0.06)
