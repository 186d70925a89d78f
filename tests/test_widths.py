"""The posterior under a prior of uncertain width, against sums that NumPy does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbayes as fb
from fedbayes.algorithm import Data
from fedbayes.models import Categorical, Normal
from fedbayes.primitives import laplace, widths
from fedbayes.primitives.laplace import Head

NOISE, SIGMAS = 0.5, (0.0, 0.3, 3.0)
SETTINGS = jnp.asarray(SIGMAS)[:, None]


def rows(n, slope, seed=0, padding=3):
    random = np.random.default_rng(seed)
    x = np.pad(random.normal(size=(n, 2)), ((0, padding), (0, 0))).astype(np.float32)
    y = (x @ np.array(slope) + NOISE * random.normal(size=n + padding)).astype(np.float32)
    return Data(jnp.asarray(x), jnp.asarray(y), jnp.arange(n + padding) < n)


def head_of(data):
    """A linear model without an intercept around 0, whose only setting is the prior's width."""

    def head(settings, mask):
        variance = {"w": settings[0] ** 2}
        return Head(lambda z: data.x @ z["w"], Normal(NOISE), data.y, mask, {"w": jnp.zeros((2, 1))}, variance)

    return head


def by_hand(data, fold, sigma, log_prior):
    """log π_k + Σ_f log p(rows of fold f | the mode from the others), and the mode from all rows."""
    x, y = np.asarray(data.x, float), np.asarray(data.y, float)

    def mode(kept):
        precision = x[kept].T @ x[kept] / NOISE**2 + np.eye(2) / max(sigma, 1e-6) ** 2
        return np.linalg.solve(precision, x[kept].T @ y[kept] / NOISE**2)

    exists = fold >= 0
    off = np.concatenate([y[fold == f] - x[fold == f] @ mode(exists & (fold != f)) for f in range(widths.FOLDS)])
    return log_prior - np.sum(off**2) / (2 * NOISE**2), mode(exists)


@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize("slope", [(0.1, 0.0), (4.0, -3.0)], ids=["near", "far"])
def test_components_are_weighed_by_rows_held_out_in_turn(n, slope):
    data, log_prior = rows(n, slope), jnp.log(jnp.array([0.5, 0.3, 0.2]))
    found = widths.fitted(jax.random.key(0), head_of(data), SETTINGS, log_prior, data)
    fold = np.asarray(widths.folds(jax.random.key(0), data))
    assert sorted(np.bincount(fold[fold >= 0], minlength=5)) == sorted(np.bincount(np.arange(n) % 5, minlength=5))
    expected = [by_hand(data, fold, sigma, float(prior)) for sigma, prior in zip(SIGMAS, log_prior, strict=True)]
    logs = np.array([one for one, _ in expected])
    np.testing.assert_allclose(found.log_weight, logs - np.logaddexp.reduce(logs), atol=1e-3 * max(1, np.abs(logs).max()))
    np.testing.assert_allclose(found.modes["w"][:, :, 0], [mode for _, mode in expected], atol=2e-3)


def test_draws_have_the_components_shares_and_each_its_own_posterior():
    data = rows(12, (0.6, 0.0))
    head = head_of(data)
    mixed = widths.fitted(jax.random.key(0), head, SETTINGS, jnp.zeros(3), data)
    mixed = mixed._replace(log_weight=jnp.log(jnp.array([0.25, 0.25, 0.5])))
    z, chosen = widths.draws(jax.random.key(1), head, SETTINGS, mixed, data.mask, 4000)
    assert np.abs(np.bincount(np.asarray(chosen)) / 4000 - [0.25, 0.25, 0.5]).max() <= 1 / 4000
    for place, sigma in enumerate(SIGMAS):
        own = np.asarray(z["w"])[np.asarray(chosen) == place, :, 0]
        x = np.asarray(data.x, float)
        covariance = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(2) / max(sigma, 1e-6) ** 2)
        sd = np.sqrt(np.diag(covariance))
        np.testing.assert_allclose(own.mean(axis=0), mixed.modes["w"][place, :, 0], atol=0.15 * sd.max() + 1e-6)
        np.testing.assert_allclose(own.std(axis=0), sd, rtol=0.1, atol=1e-6)


def test_one_component_is_the_mode_itself():
    data = rows(9, (1.0, 2.0))
    found = widths.fitted(jax.random.key(0), head_of(data), SETTINGS[2:], jnp.zeros(1), data)
    mode = laplace.mode(head_of(data)(SETTINGS[2], data.mask))["w"]
    np.testing.assert_allclose(found.modes["w"][0], mode, atol=1e-5)
    assert float(found.log_weight[0]) == 0


def test_rows_that_do_not_exist_and_their_number_change_nothing():
    few, more = rows(9, (1.0, 2.0), padding=1), rows(9, (1.0, 2.0), padding=7)
    more = Data(*(leaf.at[:9].set(other[:9]) for leaf, other in zip(more, few, strict=True)))
    one, other = (widths.fitted(jax.random.key(3), head_of(d), SETTINGS, jnp.zeros(3), d) for d in (few, more))
    scores = [np.asarray(found.log_weight) for found in (one, other)]
    np.testing.assert_allclose(np.exp(scores[0]), np.exp(scores[1]), atol=0.2)  # the folds are others
    np.testing.assert_allclose(one.modes["w"], other.modes["w"], atol=1e-4)


def test_a_client_who_differs_moves_far_and_the_others_stay():
    """Nine clients share one rule, two follow its opposite: a single width must fail one kind."""
    random = np.random.default_rng(0)
    clients = np.repeat(np.arange(13), 40)
    x = random.normal(size=(len(clients), 4)).astype(np.float32)
    flipped = np.isin(clients, (10, 11))
    y = ((x[:, 0] + 0.3 * random.normal(size=len(x)) > 0) ^ flipped).astype(np.int32)
    data = fb.Clients.build(x, y, clients, test=0.5, seed=0)
    fit = fb.simulate(fb.FedPop(fb.models.linear((4,), Categorical(2)), mixture=True), data, rounds=20, choose=False)
    weights = {}
    for name in ("0", "10"):
        rows_x, rows_y = data.rows(name)
        posterior = fit.adapt(rows_x[:20], rows_y[:20])
        right = posterior.predict(rows_x)[np.arange(len(rows_y)), rows_y]
        weights[name] = float(np.mean(np.log(right)))
    assert min(weights.values()) > -0.45, weights
    stays = fb.simulate(
        fb.FedPop(fb.models.linear((4,), Categorical(2)), sigma=0.1, temperature=0.0), data, rounds=20, choose=False
    )
    rows_x, rows_y = data.rows("10")
    narrow = stays.adapt(rows_x[:20], rows_y[:20]).predict(rows_x)[np.arange(len(rows_y)), rows_y]
    assert weights["10"] > float(np.mean(np.log(narrow))) + 0.3
