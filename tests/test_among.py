"""Searches among some rows: what is found is always one of them, and of few rows all are compared."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.disk import among as among_module
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import empty_index
from tests.oracle_neighbors import brute_force, unit_rows

COUNT, DIMENSION, K = 1500, 16, 7
FULL = ["IVF16,Flat", "HNSW8", "IVF16_HNSW8,Flat", "IVF16,RaBitQ,Refine(Flat)", "RR16,IVF8,Flat"]
"""Kinds that keep the vectors themselves."""
SHORT = ["SQ8", "IVF16,SQ4", "PQ4x4fs", "IVF16,PQ4x4fs", "RR16,IVF8,PQ4x4", "IVF16,RaBitQ", "RaBitQ"]


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    vectors = unit_rows(np.random.default_rng(0), COUNT, DIMENSION)
    vectors[100:110] = vectors[100]  # ties
    return vectors


def made(factory: str, rows: np.ndarray) -> ApproximateIndex:
    index = empty_index(factory, DIMENSION)
    assert isinstance(index, ApproximateIndex)
    index.train(rows)
    index.add(rows)
    return index


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
def test_flat_is_brute_force(rows: np.ndarray, share: float) -> None:
    index = empty_index("Flat", DIMENSION)
    index.add(rows)
    rng = np.random.default_rng(1)
    chosen = np.union1d(rng.choice(COUNT, max(1, int(share * COUNT)), replace=False), np.arange(100, 110, 2))
    queries = np.concatenate([unit_rows(rng, 20, DIMENSION), rows[100:101]])
    k = min(3, len(chosen))
    similarities, places = brute_force(queries, rows[chosen], k)
    found = index.search(queries, k, chosen)
    np.testing.assert_array_equal(found.rows, chosen[places])
    np.testing.assert_array_equal(found.similarities, similarities)


@pytest.mark.parametrize("factory", FULL)
@pytest.mark.parametrize("wanted", [K, 60, 700])
def test_few_rows_are_all_compared(rows: np.ndarray, factory: str, wanted: int) -> None:
    rng = np.random.default_rng(2)
    chosen = np.sort(rng.choice(np.setdiff1d(np.arange(COUNT), np.arange(101, 110)), wanted, replace=False))
    queries = unit_rows(rng, 10, DIMENSION)
    found = made(factory, rows).search(queries, K, chosen)
    similarities, places = brute_force(queries, rows[chosen], K)
    np.testing.assert_array_equal(found.rows, chosen[places])
    np.testing.assert_allclose(found.similarities, similarities, atol=1e-5)


@pytest.mark.parametrize("factory", [*FULL, *SHORT])
@pytest.mark.parametrize("limit", [0, 20_000])
def test_only_rows_that_pass_and_never_fewer(
    rows: np.ndarray, factory: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(among_module, "_ALL_COMPARED", limit)
    index, rng = made(factory, rows), np.random.default_rng(3)
    for wanted in (K, 30, 900):
        chosen = np.sort(rng.choice(COUNT, wanted, replace=False))
        found = index.search(unit_rows(rng, 5, DIMENSION), K, chosen)
        assert np.isin(found.rows, chosen).all() and found.rows.shape == (5, K)
        assert (np.diff(np.sort(found.rows, axis=1), axis=1) > 0).all()
        assert (np.diff(found.similarities, axis=1) <= 0).all()


@pytest.mark.parametrize("factory", ["IVF16,Flat", "HNSW8", "RR16,IVF16,Flat"])
def test_more_rows_are_found_until_nothing_changes(
    rows: np.ndarray, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(among_module, "_ALL_COMPARED", 0)
    index, rng = made(factory, rows), np.random.default_rng(4)
    index.search_setting = 4 if index.setting_name == "nprobe" else 16
    queries = unit_rows(rng, 50, DIMENSION)
    for wanted in (50, 300, 1200):
        chosen = np.sort(rng.choice(COUNT, wanted, replace=False))
        _, places = brute_force(queries, rows[chosen], K)
        found = index.search(queries, K, chosen).rows
        hits = [
            len(set(ours) & set(theirs)) for ours, theirs in zip(found.tolist(), chosen[places].tolist(), strict=True)
        ]
        assert np.mean(hits) / K >= 0.9
    assert index.search_setting in (4, 16)


def test_far_rows_are_found(rows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that pass are in lists that the search of a query does not look at first."""
    monkeypatch.setattr(among_module, "_ALL_COMPARED", 0)
    index = made("IVF16,Flat", rows)
    chosen = np.sort(np.argsort(rows @ rows[0])[:100])
    found = index.search(rows[:1], K, chosen)
    np.testing.assert_array_equal(found.rows, chosen[brute_force(rows[:1], rows[chosen], K)[1]])


def test_candidates_are_doubled_too(rows: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that pass and are unlike the query are about equally near: few candidates are not enough to tell them."""
    monkeypatch.setattr(among_module, "_ALL_COMPARED", 0)
    index = made("IVF16,RaBitQ,Refine(Flat)", rows)
    index.search_setting, index.rerank = 4, 4
    queries = unit_rows(np.random.default_rng(5), 30, DIMENSION)
    chosen = np.sort(np.argsort(rows @ queries.mean(0))[:900])
    wanted = chosen[brute_force(queries, rows[chosen], K)[1]]

    def recall() -> float:
        found = index.search(queries, K, chosen).rows
        return float(np.mean([np.isin(ours, theirs).mean() for ours, theirs in zip(found, wanted, strict=True)]))

    assert recall() >= 0.95 and index.rerank == 4
    monkeypatch.setattr(among_module, "_MOST_RERANKED", 1)
    assert recall() < 0.8


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat"])
def test_k_above_the_rows_that_pass(rows: np.ndarray, factory: str) -> None:
    index = empty_index("Flat", DIMENSION) if factory == "Flat" else made(factory, rows)
    if factory == "Flat":
        index.add(rows)
    with pytest.raises(ConfigError, match="k = 4"):
        index.search(rows[:1], 4, np.arange(3))


def test_parameters_of_all_layers_are_understood() -> None:
    """FAISS ignores parameters that it does not expect in some kinds: the selector must be among those it reads."""
    selector = among_module._selecting(np.array([3]), 10)
    assert selector.is_member(3) and not selector.is_member(2)
    assert isinstance(among_module.only(np.array([3]), 10), faiss.SearchParameters)
