"""The bound of a silo and its gradients, where the answer is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import assert_close
from hierarchy import DEVIATION, EVIDENCE, MEAN, OWN, WEIGHT, Y, population, sampled, silo

from fedbayes.errors import UserError
from fedbayes.models.structured import Structured
from fedbayes.primitives import gaussian, variational
from fedbayes.primitives.variational import Family, Shared, Silo

MODEL = Structured(population, silo)
DATA = {"y": jnp.asarray(Y)}
EXACT = Shared(gaussian.Global(jnp.float32([MEAN]), jnp.float32([np.log(DEVIATION)]), jnp.zeros((1, 1))), {})
EXACT_LOCAL = {
    "units": gaussian.Local(
        jnp.asarray(WEIGHT * Y + (1 - WEIGHT) * MEAN, jnp.float32)[:, None],
        jnp.full((12, 1), np.log(OWN), jnp.float32),
        None,
        jnp.full((12, 1, 1), 1 - WEIGHT, jnp.float32),
        jnp.zeros((12, 1, 1)),
    )
}
OFF = Shared(gaussian.Global(jnp.float32([0.8]), jnp.float32([-0.6]), jnp.zeros((1, 1))), {})
OFF_LOCAL = jax.tree.map(lambda leaf: leaf + jnp.linspace(0.0, 0.15, leaf.size).reshape(leaf.shape), EXACT_LOCAL)


@functools.partial(jax.jit, static_argnums=0)
def gradients(family, shared, eta):
    model, key, indices = MODEL, 0, {}
    noise_G, noise_L, _ = variational.chance(Silo(family, model, DATA), jax.random.key(key))
    value, more, own = variational.silo_gradient(Silo(family, model, DATA), shared, eta, noise_G, noise_L, indices)
    also, prior = variational.own_gradient(model.log_population, shared, noise_G)
    return value + also, jax.tree.map(jnp.add, prior, more), own


@pytest.mark.parametrize("bound", [1, 4])
def test_at_the_answer_the_bound_is_the_evidence_and_every_gradient_is_zero(bound):
    value, shared, own = gradients(Family(bound=bound, moving_scale=True), EXACT, EXACT_LOCAL)
    assert value == pytest.approx(EVIDENCE, abs=1e-3)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves((shared, own))) < 1e-4


def plain_bound(shared, eta, noise_G, noise_L):
    """The importance-weighted bound as it is written down, for JAX to differentiate."""
    z_G = gaussian.draw_global(shared.eta, noise_G)
    offset = z_G - shared.eta.mean

    def weight(noise):
        z_L = gaussian.draw_local(eta["units"], noise, offset)
        found = MODEL.log_silo({}, z_G, {"units": z_L}, DATA)["units"]
        return found - gaussian.log_local(eta["units"], z_L, offset)

    terms = jax.vmap(weight)(noise_L["units"])
    total = jnp.sum(jax.nn.logsumexp(terms, axis=0) - jnp.log(terms.shape[0]))
    return total + MODEL.log_population({}, z_G) - gaussian.log_global(shared.eta, z_G)


@pytest.mark.parametrize("bound", [1, 3])
def test_gradients_are_those_of_the_bound_with_less_variance(bound):
    """Away from the answer: equal in the mean to what differentiation of the bound gives, and less noisy."""
    family = Family(bound=bound, moving_scale=True, draws=1)

    @jax.jit
    @jax.vmap
    def both(key):
        noise_G, noise_L, _ = variational.chance(Silo(family, MODEL, DATA), key)
        _, more, own = variational.silo_gradient(Silo(family, MODEL, DATA), OFF, OFF_LOCAL, noise_G, noise_L, {})
        _, prior = variational.own_gradient(MODEL.log_population, OFF, noise_G)
        ours = (jax.tree.map(jnp.add, prior, more), own)
        one = {"units": noise_L["units"][0]}
        theirs = jax.grad(plain_bound, argnums=(0, 1))(OFF, OFF_LOCAL, noise_G[0], one)
        return [jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (ours, theirs)]

    ours, theirs = (np.asarray(found) for found in both(jax.random.split(jax.random.key(1), 8000)))
    error = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / len(ours))
    different = np.abs(ours.mean(axis=0) - theirs.mean(axis=0))
    assert (different < 4.5 * error + 1e-4).all()
    assert ours.var(axis=0).sum() < 0.7 * theirs.var(axis=0).sum()


def test_a_subsampled_plate_gives_the_same_in_the_mean():
    """Latents of the elements drawn only, scaled: over many draws of elements the gradient of the whole."""
    model, family = Structured(population, sampled), Family(coupled=True)

    @jax.jit
    @jax.vmap
    def drawn(key):
        noise_G, noise_L, indices = variational.chance(Silo(family, model, DATA), key)
        value, more, own = variational.silo_gradient(Silo(family, model, DATA), OFF, OFF_LOCAL, noise_G, noise_L, indices)
        return value, jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves((more, own))]), indices["units"]

    @jax.jit
    @jax.vmap
    def whole(key):
        noise_G, noise_L, _ = variational.chance(Silo(family, MODEL, DATA), key)
        value, more, own = variational.silo_gradient(Silo(family, MODEL, DATA), OFF, OFF_LOCAL, noise_G, noise_L, {})
        return value, jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves((more, own))])

    keys = jax.random.split(jax.random.key(2), 6000)
    value, gradient, rows = drawn(keys)
    all_value, all_gradient = whole(keys)
    assert rows.shape == (6000, 4)
    assert len(np.unique(rows)) == 12
    error = np.sqrt((gradient.var(axis=0) + all_gradient.var(axis=0)) / len(keys))
    assert (np.abs(gradient.mean(axis=0) - all_gradient.mean(axis=0)) < 4.5 * error + 1e-4).all()
    assert abs(value.mean() - all_value.mean()) < 4.5 * np.sqrt((value.var() + all_value.var()) / len(keys))


def test_evidence_by_importance_sampling():
    z = jnp.float32([[0.4], [1.9]])
    evidence = jax.jit(
        lambda z: variational.log_evidence(Silo(Family(), MODEL, DATA), jax.random.key(0), EXACT, EXACT_LOCAL, z, 20)
    )
    found = evidence(z)
    expected = [dist.Normal(float(mean), np.hypot(0.7, 0.5)).log_prob(Y).sum() for mean in z[:, 0]]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_evidence_with_latents_in_no_plate():
    """y_i ~ N(mean + shift, 1) with shift ~ N(0, 0.5²) for the silo: the shift is integrated out with the whole silo."""

    def shifted(mean, data):
        shift = numpyro.sample("shift", dist.Normal(0.0, 0.5))
        with numpyro.plate("units", 12):
            numpyro.sample("y", dist.Normal(mean + shift, 1.0), obs=data["y"])

    model = Structured(population, shifted)
    eta = Family().init_local(jax.random.key(0), model, DATA)
    eta[""] = eta[""]._replace(log_scale=jnp.full((1, 1), np.log(0.4)), mean=jnp.full((1, 1), 0.2))
    evidence = jax.jit(lambda z: variational.log_evidence(Silo(Family(), model, DATA), jax.random.key(0), EXACT, eta, z, 800))
    found = evidence(jnp.full((4, 1), 1.0))
    scale = 0.25 * np.ones((12, 12)) + np.eye(12)
    expected = dist.MultivariateNormal(jnp.ones(12), jnp.asarray(scale, jnp.float32)).log_prob(Y)
    np.testing.assert_allclose(found, float(expected), atol=0.15)


def test_recentred_is_the_same_distribution():
    moved = gaussian.recentre(OFF_LOCAL["units"], jnp.float32([0.7]))
    noise = jax.random.normal(jax.random.key(0), (12, 1))
    before = gaussian.draw_local(OFF_LOCAL["units"], noise, jnp.float32([1.0]))
    assert_close(gaussian.draw_local(moved, noise, jnp.float32([0.3])), before, 1e-5)


def test_natural_parameters_and_back():
    q = gaussian.Global(jnp.float32([0.5, -1.0, 2.0]), jnp.float32([0.1, -0.5, 0.3]), jnp.float32(np.full((3, 3), 0.4)))
    back = gaussian.from_natural(gaussian.natural(q))
    np.testing.assert_allclose(back.mean, q.mean, rtol=1e-4)
    np.testing.assert_allclose(gaussian.covariance(back), gaussian.covariance(q), rtol=1e-4)
    z = jnp.float32([[0.0, 0.0, 0.0], [1.0, 2.0, 0.5]])
    factor = [float(gaussian.log_factor(gaussian.natural(q), row)) for row in z]
    exact = [float(gaussian.log_global(q, row)) for row in z]
    assert factor[1] - factor[0] == pytest.approx(exact[1] - exact[0], rel=1e-4)


def test_barycentre():
    """Of diagonal covariances the standard deviations are averaged; of any, the fixed-point equation holds."""
    diagonal = jnp.stack([jnp.diag(jnp.float32([1e-4, 4.0])), jnp.diag(jnp.float32([9e-4, 1.0]))])
    found = gaussian.covariance(gaussian.barycentre(jnp.zeros(2), diagonal))
    np.testing.assert_allclose(jnp.sqrt(jnp.diagonal(found)), [0.02, 1.5], rtol=1e-3)
    full = jnp.float32([[[2.0, 0.6], [0.6, 0.5]], [[0.7, -0.3], [-0.3, 1.2]], [[1.0, 0.2], [0.2, 0.3]]])
    S = np.asarray(gaussian.covariance(gaussian.barycentre(jnp.zeros(2), full)), float)

    def root(matrix):
        values, vectors = np.linalg.eigh(matrix)
        return vectors * np.sqrt(values) @ vectors.T

    average = np.mean([root(root(S) @ C @ root(S)) for C in np.asarray(full, float)], axis=0)
    np.testing.assert_allclose(average, S, atol=1e-3)


def test_draws_cannot_be_weighed_where_a_site_outside_the_plate_reads_its_latents():
    def outside(mean, data):
        with numpyro.plate("units", 12):
            effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
        numpyro.sample("y", dist.Normal(effect.sum(), 1.0), obs=data["y"].sum())

    model = Structured(population, outside)
    Family(bound=1).check_draws(model, DATA)
    with pytest.raises(UserError, match="y depends on latents of several elements of plate 'units' at once"):
        Family(bound=5).check_draws(model, DATA)


def test_families_that_are_too_large():
    def many():
        return numpyro.sample("w", dist.Normal(0.0, 1.0).expand([20_000]).to_event(1))

    def rows(w, data):
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([20_000]).to_event(1))
        numpyro.sample("y", dist.Normal(w.sum() + v.sum(), 1.0), obs=data["y"])

    model = Structured(many, rows)
    with pytest.raises(UserError, match=r"a full covariance of 20000 global latents is too large; use Family.mean_field"):
        Family().init_shared(jax.random.key(0), model, DATA)
    with pytest.raises(UserError, match="1 × 20000 local latents cannot depend on 20000 global ones; use coupled=False"):
        Family(full=False).init_local(jax.random.key(0), model, DATA)
    with pytest.raises(UserError, match="20000 local latents in a block are too many for a covariance; use dense=False"):
        Family(full=False, coupled=False).init_local(jax.random.key(0), model, DATA)
    eta = Family.mean_field().init_local(jax.random.key(0), model, DATA)
    assert eta[""].lower is None
    assert eta[""].C is None


def test_means_at_the_start_may_differ_from_each_other_and_not_from_silo_to_silo():
    family, key = Family(jitter=0.3), jax.random.key(4)
    first, second = (family.init_local(key, MODEL, data)["units"].mean for data in (DATA, DATA))
    np.testing.assert_array_equal(first, second)
    assert 0.1 < float(first.std()) < 0.6
    assert float(family.init_shared(key, MODEL, DATA).eta.mean[0]) != 0
    assert float(Family().init_shared(key, MODEL, DATA).eta.mean[0]) == 0
