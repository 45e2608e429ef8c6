"""Pages that are read for re-ranking do not stay, and memory that is not a file's is never let go of."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.resident import resident
from sop_faiss.neighbors.disk.approximate_index import make_approximate_index, read_approximate_index
from sop_faiss.neighbors.disk.mapped_pages import pages_for_reranking
from tests.oracle_neighbors import unit_rows

FACTORY = "IVF4,RaBitQ,Refine(SQfp16)"
COUNT, DIMENSION = 4000, 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_do_not_stay(tmp_path: Path) -> None:
    rows = unit_rows(np.random.default_rng(0), COUNT, DIMENSION)
    index = make_approximate_index(FACTORY, DIMENSION)
    index.train(rows)
    index.add(rows)
    assert pages_for_reranking(index._faiss, tmp_path) is None, "it is in memory that would be lost"
    index.search_setting, index.rerank = 4, 64
    index.write(tmp_path / "index.faiss")
    opened = read_approximate_index(tmp_path / "index.faiss", FACTORY, DIMENSION, COUNT)
    opened.search_setting = 4
    found = opened.search(rows[:500], 20)
    np.testing.assert_array_equal(found.rows, index.search(rows[:500], 20).rows)
    assert opened._reranked_by is not None
    fine, coarse = 2 * COUNT * DIMENSION, COUNT * (DIMENSION // 8 + 8 + 8)
    assert resident(tmp_path / "index.faiss") < coarse + fine / 4
    unmapped = read_approximate_index(tmp_path / "index.faiss", FACTORY, DIMENSION, COUNT, mapped=False)
    assert unmapped._reranked_by is None and pages_for_reranking(unmapped._faiss, tmp_path / "index.faiss") is None
    among = np.arange(0, COUNT, 3)
    np.testing.assert_array_equal(opened.search(rows[:50], 5, among).rows, unmapped.search(rows[:50], 5, among).rows)
