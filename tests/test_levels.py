"""The width of the prior of classes' biases: against quadrature, and where clients' shares of the classes spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

import fedbayes as fb
from fedbayes.data import Clients
from fedbayes.models import Categorical, Normal, linear
from fedbayes.primitives import levels


@pytest.mark.parametrize("rows", [4, 40])
def test_the_evidence_of_a_width_is_that_of_quadrature(rows):
    random = np.random.default_rng(rows)
    outputs = random.normal(size=(rows + 3, 2))
    y = (random.random(rows + 3) < 0.8).astype(np.int32)
    exists = np.arange(rows + 3) < rows
    found = levels.evidence(jnp.asarray(outputs, jnp.float32), jnp.asarray(y), jnp.asarray(exists))
    # Of two classes only the difference of the biases matters, which is N(0, 2 τ²).
    for width, value in zip(levels.WIDTHS, found, strict=True):
        d = np.sqrt(2) * width * np.linspace(-8, 8, 2001)
        logs = log_softmax(outputs[None] + np.stack([-d / 2, d / 2], axis=1)[:, None], axis=2)
        each = np.take_along_axis(logs, y[None, :, None], axis=2)[..., 0][:, exists].sum(axis=1)
        prior = -0.5 * (d / (np.sqrt(2) * width)) ** 2 - np.log(np.sqrt(2 * np.pi) * np.sqrt(2) * width)
        assert float(value) == pytest.approx(logsumexp(each + prior) + np.log(d[1] - d[0]), abs=0.25 if rows < 10 else 0.06)


def test_averages_follow_the_rounds_in_which_clients_tell():
    total, told = jnp.zeros(6), jnp.arange(6.0)
    for round in range(12):
        total = levels.after(total, jnp.int32(round), told if (round + 1) % levels.EVERY == 0 else jnp.zeros(6))
    np.testing.assert_allclose(total, told, rtol=1e-6)


def shares(width, clients=60, rows=80):
    """Clients with the same slopes and a bias N(0, width²) of their own for each of three classes."""
    random = np.random.default_rng(3)
    x = random.normal(size=(clients * rows, 4)).astype(np.float32)
    who = np.repeat(np.arange(clients), rows)
    scores = x @ random.normal(size=(4, 3)) + width * random.normal(size=(clients, 3))[who]
    y = (scores + random.gumbel(size=scores.shape)).argmax(axis=1)
    return Clients.build(x, y, who, test=0.5, seed=0, name="shares").hold_out(20, seed=0)


@pytest.mark.parametrize("width", [0.25, 1.0])
def test_the_width_is_found_and_serves_newcomers(width):
    data = shares(width)
    modes, model = ("global", "adapted:5", "adapted"), linear((4,), Categorical(3))
    fit = fb.simulate(fb.FedPop(model, sigma=0.05, draws=50), data, 40, choose=False, modes=modes)
    assert width / 1.5 < float(jnp.sqrt(fit.simulation.down().square)) < 1.5 * width
    known = fb.simulate(fb.FedPop(model, sigma=0.05, level=width / 0.05, draws=50), data, 40, choose=False, modes=modes)
    found, right = (
        {mode: one["unseen"]["log_score"]["rows"] for mode, one in each.evaluation.summary().items()} for each in (fit, known)
    )
    for mode in ("adapted:5", "adapted"):
        assert found[mode] > right[mode] - 0.01
    assert found["adapted"] > found["global"] + (0.02 if width == 1 else -0.01)


def test_only_classes_have_a_width_of_their_own():
    def state(algorithm):
        return algorithm.init_server(jax.random.key(0)).levels

    classes = linear((4,), Categorical(3))
    assert state(fb.FedPop(classes)).tolist() == [0.0] * 6
    for other in (fb.FedPop(classes, level=2.0), fb.FedPop(classes, mixture=True), fb.FedPop(linear((4,), Normal(scale=None)))):
        assert state(other) is None
