"""Population and silo against NumPyro's own density of the joint model, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

from fedbayes.errors import UserError
from fedbayes.models.sites import on_real_line
from fedbayes.models.structured import Structured
from fedbayes.primitives.dependence import inseparable

Y = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def mixed_population():
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([2]).to_event(1))
    spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
    return beta, spread


def one_plate(population, data):
    beta, spread = population
    with numpyro.plate("children", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(beta[0], spread))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(b[:, None], scale[:, None]).expand([6, 4]).to_event(1), obs=data["y"])


def two_plates(population, data):
    beta, spread = population
    shift = numpyro.sample("shift", dist.Exponential(2.0))
    with numpyro.plate("schools", 6, dim=-2):
        school = numpyro.sample("school", dist.Normal(beta[0] + shift, spread))
        with numpyro.plate("classes", 4, dim=-1):
            room = numpyro.sample("room", dist.Gamma(2.0, jnp.exp(beta[1])))
            numpyro.sample("y", dist.Normal(school, room), obs=data["y"])


def shares(population, data):
    _, spread = population
    with numpyro.plate("documents", 6):
        share = numpyro.sample("share", dist.Dirichlet(jnp.full(3, spread)))
        offset = numpyro.sample("offset", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        mean = share @ jnp.array([0.0, 1.0, 2.0]) + offset.sum(axis=-1)
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"][:, 0])


def no_plate(population, data):
    beta, spread = population
    w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) * spread))
    numpyro.sample("y", dist.Normal(w.sum() + beta.sum(), 1.0), obs=data["y"])


def no_latent(population, data):
    beta, spread = population
    with numpyro.plate("rows", 6):
        numpyro.sample("y", dist.Normal(beta[0], spread), obs=data["y"][:, 0])


def subsampled(population, data):
    beta, spread = population
    with numpyro.plate("rows", 6, subsample_size=2) as rows:
        numpyro.sample("y", dist.Normal(beta[0], spread), obs=data["y"][rows, 0])


def bounded(population, data):
    """The support of one latent ends where another one is."""
    beta, spread = population
    top = numpyro.sample("top", dist.Uniform(0.0, spread))
    with numpyro.plate("rows", 6):
        part = numpyro.sample("part", dist.Uniform(0.0, top))
        numpyro.sample("y", dist.Normal(beta[0] * part, 1.0), obs=data["y"][:, 0])


def mixture(population, data):
    weights = dist.Categorical(probs=jnp.array([0.3, 0.7]))
    with numpyro.plate("rows", 6):
        b = numpyro.sample("b", dist.MixtureSameFamily(weights, dist.Normal(jnp.array([-1.0, 1.0]), 0.5)))
        numpyro.sample("y", dist.Normal(population[0][0] + b, 1.0), obs=data["y"][:, 0])


BLOCKS = {
    bounded: {"": (1, 1), "rows": (6, 1)},
    mixture: {"rows": (6, 1)},
    one_plate: {"children": (6, 2)},
    two_plates: {"": (1, 1), "schools": (6, 5)},
    shares: {"documents": (6, 4)},
    no_plate: {"": (1, 3)},
    no_latent: {},
    subsampled: {},
}


def drawn(model, data, seed=0):
    key = jax.random.key(seed)
    z_global = jax.random.normal(key, (model.size(),))
    z_local = {name: jax.random.normal(jax.random.fold_in(key, i), s) for i, (name, s) in enumerate(model.blocks(data).items())}
    return z_global, z_local


@pytest.mark.parametrize("silo", BLOCKS, ids=lambda silo: silo.__name__)
def test_densities_add_up_to_numpyro_s_with_each_jacobian_once(silo):
    model, data = Structured(mixed_population, silo), {"y": jnp.asarray(Y)}
    assert model.blocks(data) == BLOCKS[silo]
    z_global, z_local = drawn(model, data)
    scale = {name: plate.scale for name, plate in model.plates(data).items()}

    @jax.jit
    def density(z_global, z_local):
        terms = model.log_silo({}, z_global, z_local, data)
        return model.log_population({}, z_global) + sum(scale[name] * jnp.sum(part) for name, part in terms.items())

    ours = density(z_global, z_local)

    def joint():
        silo(mixed_population(), data)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        real = {
            **on_real_line(model.global_latents(), {"": z_global[None]}),
            **on_real_line(model.local_latents(data), z_local),
        }
        with numpyro.handlers.seed(rng_seed=0):
            theirs = -jax.jit(lambda real: potential_energy(joint, (), {}, real))(real)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_blocks_are_independent():
    """Changing one child's latents or data changes that child's entry alone."""
    model, data = Structured(mixed_population, one_plate), {"y": Y}
    z_global, z_local = drawn(model, data)
    before = model.log_silo({}, z_global, z_local, data)["children"]
    moved = {"children": z_local["children"].at[2].add(1.0)}
    other = np.where(np.arange(6)[:, None] == 4, Y + 1, Y).astype(np.float32)
    after = model.log_silo({}, z_global, moved, {"y": other})["children"]
    assert before.shape == (6,)
    assert (np.flatnonzero(np.abs(after - before) > 1e-6) == [2, 4]).all()


def test_silos_add_up_to_all_the_data_in_one():
    model = Structured(mixed_population, one_plate_of_any_size)
    z_global, z_local = drawn(model, {"y": Y})
    whole = model.log_silo({}, z_global, z_local, {"y": Y})["children"]
    parts = [
        model.log_silo({}, z_global, {"children": z_local["children"][rows]}, {"y": Y[rows]})["children"]
        for rows in (slice(0, 2), slice(2, 6))
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-5)


def one_plate_of_any_size(population, data):
    beta, spread = population
    with numpyro.plate("children", data["y"].shape[0]):
        b = numpyro.sample("b", dist.Normal(beta[0], spread))
        numpyro.sample("y", dist.Normal(b[:, None], 1.0).expand(data["y"].shape).to_event(1), obs=data["y"])


def test_params_are_theta_unconstrained_and_differentiable():
    def population():
        return numpyro.sample("mean", dist.Normal(0.0, numpyro.param("prior", 2.0, constraint=dist.constraints.positive)))

    def silo(mean, data):
        noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(mean, noise), obs=data["y"])

    model, data = Structured(population, silo), {"y": Y}
    theta = model.theta(data)
    np.testing.assert_allclose([theta["prior"], theta["noise"]], np.log([2.0, 0.5]), rtol=1e-6)
    z = jnp.array([0.3])
    np.testing.assert_allclose(model.log_population(theta, z), dist.Normal(0.0, 2.0).log_prob(0.3), rtol=1e-5)
    moved = {**theta, "noise": jnp.float32(np.log(0.8))}
    found = model.log_silo(moved, z, {}, data)[""][0]
    np.testing.assert_allclose(found, dist.Normal(0.3, 0.8).log_prob(Y).sum(), rtol=1e-5)
    gradient = jax.grad(lambda theta: model.log_silo(theta, z, {}, data)[""][0])(theta)
    expected = (((Y - 0.3) / 0.5) ** 2 - 1).sum()  # of Σ log N(y | 0.3, e^t) in t
    np.testing.assert_allclose(gradient["noise"], expected, rtol=1e-4)


def test_compiles_and_maps():
    model, data = Structured(mixed_population, shares), {"y": Y}
    z_global, z_local = drawn(model, data)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), (z_global, z_local))
    both = jax.jit(jax.vmap(lambda zs: model.log_silo({}, *zs, data)["documents"]))(stack)
    alone = jax.jit(lambda *zs: model.log_silo({}, *zs, data)["documents"])(z_global, z_local)
    np.testing.assert_allclose(both[0], alone, rtol=1e-5)


def test_elements_that_read_each_other_are_found():
    def walk(population, data):
        with numpyro.plate("times", 6):
            step = numpyro.sample("step", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(jnp.cumsum(step), 1.0), obs=data["y"][:, 0])

    assert inseparable(Structured(mixed_population, walk), {"y": Y}) == (
        "y depends on latents of several elements of plate 'times' at once"
    )
    assert inseparable(Structured(mixed_population, one_plate), {"y": Y}) == ""


def test_what_a_population_calls_deterministic_is_among_its_values():
    def population():
        raw = numpyro.sample("raw", dist.Normal(0.0, 1.0))
        return numpyro.deterministic("mean", 3.0 + 2.0 * raw)

    def silo(mean, data):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=data["y"])

    assert Structured(population, silo).global_values({}, jnp.array([0.5]))["mean"] == 4.0


def test_a_network_s_parameters_are_a_tree_of_theta():
    from flax import nnx
    from numpyro.contrib.module import nnx_module

    def silo(population, data):
        with jax.numpy_dtype_promotion("standard"):
            network = nnx_module("network", nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
            numpyro.sample("y", dist.Normal(network(data["y"])[:, 0], 1.0), obs=data["y"][:, 0])

    model, data = Structured(mixed_population, silo), {"y": Y}
    theta, z = model.theta(data), jnp.zeros(3)
    gradient = jax.grad(lambda theta: model.log_silo(theta, z, {}, data)[""][0])(theta)
    assert {leaf.shape for leaf in jax.tree.leaves(gradient)} == {(4, 1), (1,)}
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient))


def refuses(population, silo, message):
    with pytest.raises(UserError, match=message):
        Structured(population, silo).local_latents({"y": Y})


def test_a_latent_in_both_functions():
    def silo(population, data):
        numpyro.sample("beta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=data["y"])

    refuses(mixed_population, silo, "beta is sampled in population and in silo; give the silo's another name")


def test_a_population_that_reads_data():
    with pytest.raises(UserError, match=r"population takes data, but it must not read data"):
        Structured(lambda data: None, no_plate)


def test_a_silo_without_likelihood():
    def silo(population, data):
        numpyro.sample("w", dist.Normal(0.0, 1.0))

    refuses(mixed_population, silo, "silo observes nothing: sample at least one site with obs")


def test_discrete_latents():
    def silo(population, data):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(k, 1.0), obs=data["y"])

    refuses(mixed_population, silo, "k in silo is discrete, but a latent must be continuous; sum it out of the model")


def test_data_that_does_not_fit_the_global_shapes():
    def silo(population, data):
        numpyro.sample("y", dist.Normal(data["y"] @ population[0], 1.0), obs=data["y"][:, 0])

    refuses(mixed_population, silo, r"silo\(population, data\) does not fit this data: ")


def test_a_latent_in_an_inner_plate_that_is_subsampled():
    def silo(population, data):
        with numpyro.plate("schools", 6, dim=-2), numpyro.plate("classes", 4, subsample_size=2, dim=-1) as rows:
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"][:, rows])

    refuses(mixed_population, silo, "b in silo is a latent in an inner plate that is subsampled; give it its full size")


def test_a_population_that_subsamples():
    def population():
        with numpyro.plate("g", 10, subsample_size=3):
            return numpyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(UserError, match="w in population is a latent in a plate that is subsampled; give it its full size"):
        Structured(population, no_plate).size()


def test_data_that_lacks_what_the_model_reads():
    def silo(population, data):
        numpyro.sample("y", dist.Normal(data["x"], 1.0), obs=data["y"])

    refuses(mixed_population, silo, "silo reads 'x', which its data and what population returns do not have")


@pytest.mark.slow
def test_all_elements_of_a_subsampled_plate():
    """Given every element, the density is that of the plate without subsampling."""

    def silo(population, data, size=None):
        beta, spread = population
        with numpyro.plate("units", 6, subsample_size=size) as rows:
            b = numpyro.sample("b", dist.Normal(beta[0], spread))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=data["y"][rows, 0])

    whole = Structured(mixed_population, silo)
    part = Structured(mixed_population, lambda population, data: silo(population, data, 2))
    data = {"y": Y}
    z_global, z_local = drawn(whole, data)
    assert part.blocks(data) == whole.blocks(data) == {"units": (6, 1)}
    everyone = part.everyone(data)
    found = part.log_silo({}, z_global, z_local, data, everyone)["units"]
    np.testing.assert_allclose(found, whole.log_silo({}, z_global, z_local, data)["units"], rtol=1e-5)
    assert part.predictive(jax.random.key(0), {}, z_global, z_local, data)["b"].shape == (6,)
    two = {"units": jnp.array([4, 1])}
    some = part.log_silo({}, z_global, {"units": z_local["units"][two["units"]]}, data, two)["units"]
    np.testing.assert_allclose(some, found[two["units"]], rtol=1e-5)
