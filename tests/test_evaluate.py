"""Scores against figures worked out by hand or by another library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedbayes.evaluation.score import Score, metrics, score, summary
from fedbayes.models import Bernoulli, Categorical, Normal, Poisson


def scored(likelihood, draws, y, mask=None):
    mask = jnp.ones(len(y), bool) if mask is None else mask
    return jax.jit(score, static_argnums=0)(likelihood, jnp.asarray(draws, jnp.float32), jnp.asarray(y), mask)


@pytest.fixture(scope="module")
def labels():
    generator = np.random.default_rng(1)
    return generator.normal(size=(5, 200, 3)) * 2, generator.integers(0, 3, 200).astype(np.int32)


def test_label_figures_from_their_definitions(labels):
    draws, y = labels
    p = np.exp(draws) / np.exp(draws).sum(-1, keepdims=True)
    mixture = p.mean(0)
    found = metrics(scored(Categorical(3), draws, y), numeric=False)
    confidence, hits = mixture.max(1), mixture.argmax(1) == y
    ece, mce = 0.0, 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            gap = abs(hits[inside].mean() - confidence[inside].mean())
            ece, mce = ece + inside.mean() * gap, max(mce, gap)
    entropy = stats.entropy(mixture, axis=1).mean()
    expected = {
        "accuracy": hits.mean(),
        "log_score": np.log(mixture[np.arange(200), y]).mean(),
        "brier": ((mixture - np.eye(3)[y]) ** 2).sum(1).mean(),
        "ece": ece,
        "mce": mce,
        "entropy": entropy,
        "mutual_information": entropy - stats.entropy(p, axis=2).mean(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=2e-6), name


def test_scores_add_up(labels):
    draws, y = labels
    whole = scored(Categorical(3), draws, y)
    parts = [scored(Categorical(3), draws[:, half], y[half]) for half in (slice(0, 70), slice(70, 200))]
    for a, b in zip(whole, jax.tree.map(jnp.add, *parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_rows_behind_the_mask_do_not_count(labels):
    draws, y = labels
    part = scored(Categorical(3), draws[:, :150], y[:150])
    masked = scored(Categorical(3), np.where(np.arange(200)[None, :, None] < 150, draws, 1e30), y, jnp.arange(200) < 150)
    for a, b in zip(part, masked, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_two_draws_that_contradict_each_other_are_one_bit_of_epistemic_uncertainty():
    draws = np.array([[[60.0, -60.0]], [[-60.0, 60.0]]])
    found = metrics(scored(Categorical(2), draws, np.array([0])), numeric=False)
    assert found["mutual_information"] == pytest.approx(np.log(2), abs=1e-6)
    assert found["entropy"] == pytest.approx(np.log(2), abs=1e-6)


def test_one_draw_has_no_epistemic_part(labels):
    draws, y = labels
    assert metrics(scored(Categorical(3), draws[:1], y), numeric=False)["mutual_information"] == 0


def test_bernoulli_is_categorical_with_a_zero_logit(labels):
    draws, y = labels[0][..., :1], (labels[1] > 0).astype(np.int32)
    both = np.concatenate([np.zeros_like(draws), draws], axis=-1)
    for a, b in zip(scored(Bernoulli(), draws, y), scored(Categorical(2), both, y), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_normal_figures_from_their_definitions():
    generator = np.random.default_rng(2)
    means, y = generator.normal(size=(4, 300, 1)), generator.normal(size=300).astype(np.float32)
    found = metrics(scored(Normal(0.8), means, y), numeric=True)
    mean, epistemic = means[..., 0].mean(0), means[..., 0].var(0)
    deviation = np.sqrt(0.64 + epistemic)
    z = (y - mean) / deviation
    crps = deviation * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    level = stats.norm.cdf(y, means[..., 0], 0.8).mean(0)
    levels = np.arange(1, 15) / 15
    assert found["rmse"] == pytest.approx(np.sqrt(((y - mean) ** 2).mean()), rel=1e-5)
    assert found["log_score"] == pytest.approx(np.log(stats.norm.pdf(y, means[..., 0], 0.8).mean(0)).mean(), rel=1e-5)
    assert found["crps"] == pytest.approx(crps.mean(), rel=1e-4)
    assert found["variance"] == pytest.approx((deviation**2).mean(), rel=1e-5)
    assert found["epistemic_variance"] == pytest.approx(epistemic.mean(), rel=1e-5)
    assert found["coverage"] == pytest.approx((np.abs(level - 0.5) <= 0.45).mean(), abs=1e-6)
    assert found["calibration_error"] == pytest.approx(np.abs((level[:, None] < levels).mean(0) - levels).mean(), abs=1e-6)


def test_a_true_predictive_is_calibrated_and_a_narrow_one_is_not():
    y = np.random.default_rng(3).normal(size=20000).astype(np.float32)
    zeros = np.zeros((1, 20000, 1))
    right, narrow = (metrics(scored(Normal(scale), zeros, y), numeric=True)["calibration_error"] for scale in (1.0, 0.4))
    assert right < 0.01 < 0.1 < narrow


def test_poisson_levels_are_halfway_up_the_step():
    rates, y = np.array([0.5, 3.0, 9.0]), np.array([0, 4, 7])
    found = scored(Poisson(), np.log(rates)[None, :, None], y)
    level = stats.poisson.cdf(y, rates) - stats.poisson.pmf(y, rates) / 2
    assert float(jnp.sum(found.bin_confidence)) == pytest.approx(level.sum(), rel=1e-5)
    assert float(found.log_score) == pytest.approx(stats.poisson.logpmf(y, rates).sum(), rel=1e-5)


def test_summary_weighs_by_rows_and_by_client_and_leaves_out_the_empty():
    def of(rows, errors):
        blank = np.zeros((len(rows), 15))
        rows = np.array(rows, float)
        return Score(rows, np.array(errors, float), *(np.zeros(len(rows)),) * 4, blank, blank, blank)

    found = summary(of([10, 30, 0], [5, 3, 0]), numeric=False)["accuracy"]
    assert found["rows"] == pytest.approx(1 - 8 / 40)
    assert found["clients"] == pytest.approx((0.5 + 0.9) / 2)
    assert found["spread"] == pytest.approx(np.std([0.5, 0.9], ddof=1))
    assert found["worst_tenth"] == pytest.approx(0.5)
    assert summary(of([0], [0]), numeric=False) == {}
