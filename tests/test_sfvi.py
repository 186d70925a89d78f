"""SFVI where the answer is known: conjugate hierarchies, invariance to the partition, and what leaves a silo."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import assert_close

from fedbayes import gaussian, wire
from fedbayes.algorithms.sfvi import SFVI
from fedbayes.silos import fit_silos

PRIOR, SPREAD, NOISE = 2.0, 0.7, 0.5
Y = (1.3 + np.random.default_rng(3).normal(size=12) * np.hypot(SPREAD, NOISE)).astype(np.float32)


def population():
    return numpyro.sample("mean", dist.Normal(0.0, PRIOR))


def silo(mean, data):
    with numpyro.plate("units", data["y"].shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mean, SPREAD))
        numpyro.sample("y", dist.Normal(effect, NOISE), obs=data["y"])


def partition(*counts):
    return {f"s{i}": {"y": part} for i, part in enumerate(np.split(Y, np.cumsum(counts)[:-1]))}


def test_conjugate_hierarchy_is_exact():
    """mean | y is normal with precision 1/s² + n/(τ²+σ²); effect | mean, y has a mean that is linear in `mean`."""
    fit = fit_silos(SFVI(population, silo, lr=0.05, decay=1e-3), partition(5, 7), 4000)
    precision = 1 / PRIOR**2 + len(Y) / (SPREAD**2 + NOISE**2)
    mean, deviation = Y.sum() / (SPREAD**2 + NOISE**2) / precision, precision**-0.5
    q = fit.server.shared.eta
    assert abs(q.mean[0] - mean) < 0.01 * deviation
    assert np.exp(q.log_scale[0]) == pytest.approx(deviation, rel=0.01)
    weight = SPREAD**2 / (SPREAD**2 + NOISE**2)
    own = fit.local["s1"].eta["units"]
    np.testing.assert_allclose(own.C[:, 0, 0], 1 - weight, rtol=0.01)
    np.testing.assert_allclose(np.exp(own.log_scale), SPREAD * NOISE / np.hypot(SPREAD, NOISE), rtol=0.01)
    np.testing.assert_allclose(own.mean[:, 0], weight * Y[5:] + (1 - weight) * q.mean[0], atol=0.01 * deviation)
    draws = fit.draws(20_000)["mean"]
    assert float(draws.std()) == pytest.approx(deviation, rel=0.03)


def test_at_the_answer_the_gradient_has_no_variance():
    """Sticking the landing: where q is the posterior, every draw gives a gradient of zero."""
    algorithm = SFVI(population, silo)
    precision = 1 / PRIOR**2 + len(Y) / (SPREAD**2 + NOISE**2)
    mean, weight = Y.sum() / (SPREAD**2 + NOISE**2) / precision, SPREAD**2 / (SPREAD**2 + NOISE**2)
    data = {"y": Y}
    server, local = algorithm.init_server(jax.random.key(0), data), algorithm.init_local(jax.random.key(0), data)
    eta = gaussian.Global(jnp.float32([mean]), jnp.float32([np.log(precision) / -2]), jnp.zeros((1, 1)))
    own = gaussian.Local(
        jnp.asarray(weight * Y + (1 - weight) * mean, jnp.float32)[:, None],
        jnp.full((12, 1), np.log(SPREAD * NOISE / np.hypot(SPREAD, NOISE)), jnp.float32),
        None,
        jnp.full((12, 1, 1), 1 - weight, jnp.float32),
        None,
    )
    server = server._replace(shared=server.shared._replace(eta=eta))
    down = algorithm.broadcast(jax.random.key(5), server)
    noise = algorithm.noise(jax.random.key(6), local._replace(eta={"units": own}))
    gradient = jax.grad(
        lambda own: algorithm._silo_bound(server.shared, {"units": own}, down.noise[0], {"units": noise["units"][0]}, data)
    )(own)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-4
    up, _ = algorithm.respond(noise, down, local._replace(eta={"units": own}), data)
    own_term = jax.grad(lambda shared: algorithm.own_bound(down._replace(shared=shared)))(server.shared)
    assert_close(jax.tree.map(jnp.add, up.gradient.eta, own_term.eta), jax.tree.map(jnp.zeros_like, eta), 1e-4)


@pytest.mark.parametrize(("bound", "partitions"), [(1, ((12,), (5, 7), (1, 2, 3, 4, 2))), (3, ((12,), (5, 7)))])
def test_the_same_noise_gives_the_same_iterates_for_any_partition(bound, partitions):
    algorithm = SFVI(population, silo, moving_scale=True, bound=bound, lr=0.02)
    iterates = {}
    for counts in partitions:
        silos = list(partition(*counts).values())
        edges = np.cumsum((0, *counts))
        server = algorithm.init_server(jax.random.key(0), silos[0])
        local = [algorithm.init_local(jax.random.key(0), data) for data in silos]
        whole = algorithm.init_local(jax.random.key(0), {"y": Y})

        def iterate(server, local, number, silos=silos, edges=edges, whole=whole):
            key = jax.random.fold_in(jax.random.key(1), number)
            down, noise = algorithm.broadcast(key, server), algorithm.noise(key, whole)["units"]
            replies = [
                algorithm.respond({"units": noise[:, :, edges[i] : edges[i + 1]]}, down, local[i], data)
                for i, data in enumerate(silos)
            ]
            up = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *[reply[0] for reply in replies])
            return algorithm.server(key, server, down, up), [reply[1] for reply in replies]

        compiled = jax.jit(iterate)
        for number in range(20):
            server, local = compiled(server, local, number)
        iterates[counts] = (server.shared, jnp.concatenate([state.eta["units"].mean for state in local]))
    for other in list(iterates.values())[1:]:
        assert_close(other, iterates[(12,)], 1e-5)


def test_more_draws_tighten_the_bound_and_widen_a_posterior_that_is_too_narrow():
    """Without coupling the family is too small: its bound lies below log p(y) and q(Z_G) is too narrow; K draws mend both."""
    scale = PRIOR**2 * jnp.ones((12, 12)) + (SPREAD**2 + NOISE**2) * jnp.eye(12)
    evidence = float(dist.MultivariateNormal(jnp.zeros(12), scale).log_prob(Y))
    deviation = (1 / PRIOR**2 + len(Y) / (SPREAD**2 + NOISE**2)) ** -0.5

    def fitted(bound, **options):
        algorithm = SFVI(population, silo, bound=bound, draws=8, lr=0.05, decay=0.01, **options)
        fit = fit_silos(algorithm, partition(5, 7), 1500)
        return fit.bound[-500:].mean(), float(np.exp(fit.server.shared.eta.log_scale[0]))

    narrow, wide, exact = fitted(1, coupled=False), fitted(20, coupled=False), fitted(1)
    assert narrow[0] + 0.08 < wide[0] < evidence + 0.02
    assert narrow[1] < 0.85 * deviation
    assert wide[1] == pytest.approx(deviation, rel=0.05)
    assert exact[0] == pytest.approx(evidence, abs=0.01)


def test_nothing_local_leaves_a_silo():
    algorithm = SFVI(population, silo, moving_scale=True)
    fit = fit_silos(algorithm, partition(5, 7), 50)
    data = {"y": jnp.asarray(Y[5:])}
    down = algorithm.broadcast(jax.random.key(0), fit.server)
    up, new = algorithm.client(jax.random.key(1), down, fit.local["s1"], data)
    sent = wire.pack(jax.device_get(up)) + wire.pack(jax.device_get(down))
    for secret in [*Y[5:], *jax.tree.leaves(fit.local["s1"].eta), *jax.tree.leaves(new.eta)]:
        assert np.asarray(secret).tobytes() not in sent
