"""Rows by a condition on the index's own columns and on those of a table."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sop_faiss.errors import ConfigError, DataError, SopError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import build_index
from sop_faiss.index.rows_where import rows_where
from sop_faiss.index.search import FeatureIndex
from tests.test_search import make_store


@pytest.fixture(scope="module")
def store() -> FeatureStore:
    return make_store()


@pytest.fixture(scope="module")
def index(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> FeatureIndex:
    out = tmp_path_factory.mktemp("indices") / "photos.index"
    build_index(store, out)
    return FeatureIndex.open(out)


def write(path: Path, **columns: object) -> Path:
    table = pa.table(columns)
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


def test_own_columns(index: FeatureIndex, store: FeatureStore) -> None:
    assert store.labels is not None
    for number, name in enumerate(["apple", "pear", "plum"]):
        wanted = np.flatnonzero(store.labels == number)
        np.testing.assert_array_equal(rows_where(index, f"label = '{name}'"), wanted)
    np.testing.assert_array_equal(rows_where(index, "label is null"), np.flatnonzero(store.labels == -1))
    odd = np.arange(1, len(store), 2)
    np.testing.assert_array_equal(rows_where(index, "source = 'a.tar'"), odd)
    assert rows_where(index, "member = '7.jpg' or key = 'bild-0003'").tolist() == [3, 7]


def test_labels_without_names_are_numbers(tmp_path: Path) -> None:
    store = make_store()
    store.manifest["class_names"] = None
    build_index(store, tmp_path / "index")
    assert store.labels is not None
    rows = rows_where(FeatureIndex.open(tmp_path / "index"), "label = 2")
    np.testing.assert_array_equal(rows, np.flatnonzero(store.labels == 2))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_is_joined_by_key(
    index: FeatureIndex, store: FeatureStore, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    known = rng.permutation(len(store))[:40]
    price = rng.integers(0, 100, 41)
    keys = [*(store.keys[row] for row in known), "nobody"]
    table = write(tmp_path / f"shop{suffix}", price=price, key=keys, brand=["Ann"] * 20 + ["Bob"] * 21)
    with caplog.at_level(logging.WARNING, "sop_faiss"):
        found = rows_where(index, "price < 50 and brand = 'Bob' and label is not null", table)
    assert store.labels is not None
    wanted = [row for place, row in enumerate(known) if price[place] < 50 and place >= 20 and store.labels[row] >= 0]
    assert found.tolist() == sorted(wanted) and "40 of 41" in caplog.text
    unpriced = rows_where(index, "price is null", table)
    np.testing.assert_array_equal(unpriced, np.setdiff1d(np.arange(len(store)), known))


def test_keys_that_look_like_numbers(tmp_path: Path) -> None:
    store = make_store(count=3)
    store.keys = ["007", "7", "1e3"]
    build_index(store, tmp_path / "index")
    (tmp_path / "t.csv").write_text("key,x\n7,1\n007,2\n1e3,3\n")
    assert rows_where(FeatureIndex.open(tmp_path / "index"), "x = 2", tmp_path / "t.csv").tolist() == [0]


@pytest.mark.parametrize(
    ("condition", "argument"),
    [
        ("price < 3", "where"),
        ("labl = 'pear'", "where"),
        ("\x00", "where"),
        ("label = 'brick'", "where"),
        ('label = "pear"', "where"),
    ],
)
def test_conditions_that_do_not_fit(index: FeatureIndex, condition: str, argument: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rows_where(index, condition)
    assert argument in raised.value.arguments


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("missing.csv", None),
        ("t.txt", b"key,x\nbild-0001,1\n"),
        ("empty.csv", b""),
        ("heading.csv", b"key,x\n"),
        ("strangers.csv", b"key,x\nnobody,1\n"),
        ("no_key.csv", b"name,x\nbild-0001,1\n"),
        ("twice.csv", b"key,x\nbild-0001,1\nbild-0001,2\n"),
        ("two_columns.csv", b"key,x,x\nbild-0001,1,2\n"),
        ("ragged.csv", b"key,x\nbild-0001\n"),
        ("binary.csv", bytes(range(256))),
        ("not.parquet", b"key,x\nbild-0001,1\n"),
        ("cut.parquet", b"PAR1"),
    ],
)
def test_tables_that_cannot_be_used(index: FeatureIndex, name: str, content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        rows_where(index, "x = 1", tmp_path / name)
    assert "table" in raised.value.arguments


def test_a_folder_is_not_a_table(index: FeatureIndex, tmp_path: Path) -> None:
    (tmp_path / "x.parquet").mkdir()
    with pytest.raises(DataError):
        rows_where(index, "x = 1", tmp_path / "x.parquet")


def test_a_column_that_both_have(index: FeatureIndex, tmp_path: Path) -> None:
    table = write(tmp_path / "t.parquet", key=["bild-0001"], label=["mine"], x=[1])
    with pytest.raises(SopError) as raised:
        rows_where(index, "label = 'mine'", table)
    assert "where" in raised.value.arguments
    assert rows_where(index, "x = 1", table).tolist() == [1]


def test_parquet_categories_are_texts(index: FeatureIndex, tmp_path: Path) -> None:
    brands = pa.array(["Ann", "Bob"]).dictionary_encode()
    table = write(tmp_path / "t.parquet", key=["bild-0001", "bild-0002"], brand=brands)
    assert rows_where(index, "brand = 'Bob'", table).tolist() == [2]


def test_parquet_types_that_pyarrow_does_not_compare(index: FeatureIndex, tmp_path: Path) -> None:
    keys = ["bild-0001", "bild-0002"]
    brands, prices = pa.array(["Ann", "Bob"], pa.string_view()), pa.array(np.array([1, 2], np.float16))
    table = write(tmp_path / "t.parquet", key=keys, brand=brands, price=prices)
    assert rows_where(index, "brand = 'Bob'", table).tolist() == [2]
    assert rows_where(index, "price < 2 and brand like 'A%'", table).tolist() == [1]
    views = write(tmp_path / "v.parquet", key=keys, x=pa.array([b"a", b"b"], pa.binary_view()))
    with pytest.raises(SopError) as raised:
        rows_where(index, "x is null", views)
    assert raised.value.arguments
