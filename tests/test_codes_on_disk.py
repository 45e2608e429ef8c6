"""Vectors for re-ranking come from the file as they were written, and do not stay in this process's memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.resident import resident
from sop_faiss.errors import IndexMismatchError
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.codes_on_disk import codes_for_reranking
from sop_faiss.neighbors.disk.from_factory import make_approximate_index, read_approximate_index
from tests.oracle_neighbors import unit_rows

FACTORY = "IVF4,RaBitQ,Refine(SQfp16)"
FACTORIES = (FACTORY, "IVF8,RaBitQ,Refine(Flat)", "RR64,IVF4,PQ8x4fs,Refine(SQ8)", "PQ8x4,Refine(SQfp16)")
COUNT, DIMENSION = 4000, 64

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def written(factory: str, rows: np.ndarray, path: Path) -> ApproximateIndex:
    index = make_approximate_index(factory, DIMENSION)
    index.train(rows)
    index.add(rows)
    index.rerank = 16
    index.write(path)
    return index


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return unit_rows(np.random.default_rng(0), COUNT, DIMENSION)


@pytest.mark.parametrize("factory", FACTORIES)
def test_finds_what_faiss_finds_in_memory(factory: str, rows: np.ndarray, tmp_path: Path) -> None:
    index = written(factory, rows, tmp_path / "index.faiss")
    opened = read_approximate_index(tmp_path / "index.faiss", factory, DIMENSION, COUNT)
    assert opened._on_disk is not None and opened.rerank == 16
    some = np.random.default_rng(1).permutation(COUNT)[:300]
    np.testing.assert_array_equal(opened.features(some), index.features(some))
    assert opened.features(some[:0]).shape == (0, DIMENSION)
    queries = unit_rows(np.random.default_rng(2), 20, DIMENSION)
    for among in (None, np.arange(0, COUNT, 3), some[:30].copy()):
        among = None if among is None else np.sort(among)
        for k in (1, 20):
            found, wanted = (each.search(queries, k, among) for each in (opened, index))
            np.testing.assert_allclose(found.similarities, wanted.similarities, atol=2e-6)
            assert (found.rows == wanted.rows).mean() > 0.999, "but for rows that tie"
    assert (opened.search(rows[:2], COUNT).rows >= 0).all(), "all rows, by wider searches"


def test_pages_do_not_stay(rows: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    written(FACTORY, rows, path)
    opened = read_approximate_index(path, FACTORY, DIMENSION, COUNT)
    opened.search_setting, opened.rerank = 4, 64
    opened.search(rows[:20], 20)
    opened.search(rows[:10], 20, np.arange(0, COUNT, 3))
    opened.features(np.arange(COUNT))
    fine, coarse = 2 * COUNT * DIMENSION, COUNT * (DIMENSION // 8 + 8 + 8)
    assert resident(path) < coarse + fine / 2


def test_only_of_the_file(rows: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    index = written(FACTORY, rows, path)
    assert codes_for_reranking(index._faiss, path) is None, "they are in memory"
    assert read_approximate_index(path, FACTORY, DIMENSION, COUNT, mapped=False)._on_disk is None
    opened = read_approximate_index(path, FACTORY, DIMENSION, COUNT)
    other = tmp_path / "other.faiss"
    other.write_bytes(path.read_bytes())
    assert codes_for_reranking(opened._faiss, other) is None
    before = opened.search(rows[:5], 3).rows
    other.replace(path)
    np.testing.assert_array_equal(opened.search(rows[:5], 3).rows, before)


def test_a_file_that_is_cut_off(rows: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    written(FACTORY, rows, path)
    opened = read_approximate_index(path, FACTORY, DIMENSION, COUNT)
    os.truncate(path, path.stat().st_size - 2 * DIMENSION)
    assert opened._on_disk is not None
    with pytest.raises(IndexMismatchError, match=str(path)):
        opened._on_disk.vectors(np.arange(COUNT - 3, COUNT))
