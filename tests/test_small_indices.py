"""A target for a query's time, and indices that keep their vectors on disk for re-ranking."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import sop_faiss.index.build as build_module
from sop_faiss.cli.index import main
from sop_faiss.errors import ConfigError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.change import merge_indices, remove_from_index
from sop_faiss.index.search import FeatureIndex
from tests.oracle_neighbors import brute_force, unit_rows
from tests.test_search import make_store

COUNT, DIMENSION = 600, 64


def store_of(seed: int = 0) -> FeatureStore:
    store = make_store(seed, COUNT)
    store.keys = [f"{seed}-{row}" for row in range(COUNT)]
    store.features = unit_rows(np.random.default_rng(seed), COUNT, DIMENSION)
    return store


def test_little_memory_keeps_vectors_on_disk(tmp_path: Path) -> None:
    store = store_of()
    manifest = build_index(store, tmp_path / "index", IndexOptions(max_bytes=20_000, recall=0.99))
    assert manifest.factory == "IVF15,RaBitQ,Refine(SQfp16)" and manifest.search["recall"] >= 0.98
    index = FeatureIndex.open(tmp_path / "index")
    rows = [store.keys.index(key) for key in index.ids.keys]
    np.testing.assert_allclose(index.features(range(COUNT)), store.features[rows], atol=1e-3)
    found = index.search(store.features[:50], 5)
    wanted = brute_force(store.features[:50], store.features[rows], 5)[1]
    hits = [len(set(ours) & set(theirs)) for ours, theirs in zip(found.rows.tolist(), wanted.tolist(), strict=True)]
    assert np.mean(hits) / 5 > 0.9
    other = index.search_rows([3], 4)
    assert 3 not in other.rows and other.similarities[0, 0] <= 1


def test_it_can_be_changed(tmp_path: Path) -> None:
    options = IndexOptions("IVF4,RaBitQ,Refine(SQfp16)", recall=1.0)
    one, two = store_of(1), store_of(2)
    for name, store in (("one", one), ("two", two)):
        build_index(store, tmp_path / name, options)
    merge_indices([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    gone = [f"2-{row}" for row in range(0, COUNT, 2)]
    remove_from_index(tmp_path / "both", gone)
    index = FeatureIndex.open(tmp_path / "both")
    assert len(index) == 2 * COUNT - len(gone)
    features = {key: row for store in (one, two) for key, row in zip(store.keys, store.features, strict=True)}
    expected = np.stack([features[key] for key in index.ids.keys])
    np.testing.assert_allclose(index.features(range(len(index))), expected, atol=1e-3)
    found = index.search(expected[:40], 1)
    np.testing.assert_array_equal(found.rows[:, 0], np.arange(40))


def test_coarser_codes_until_a_query_is_fast_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = {"Flat": 9.0, "IVF15,Flat": 7.0, "IVF15,SQfp16": 4.0}
    monkeypatch.setattr(build_module, "query_milliseconds", lambda index, queries, k: times.get(index.factory, 8.0))
    store = store_of()
    with caplog.at_level(logging.WARNING, "sop_faiss"):
        manifest = build_index(store, tmp_path / "index", IndexOptions(max_query_ms=5.0))
    assert manifest.factory == "IVF15,SQfp16" and manifest.search["milliseconds"] == 4.0
    assert sum("wanted 5" in each.message for each in caplog.records) == 2
    none = build_index(store, tmp_path / "none", IndexOptions(max_query_ms=1.0))
    assert none.factory == "IVF15,SQfp16" and none.search["milliseconds"] == 4.0  # the fastest, where none is enough
    only = build_index(store, tmp_path / "only", IndexOptions("SQ8", max_query_ms=1.0))
    assert only.factory == "SQ8" and only.search["milliseconds"] == 8.0
    assert "milliseconds" not in build_index(store, tmp_path / "without").search


def test_the_time_is_measured_and_shown(tmp_path: Path) -> None:
    manifest = build_index(store_of(), tmp_path / "index", IndexOptions(max_query_ms=1e6))
    assert manifest.factory == "Flat" and 0 < manifest.search["milliseconds"] < 1e6
    result = CliRunner().invoke(main, ["info", str(tmp_path / "index")])
    assert "ms a query" in result.stdout


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times(value: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        build_index(store_of(), tmp_path / "index", IndexOptions(max_query_ms=value))
    assert raised.value.arguments == ("max_query_ms",)
