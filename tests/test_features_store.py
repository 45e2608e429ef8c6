from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sop_faiss.errors import FeatureError, SopError
from sop_faiss.features import store as store_module
from sop_faiss.features.store import FeatureStore


def make_store(count: int = 7, dimension: int = 5, labels: bool = True) -> FeatureStore:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(count, dimension))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    classes = rng.integers(0, 3, count)
    classes[0] = -1
    return FeatureStore(
        keys=[f"photo/{number}" for number in range(count)],
        labels=classes if labels else None,
        sources=["a.tar"] * (count - 1) + [""],
        members=[f"{number}.jpg" for number in range(count)],
        features=features.astype(np.float32),
        manifest={"encoder": {"name": "n", "fingerprint": "f"}, "preprocess": {"resize": 32}, "root": "/photos"},
    )


def assert_same(one: FeatureStore, other: FeatureStore, tolerance: float = 0.0) -> None:
    assert (one.keys, one.sources, one.members) == (other.keys, other.sources, other.members)
    assert (one.labels is None) == (other.labels is None)
    if one.labels is not None and other.labels is not None:
        assert np.array_equal(one.labels, other.labels)
    np.testing.assert_allclose(one.features, other.features, atol=tolerance, rtol=0)


@pytest.mark.parametrize("labels", [True, False])
def test_what_is_written_is_read(tmp_path: Path, labels: bool) -> None:
    store = make_store(labels=labels)
    written = store.write(tmp_path / "store")
    read = FeatureStore.read(tmp_path / "store")
    assert_same(store, read)
    assert read.manifest == written
    assert {"encoder", "preprocess", "root"} <= set(written)
    assert (written["dimension"], written["count"], written["normalized"]) == (5, 7, True)


def test_float16_is_half_as_exact_and_of_unit_norm_again(tmp_path: Path) -> None:
    store = make_store(50, 64)
    store.write(tmp_path / "store", feature_dtype="float16")
    read = FeatureStore.read(tmp_path / "store")
    assert_same(store, read, tolerance=1e-3)
    np.testing.assert_allclose(np.linalg.norm(read.features, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(("dtype", "number"), [("float32", pa.float32()), ("float16", pa.float16())])
def test_columns_are_the_contracts_for_any_parquet_reader(tmp_path: Path, dtype: str, number: pa.DataType) -> None:
    store = make_store()
    store.write(tmp_path / "store", feature_dtype=dtype)
    table = pq.read_table(tmp_path / "store" / "features-00000.parquet")
    assert table.schema.names == ["key", "label", "source", "member", "feature"]
    assert table.schema.types == [pa.string(), pa.int64(), pa.string(), pa.string(), pa.list_(number, 5)]
    assert table["key"].to_pylist() == store.keys
    assert store.labels is not None
    assert table["label"].to_pylist() == [None, *store.labels[1:].tolist()]
    np.testing.assert_allclose(np.array(table["feature"].to_pylist()), store.features, atol=1e-3)


def test_large_stores_are_several_files(tmp_path: Path) -> None:
    store = make_store()
    manifest = store.write(tmp_path / "store", bytes_per_file=4 * 5 * 3)
    assert [part["rows"] for part in manifest["files"]] == [3, 3, 1]
    assert_same(store, FeatureStore.read(tmp_path / "store"))


def test_occupied_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "mine.txt").write_text("mine")
    with pytest.raises(SopError, match="not empty"):
        make_store().write(tmp_path / "store")
    assert [file.name for file in tmp_path.rglob("*.*")] == ["mine.txt"]


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "write_json", full_disk)
    with pytest.raises(OSError, match="No space"):
        make_store().write(tmp_path / "store")
    assert not list(tmp_path.iterdir())


def broken_stores() -> list[tuple[str, FeatureStore, str]]:
    cases = []
    for name, value, message in (
        ("nan", np.nan, r"1 of 7 rows are not unit vectors \('photo/3' is NaN or infinite\)"),
        ("infinity", np.inf, "'photo/3' is NaN or infinite"),
        ("zero", 0.0, "'photo/3' is zero"),
        ("long", 2.0, "'photo/3' is of norm 4.472"),
    ):
        store = make_store()
        store.features[3] = value
        cases.append((name, store, message))
    store = make_store()
    store.keys[2] = store.keys[5]
    cases.append(("keys", store, r"1 keys are not unique \(first 'photo/5'\)"))
    store = make_store()
    store.members.pop()
    cases.append(("columns", store, "7 rows, but column member has 6"))
    store = make_store()
    store.features = store.features[:0]
    store.keys, store.sources, store.members, store.labels = [], [], [], None
    cases.append(("empty", store, "no features"))
    return cases


@pytest.mark.parametrize(("name", "store", "message"), broken_stores())
def test_unusable_features_are_not_written(tmp_path: Path, name: str, store: FeatureStore, message: str) -> None:
    with pytest.raises(FeatureError, match=message):
        store.write(tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match="wanted one of float32, float16"):
        make_store().write(tmp_path / "store", feature_dtype="int8")


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 3.0])
def test_unusable_features_are_not_read(tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store()
    store.features[3, :] = value
    monkeypatch.setattr(FeatureStore, "check", lambda self: None)
    store.write(tmp_path / "store")
    with pytest.raises(FeatureError, match=r"features: 1 of 7 rows .* \('photo/3' is "):
        FeatureStore.read(tmp_path / "store")


def damage_manifest(directory: Path, **changes: Any) -> None:
    path = directory / "manifest.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": None},
        {"format": "another"},
        {"count": 8},
        {"count": "7"},
        {"dimension": None},
        {"dimension": 0},
        {"feature_dtype": "int8"},
        {"files": None},
        {"files": []},
        {"files": [{"name": "features-00000.parquet"}]},
        {"files": [{"name": "../features-00000.parquet", "rows": 7, "sha256": ""}]},
        {"dimension": 4},
        {"encoder": 5},
        {"encoder": {"name": "n"}},
        {"preprocess": "x"},
        {"pooling": 5},
        {"root": 5},
        {"class_names": 5},
        {"class_names": ["a", 5]},
        {"dropped": 5},
        {"dropped": {"reasons": {"empty": "x"}}},
        {"scores": 5},
        {"scores": {"best_by": "map", "first_score": None, "best_score": 1.0}},
        {"scores": {"best_by": "map", "first_score": 1.0, "best_score": 1.0, "difference": 5}},
        {"scores": {"best_by": "map", "first_score": 1.0, "best_score": 1.0, "difference": [1.0, None, 2.0]}},
        {"scores": {"best_by": "map", "first_score": 1.0, "best_score": float("inf")}},
    ],
)
def test_damaged_manifest_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_store().write(tmp_path / "store")
    damage_manifest(tmp_path / "store", **changes)
    with pytest.raises(FeatureError) as caught:
        FeatureStore.read(tmp_path / "store")
    assert "\n" not in str(caught.value)


def test_unfinished_and_absent_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match="does not exist"):
        FeatureStore.read(tmp_path / "store")
    make_store().write(tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(FeatureError, match="damaged, or not"):
        FeatureStore.read(tmp_path / "store")
    manifest.unlink()
    with pytest.raises(FeatureError, match="unfinished"):
        FeatureStore.read(tmp_path / "store")


def test_missing_added_and_changed_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store" / "features-00000.parquet"
    make_store().write(tmp_path / "store")
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(FeatureError, match="differs from what was written"):
        FeatureStore.read(tmp_path / "store")
    path.unlink()
    with pytest.raises(FeatureError, match="is missing"):
        FeatureStore.read(tmp_path / "store")
    path.write_bytes(content)
    (tmp_path / "store" / "features-00001.parquet").write_bytes(content)
    with pytest.raises(FeatureError, match="not in the manifest"):
        FeatureStore.read(tmp_path / "store")
