"""Networks and likelihoods: shapes, paths, transformations, values, and what is refused."""

import math
import types

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import fedbayes as fb
from fedbayes import models
from fedbayes.errors import UserError
from fedbayes.models import Bernoulli, Categorical, Normal, Poisson

KEY = jax.random.key(0)

NETWORKS = {
    "linear": lambda likelihood: models.mlp((4, 4), likelihood, hidden=()),
    "mlp": lambda likelihood: models.mlp((4, 4), likelihood, hidden=(8, 8)),
    "cnn": lambda likelihood: models.cnn((8, 8), likelihood, channels=(4, 6), hidden=(5,)),
    "mobilenet": lambda likelihood: models.mobilenet((8, 8, 3), likelihood, group=2, blocks=((8, 1), (6, 1), (10, 2))),
}
SHAPES = {"linear": (4, 4), "mlp": (4, 4), "cnn": (8, 8), "mobilenet": (8, 8, 3)}


@pytest.mark.parametrize("likelihood", [Categorical(3), Bernoulli(), Normal(0.5), Normal(None), Poisson()], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_network_gives_what_the_likelihood_needs(name, likelihood):
    model = NETWORKS[name](likelihood)
    params = jax.jit(model.init)(KEY)
    assert set(params) - {"log_scale"} == ({"head"} if name == "linear" else {"body", "head"})
    assert set(params["head"]) == {"kernel", "bias"}
    assert ("log_scale" in params) == (likelihood == Normal(None))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    x = jax.random.normal(jax.random.key(1), (6, *SHAPES[name]))
    y = jnp.array([0, 1, 1, 0, 1, 0])
    outputs = jax.jit(model.apply)(params, x)
    assert outputs.shape == (6, likelihood.outputs)
    assert likelihood.distribution(outputs).batch_shape == (6,)

    def loss(params, x, y):
        return -likelihood.log_prob(model.apply(params, x), y).sum()

    gradient = jax.jit(jax.grad(loss))(params, x, y)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))
    assert all(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(gradient["head"]))


@pytest.mark.parametrize("name", NETWORKS)
def test_network_maps_scans_and_splits_by_rows(name):
    model = NETWORKS[name](Categorical(3))
    many = jax.vmap(model.init)(jax.random.split(KEY, 2))
    x = jax.random.normal(jax.random.key(1), (2, 6, *SHAPES[name]))
    y = jnp.zeros((6,), jnp.int32)

    def gradient(params, x):
        return jax.grad(lambda p: -model.likelihood.log_prob(model.apply(p, x), y).mean())(params)

    mapped = jax.jit(jax.vmap(gradient))(many, x)
    looped = jax.lax.scan(lambda carry, each: (carry, gradient(*each)), 0, (many, x))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), mapped, looped)
    params = jax.tree.map(lambda leaf: leaf[0], many)
    apply = jax.jit(model.apply)
    whole = apply(params, x[0])
    parts = jnp.concatenate([apply(params, x[0, :1]), apply(params, x[0, 1:])])
    np.testing.assert_allclose(whole, parts, rtol=1e-4, atol=1e-5)
    assert apply(params, x[0, :0]).shape == (0, 3)


def test_initialisations():
    kernel = models.mlp((400,), Categorical(10), hidden=(300,)).init(KEY)["body"]["dense0"]["kernel"]
    assert float(jnp.abs(kernel).max()) <= 1 / 20
    np.testing.assert_allclose(kernel.std(), 1 / 20 / math.sqrt(3), rtol=0.02)
    params = models.mlp((400,), Categorical(10), hidden=(300,), init="lecun").init(KEY)["body"]["dense0"]
    np.testing.assert_allclose(params["kernel"].std(), 1 / 20, rtol=0.02)
    assert not params["bias"].any()
    one, other = (models.cnn((8, 8), Categorical(2)).init(jax.random.key(seed)) for seed in (1, 2))
    assert all(bool(jnp.any(a != b)) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    with pytest.raises(UserError, match="torch or lecun"):
        models.mlp((4,), Categorical(2), init="he")


def test_published_sizes():
    def size(model):
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)))

    assert size(models.cnn((28, 28), Categorical(62))) == 1_206_590  # Reddi et al. 2020, table 4
    convolutions = 3 * 9 * 32 + sum(9 * c + c * d for c, d in [(32, 64), (64, 128), (128, 128), (128, 256), (256, 256)])
    convolutions += 9 * 256 + 256 * 512 + 5 * (9 * 512 + 512 * 512) + 9 * 512 + 512 * 1024 + 9 * 1024 + 1024 * 1024
    body = jax.eval_shape(models.mobilenet((32, 32, 3), Categorical(100)).init, KEY)["body"]
    assert convolutions == sum(math.prod(layer["kernel"].shape) for layer in body.values() if "kernel" in layer)


def test_rows_do_not_look_alike_after_thirteen_blocks():
    params = (model := models.mobilenet((32, 32, 3), Categorical(100), width=0.25)).init(KEY)
    rows = jax.image.resize(jax.random.normal(KEY, (20, 4, 4, 3)), (20, 32, 32, 3), "linear")
    outputs = model.apply(params, rows) - params["head"]["bias"][None]
    between = jnp.std(outputs, axis=0).mean() / jnp.std(outputs)
    assert between > 0.7  # .9; with plain ReLUs .16, and the head sees next to nothing of a row


@pytest.mark.parametrize(("shift", "scale"), [(3.0, 2.0), (np.arange(12.0).reshape(2, 2, 3), np.full((2, 2, 3), 2.0))])
def test_rows_are_standardised(shift, scale):
    x = np.arange(48, dtype=np.uint8).reshape(4, 2, 2, 3)
    params = models.mlp((2, 2, 3), Categorical(2)).init(KEY)
    given = models.mlp((2, 2, 3), Categorical(2), shift=shift, scale=scale).apply(params, jnp.asarray(x))
    expected = models.mlp((2, 2, 3), Categorical(2)).apply(
        params, jnp.asarray((x.astype(np.float32) - shift) / scale, jnp.float32)
    )
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_standardisation_by_channel():
    shift = np.array([1.0, 2.0, 3.0])
    model = models.mlp((2, 2, 3), Categorical(2), shift=shift)
    params = model.init(KEY)
    x = jnp.broadcast_to(jnp.asarray(shift, jnp.float32).reshape(1, 1, 1, 3), (1, 2, 2, 3))
    zero = models.mlp((2, 2, 3), Categorical(2)).apply(params, jnp.zeros((1, 2, 2, 3)))
    np.testing.assert_allclose(model.apply(params, x), zero, rtol=1e-6)
    with pytest.raises(UserError, match="do not fit"):
        models.mlp((4,), Categorical(2), shift=shift)


def test_log_prob_by_hand():
    logits = jnp.array([[0.0, 1.0], [2.0, -1.0]])
    expected = [1 - math.log(1 + math.e), 2 - math.log(math.exp(2) + math.exp(-1))]
    np.testing.assert_allclose(Categorical(2).log_prob(logits, jnp.array([1, 0])), expected, rtol=1e-6)
    np.testing.assert_allclose(
        Bernoulli().log_prob(jnp.array([[1.0], [1.0]]), jnp.array([1, 0])),
        [-math.log1p(math.exp(-1)), -math.log1p(math.exp(1))],
        rtol=1e-6,
    )
    normal = -0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(
        Normal(0.5).log_prob(jnp.array([[1.0]]), jnp.array([2.0])), [normal - math.log(0.5) - 2.0], rtol=1e-6
    )
    np.testing.assert_allclose(
        Normal(None).log_prob(jnp.array([[1.0, math.log(2.0)]]), jnp.array([2.0])), [normal - math.log(2) - 1 / 8], rtol=1e-6
    )
    np.testing.assert_allclose(
        Poisson().log_prob(jnp.array([[math.log(3.0)]]), jnp.array([2])), [2 * math.log(3) - 3 - math.log(2)], rtol=1e-5
    )


@pytest.mark.parametrize("likelihood", [Categorical(3), Bernoulli(), Normal(0.5), Normal(None), Poisson()], ids=str)
def test_log_prob_of_draws_and_samples(likelihood):
    parameters = jax.random.normal(KEY, (7, 5, likelihood.outputs))
    y = jnp.array([0, 1, 1, 0, 1])
    draws = likelihood.log_prob(parameters, y)
    assert draws.shape == (7, 5)
    np.testing.assert_allclose(draws[3], likelihood.log_prob(parameters[3], y), rtol=1e-6)
    with jax.numpy_dtype_promotion("standard"):  # NumPyro's Bernoulli asks whether a boolean is 0 or 1
        assert likelihood.distribution(parameters).sample(KEY).shape == (7, 5)


def test_learned_scale_recovers_the_noise():
    x = jax.random.normal(KEY, (500, 2))
    y = x @ jnp.array([1.0, -2.0]) + 0.3 * jax.random.normal(jax.random.key(1), (500,))
    model = models.mlp((2,), Normal(None), hidden=())
    assert model.init(KEY)["log_scale"].shape == ()

    def step(params, _):
        gradient = jax.grad(lambda p: -model.likelihood.log_prob(model.apply(p, x), y).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient), None

    params, _ = jax.lax.scan(step, model.init(KEY), length=1000)
    np.testing.assert_allclose(jnp.exp(params["log_scale"]), 0.3, rtol=0.1)
    np.testing.assert_allclose(params["head"]["kernel"][:, 0], [1.0, -2.0], atol=0.05)


def test_flax_module():
    model = models.from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs), Categorical(3))
    params = model.init(KEY)
    x = jax.random.normal(KEY, (5, 4))
    np.testing.assert_allclose(model.apply(params, x), x @ params["kernel"] + params["bias"].reshape(1, 3), rtol=1e-5)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(12)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    stack = models.from_flax(Stack, Categorical(4), shape=(4,))
    params = stack.init(KEY)
    assert set(params["layers"]) == {str(i) for i in range(12)}
    assert stack.apply(params, x).shape == (5, 4)


def test_flax_module_with_state_is_refused():
    class Normalised(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)

    with pytest.raises(UserError, match=r"BatchStat at norm/mean.*group or layer"):
        models.from_flax(Normalised, Categorical(3))

    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    with pytest.raises(UserError, match="dropout"):
        models.from_flax(Dropped, Categorical(3))


def test_linen_module():
    module = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(3)])
    model = models.from_flax(module, Categorical(3), shape=(4,), shift=1.0, scale=2.0)
    params, x = model.init(KEY), jax.random.normal(KEY, (5, 4))
    assert jax.tree.map(jnp.shape, params)["layers_2"] == {"bias": (3,), "kernel": (8, 3)}
    np.testing.assert_allclose(model.apply(params, x), module.apply({"params": params}, (x - 1) / 2), rtol=1e-5)
    assert set(fb.FedPer(model, personal=("layers_2",)).init_server(KEY).shared) == set(params)
    scaled = models.from_flax(linen.Dense(1), Normal(None), shape=(4,))
    assert scaled.apply(scaled.init(KEY), x).shape == (5, 2)


def test_linen_module_trains(clients):
    model = models.from_flax(linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(2)]), Categorical(2), shape=(4,))
    fit = fb.simulate(fb.FedAvg(model, train=fb.Training(epochs=5, batch=8, lr=0.3, momentum=0.9)), clients, rounds=10)
    assert fit.evaluation.summary()["global"]["participating"]["accuracy"]["rows"] > 0.85


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (linen.Dense(3), None, "shape is missing; give that of one row"),
        (
            linen.Sequential([linen.BatchNorm(use_running_average=False), linen.Dense(3)]),
            (4,),
            "keeps batch_stats.*group or layer",
        ),
        (linen.Dense(2), (4,), "change the last layer"),
        (nnx.Linear(4, 3, rngs=nnx.Rngs(0)), (4,), r"takes a function that makes one: lambda rngs: Linear\(…, rngs=rngs\)"),
    ],
)
def test_flax_modules_that_are_no_model(module, shape, message):
    with pytest.raises(UserError, match=message):
        models.from_flax(module, Categorical(3), shape=shape)


@pytest.mark.parametrize("foreign", ["mlp", linen.Dense(3), equinox.nn.Linear(4, 3, key=KEY), None, jnp.tanh])
@pytest.mark.parametrize("make", [fb.FedAvg, fb.FedVI, fb.BPFed, fb.FedHBNIW])
def test_what_is_no_model_is_refused_when_the_algorithm_is_made(make, foreign):
    given = "'mlp'" if foreign == "mlp" else type(foreign).__name__
    with pytest.raises(
        UserError, match=rf'the model is {given}, but it is a network for the data: fb.network\("mlp", clients\)'
    ):
        make(foreign)


def test_equinox_module():
    model = models.from_equinox(lambda key: equinox.nn.MLP(4, 3, 8, 2, key=key), Categorical(3), shape=(4,))
    params = model.init(KEY)
    assert set(params["layers"]) == {"0", "1", "2"}
    x = jax.random.normal(KEY, (5, 4))
    expected = jax.vmap(equinox.nn.MLP(4, 3, 8, 2, key=KEY))(x)
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-5)
    assert jax.tree.structure(jax.jit(jax.grad(lambda p: model.apply(p, x).sum()))(params)) == jax.tree.structure(params)
    scaled = models.from_equinox(lambda key: equinox.nn.MLP(4, 1, 8, 2, key=key), Normal(None), shape=(4,))
    assert scaled.apply(scaled.init(KEY), x).shape == (5, 2)


def test_equinox_module_with_state_is_refused():
    with pytest.raises(UserError, match="running state"):
        models.from_equinox(lambda key: equinox.nn.BatchNorm(3, "batch", mode="ema"), Categorical(3))


def test_outputs_that_do_not_match_the_likelihood():
    with pytest.raises(UserError, match="change the last layer"):
        models.from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs), Categorical(5), shape=(4,))
    with pytest.raises(UserError, match="change the last layer"):
        models.from_functions(lambda key: {"w": jnp.zeros((4,))}, lambda params, x: x @ params["w"], Bernoulli(), shape=(4,))
    with pytest.raises(UserError, match="one mean per row"):
        models.from_flax(lambda rngs: nnx.Linear(4, 3, rngs=rngs), Normal(None), shape=(4,))
    with pytest.raises(UserError, match="return a dict"):
        models.from_functions(lambda key: jnp.zeros(4), lambda params, x: x, Bernoulli())


def rows(shape, classes=tuple("abc")):
    return types.SimpleNamespace(
        shape=shape, classes=classes, y=None, shift=0.0, scale=255.0, target_moments=lambda: (0.0, 1.0)
    )


def test_network_by_name():
    assert models.network("mlp", rows((7,))).likelihood == Categorical(3)
    assert models.network("mlp", rows((7,), None)).likelihood == Normal(None)
    assert models.network("mlp", rows((7,), None), likelihood="poisson").likelihood == Poisson()
    assert models.network("mlp", rows((7,), ("no", "yes")), likelihood="bernoulli").likelihood == Bernoulli()
    assert models.network("mlp", rows((7,)), likelihood=Normal(2.0)).likelihood == Normal(2.0)
    model = models.network("cnn", rows((28, 28)), channels=(4,), hidden=())
    images = jnp.full((2, 28, 28), 255, jnp.uint8)
    params = model.init(KEY)
    assert params["body"]["conv0"]["kernel"].shape == (3, 3, 1, 4)
    expected = models.cnn((28, 28, 1), Categorical(3), channels=(4,), hidden=()).apply(params, jnp.ones((2, 28, 28, 1)))
    np.testing.assert_allclose(model.apply(params, images), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("cn", rows((28, 28)), {}, 'no network "cn"; did you mean cnn'),
        ("transformer", rows((28, 28)), {}, "there is linear, mlp, cnn, mobilenet"),
        ("cnn", rows((784,)), {}, r"\(height, width\).*\(784,\); use mlp"),
        ("mobilenet", rows((784,)), {}, r"\(height, width\)"),
        ("cnn", rows((5, 5)), {}, "at least 6 pixels"),
        ("mlp", rows((7,)), {"likelihood": "poison"}, "did you mean poisson"),
        ("mlp", rows((7,)), {"likelihood": "bernoulli"}, "2 classes"),
        ("mlp", rows((7,), None), {"likelihood": "categorical"}, "needs labels"),
        ("mlp", rows((7,)), {"depth": 3}, "mlp has no option depth"),
    ],
)
def test_bad_names(name, data, options, message):
    with pytest.raises(UserError, match=message):
        models.network(name, data, **options)


def test_normal_scale_must_be_positive():
    with pytest.raises(UserError, match="above zero"):
        Normal(0.0)


@pytest.mark.parametrize("likelihood", [Categorical(3), Normal(None)], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_readout_of_features_is_the_network(name, likelihood):
    model = models.in_units(NETWORKS[name](likelihood), 5.0, 2.0)
    params, x = model.init(KEY), jax.random.normal(jax.random.key(1), (5, *SHAPES[name]))
    features = jax.jit(model.features)(params, x)
    assert features.ndim == 2
    np.testing.assert_allclose(jax.jit(model.readout)(params, features), jax.jit(model.apply)(params, x), rtol=1e-5, atol=1e-6)
