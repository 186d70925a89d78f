"""Temperature scaling: the temperature that is known, rows that never train, messages that stay what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close, assert_same, simulated

import fedbayes as fb
from fedbayes import wire
from fedbayes.algorithm import Data
from fedbayes.algorithms.tempered import Tempered
from fedbayes.evaluation.assess import assess
from fedbayes.evaluation.score import score
from fedbayes.models import Categorical, Normal, from_functions, linear
from fedbayes.primitives.training import Training

KEY = jax.random.key(3)
NONE = Training(epochs=0)


def logits_as_given():
    """A network that passes its rows on as logits, times a weight that starts at 5."""

    def init(key):
        return {"body": jnp.float32(5), "head": jnp.float32(0)}

    def apply(params, x):
        return params["body"] * x + params["head"]

    return from_functions(init, apply, Categorical(3), shape=(3,))


def rows_from(logits, seed=0):
    generator = np.random.default_rng(seed)
    noise = -np.log(-np.log(generator.uniform(size=logits.shape)))
    return np.argmax(logits + noise, axis=1)


def test_finds_the_temperature_that_logits_were_multiplied_by():
    x = np.random.default_rng(1).normal(size=(20000, 3)).astype(np.float32)
    data = Data(jnp.asarray(x), jnp.asarray(rows_from(x)), jnp.ones(len(x), bool))
    algorithm = Tempered(fb.FedPer(logits_as_given(), train=NONE, tune=NONE), share=0.5)
    server, local = algorithm.init_server(KEY), algorithm.init_local(KEY, data)
    down = algorithm.broadcast(KEY, server)
    _, kept = jax.jit(algorithm.client)(KEY, down, local, data)
    assert float(jnp.exp(kept.log_temperature)) == pytest.approx(5, rel=0.05)
    adapted = jax.jit(algorithm.adapt)(KEY, down, local, data)
    assert float(adapted.log_temperature) == pytest.approx(float(kept.log_temperature), abs=1e-6)
    before, after = (
        score(algorithm.model.likelihood, algorithm.predict(KEY, down, state, data.x), data.y, data.mask)
        for state in (local, kept)
    )
    assert float(before.error) == float(after.error)
    assert float(after.log_score) > float(before.log_score)


def test_few_rows_stay_near_one():
    x = 10 * np.eye(3, dtype=np.float32)[[0, 1]]
    data = Data(jnp.asarray(x), jnp.array([1, 0]), jnp.ones(2, bool))
    algorithm = Tempered(fb.FedPer(logits_as_given(), train=NONE), share=0.4)  # less than one row of two
    local = algorithm.init_local(KEY, data)
    _, kept = algorithm.client(KEY, algorithm.broadcast(KEY, algorithm.init_server(KEY)), local, data)
    assert float(kept.log_temperature) == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
def test_rows_that_calibrate_take_no_part_in_training():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(10, 4)).astype(np.float32), generator.integers(0, 2, 10)
    algorithm = Tempered(fb.FedAvg(linear((4,), Categorical(2)), train=Training(batch=4)), share=0.3)
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))

    def sent(y, key=KEY):
        data = Data(jnp.asarray(x), jnp.asarray(y), jnp.ones(10, bool))
        return jax.jit(algorithm.client)(key, down, algorithm.init_local(key, data), data)[0]

    def idle(key):
        """The rows whose labels change nothing of what is sent."""
        start, found = jax.tree.leaves(sent(y, key)), []
        for place in range(10):
            flipped = y.copy()
            flipped[place] = 1 - flipped[place]
            other = jax.tree.leaves(sent(flipped, key))
            if all(np.array_equal(a, b) for a, b in zip(start, other, strict=True)):
                found.append(place)
        return found

    assert len(idle(KEY)) == 3
    assert idle(jax.random.key(9)) == idle(KEY)  # the same rows in each round


def test_padding_changes_nothing():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(16, 4)).astype(np.float32), generator.integers(0, 2, 16)
    algorithm = Tempered(fb.FedAvg(linear((4,), Categorical(2)), train=Training(batch=4)), share=0.3)
    down = algorithm.broadcast(KEY, algorithm.init_server(KEY))
    found = []
    for length in (10, 16):
        data = Data(jnp.asarray(x[:length]), jnp.asarray(y[:length]), jnp.arange(length) < 10)
        found.append(jax.jit(algorithm.client)(KEY, down, algorithm.init_local(KEY, data), data))
    (up, local), (padded_up, padded_local) = found
    assert_close(up, padded_up, 1e-6)
    # A search in single precision finds where a parabola is lowest to about the root of its precision.
    assert_close(local.log_temperature, padded_local.log_temperature, 1e-3)


def test_messages_are_those_of_the_algorithm_inside(clients, model):
    inner = fb.FedPer(model)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), clients.train([0], 8))
    plain, tempered = (wire.manifest(one, data) for one in (inner, Tempered(inner)))
    wire.check(tempered)
    assert [(leaf.path, leaf.shape) for leaf in plain] == [(leaf.path, leaf.shape) for leaf in tempered]


def test_a_run_in_rounds_with_a_temperature_for_each_client(clients, model):
    train = Training(epochs=2, batch=8, lr=0.2)
    simulation = simulated(Tempered(fb.FedPer(model, train=train)), clients, 3, cohort=3)
    again = simulated(Tempered(fb.FedPer(model, train=train)), clients, 3, cohort=3)
    assert_same(simulation.state, again.state)
    temperatures = simulation.local.get(np.arange(len(clients))).log_temperature
    assert len(set(np.round(np.asarray(temperatures), 4))) > 1
    assert set(assess(simulation).summary()) == {"global", "personal", "adapted"}


def test_bad_input_is_refused(model):
    with pytest.raises(fb.UserError, match="share is 1"):
        Tempered(fb.FedPer(model), share=1.0)
    with pytest.raises(fb.UserError, match="predicts numbers"):
        Tempered(fb.FedPer(linear((4,), Normal(scale=1.0))))


@pytest.mark.slow
def test_uncertainty_of_rows_is_what_the_score_sums(clients, model):
    fit = fb.simulate(fb.BPFed(model, train=Training(1, "adam", 8, lr=0.01), draws=5), clients, 1)
    name = str(clients.names[0])
    x, y = clients.rows(name, "test")
    parts = fit.uncertainty(x, name)
    np.testing.assert_allclose(parts.total, parts.aleatoric + parts.epistemic, atol=1e-6)
    scores = fit.evaluation.scores["personal"]
    assert float(parts.epistemic.sum()) == pytest.approx(float(scores.epistemic[0]), rel=1e-3)
    assert float(parts.total.sum()) == pytest.approx(float(scores.total[0]), rel=1e-3)
    assert fit.adapt(x, y).uncertainty(x).total.shape == (len(x),)
