"""Names, files and folders as data, and what is said when they are not as they should be."""

from __future__ import annotations

import gzip
import json
import os
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbayes import data
from fedbayes.data import NAMES, Clients, label_counts, load
from fedbayes.data.stream import RowReader
from fedbayes.errors import UserError


@pytest.fixture
def shared_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the named sets; tests that need it are skipped where it is not."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FEDBAYES_DATA") or beside)
    if not folder.is_dir():
        pytest.skip("the named data sets are not here; set FEDBAYES_DATA to their folder")
    monkeypatch.setenv("FEDBAYES_DATA", str(folder))
    return folder


def frame(rows: int = 40) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "hospital": np.array(["north", "south", "east", "west"])[np.arange(rows) % 4],
            "age": rng.integers(20, 80, rows),
            "sex": np.where(rng.random(rows) < 0.5, "f", "m"),
            "smoker": rng.random(rows) < 0.3,
            "dose": rng.normal(size=rows),
            "ill": np.arange(rows) // 4 % 2,
            "outcome": np.array(["died", "left", "cured"])[np.arange(rows) % 3],
            "pressure": rng.normal(120, 10, rows),
            "visits": rng.poisson(3, rows),
        }
    )


OTHERS = ("outcome", "pressure", "visits")


@pytest.mark.parametrize(
    ("value", "options", "sentence"),
    [
        ([1.0, 2.0], {}, "column 'dose' holds lists; give each part a column of its own, or ignore it"),
        ({"mg": 1.0}, {}, "column 'dose' holds records"),
        ([1, 2], {"target": "dose"}, "column 'dose' holds lists"),
        ({"mg": 1}, {"client_column": "dose"}, "column 'dose' holds records"),
    ],
)
def test_nested_columns_have_a_sentence(tmp_path: Path, value, options, sentence) -> None:
    table = frame()
    table["dose"] = [value] * len(table)
    path = tmp_path / "nested.parquet"
    table.to_parquet(path)
    settings = {"client_column": "hospital", "target": "ill", **options}
    with pytest.raises(UserError, match=sentence):
        load(str(path), **settings)
    flat = frame()
    flat.to_parquet(tmp_path / "flat.parquet")
    layout = load(str(tmp_path / "flat.parquet"), client_column="hospital", target="ill").layout
    rows = RowReader(path, layout, (len(layout.columns),), ("0", "1"))
    with pytest.raises(UserError, match="column 'dose' holds"):
        next(iter(rows))


def test_clients_are_held_out_by_name(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "a.csv", index=False)
    clients = load(str(tmp_path / "a.csv"), client_column="hospital", target="ill", ignore=OTHERS, hold_out=["east", "west"])
    assert clients.names[clients.unseen].tolist() == ["east", "west"]
    with pytest.raises(UserError, match="no client 'wset'; did you mean west"):
        load(str(tmp_path / "a.csv"), client_column="hospital", target="ill", ignore=OTHERS, hold_out=["wset"])


# Names


def test_digits_differ_between_clients() -> None:
    clients = load("digits", hold_out=4)
    assert len(clients) == 20
    assert len(clients.participants) == 16
    assert clients.shape == (64,)
    assert clients.x.dtype == np.uint8
    seen = (clients.x - clients.shift) / clients.scale
    assert abs(seen.mean()) < 0.05
    assert abs(seen.std() - 1) < 0.05
    counts = label_counts(clients)
    assert counts.sum() == 1797
    assert (counts.max(1) / counts.sum(1)).mean() > 0.25
    assert len(load("digits", partition="iid", clients=7)) == 7


def test_unknown_names_say_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown data set 'mnits': did you mean mnist"):
        load("mnits")
    with pytest.raises(UserError, match=r"no file or folder .*nothing\.csv"):
        load("there/is/nothing.csv")


def test_named_sets_need_their_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDBAYES_DATA", raising=False)
    with pytest.raises(UserError, match="FEDBAYES_DATA is not set; set it to the folder that has mnist_writers/"):
        load("mnist")
    monkeypatch.setenv("FEDBAYES_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no file .*cifar10"):
        load("cifar10")


def test_fixed_columns_of_named_sets() -> None:
    with pytest.raises(UserError, match="digits has fixed columns"):
        load("digits", target="y")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_loads(name: str, shared_data: Path) -> None:
    clients = load(name)
    assert isinstance(clients, Clients)
    assert clients.name == name
    assert clients.classes is not None
    assert len(clients.participants) > 1
    assert clients.test_counts.min() >= 1


def test_mnist_is_fedhbs_protocol(shared_data: Path) -> None:
    clients = load("mnist")
    assert len(clients) == 100
    assert (clients.train_counts == 600).all()
    assert clients.test_counts.sum() == 10000
    np.testing.assert_allclose([clients.shift.item() / 255, clients.scale.item() / 255], [0.1307, 0.3081], atol=1e-4)
    train, test = np.zeros((100, 10)), np.zeros((100, 10))
    for i in range(100):
        start, middle, stop = clients.offsets[i], clients.offsets[i] + clients.train_counts[i], clients.offsets[i + 1]
        train[i] = np.bincount(clients.y[start:middle], minlength=10)
        test[i] = np.bincount(clients.y[middle:stop], minlength=10)
    assert ((train > 0).sum(1) <= 8).all(), "5 shards, of which few cross from one label to the next"
    assert (test[train == 0] == 0).all()
    assert abs(test / test.sum(1, keepdims=True) - train / 600).max() < 0.03


def test_mnist_writers_of_the_test_set_are_unseen(shared_data: Path) -> None:
    clients = load("mnist_writers")
    assert len(clients.participants) == 539
    assert clients.unseen.sum() == 297
    assert clients.train_counts.min() >= 1


def test_heart_disease_is_flambys_cohort(shared_data: Path) -> None:
    clients = load("heart_disease_uci")
    assert clients.names.tolist() == ["cleveland", "hungarian", "switzerland", "va"]
    assert np.diff(clients.offsets).tolist() == [303, 261, 46, 130]
    assert len(load("heart_disease_uci", missing="mean").x) == 920
    with pytest.raises(UserError, match="missing value"):
        load("heart_disease_uci", missing="refuse")


def test_cifar100_pachinko_follows_coarse_labels(shared_data: Path) -> None:
    counts = label_counts(load("cifar100", clients=50))
    assert np.median((counts > 0).sum(1)) < 45


# Arrays


def test_npz(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), np.arange(30) % 3
    is_test = np.arange(30) >= 20
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.arange(30) % 5, is_test=is_test)
    clients = load(str(tmp_path / "a.npz"), standardise=False)
    assert repr(clients) == "Clients(a: 5 clients, 30 rows of (4,), 3 classes)"
    assert clients.train_counts.tolist() == [4] * 5
    np.testing.assert_allclose(clients.x[:4], x[[0, 5, 10, 15]].astype(np.float32))
    assert load(str(tmp_path / "a.npz"), test=0.5).train_counts.tolist() == [3] * 5
    assert len(load(str(tmp_path / "a.npz"), partition="shards:1", clients=3)) == 3
    assert load(str(tmp_path / "a.npz"), task="regression").classes is None


def test_npz_with_names(tmp_path: Path) -> None:
    y = np.array(["cat", "dog", "cat", "dog"])
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=y, client=["u", "u", "v", "v"], unseen=[0, 0, 1, 1])
    clients = load(str(tmp_path / "a.npz"))
    assert clients.classes == ("cat", "dog")
    assert clients.names.tolist() == ["u", "v"]
    assert clients.unseen.tolist() == [False, True]
    np.savez(tmp_path / "b.npz", x=np.ones((4, 2)), y=[0, 2, 0, 2], client=[0, 0, 1, 1], classes=["a", "b", "c"])
    assert load(str(tmp_path / "b.npz")).classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((4, 2)), "client": np.arange(4)}, "has no array 'y'"),
        ({"X": np.ones((4, 2)), "y": np.arange(4)}, "has no array 'x': did you mean"),
        ({"x": np.ones((4, 2)), "y": np.array([1, 2, 3, 4]), "client": np.zeros(4)}, "the labels are 1, 2, 3, 4"),
        ({"x": np.ones((4, 2)), "y": np.arange(3), "client": np.zeros(4)}, "different lengths .x 4, y 3, client 4"),
        ({"x": np.ones((0, 2)), "y": np.arange(0), "client": np.zeros(0)}, "has no rows"),
        ({"x": np.ones((4, 2)), "y": np.arange(4)}, "which rows belong to which client"),
        ({"x": np.full((4, 2), np.nan), "y": np.arange(4) % 2, "client": np.zeros(4)}, r"missing value \(NaN\) in row 0"),
        ({"x": np.array([{}] * 4), "y": np.arange(4), "client": np.zeros(4)}, "holds Python objects"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / "a.npz"))


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".csv"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="is empty"):
        load(str(file), target="y", client_column="c")
    if suffix == ".npz":
        np.savez(file, x=np.ones((400, 2)), y=np.arange(400) % 2, client=np.zeros(400))
    elif suffix == ".parquet":
        frame().to_parquet(file)
    else:
        file.write_text('y,c,a\n1,2,"3\n4,5,6\n7,8,9,10,11')
    file.write_bytes(file.read_bytes()[:-30] if suffix != ".csv" else file.read_bytes())
    with pytest.raises(UserError, match="cannot be read"):
        load(str(file), target="y", client_column="c")


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(UserError, match=r"unknown kind; expected a \.npz"):
        load(str(tmp_path / "a.docx"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="has neither train-images-idx3-ubyte nor train"):
        load(str(tmp_path / "folder"))


# Tables


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "tsv", "parquet"])
def test_tables(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"patients.{kind}"
    if kind == "parquet":
        frame().to_parquet(file)
    else:
        frame().to_csv(file, index=False, sep="\t" if kind == "tsv" else ",")
    clients = load(str(file), client_column="hospital", target="ill", ignore=OTHERS, hold_out=1)
    assert clients.names.tolist() == ["east", "north", "south", "west"]
    assert clients.features == ("age", "sex=f", "sex=m", "smoker", "dose")
    assert clients.classes == ("0", "1")
    assert clients.unseen.sum() == 1
    rows = np.concatenate([clients.x[clients.offsets[i] :][: clients.train_counts[i]] for i in clients.participants])
    seen = (rows - clients.shift) / clients.scale
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(seen.std(0), 1, atol=1e-5)
    sexes = clients.x[:, 1:3]
    assert set(sexes.sum(1).tolist()) == {1.0}


@pytest.mark.parametrize(
    ("target", "task", "classes", "dtype"),
    [
        ("ill", None, ("0", "1"), np.int32),
        ("outcome", None, ("cured", "died", "left"), np.int32),
        ("smoker", None, ("False", "True"), np.int32),
        ("pressure", None, None, np.float32),
        ("visits", "counts", None, np.float32),
        ("age", "regression", None, np.float32),
    ],
)
def test_targets(tmp_path: Path, target: str, task: str | None, classes: tuple[str, ...] | None, dtype: type) -> None:
    file = tmp_path / "patients.csv"
    frame().to_csv(file, index=False)
    clients = load(str(file), client_column="hospital", target=target, task=task)  # type: ignore[arg-type]
    assert clients.classes == classes
    assert clients.y.dtype == dtype
    assert target not in clients.features  # type: ignore[operator]


def test_whole_numbers_are_classes_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "patients.csv"
    frame().assign(grade=np.arange(40) % 2 * 4 + 1).to_csv(file, index=False)
    with pytest.raises(UserError, match="the labels are 1, 5; expected whole numbers from 0 to 1"):
        load(str(file), client_column="hospital", target="grade")
    assert load(str(file), client_column="hospital", target="grade", task="classification").classes == ("1", "5")


def test_test_column(tmp_path: Path) -> None:
    file = tmp_path / "patients.csv"
    frame().assign(part=np.where(np.arange(40) < 28, "train", "test")).to_csv(file, index=False)
    clients = load(str(file), client_column="hospital", target="ill", test_column="part")
    assert clients.train_counts.tolist() == [7] * 4
    with pytest.raises(UserError, match="test column 'sex' has 'f'"):
        load(str(file), client_column="hospital", target="ill", test_column="sex")


def test_missing_values_are_refused_filled_or_dropped(tmp_path: Path) -> None:
    table = frame()
    table.loc[3, "dose"] = np.nan
    table.loc[8, "sex"] = None
    file = tmp_path / "patients.csv"
    table.to_csv(file, index=False)

    def loaded(missing: str | None) -> Clients:
        return load(str(file), client_column="hospital", target="ill", ignore=OTHERS, missing=missing, standardise=False)  # type: ignore[arg-type]

    with pytest.raises(UserError, match=r"missing value .* in row 8, column 'sex=f'|row 3, column 'dose'"):
        loaded(None)
    assert len(loaded("drop").x) == 38
    filled = loaded("mean")
    assert len(filled.x) == 40
    assert np.isfinite(filled.x).all()
    train = np.concatenate([filled.x[filled.offsets[i] :][: filled.train_counts[i]] for i in range(4)])
    known = train[np.isin(train[:, 1], [0, 1])]
    shares = filled.x[~np.isin(filled.x[:, 1], [0, 1])]
    assert len(shares) == 1, "a missing category becomes the shares of the categories"
    np.testing.assert_allclose(shares[0, 1:3], known[:, 1:3].mean(0), atol=1e-6)


@pytest.mark.parametrize("column", ["ill", "hospital"])
def test_missing_targets_and_clients_are_never_filled(tmp_path: Path, column: str) -> None:
    table = frame()
    table[column] = table[column].astype(object)
    table.loc[5, column] = None
    file = tmp_path / "patients.csv"
    table.to_csv(file, index=False)
    with pytest.raises(UserError, match=rf"column '{column}' is missing in 1 rows, first in row 5 .* missing=drop"):
        load(str(file), client_column="hospital", target="ill", missing="mean")
    clients = load(str(file), client_column="hospital", target="ill", missing="drop")
    assert len(clients.x) == 39
    assert clients.classes == ("0", "1"), "a gap does not turn whole numbers into floats"


def change(name: str, values: object) -> pd.DataFrame:
    return frame().assign(**{name: values})


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (frame(), {"client_column": "hospitl"}, "has no column 'hospitl': did you mean hospital"),
        (frame(), {"target": "il"}, "has no column 'il': did you mean ill"),
        (frame(), {"target": None}, "say which column to predict with --target; there is hospital, age"),
        (frame(), {"ignore": ["weight"]}, "has no column 'weight'"),
        (frame(), {"client_column": None}, "nothing says which rows belong to which client"),
        (frame(), {"client_column": "ill"}, "must differ"),
        (frame().head(0), {}, "has no rows"),
        (frame()[["hospital", "ill"]], {}, "no column left for features"),
        (change("age", [f"p{i}" for i in range(40)] + []).pipe(lambda t: pd.concat([t] * 3)), {}, None),
        (pd.concat([frame(200).assign(id=[f"p{i}" for i in range(200)])]), {}, "column 'id' has 200 different values"),
        (change("dose", [np.inf] + [1.0] * 39), {}, "an infinite value in row 0, column 'dose'"),
        (frame(), {"target": "outcome", "task": "regression"}, "the target outcome is text"),
        (frame(), {"target": "pressure", "task": "counts"}, "not counts"),
        (frame(), {"clients": 3}, "has clients of its own"),
        (frame(), {"partition": "shards:50", "clients": 4}, "4 clients with 50 shards each need 200 rows but there are 40"),
        (frame(), {"partition": "stripes"}, "unknown partition 'stripes'"),
        (frame(), {"hold_out": 4}, "cannot hold out 4 of 4"),
    ],
)
def test_bad_tables(tmp_path: Path, table: pd.DataFrame, options: dict[str, object], message: str | None) -> None:
    file = tmp_path / "patients.csv"
    table.to_csv(file, index=False)
    given = {"client_column": "hospital", "target": "ill"} | options
    if message is None:
        assert len(load(str(file), **given)) == 4  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=message) as caught:
        load(str(file), **given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_dates_are_refused(tmp_path: Path) -> None:
    change("day", pd.date_range("2020-01-01", periods=40)).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column 'day' is a date"):
        load(str(tmp_path / "a.parquet"), client_column="hospital", target="ill")


def test_one_client_per_number(tmp_path: Path) -> None:
    frame().assign(site=np.arange(40) % 12).to_csv(tmp_path / "a.csv", index=False)
    clients = load(str(tmp_path / "a.csv"), client_column="site", target="ill")
    assert clients.names.tolist() == [str(i) for i in range(12)], "in the order of numbers, not of text"


# IDX


def write_idx(file: Path, array: np.ndarray) -> None:
    content = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for prefix, rows, end in (("train", 60, ""), ("t10k", 30, ".gz")):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{end}", rng.integers(0, 255, (rows, 4, 5)).astype(np.uint8))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{end}", (np.arange(rows) % 3).astype(np.uint8))
    return tmp_path


def test_idx(idx_folder: Path) -> None:
    clients = load(str(idx_folder), partition="labels:1", clients=3)
    assert clients.shape == (4, 5)
    assert clients.train_counts.tolist() == [20, 20, 20]
    assert clients.test_counts.tolist() == [10, 10, 10]
    assert (np.sort(label_counts(clients), 1) == [0, 0, 30]).all()


@pytest.mark.parametrize("damage", ["truncated", "missing", "other", "gz", "lengths"])
def test_bad_idx(idx_folder: Path, damage: str) -> None:
    images, message = idx_folder / "train-images-idx3-ubyte", "cannot be read as IDX"
    if damage == "truncated":
        images.write_bytes(images.read_bytes()[:-7])
    elif damage == "missing":
        images.unlink()
        message = "has no train-images-idx3"
    elif damage == "other":
        images.write_bytes(b"no")
    elif damage == "gz":
        packed = idx_folder / "t10k-images-idx3-ubyte.gz"
        packed.write_bytes(packed.read_bytes()[:-20])
    else:
        write_idx(images, np.zeros((59, 4, 5), np.uint8))
        message = "59 images"
    with pytest.raises(UserError, match=message):
        load(str(idx_folder), partition="iid")


# LEAF


def leaf(folder: Path, part: str, users: dict[str, int], dimension: int = 3) -> None:
    (folder / part).mkdir(parents=True, exist_ok=True)
    rows = {u: {"x": [[float(i)] * dimension for i in range(n)], "y": [i % 3 for i in range(n)]} for u, n in users.items()}
    content = {"users": list(users), "num_samples": list(users.values()), "user_data": rows}
    (folder / part / "all_data_0.json").write_text(json.dumps(content))


def test_leaf(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {"f01": 6, "f02": 3})
    leaf(tmp_path, "test", {"f01": 2, "f02": 1, "f03": 4})
    clients = load(str(tmp_path))
    assert clients.names.tolist() == ["f01", "f02", "f03"]
    assert clients.train_counts.tolist() == [6, 3, 2]
    assert clients.test_counts.tolist() == [2, 1, 2]
    assert clients.unseen.tolist() == [False, False, True], "who is only under test never trains"
    assert clients.classes == ("0", "1", "2")


def test_leaf_without_test_is_split(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {"f01": 8, "f02": 4})
    assert load(str(tmp_path)).train_counts.tolist() == [6, 3]


def test_bad_leaf(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {"f01": 6, "f02": 0})
    with pytest.raises(UserError, match="client 'f02' has no rows"):
        load(str(tmp_path))
    file = tmp_path / "train" / "all_data_0.json"
    file.write_text(json.dumps({"users": ["a"], "user_data": {"a": {"x": ["to be or not"], "y": ["t"]}}}))
    with pytest.raises(UserError, match="x of user 'a' is text"):
        load(str(tmp_path))
    file.write_text(json.dumps({"users": ["a"]}))
    with pytest.raises(UserError, match=r"is not LEAF's JSON .no 'user_data'"):
        load(str(tmp_path))
    file.write_text('{"users": [')
    with pytest.raises(UserError, match="is not LEAF's JSON"):
        load(str(tmp_path))


# The hub


def test_hub_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'fedbayes\[hub\]'"):
        load("hub:flwrlabs/femnist")


def test_hub_from_a_local_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr_datasets", reason="the extra hub is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    table = pd.DataFrame(
        {"pixels": [[1.0, 2.0]] * 24, "writer_id": [f"w{i % 4}" for i in range(24)], "label": np.arange(24) % 3}
    )
    table.to_parquet(folder / "train.parquet")
    table.head(12).to_parquet(folder / "test.parquet")
    clients = load(f"hub:{folder}", client_column="writer_id")
    assert clients.names.tolist() == ["w0", "w1", "w2", "w3"]
    assert clients.shape == (2,)
    assert np.diff(clients.offsets).tolist() == [9] * 4
    divided = load(f"hub:{folder}", partition="labels:1", clients=3, ignore=["writer_id"])
    assert divided.test_counts.tolist() == [4, 4, 4]
    with pytest.raises(UserError, match="has no column 'writer': did you mean writer_id"):
        load(f"hub:{folder}", client_column="writer")


def test_partitioners_of_flower() -> None:
    partitioner = pytest.importorskip("flwr_datasets.partitioner", reason="the extra hub is not installed")
    from fedbayes.data.hub import partition

    labels = np.arange(300) % 10
    client = partition(partitioner.PathologicalPartitioner(10, "label", 2, class_assignment_mode="deterministic"), labels)
    assert [len(np.unique(labels[client == i])) for i in range(10)] == [2] * 10


# The page for users


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "your-data.md").read_text("utf-8")
    frame().to_csv(tmp_path / "patients.csv", index=False)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in page.split("```python\n")[1:]:
        exec(block.split("```")[0], names)
    assert repr(names["again"]) == "Clients(data: 30 clients, 600 rows of (5,), 3 classes)"
    for name in NAMES:
        assert name == "synthetic" or f"`{name}`" in page


# Corruptions


def corrupted(corrupt=lambda image, severity, kind: image, **options):
    images = np.repeat(np.arange(40, dtype=np.uint8), 32 * 32 * 3).reshape(40, 32, 32, 3)  # a pixel says which image it is
    return data.corrupted(images, np.arange(40) % 4, each=2, partition="iid", corrupt=corrupt, **options)


def test_corrupted_clients_hold_every_image_once_for_each_kind() -> None:
    clients = corrupted(train=["fog", "snow"])
    assert {str(name).rsplit("-", 1)[0] for name in clients.names[~clients.unseen]} == {"fog", "snow"}
    for kind in ("fog", "jpeg_compression"):
        images = np.concatenate(
            [clients.rows(f"{kind}-{i}", part)[0][:, 0, 0, 0] for i in (0, 1) for part in ("train", "test")]
        )
        assert sorted(images) == list(range(40))


def test_no_test_image_was_trained_on_under_another_corruption() -> None:
    for same, expected in ((True, True), (False, False)):
        clients = corrupted(same_test=same)
        pixels = [
            {int(pixel) for name in clients.names for pixel in clients.rows(name, part)[0][:, 0, 0, 0]}
            for part in ("train", "test")
        ]
        assert (not pixels[0] & pixels[1]) == expected


def test_a_seed_decides_the_noise_of_every_kind(monkeypatch) -> None:
    """Of the package's kinds some draw from NumPy's global stream and two from a generator that only their `seed` reaches."""

    def corrupt(image, severity, corruption_name, **options):
        own = corruption_name in ("glass_blur", "impulse_noise")
        assert own or not options, "the others take no seed"
        random = np.random.default_rng(options.get("seed") if own else np.random.randint(2**31))
        return random.integers(0, 256, image.shape, np.uint8)

    monkeypatch.setitem(sys.modules, "imagecorruptions", types.SimpleNamespace(corrupt=corrupt))
    made = [corrupted(corrupt=None, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(made[0].x, made[1].x)
    blurred = [clients.rows("glass_blur-0")[0] for clients in made]
    assert not np.array_equal(blurred[0][0], blurred[0][1])
    assert not np.array_equal(blurred[0], blurred[2])


def test_corruptions_leave_the_global_stream_alone() -> None:
    np.random.seed(3)
    before = np.random.random()
    np.random.seed(3)
    corrupted()
    assert np.random.random() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 20}, "train is 20, but there are 19 kinds of corruption"),
        ({"train": ["rain"]}, "there is no corruption 'rain'"),
        ({"severity": 9}, "severity is 9, but it is a whole number from 1 to 5"),
    ],
)
def test_bad_corruptions(options, message) -> None:
    with pytest.raises(UserError, match=message):
        corrupted(**options)
    with pytest.raises(UserError, match="at least 32 pixels a side"):
        data.corrupted(np.zeros((4, 8, 8, 3), np.uint8), np.arange(4))
