"""Families that follow the model: blocks that move with the silo's own latents, scales that move, and encoders."""

import jax
import jax.numpy as jnp
import nested
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import assert_close
from hierarchy import PRIOR, SPREAD, Y, partition, population, silo

import fedbayes as fb
from fedbayes.errors import UserError
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian, variational
from fedbayes.primitives.dependence import moving
from fedbayes.primitives.variational import Family, Silo

MODEL = Structured(nested.population, nested.silo)
DATA = {"y": jnp.asarray(nested.DATA["s0"]["y"])}


def test_sfvi_at_its_defaults_is_exact_on_a_nested_normal_model():
    fit = fb.simulate(fb.SFVI(nested.population, nested.silo), nested.DATA)
    assert fit.bound[-20:].mean() == pytest.approx(nested.EVIDENCE, abs=0.05)
    for j, name in enumerate(nested.DATA):
        own = fit.local_posterior(name, 40_000).posterior
        for site, where in zip(("h", "b"), nested.places(j), strict=True):
            drawn = np.asarray(own[site][0])
            np.testing.assert_allclose(drawn.std(axis=0), nested.DEVIATIONS[where], rtol=0.02)
            assert (np.abs(drawn.mean(axis=0) - nested.MEANS[where]) < 0.05 * nested.DEVIATIONS[where]).all()


@pytest.mark.parametrize("bound", [1, 3])
def test_at_the_answer_every_gradient_is_zero_also_with_draws_on_both_levels(bound):
    family, model = Family(bound=bound), MODEL
    total = 0.0
    for j, data in enumerate(nested.DATA.values()):
        shared, eta = nested.exact(j)
        at = Silo(family, model, jax.tree.map(jnp.asarray, data))
        noise_G, noise_L, _ = variational.chance(at, jax.random.key(0))
        assert noise_L["wards"].shape[1] == bound**2
        value, for_shared, own = jax.jit(
            lambda at=at, shared=shared, eta=eta, G=noise_G, L=noise_L: variational.silo_gradient(at, shared, eta, G, L, {})
        )()
        assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(own)) < 1e-3
        total = jax.tree.map(jnp.add, total, (value, for_shared)) if j else (value, for_shared)
    also, prior = variational.own_gradient(model.log_population, shared, noise_G)
    assert total[0] + also == pytest.approx(nested.EVIDENCE, abs=1e-3)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(jax.tree.map(jnp.add, total[1], prior))) < 1e-3


def nested_bound(shared, eta, noise_G, noise_L, outer):
    """The nested importance-weighted bound as it is written down, for JAX to differentiate."""
    z_G = gaussian.draw_global(shared.eta, noise_G)
    offset = z_G - shared.eta.mean

    def weigh(noise_S, noise_B):
        z_S = gaussian.draw_local(eta[""], noise_S, offset)
        below = jnp.concatenate([offset, (z_S - eta[""].mean)[0]])

        def inner(noise):
            z_B = gaussian.draw_local(eta["wards"], noise, below)
            found = MODEL.log_silo({}, z_G, {"": z_S, "wards": z_B}, DATA)
            return found["wards"] - gaussian.log_local(eta["wards"], z_B, below), found[""]

        blocks, alone = jax.vmap(inner)(noise_B)
        blocks = jax.nn.logsumexp(blocks, axis=0) - jnp.log(len(blocks))
        return blocks.sum() + alone[0, 0] - gaussian.log_local(eta[""], z_S, offset)[0]

    totals = jax.vmap(weigh)(noise_L[""], noise_L["wards"].reshape(outer, outer, nested.WARDS, 1))
    own = MODEL.log_population({}, z_G) - gaussian.log_global(shared.eta, z_G)
    return jax.nn.logsumexp(totals) - jnp.log(outer) + own


def test_gradients_with_draws_on_both_levels_are_those_of_the_bound_with_less_variance():
    family, (shared, eta) = Family(bound=3), nested.exact(0)
    eta = jax.tree.map(lambda leaf: leaf + jnp.linspace(0.1, 0.25, leaf.size).reshape(leaf.shape), eta)
    at = Silo(family, MODEL, DATA)

    @jax.jit
    @jax.vmap
    def both(key):
        noise_G, noise_L, _ = variational.chance(at, key)
        value, more, own = variational.silo_gradient(at, shared, eta, noise_G, noise_L, {})
        also, prior = variational.own_gradient(MODEL.log_population, shared, noise_G)
        one = (noise_G[0], jax.tree.map(lambda leaf: leaf[0], noise_L), 3)
        bound, theirs = jax.value_and_grad(nested_bound, argnums=(0, 1))(shared, eta, *one)
        ours = (jax.tree.map(jnp.add, prior, more), own)
        flat = [jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (ours, theirs)]
        return value + also - bound, *flat

    off, ours, theirs = (np.asarray(found) for found in both(jax.random.split(jax.random.key(1), 12_000)))
    np.testing.assert_allclose(off, 0.0, atol=1e-3)
    error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / len(ours))
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 4.5 * error + 1e-4).all()
    assert ours.var(axis=0).sum() < 0.7 * theirs.var(axis=0).sum()


def test_a_mu_that_has_moved_leaves_both_levels_the_same_distribution():
    shared, eta = nested.exact(0)
    centre = shared.eta.mean
    there = shared._replace(eta=shared.eta._replace(mean=centre + 0.7))
    moved, z_G = variational.moved(eta, there, centre), centre + 1.0

    def drawn(eta, mean):
        keys = {name: jax.random.key(place) for place, name in enumerate(eta)}
        return variational._drawn(eta, keys, z_G - mean)

    assert_close(drawn(moved, there.eta.mean), drawn(eta, centre), 1e-5)


def scales():
    return numpyro.sample("mean", dist.Normal(0.0, 1.0)), numpyro.sample("spread", dist.HalfNormal(1.0))


def of_silo(shared, data):
    """A global location, a scale of the silo's own, and a known one."""
    mean, spread = shared
    own = numpyro.sample("own", dist.HalfNormal(2.0))
    with numpyro.plate("located", 4):
        numpyro.sample("a", dist.Normal(mean, 1.0))
    with numpyro.plate("scaled", 4):
        numpyro.sample("b", dist.Normal(mean, spread))
    with numpyro.plate("by_silo", 4):
        numpyro.sample("c", dist.Normal(0.0, own))
    numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])


def test_a_scale_moves_where_a_latent_is_the_scale_of_others():
    model, data = Structured(scales, of_silo), {"y": jnp.zeros(3)}
    assert moving(model, data) == {"scaled", "by_silo"}
    eta = Family().init_local(jax.random.key(0), model, data)
    assert {name for name, q in eta.items() if q.D is not None} == {"scaled", "by_silo"}
    assert eta["scaled"].C.shape == (4, 1, 3)
    assert all(q.D is None for q in Family(moving_scale=False).init_local(jax.random.key(0), model, data).values())
    assert all(q.D is not None for q in Family(moving_scale=True).init_local(jax.random.key(0), model, data).values())


@pytest.mark.slow
def test_an_encoder_that_reads_the_global_latents_finds_the_coupled_posterior():
    def encoder(data, z):
        a, b, c, d = (numpyro.param(name, 0.0) for name in ("slope", "shift", "width", "coupling"))
        return {"units": ((a * data["y"] + b + d * z[0])[:, None], jnp.full((data["y"].shape[0], 1), 1.0) * c)}

    fits = [
        fb.simulate(fb.SFVI(population, silo, family=Family(draws=4, **more), lr=0.05, decay=1e-2), partition(5, 7), 1500)
        for more in ({}, {"encoder": encoder})
    ]
    assert fits[1].bound[-20:].mean() == pytest.approx(fits[0].bound[-20:].mean(), abs=0.03)
    np.testing.assert_allclose(*(np.exp(fit.shared.eta.log_scale) for fit in fits), rtol=0.03)
    assert fits[1].diagnose(400)["ess"] > 0.95


def in_units(unit, shift):
    """The normal hierarchy of hierarchy.py with everything in other units."""

    def shared():
        return numpyro.sample("mean", dist.Normal(shift, unit * PRIOR)), numpyro.sample("sigma", dist.HalfNormal(unit))

    def own(shared, data):
        mean, sigma = shared
        with numpyro.plate("units", 3):
            effect = numpyro.sample("effect", dist.Normal(mean, unit * SPREAD))
        numpyro.sample("y", dist.Normal(effect[data["unit"]], sigma), obs=data["y"])

    index = np.arange(6, dtype=np.int32) % 3
    parts = [(shift + unit * part).astype(np.float32) for part in np.split(Y, 2)]
    return shared, own, {f"s{j}": {"y": part, "unit": index} for j, part in enumerate(parts)}


@pytest.mark.parametrize("method", [fb.SFVI, *(pytest.param(one, marks=pytest.mark.slow) for one in (fb.PVI, fb.SFVIAvg))])
def test_units_of_the_data_do_not_matter(method):
    """From the start on, every step is the same in units of the prior."""
    found = []
    for unit, shift in ((1.0, 0.0), (50.0, 120.0)):
        shared, own, data = in_units(unit, shift)
        options = {} if method is fb.SFVI else {"steps": 30}
        fit = fb.simulate(method(shared, own, **options), data, 100 if method is fb.SFVI else 3)
        q = fit.shared.eta
        own_q = fit._eta("s1")["units"]
        found.append(((q.mean[0] - shift) / unit, jnp.exp(q.log_scale[0]) / unit, (own_q.mean - shift) / unit, own_q.C[..., 0]))
    assert_close(found[1], found[0], 2e-3)


@pytest.mark.parametrize(("method", "rounds"), [(fb.SFVI, 3000), (fb.PVI, 12)])
def test_raw_units_at_the_defaults(method, rounds):
    """mean ~ N(100, 50²), effect ~ N(mean, 8²), y ~ N(effect, 14²) in mmHg, around 118: the posterior is known."""
    random = np.random.default_rng(5)
    group = np.arange(24, dtype=np.int32) % 8
    y = [(118 + random.normal(0, 8, 8)[group] + random.normal(0, 14, 24)).astype(np.float32) for _ in range(2)]

    def shared():
        return numpyro.sample("mean", dist.Normal(100.0, 50.0))

    def own(mean, data):
        with numpyro.plate("groups", 8):
            effect = numpyro.sample("effect", dist.Normal(mean, 8.0))
        numpyro.sample("y", dist.Normal(effect[data["group"]], 14.0), obs=data["y"])

    fit = fb.simulate(method(shared, own), {f"s{j}": {"y": part, "group": group} for j, part in enumerate(y)}, rounds)
    means = np.concatenate([[part[group == g].mean() for g in range(8)] for part in y])
    precision = 1 / 50**2 + 16 / (8**2 + 14**2 / 3)
    expected = (100 / 50**2 + means.sum() / (8**2 + 14**2 / 3)) / precision
    assert abs(float(fit.shared.eta.mean[0]) - expected) < 0.05 * precision**-0.5
    assert float(jnp.exp(fit.shared.eta.log_scale[0])) == pytest.approx(precision**-0.5, rel=0.03)


def test_the_start_is_the_prior_s():
    def shared():
        level = numpyro.sample("level", dist.Normal(100.0, 50.0))
        scale = numpyro.sample("scale", dist.LogNormal(1.0, 0.5))
        return level, scale, numpyro.sample("rate", dist.Gamma(3.0, 2.0).expand([2]).to_event(1))

    def own(shared, data):
        level, scale, _ = shared
        with numpyro.plate("units", 4):
            numpyro.sample("a", dist.Normal(level + data["x"], scale))
            numpyro.sample("b", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=data["y"])

    model, data = Structured(shared, own), {"x": jnp.full(4, 7.0), "y": jnp.zeros(2)}
    eta = Family(start=0.2).init_shared(jax.random.key(0), model, data).eta
    np.testing.assert_allclose(eta.mean[:2], [100.0, 1.0], rtol=1e-5)
    np.testing.assert_allclose(np.exp(eta.log_scale[:2]) / 0.2, [50.0, 0.5], rtol=1e-3)
    drawn = np.log(np.random.default_rng(0).gamma(3.0, 0.5, 100_000))
    np.testing.assert_allclose(eta.mean[2:], np.median(drawn), atol=0.2)
    np.testing.assert_allclose(np.exp(eta.log_scale[2:]) / 0.2, drawn.std(), rtol=0.25)
    q = Family(start=0.2).init_local(jax.random.key(0), model, data)["units"]
    np.testing.assert_allclose(q.mean[:, 0], 100.0, rtol=1e-5)  # whatever the numbers in the data are
    np.testing.assert_allclose(np.exp(q.log_scale[:, 0]) / 0.2, np.exp(1.0), rtol=1e-3)
    assert q.mean.shape == (4, 3)


@pytest.mark.parametrize("option", ["coupled", "dense", "moving_scale"])
def test_options_that_an_encoder_has_no_use_for(option):
    with pytest.raises(UserError, match=f"{option}=True has no effect with an encoder"):
        Family(encoder=lambda data: {}, **{option: True})
    Family(encoder=lambda data: {}, **{option: False})
