"""Each partition against what its paper says of it."""

from __future__ import annotations

import numpy as np
import pytest

from fedbayes.data import partitions
from fedbayes.data.partitions import FORMS, parse
from fedbayes.errors import UserError

LABELS = np.random.default_rng(5).permutation(np.arange(6000) % 10)
CALLS = {kind: parse({"shards": "shards:5", "labels": "labels:3"}.get(kind, kind)) for kind in FORMS}


def table(labels: np.ndarray, client: np.ndarray, clients: int) -> np.ndarray:
    counts = np.zeros((clients, labels.max() + 1), int)
    np.add.at(counts, (client[client >= 0], labels[client >= 0]), 1)
    return counts


@pytest.mark.parametrize("kind", FORMS)
def test_every_partition_is_seeded_and_gives_every_client_rows(kind: str) -> None:
    coarse = np.arange(10) // 2
    client = CALLS[kind](LABELS, 20, 3, coarse)
    assert client.shape == LABELS.shape
    assert client.min() >= -1
    assert np.bincount(client[client >= 0], minlength=20).min() > 0
    assert client.max() == 19
    assert (client >= 0).mean() > 0.95
    assert (client == CALLS[kind](LABELS, 20, 3, coarse)).all()
    assert (client != CALLS[kind](LABELS, 20, 4, coarse)).any()


def test_iid_has_equal_sizes_and_labels_as_in_all() -> None:
    counts = table(LABELS, partitions.iid(LABELS, 10), 10)
    assert (counts.sum(1) == 600).all()
    assert abs(counts - 60).max() < 40


def test_shards_have_equal_sizes_and_few_labels() -> None:
    counts = table(LABELS, partitions.shards(LABELS, 100, 5), 100)
    assert (counts.sum(1) == 60).all()
    assert (counts % 12 == 0).all(), "600 rows a label are 50 whole shards of 12"
    assert ((counts > 0).sum(1) <= 5).all()
    assert (counts.sum(0) == 600).all()


def test_dirichlet_concentrates_with_alpha() -> None:
    def largest_share(alpha: float) -> float:
        counts = table(LABELS, partitions.dirichlet(LABELS, 20, alpha, minimum=10), 20)
        assert counts.sum() == 6000
        assert counts.sum(1).min() >= 10
        return float((counts.max(1) / counts.sum(1)).mean())

    assert largest_share(0.05) > 0.6 > largest_share(0.5) > 0.2 > largest_share(100.0) > 0.1


def test_dirichlet_proportions_have_the_variance_of_the_distribution() -> None:
    labels = np.zeros(20000, int)
    shares = np.concatenate(
        [np.bincount(partitions.dirichlet(labels, 5, 2.0, seed=s), minlength=5) / 20000 for s in range(200)]
    )
    # Dirichlet(2, ..., 2) over 5: mean 1/5, variance (1/5)(4/5)/(10 + 1)
    assert abs(shares.mean() - 0.2) < 1e-9
    assert abs(shares.var() - 0.16 / 11) < 0.0015


def test_dirichlet_fills_up_to_the_minimum() -> None:
    client = partitions.dirichlet(LABELS[:200], 50, 0.01, minimum=4)
    assert (np.bincount(client) == 4).all()


def test_labels_per_client_are_balanced() -> None:
    counts = table(LABELS, partitions.labels_per_client(LABELS, 10, 5), 10)
    assert ((counts > 0).sum(1) == 5).all()
    assert ((counts > 0).sum(0) == 5).all(), "each label has as many clients as any other"
    assert set(counts[counts > 0].tolist()) == {120}
    assert ((table(LABELS, partitions.labels_per_client(LABELS, 7, 3), 7) > 0).sum(0) >= 2).all()


@pytest.mark.parametrize("clients", [10, 50])
def test_majority_is_of_the_share(clients: int) -> None:
    counts = table(LABELS, partitions.majority(LABELS, clients, 0.9), clients)
    size = 6000 // clients
    assert (counts.sum(1) == size).all()
    assert (counts.max(1) == round(0.9 * size)).all()
    assert (np.bincount(counts.argmax(1)) == clients // 10).all()
    assert ((counts > 0).sum(1) >= 6).all(), "the others are spread over the labels"


@pytest.mark.parametrize("clients", [3, 4, 10, 25, 60])
def test_majority_with_unequal_labels(clients: int) -> None:
    labels = np.repeat(np.arange(5), [100, 400, 800, 1200, 2000])
    counts = table(labels, partitions.majority(labels, clients, 0.8), clients)
    sizes = counts.sum(1)
    assert (sizes == sizes[0]).all()
    np.testing.assert_allclose(counts.max(1) / sizes, 0.8, atol=1 / sizes[0])


def test_pachinko_prefers_fine_labels_of_the_same_coarse_label() -> None:
    fine = np.arange(12000) % 100
    coarse = np.arange(100) // 5
    client = partitions.pachinko(fine, coarse, 100)
    counts = table(fine, client, 100)
    assert (counts.sum(1) == 120).all(), "without replacement, all rows in equal parts"
    assert (counts.sum(0) == 120).all()
    by_coarse = counts.reshape(100, 20, 5).sum(2)
    assert np.median((by_coarse > 0).sum(1)) < 10, "Dirichlet(0.1) over 20: few coarse labels"
    first = counts[:30].reshape(30, 20, 5)
    main = first[np.arange(30), first.sum(2).argmax(1)]
    assert (main > 0).mean() > 0.95, "Dirichlet(10) over 5: nearly all fine labels"


def test_by_column() -> None:
    client, names = partitions.by_column(np.array([30, 10, 30]))
    assert client.tolist() == [1, 0, 1]
    assert names.tolist() == ["10", "30"]


@pytest.mark.parametrize("kind", FORMS)
def test_test_rows_follow_the_training_rows(kind: str) -> None:
    test_labels = np.arange(3000) % 10
    client = CALLS[kind](LABELS, 20, 0, np.arange(10) // 2)
    followed = partitions.follow(LABELS, client, test_labels, 20)
    train, test = table(LABELS, client, 20), table(test_labels, followed, 20)
    assert (followed >= 0).all()
    # proportional means within one row of the exact share
    assert abs(test - train / train.sum(0) * 300).max() < 1
    assert (test[train == 0] == 0).all()


def test_test_rows_of_a_label_that_nobody_trains_on_are_left_out() -> None:
    assert partitions.follow(np.array([0, 0]), np.array([0, 1]), np.array([0, 1]), 2)[1] == -1


def test_pachinko_by_its_own_function_needs_coarse_labels() -> None:
    with pytest.raises(UserError, match="needs coarse and fine labels"):
        parse("pachinko")(LABELS, 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shard:5", "did you mean shards"),
        ("zebra", "choose one of iid, shards:5"),
        ("shards:x", "a number that does not fit; write shards:5"),
        ("shards:2.5", "does not fit"),
        ("dirichlet:-1", "does not fit"),
        ("dirichlet:nan", "does not fit"),
        ("iid:3", "does not fit"),
    ],
)
def test_unknown_partitions_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("shards:5", 100, "100 clients with 5 shards each need 500 rows but there are 60"),
        ("iid", 61, "61 clients need 61 rows but there are 60"),
        ("dirichlet:0.3", 61, "need 61 rows"),
        ("labels:11", 5, "labels:11 cannot share 10 labels over 5 clients; expected between 2 and 10"),
        ("labels:1", 5, "cannot share 10 labels"),
        ("majority:1.2", 5, "majority:1.2 is not a share"),
        ("iid", 0, "over 0 clients"),
    ],
)
def test_impossible_partitions_are_refused(spec: str, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(spec)(LABELS[:60], clients)


def test_numbers_have_no_labels_to_divide_by() -> None:
    with pytest.raises(UserError, match="the target is numeric; use iid"):
        parse("shards:2")(np.ones(60, np.float32), 3)
    assert np.bincount(parse("iid")(np.ones(60, np.float32), 3)).tolist() == [20, 20, 20]
