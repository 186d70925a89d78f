"""Clients, what they are built from and how they are gathered, kept and described."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedbayes.data.rows
from fedbayes.data import Clients, describe, label_counts, load, synthetic
from fedbayes.errors import UserError


@pytest.fixture
def clients() -> Clients:
    """Three clients of 5, 2 and 1 rows whose feature is their row number."""
    client = np.array(list("caabaaba"))
    return Clients.build(np.arange(8.0)[:, None] + 1, np.array([0, 1, 0, 1, 0, 1, 0, 1]), client, name="letters", seed=3)


def test_build_sorts_by_client_and_splits_each(clients: Clients) -> None:
    assert clients.names.tolist() == ["a", "b", "c"]
    assert clients.offsets.tolist() == [0, 5, 7, 8]
    assert clients.train_counts.tolist() == [4, 1, 1]
    assert clients.test_counts.tolist() == [1, 1, 0]
    assert sorted(clients.x[:5, 0].tolist()) == [2, 3, 5, 6, 8]
    assert (clients.y == (clients.x[:, 0] - 1) % 2).all(), "rows keep their labels"
    assert clients.x.dtype == np.float32
    assert clients.y.dtype == np.int32
    assert clients.classes == ("0", "1")


def test_split_is_seeded_and_of_the_share() -> None:
    def built(seed: int) -> Clients:
        return Clients.build(np.arange(3000.0), np.arange(3000) % 2, np.arange(3000) % 30, test=0.2, seed=seed)

    assert (built(1).x == built(1).x).all()
    assert not (built(1).x == built(2).x).all()
    assert (built(1).test_counts == 20).all()


@pytest.mark.parametrize("part", ["train", "test"])
def test_gather_is_padded_with_rows_that_do_not_exist(clients: Clients, part: str) -> None:
    counts = clients.train_counts if part == "train" else clients.test_counts
    data = getattr(clients, part)([2, 0], 6, slots=3)
    assert data.x.shape == (3, 6, 1)
    assert data.y.shape == data.mask.shape == (3, 6)
    assert data.mask.sum(1).tolist() == [counts[2], counts[0], 0]
    start = 0 if part == "train" else clients.train_counts[0]
    assert data.x[1][data.mask[1]].tolist() == clients.x[start : start + counts[0]].tolist()
    assert data.y[1][data.mask[1]].tolist() == clients.y[start : start + counts[0]].tolist()
    assert not data.x[~data.mask].any()
    assert not data.y[~data.mask].any()


def test_gather_refuses_what_does_not_fit(clients: Clients) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        clients.train([0], 2)
    assert clients.train(np.array([], int), 4, slots=2).mask.sum() == 0


def test_given_test_rows_are_kept() -> None:
    is_test = np.array([True, False, False, True, True, False])
    clients = Clients.build(np.arange(6.0), np.arange(6) % 2, np.zeros(6, int), is_test=is_test)
    assert clients.x[:, 0].tolist() == [1, 2, 5, 0, 3, 4]
    assert clients.train_counts.tolist() == [3]


def test_rows_without_a_client_are_left_out() -> None:
    client = np.array([-1, 0, 0, 1, 1, -1])
    clients = Clients.build(np.arange(6.0), np.arange(6) % 2, client, names=["a", "b"])
    assert sorted(clients.x[:, 0].tolist()) == [1, 2, 3, 4]
    named = Clients.build(np.arange(6.0), np.arange(6) % 2, np.array([-1, 0, 0, 1, 1, -1]), names=["u", "v"])
    assert named.names.tolist() == ["u", "v"]
    assert (named.x == clients.x).all()


def test_hold_out_is_seeded_and_leaves_participants() -> None:
    clients = synthetic(clients=50)
    held = clients.hold_out(10, seed=1)
    assert held.unseen.sum() == 10
    assert (held.unseen == clients.hold_out(10, seed=1).unseen).all()
    assert (held.unseen != clients.hold_out(10, seed=2).unseen).any()
    assert not held.unseen[held.participants].any()
    assert held.hold_out(5).unseen.sum() == 15
    with pytest.raises(UserError, match="cannot hold out 50 of 50"):
        clients.hold_out(50)


def test_hold_out_by_name() -> None:
    names = np.array([f"s{i:02d}" for i in range(10)])
    clients = Clients.build(np.ones((40, 1)), np.arange(40) % 2, np.repeat(np.arange(10), 4), names=names)
    held = clients.hold_out(["s01", "s07", "s01"])
    assert held.names[held.unseen].tolist() == ["s01", "s07"]
    assert held.hold_out("s03").names[held.hold_out("s03").unseen].tolist() == ["s01", "s03", "s07"]
    with pytest.raises(UserError, match=r"has no client 's1'; did you mean s01"):
        clients.hold_out(["s1"])
    with pytest.raises(UserError, match="cannot hold out 10 of 10"):
        clients.hold_out(names)


def test_standardised_uses_only_participants_training_rows() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(1e4, 2, (400, 3)).astype(np.float32)
    x[:, 2] = 7
    clients = Clients.build(x, np.arange(400) % 2, np.arange(400) % 8).hold_out(3)
    spoiled = clients.x.copy()
    mine = np.zeros(400, bool)
    for i in clients.participants:
        mine[clients.offsets[i] : clients.offsets[i] + clients.train_counts[i]] = True
    spoiled[~mine] = -1e6
    fitted = Clients(**{**vars(clients), "x": spoiled}).standardised()
    rows = clients.x[mine].astype(np.float64)
    np.testing.assert_allclose(fitted.shift, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(fitted.scale, [*rows.std(0)[:2], 1], rtol=1e-4)


@pytest.mark.parametrize(("shape", "expected"), [((4,), (4,)), ((5, 5), ()), ((5, 5, 3), (3,))])
def test_images_have_one_scale_per_channel(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, *shape)).astype(np.uint8)
    clients = Clients.build(x, np.arange(40) % 2, np.arange(40) % 4).standardised()
    assert clients.x.dtype == np.uint8
    assert clients.scale.shape == expected
    seen = (clients.x[:30] - clients.shift) / clients.scale
    assert abs(seen.mean()) < 0.3
    assert abs(seen.std() - 1) < 0.3
    assert clients.standardised(pooled=True).scale.shape == ()


def test_moments_do_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = synthetic(clients=30, rows=7)
    whole = clients.standardised()
    monkeypatch.setattr(fedbayes.data.rows, "BLOCK", 300)
    np.testing.assert_allclose(clients.standardised().scale, whole.scale, rtol=1e-6)
    np.testing.assert_allclose(clients.standardised().shift, whole.shift, rtol=1e-5, atol=1e-7)


def test_imputed_takes_the_mean_of_training_rows() -> None:
    x = np.array([[1.0, 4.0], [3.0, np.nan], [np.nan, 8.0], [50.0, np.nan]])
    is_test = np.array([False, False, False, True])
    clients = Clients.build(x, np.array([0, 1, 0, 1]), np.zeros(4, int), is_test=is_test, missing="keep").imputed()
    assert clients.x.tolist() == [[1, 4], [3, 6], [2, 8], [50, 6]]
    empty = Clients.build(np.full((2, 1), np.nan), np.arange(2), np.zeros(2, int), missing="keep", features=["age"])
    with pytest.raises(UserError, match="column 'age' has no value"):
        empty.imputed()


BAD = [
    ({"x": np.zeros((0, 2)), "y": np.zeros(0, int), "client": np.zeros(0, int)}, "there are no rows"),
    ({"y": np.array([0, 1, 0])}, r"y has shape \(3,\), expected one value for each of the 4 rows"),
    ({"client": np.array([0, 1])}, "client has shape"),
    ({"y": np.array([1, 2, 1, 2])}, "the labels are 1, 2; expected whole numbers from 0 to 1"),
    ({"y": np.array([0, 2, 0, 2])}, "the labels are 0, 2"),
    ({"y": np.array([0, -1, 0, 1])}, "the labels are -1, 0, 1"),
    ({"y": np.array([0, 1, 0, 3]), "classes": ["no", "yes"]}, "expected whole numbers from 0 to 1 for 2 classes"),
    ({"y": np.array([0, np.nan, 0, 3])}, "y of row 1 is not a finite number"),
    ({"y": np.array(list("abab"))}, "y has type <U1"),
    ({"x": np.array([[1, 2], [1, np.nan], [1, 2], [1, 2]]), "features": ["age", "dose"]}, "row 1, column 'dose'"),
    ({"x": np.array([[1, 2], [1, 2], [np.inf, 2], [1, 2]])}, "an infinite value in row 2, feature 0"),
    ({"x": np.array([[1, 2], [1, 2], [1e300, 2], [1, 2]])}, "an infinite value in row 2, feature 0"),
    ({"x": np.array([["a"], ["b"], ["c"], ["d"]])}, "x has type <U1, expected numbers"),
    ({"client": np.array([0, np.nan, 1, 1])}, "the client of row 1 is missing"),
    ({"client": np.array([0, 0, 1, 1]), "names": ["a", "b", "c"]}, "client 'c' has no rows"),
    ({"client": np.array([0, 0, 1, 5]), "names": ["a", "b"]}, "whole numbers below 2"),
    ({"is_test": np.array([False, False, True, True])}, "client '1' has no training rows"),
    ({"test": 1.5}, "test=1.5 is not a share"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_rows_are_refused(change: dict[str, object], message: str) -> None:
    given = {"x": np.ones((4, 2)), "y": np.array([0, 1, 0, 1]), "client": np.array([0, 0, 1, 1])} | change
    with pytest.raises(UserError, match=message) as caught:
        Clients.build(**given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_large_rows_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, y, client = rng.normal(size=(500, 3)), rng.integers(0, 3, 500), rng.integers(0, 20, 500)
    small = Clients.build(x, y, client)
    monkeypatch.setattr(fedbayes.data.rows, "LARGE", 1000)
    monkeypatch.setattr(fedbayes.data.rows, "BLOCK", 100)
    large = Clients.build(x, y, client)
    assert isinstance(large.x, np.memmap)
    assert (large.x == small.x).all()
    assert (large.train([3, 4], 60).x == small.train([3, 4], 60).x).all()


def test_a_full_disk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fedbayes.data.rows, "LARGE", 10)
    monkeypatch.setattr(fedbayes.data.rows.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match="No space left on device"):
        Clients.build(np.ones((9, 9)), np.arange(9) % 2, np.arange(9) % 3)


def same(a: Clients, b: Clients) -> None:
    for field in ("x", "y", "offsets", "train_counts", "names", "unseen", "shift", "scale"):
        assert (getattr(a, field) == getattr(b, field)).all(), field
    assert (a.classes, a.features, a.name) == (b.classes, b.features, b.name)


def test_save_and_load(tmp_path: Path, clients: Clients) -> None:
    clients = clients.hold_out(1).standardised()
    clients.save(tmp_path / "kept")
    same(Clients.load(tmp_path / "kept"), clients)
    assert isinstance(Clients.load(tmp_path / "kept").x, np.memmap)
    same(load(str(tmp_path / "kept")), clients)
    clients.save(tmp_path / "kept")  # again, in its place
    Clients.load(tmp_path / "kept").save(tmp_path / "kept")  # also from itself
    same(Clients.load(tmp_path / "kept"), clients)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "nothing half written is left"


def test_save_refuses_a_folder_of_something_else(tmp_path: Path, clients: Clients) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="nothing was overwritten"):
        clients.save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        clients.save(tmp_path / "file" / "kept")


@pytest.mark.parametrize("damage", ["missing", "truncated", "manifest"])
def test_damaged_clients_are_refused(tmp_path: Path, clients: Clients, damage: str) -> None:
    clients.save(tmp_path / "kept")
    file = tmp_path / "kept" / ("clients.json" if damage == "manifest" else "x.npy")
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[: len(content) - 9])
    with pytest.raises(UserError, match="does not hold complete clients"):
        Clients.load(tmp_path / "kept")


def test_synthetic_is_the_same_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = synthetic(clients=2500, rows=4, features=3, classes=5, seed=7)
    same(synthetic(clients=2500, rows=4, features=3, classes=5, seed=7, folder=tmp_path / "s"), here)
    monkeypatch.setattr(importlib.import_module("fedbayes.data.synthetic"), "LARGE", 10)
    same(synthetic(clients=2500, rows=4, features=3, classes=5, seed=7), here)
    assert np.bincount(here.y, minlength=5).min() > 500
    assert (here.train_counts == 3).all()


def test_synthetic_numbers_come_from_a_linear_model_per_client() -> None:
    clients = synthetic(clients=4, rows=400, features=5, classes=None)
    for i in range(4):
        x, y = clients.x[i * 400 : (i + 1) * 400], clients.y[i * 400 : (i + 1) * 400]
        residual = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        assert abs(residual.std() - 0.1) < 0.02
    pooled = clients.y - clients.x @ np.linalg.lstsq(clients.x, clients.y, rcond=None)[0]
    assert pooled.std() > 0.2, "clients differ"


def test_memory_does_not_grow_with_the_clients_visited(tmp_path: Path) -> None:
    program = """
import resource, sys
import numpy as np
from fedbayes.data import synthetic
clients = synthetic(clients=20_000, rows=10, features=100, classes=None, folder=sys.argv[1])
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
clients.train(np.arange(100), 8)
before = resident()
for start in range(0, 20_000, 100):
    clients.train(np.arange(start, start + 100), 8)
    clients.test(np.arange(start, start + 100), 2)
print(clients.x.nbytes, resident() - before)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to measure memory")
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, check=True)
    size, growth = map(int, run.stdout.split())
    assert size == 80_000_000
    assert growth < 10_000_000


def test_describe_many_clients_and_classes() -> None:
    text = describe(synthetic(clients=500, rows=10, classes=10).hold_out(20))
    assert "500 clients, 20 of them unseen" in text
    assert "rows per client: 10 to 10, median 10" in text
    assert "… 482 more" in text
    assert len(text.splitlines()) < 30
    assert "most frequent" in describe(synthetic(clients=3, rows=100, classes=50))
    assert "deviation" in describe(synthetic(clients=3, classes=None))
    counts = label_counts(synthetic(clients=5, rows=30, classes=4))
    assert (counts.sum(1) == 30).all()


@pytest.mark.parametrize(("n", "classes"), [(5, 3), (1200, 40), (5, None), (300, None)])
def test_picture_of_labels(tmp_path: Path, n: int, classes: int | None) -> None:
    from fedbayes.report.labels import label_distribution

    clients = synthetic(clients=n, rows=10, classes=classes).hold_out(2)
    file = label_distribution(clients, tmp_path / "labels.svg")
    assert file.read_text().startswith("<?xml")
    assert f"{n} clients, 2 unseen" in file.read_text()
    again = file.read_bytes()
    assert label_distribution(clients, file).read_bytes() == again


def test_picture_of_an_unknown_kind(tmp_path: Path) -> None:
    from fedbayes.report.labels import label_distribution

    with pytest.raises(UserError, match=r"\.svg, \.png or \.pdf"):
        label_distribution(synthetic(clients=3), tmp_path / "labels.docx")
