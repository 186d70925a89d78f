"""FedVI: the exact posterior where it is known, what it may not look at, and its options."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from fedbayes import wire
from fedbayes.algorithm import Data
from fedbayes.algorithms.fedvi import FedVI, Local, Posterior
from fedbayes.data import Clients
from fedbayes.engine.clients import Simulation
from fedbayes.errors import UserError
from fedbayes.evaluation.assess import assess
from fedbayes.models import Categorical, Model, Normal, linear, mlp
from fedbayes.models.beliefs import Beliefs, Marginals
from fedbayes.primitives.training import Training

KEY = jax.random.key(0)


def slopes(count, n, seed, unseen):
    """y = β_k v + noise with v = ±1; a row shows v y and v. Σ v y is sufficient for β_k, and no linear map of it predicts y."""
    random = np.random.default_rng(seed)
    beta, v = random.normal(size=(count, 1)), random.choice([-1.0, 1.0], size=(count, n))
    y = beta * v + random.normal(size=(count, n))
    x = np.stack([v * y, v], axis=-1).reshape(-1, 2)
    nobody = np.zeros(count * n, bool)
    return Clients.build(
        x, y.ravel(), np.repeat(np.arange(count), n), is_test=nobody, unseen=np.arange(count) >= count - unseen
    )


def rows_of(data, client, n):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.train([client], n))


def test_reaches_the_exact_posterior_of_unseen_clients():
    """With support = query and τ = 1 the loss is the negative ELBO of β_k ~ N(0, 1): its best q is the posterior itself."""
    n, unseen = 8, 50
    data = slopes(300, n, 0, unseen)
    algorithm = FedVI.paper(
        linear((2,), Normal(1.0)),
        local=0.5,
        constructor=(),
        tau=1.0,
        sigma0=1.0,
        mean_scale=1.0,
        sigma_scale=1.0,
        bias=False,
        shared=True,
        train=Training(batch=n, lr=0.05, decay_at=(0.5, 0.75)),
        server_lr=1.0,
    ).planned(600)
    simulation = Simulation(algorithm, data, seed=1)
    for _ in range(600):
        simulation.step()
    adapt, down = jax.jit(algorithm.adapt), simulation.down()
    for client in range(300 - unseen, 300):
        rows = rows_of(data, client, n)
        q = adapt(KEY, down, Local(None), rows).q
        precision = 1 + n
        exact = float(jnp.sum(rows.x[:, 0])) / precision
        assert abs(float(q.mean[0, 0]) - exact) < 0.05 / precision**0.5
        assert abs(float(q.sigma[0, 0]) * precision**0.5 - 1) < 0.05
    assert abs(float(simulation.state.theta.network["head"]["kernel"][0, 0])) < 0.05  # v y says nothing of y by itself


@pytest.fixture(scope="module")
def trained(model, clients):
    """A few rounds, with a wide constructor output so that β matters."""
    algorithm = FedVI.paper(
        model, constructor=(8,), mean_scale=1.0, train=Training(epochs=2, batch=8, lr=0.1), server_lr=1.0
    ).planned(10)
    simulation = Simulation(algorithm, clients, seed=3)
    for _ in range(10):
        simulation.step()
    return simulation


def test_labels_are_not_looked_at(trained, clients):
    """Not by value, and not by provenance: the program that adapts does not read y."""
    algorithm, down = trained.algorithm, trained.down()
    rows = rows_of(clients, 1, 32)
    other = rows._replace(y=jnp.flip(rows.y) + 1)
    adapt, predict = jax.jit(algorithm.adapt), jax.jit(algorithm.predict)
    one, two = (adapt(KEY, down, Local(None), each) for each in (rows, other))
    assert_close(one, two, 0)
    assert_close(predict(KEY, down, one, rows.x), predict(KEY, down, two, rows.x), 0)
    without = Data(rows.x, jnp.zeros_like(rows.y), rows.mask)
    assert_close(adapt(KEY, down, Local(None), without), one, 0)
    assert not wire.adapt_reads_labels(algorithm, rows)


def test_the_order_of_the_support_does_not_matter(trained, clients):
    algorithm, down = trained.algorithm, trained.down()
    rows = rows_of(clients, 1, int(clients.train_counts[1]))
    turned = jax.tree.map(lambda leaf: leaf[::-1], rows)
    adapt = jax.jit(algorithm.adapt)
    assert_close(adapt(KEY, down, Local(None), rows), adapt(KEY, down, Local(None), turned), 1e-6)
    half = len(rows.y) // 2
    order = jnp.concatenate([jnp.arange(half)[::-1], jnp.arange(half, len(rows.y))])
    loss = jax.jit(algorithm._loss)
    batch = jax.tree.map(lambda leaf: leaf[order], rows)
    assert_close(loss(down.theta, KEY, rows), loss(down.theta, KEY, batch), 1e-6)


def test_support_and_query_are_halves_of_the_rows_that_exist(trained, clients):
    """The loss of a padded batch whose query labels change does; of one whose support labels change does not."""
    algorithm, down, rows = trained.algorithm, trained.down(), rows_of(clients, 1, 32)
    count = int(rows.mask.sum())
    loss = jax.jit(algorithm._loss)
    before = loss(down.theta, KEY, rows)
    support = rows._replace(y=rows.y.at[: count // 2].set(1 - rows.y[: count // 2]))
    query = rows._replace(y=rows.y.at[count // 2].set(1 - rows.y[count // 2]))
    assert_close(loss(down.theta, KEY, support), before, 0)
    assert abs(float(loss(down.theta, KEY, query) - before)) > 1e-4


def test_only_moves_of_theta_leave(trained, clients):
    """Neither q(β), nor features, nor anything else of the client's own."""
    leaves = wire.manifest(trained.algorithm, rows_of(clients, 0, 8))
    up = {leaf.path.split("/")[0] for leaf in leaves if leaf.message == "up"}
    assert up == {"delta", "weight", "loss"}
    assert jax.tree.leaves(trained.fresh) == []


def test_no_row_means_the_prior(trained, clients):
    algorithm, down, rows = trained.algorithm, trained.down(), rows_of(clients, 0, 8)
    q = jax.jit(algorithm.adapt)(KEY, down, Local(None), rows._replace(mask=jnp.zeros(8, bool))).q
    size = algorithm.sizes
    prior = algorithm.mean_layer.sigma0
    assert_close(q, Posterior(jnp.zeros((size.local, 2)), jnp.full((size.local, 2), prior + 1e-5), jnp.zeros(2)), 1e-6)
    assert float(algorithm.mean_layer.divergence(q._replace(sigma=q.sigma - 1e-5))) == pytest.approx(0.0, abs=1e-6)


def test_divergence_is_numpyros(trained):
    import numpyro.distributions as dist

    q = Posterior(jnp.array([[0.3, -1.0]]), jnp.array([[0.5, 2.0]]), jnp.zeros(2))
    exact = sum(
        dist.kl_divergence(dist.Normal(m, s), dist.Normal(0.0, trained.algorithm.mean_layer.sigma0))
        for m, s in zip(q.mean[0], q.sigma[0], strict=True)
    )
    assert float(trained.algorithm.mean_layer.divergence(q)) == pytest.approx(float(exact), rel=1e-5)


def test_a_posterior_over_theta_has_its_divergence_on_the_server(model, clients):
    """Clients that send nothing leave the server with the gradient of the global term alone: θ goes to t(θ)."""
    algorithm = FedVI.paper(
        model, constructor=(8,), gamma=1.0, sigma_theta=0.5, train=Training(lr=0.1), server_lr=2.0, server_momentum=0.0, D=1
    )
    server = jax.jit(algorithm.init_server)(KEY)
    down = algorithm.broadcast(KEY, server)
    nothing = jax.tree.map(jnp.zeros_like, server.theta)
    step = jax.jit(algorithm.server)
    from fedbayes.algorithms.fedvi import Up

    for _ in range(600):
        server = step(KEY, server, down, Up(nothing, jnp.float32(1), jnp.float32(0), jnp.float32(1)))
    for mean in jax.tree.leaves(server.theta.mean):
        np.testing.assert_allclose(mean, 0.0, atol=1e-3)
    for rho in jax.tree.leaves(server.theta.rho):
        np.testing.assert_allclose(jax.nn.softplus(rho), 0.5, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 4])
def test_the_posterior_over_theta_does_not_depend_on_how_many_steps_a_round_has(epochs):
    """y ~ N(b, 1) for a bias b ~ N(0, σ²): every client of n rows takes `epochs` steps, and q(b) is the exact posterior."""
    count, n, sigma = 8, 4, 0.5
    y = np.random.default_rng(0).normal(1.0, 1.0, count * n)
    data = Clients.build(np.zeros((count * n, 2)), y, np.repeat(np.arange(count), n), is_test=np.zeros(count * n, bool))
    train = Training(epochs=epochs, batch=n, lr=0.02 / epochs)
    algorithm = FedVI.paper(
        linear((2,), Normal(1.0)), local=0.5, constructor=(), bias=False, tau=0.0, gamma=1.0, sigma_theta=sigma, rho=-1.0,
        train=train, server_lr=1.0, server_momentum=0.9,
    ).planned(1500, **data.facts)  # fmt: skip
    simulation = Simulation(algorithm, data, seed=0)
    means, scales = [], []
    for number in range(1500):
        simulation.step()
        if number >= 700:  # steps draw θ, so the state moves around its end
            head = simulation.state.theta.mean.network["head"]["bias"], simulation.state.theta.rho.network["head"]["bias"]
            means.append(float(head[0][0]))
            scales.append(float(jax.nn.softplus(head[1][0])))
    precision = 1 / sigma**2 + count * n
    assert np.mean(means) == pytest.approx(y.sum() / precision, abs=0.2 / precision**0.5)
    assert np.mean(scales) == pytest.approx(precision**-0.5, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"gamma": 1e-3}, marks=pytest.mark.slow), {"shared": True}, {"bias": False}, {"local": 0.5}],
    ids=str,
)
def test_options_learn(options, model, clients):
    train = Training(epochs=5, batch=16, lr=0.1)
    algorithm = FedVI(model, constructor=(8,), train=train, server_lr=1.0, server_momentum=0.5, **options).planned(
        30, **clients.facts
    )
    simulation = Simulation(algorithm, clients, seed=2)
    for _ in range(30):
        simulation.step()
    assert assess(simulation, ("adapted",)).summary()["adapted"]["participating"]["accuracy"]["rows"] > 0.85


def test_regression_on_clients_with_their_own_slopes():
    """y = β_k x + noise where a client's inputs lie around its β_k: FedVI finds a new client's slope from inputs alone."""
    random = np.random.default_rng(4)
    count, n = 200, 20
    beta = random.normal(size=(count, 1))
    around, v = beta + 0.3 * random.normal(size=(count, n)), random.normal(size=(count, n))
    y = beta * v + 0.2 * random.normal(size=(count, n))
    data = Clients.build(
        np.stack([around, v], -1).reshape(-1, 2),
        y.ravel(),
        np.repeat(np.arange(count), n),
        unseen=np.arange(count) >= 150,
        seed=1,
    )
    algorithm = FedVI.paper(
        linear((2,), Normal(1.0)),
        local=0.5,
        constructor=(16,),
        tau=1.0,
        sigma0=1.0,
        mean_scale=1.0,
        sigma_scale=1.0,
        train=Training(batch=20, lr=0.01),
        server_lr=1.0,
    ).planned(300)
    simulation = Simulation(algorithm, data, seed=0)
    for _ in range(300):
        simulation.step()
    figures = {mode: found["unseen"]["rmse"]["rows"] for mode, found in assess(simulation).summary().items()}
    assert figures["global"] > 0.7  # without its slope a client's y is as wide as β_k
    assert figures["adapted"] < 0.3


def test_refusals(model):
    plain = Model(lambda key: {"w": jnp.zeros((4, 2))}, lambda params, x: x @ params["w"], Categorical(2))
    with pytest.raises(UserError, match="does not say what they are; give from_functions features and readout"):
        FedVI(plain)
    with pytest.raises(UserError, match="has none at head/kernel"):
        FedVI(dataclasses.replace(plain, features=lambda params, x: x, readout=lambda params, h: h)).sizes  # noqa: B018
    with pytest.raises(UserError, match="needs at least a global and a local one"):
        FedVI.paper(mlp((4,), Categorical(2), hidden=(1,))).sizes  # noqa: B018
    for options, message in (
        ({"local": 1.5}, "local is 1.5, but it is a share"),
        ({"tau": -1.0}, "tau is -1.0, but it weighs a divergence"),
        ({"draws": 0}, "draws is 0, but it is at least 1"),
        ({"sigma0": 0.0}, "sigma0 is 0.0, but it is a standard deviation"),
        ({"gamma": 1.0, "train": Training(momentum=0.9)}, "train with sgd, momentum 0"),
    ):
        with pytest.raises(UserError, match=message):
            FedVI.paper(model, **options)


def conjugate(n, seed=0, d=3):
    """An untrained default FedVI of a linear model with known noise, and rows of a client."""
    algorithm = FedVI(linear((d,), Normal(0.5)), steps=1)
    theta = jax.jit(algorithm.init_server)(KEY).theta
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, d)).astype(np.float32)
    y = (x @ random.normal(size=d) + 0.5 * random.normal(size=n)).astype(np.float32)
    return algorithm, theta, Data(jnp.asarray(x), jnp.asarray(y), jnp.ones(n, bool))


def test_default_is_exact_for_a_conjugate_client():
    """Mean, covariance and KL of (β, b_β) under N(0, diag s²), normal noise of sd .5."""
    algorithm, theta, data = conjugate(7)
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    q = jax.jit(algorithm.adapt)(KEY, down, Local(None), data).q
    u = np.concatenate([np.asarray(data.x) @ np.asarray(theta.constructor["basis"]), np.ones((7, 1))], axis=1).astype(float)
    head = theta.network["head"]
    left = np.asarray(data.y, float) - (np.asarray(data.x) @ np.asarray(head["kernel"]) + np.asarray(head["bias"]))[:, 0]
    covariance = np.linalg.inv(np.eye(4) / 0.5**2 + u.T @ u / 0.25)  # s starts at .5
    np.testing.assert_allclose(q.mean[:, 0], covariance @ u.T @ left / 0.25, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(q.root @ q.root.T, covariance, rtol=1e-3, atol=1e-5)
    mean = np.asarray(q.mean[:, 0], float)
    exact = (np.trace(covariance) / 0.25 + mean @ mean / 0.25 - 4 - np.linalg.slogdet(covariance / 0.25)[1]) / 2
    assert float(algorithm.gibbs(KEY, down, data, 2)[1]) == pytest.approx(exact, rel=1e-3)


def test_default_contracts_as_one_over_n():
    traces = []
    for n in (10, 100, 1000):
        algorithm, theta, data = conjugate(n)
        q, _ = jax.jit(algorithm.own)(theta, data)
        traces.append(float(jnp.sum(q.root**2)) * n)
    assert traces[2] == pytest.approx(traces[1], rel=0.15)
    assert traces[1] == pytest.approx(traces[0], rel=0.5)  # ten rows in four dimensions: the prior and chance still count


def test_default_reaches_the_mode_with_classes():
    """Many steps end where the gradient of the log posterior is 0, found here by plain ascent."""
    algorithm = FedVI(mlp((4,), Categorical(3), hidden=(5,)), steps=200, sigma0=2.0)
    theta = jax.jit(algorithm.init_server)(KEY).theta
    x = jax.random.normal(jax.random.key(1), (12, 4))
    data = Data(x, jnp.arange(12) % 3, jnp.ones(12, bool))
    layer = algorithm.layer
    q, _ = jax.jit(algorithm.own)(theta, data)
    h, scale = algorithm.model.features(theta.network, x), layer.deviations(theta.constructor)

    def log_posterior(beta):
        outputs = layer.shifted(theta.network, h, None, layer.features(theta.constructor, h) @ beta)
        return jnp.sum(algorithm.likelihood.log_prob(outputs, data.y)) - jnp.sum((beta / scale[:, None]) ** 2) / 2

    slope = jax.jit(jax.grad(log_posterior))
    assert float(jnp.abs(slope(jnp.zeros_like(q.mean))).max()) > 0.5
    assert float(jnp.abs(slope(q.mean)).max()) < 5e-3


def test_default_without_labels_reads_features_alone_and_without_rows_is_the_prior():
    algorithm, theta, data = conjugate(7)
    from fedbayes.primitives.training import unlabelled

    bare = data._replace(y=unlabelled(data.y))
    q, _ = jax.jit(algorithm.own)(theta, bare)
    assert np.isfinite(q.root).all()
    assert_close(q.mean, jnp.zeros_like(q.mean), 1e-6)  # the constructor has not learnt to say anything
    half = data._replace(y=jnp.where(jnp.arange(7) < 4, data.y, jnp.nan))
    assert float(jnp.abs(jax.jit(algorithm.own)(theta, half)[0].mean).max()) > 1e-3
    nobody, divergence = jax.jit(algorithm.own)(theta, data._replace(mask=jnp.zeros(7, bool)))
    assert_close(nobody.root, 0.5 * jnp.eye(4), 1e-5)
    assert float(divergence) == pytest.approx(0.0, abs=1e-4)


def test_default_nests_beta_in_theta(model, clients):
    """With γ > 0 each draw of θ has a q(β) of its own, found again in `predict` from the key that `adapt` kept."""
    algorithm = FedVI(model, constructor=(8,), gamma=1e-3, draws=3, rho=-1.0, D=80, train=Training(lr=0.1, batch=16))
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    rows = rows_of(clients, 1, 32)
    local = jax.jit(algorithm.adapt)(KEY, down, Local(None), rows)
    assert local.q.mean.shape[0] == 3
    for place, key in enumerate(jax.random.split(KEY, 3)):
        from fedbayes.primitives import gaussian

        alone, _ = algorithm.own(gaussian.draw(key, down.theta), rows)
        assert_close(alone.mean, local.q.mean[place], 1e-3)
    more = dataclasses.replace(algorithm, draws=7)
    assert jax.jit(more.predict)(KEY, down, local, rows.x).shape == (7, 32, 2)
    found = algorithm.beliefs(down, local)
    same = algorithm.predict(KEY, *algorithm.with_beliefs(down, local, found._replace(prior=None)), rows.x)
    drawn = algorithm.predict(KEY, down, local, rows.x)
    assert_close(same, drawn, 1e-4)
    assert float(jnp.abs(drawn[1:] - drawn[:1]).max()) > 0.1
    point = Beliefs(Marginals(found.posterior.mean, jax.tree.map(jnp.zeros_like, found.posterior.deviation)))
    alike = algorithm.predict(KEY, *algorithm.with_beliefs(down, local, point), rows.x)
    assert_close(alike, jnp.broadcast_to(alike[:1], alike.shape), 1e-5)


def personal(seed, clients=60, n=40, unseen=20):
    """y = x (w + w_k) + noise, w_k ~ N(0, .5²)."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(clients * n, 3)).astype(np.float32)
    client = np.repeat(np.arange(clients), n)
    weights = random.normal(size=3) + 0.5 * random.normal(size=(clients, 3))
    y = np.sum(x * weights[client], axis=1) + 0.5 * random.normal(size=len(x))
    new = np.arange(clients) >= clients - unseen
    return Clients.build(x, y.astype(np.float32), client, test=0.5, unseen=new, seed=seed)


def test_beta_is_alive_at_the_defaults():
    """Unseen clients: their own q(β) is ahead of β = 0 and of another client's by more than two standard errors."""
    data = personal(0)
    algorithm = FedVI(linear((3,), Normal(scale=0.5)), train=Training(batch=50, lr=0.02)).planned(40, **data.facts)
    simulation = Simulation(algorithm, data, seed=0)
    for _ in range(40):
        simulation.step()
    down, adapt, predict = simulation.down(), jax.jit(algorithm.adapt), jax.jit(algorithm.predict)
    places = np.flatnonzero(data.unseen)
    own = [adapt(KEY, down, Local(None), rows_of(data, place, 32)) for place in places]

    def score(place, local):
        test = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data.test([place], 32))
        each = algorithm.likelihood.log_prob(predict(KEY, down, local, test.x), test.y)
        mixed = jax.nn.logsumexp(each, axis=0) - np.log(len(each))
        return float(jnp.sum(jnp.where(test.mask, mixed, 0)) / test.mask.sum().astype(jnp.float32))

    mine = np.array([score(place, local) for place, local in zip(places, own, strict=True)])
    nothing = np.array([score(place, Local(None)) for place in places])
    others = np.array([score(place, local) for place, local in zip(places, own[1:] + own[:1], strict=True)])
    for gaps in (mine - nothing, mine - others):
        assert gaps.mean() > 2 * gaps.std(ddof=1) / len(gaps) ** 0.5


def test_default_predicts_the_global_model_where_sigma0_is_0(model, clients):
    from fedbayes.algorithm import settled

    algorithm = settled(FedVI(model, constructor=(8,)), {"sigma0": 0.0, "steps": 0.0, "temperature": 0.0})
    down, rows = algorithm.broadcast(KEY, algorithm.init_server(KEY)), rows_of(clients, 1, 32)
    local = jax.jit(algorithm.adapt)(KEY, down, Local(None), rows)
    assert_close(algorithm.predict(KEY, down, local, rows.x)[0], algorithm.predict(KEY, down, Local(None), rows.x)[0], 1e-5)
