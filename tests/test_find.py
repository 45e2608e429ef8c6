"""Re-ranking, filters, thresholds and folding in one search, against going through all rows in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.find import find, find_others
from sop_faiss.index.narrowed import Narrowing
from sop_faiss.index.rerank.order import order_by_features
from sop_faiss.index.rerank.reranker import open_reranker
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.search import FeatureIndex
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from tests.oracle_neighbors import unit_rows
from tests.test_search import DIMENSION
from tests.test_search_above import spread_store


@pytest.fixture(scope="module")
def store() -> FeatureStore:
    return spread_store()


@pytest.fixture(scope="module")
def index(store: FeatureStore, tmp_path_factory: pytest.TempPathFactory) -> FeatureIndex:
    out = tmp_path_factory.mktemp("indices") / "index"
    build_index(store, out)
    return FeatureIndex.open(out)


def slow(
    features: np.ndarray, query: np.ndarray, k: int | None, threshold: float, how: Narrowing, rerank: Rerank | None
) -> list[list[int]]:
    """Return each kept row with those folded into it: all that count, the first re-ranked, then folded, then cut."""
    scores = (features.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    rows = [
        row
        for row in np.lexsort((np.arange(len(scores)), -scores)).tolist()
        if scores[row] >= threshold
        and (how.among is None or row in how.among)
        and (how.without is None or row not in how.without)
    ]
    if rerank is not None:
        first = rows[: rerank.depth]
        rows[: rerank.depth] = [first[place] for place in order_by_features(rerank, query, features[first])]
    groups: list[list[int]] = []
    for row in rows:
        alike = [g for g in groups if how.unique is not None and features[g[0]] @ features[row] >= how.unique - 1e-6]
        if alike:
            alike[0].append(row)
        elif k is not None and len(groups) == k:
            break
        else:
            groups.append([row])
    return groups


@pytest.mark.parametrize("method", ["global", "diffusion", None])
@pytest.mark.parametrize("unique", [None, 0.9])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("k", "threshold"), [(7, None), (7, 0.2), (None, 0.2), (60, None)])
def test_as_going_through_all_rows(
    index: FeatureIndex,
    store: FeatureStore,
    method: str | None,
    unique: float | None,
    narrow: bool,
    k: int | None,
    threshold: float | None,
) -> None:
    rng = np.random.default_rng(5)
    rerank = None if method is None else Rerank(method, depth=30)
    how = Narrowing(
        np.sort(rng.choice(300, 120, replace=False)) if narrow else None, unique, np.array([3, 40]) if narrow else None
    )
    queries = unit_rows(rng, 3, DIMENSION)
    given = how if narrow or unique is not None else None
    found = find(index, queries, k, threshold, given, open_reranker(index, rerank))
    for query, (line, folded) in zip(queries, found, strict=True):
        wanted = slow(store.features, query, k, -2 if threshold is None else threshold, how, rerank)
        assert line.rows[0].tolist() == [group[0] for group in wanted]
        assert (folded is None) == (unique is None)
        if folded is not None:
            assert [len(each) for each in folded] == [len(group) - 1 for group in wanted]


@pytest.mark.parametrize("method", ["global", None])
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_a_row_is_not_its_own_neighbor(
    index: FeatureIndex, store: FeatureStore, method: str | None, threshold: float | None
) -> None:
    rerank = None if method is None else Rerank(method, depth=20)
    rows = [3, 17, 200]  # two of them are equal
    found = find_others(index, rows, 9, threshold, None, open_reranker(index, rerank))
    for row, (line, folded) in zip(rows, found, strict=True):
        how = Narrowing(without=np.array([row]))
        wanted = slow(store.features, store.features[row], 9, -2 if threshold is None else threshold, how, rerank)
        assert line.rows[0].tolist() == [group[0] for group in wanted] and folded is None


def test_rows_that_were_left_out_before_stay_so(index: FeatureIndex, store: FeatureStore) -> None:
    how = Narrowing(without=np.arange(0, 300, 2))
    ((line, _),) = find_others(index, [3], 9, None, how)
    wanted = slow(store.features, store.features[3], 9, -2, Narrowing(without=np.array([3, *range(0, 300, 2)])), None)
    assert line.rows[0].tolist() == [group[0] for group in wanted]


def test_a_threshold_among_some_rows_of_an_approximate_index_finds_all(store: FeatureStore, tmp_path: Path) -> None:
    build_index(store, tmp_path / "index", IndexOptions("IVF8,Flat"))
    opened = FeatureIndex.open(tmp_path / "index")
    assert isinstance(opened._vectors, ApproximateIndex)
    opened._vectors.search_setting = 1  # one list of eight
    features = opened.features(range(300))  # whose rows are in another order than the store's
    how, query = Narrowing(np.arange(0, 300, 3)), features[:1]
    ((line, _),) = find(opened, query, None, 0.0, how)
    assert line.rows[0].tolist() == [group[0] for group in slow(features, query[0], None, 0.0, how, None)]
    ((some, _),) = find(opened, query, None, 0.0)
    assert some.rows.shape[1] < sum(features @ query[0] >= 0)  # of all rows, those of its one list


def test_of_more_rows_it_is_said_that_some_may_be_missed(
    store: FeatureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sop_faiss.index.narrowed._MOST_FETCHED", 50)
    build_index(store, tmp_path / "index", IndexOptions("IVF8,Flat"))
    opened = FeatureIndex.open(tmp_path / "index")
    ((line, _),) = find(opened, store.features[:1], None, 0.5, Narrowing(np.arange(0, 300, 3)))
    assert (line.rows % 3 == 0).all() and "may be missed" in caplog.text


@pytest.mark.parametrize(("k", "narrowing"), [(5, None), (None, None), (5, Narrowing(unique=0.9))])
def test_nothing_reaches_the_threshold(index: FeatureIndex, k: int | None, narrowing: Narrowing | None) -> None:
    query = unit_rows(np.random.default_rng(8), 1, DIMENSION)
    for rerank in (None, Rerank("global")):
        ((line, folded),) = find(index, query, k, 1.0, narrowing, open_reranker(index, rerank))
        assert line.rows.shape == (1, 0) and folded in (None, [])


def test_parts_of_several_images_are_not_compared(index: FeatureIndex) -> None:
    with pytest.raises(ConfigError) as raised:
        open_reranker(index, Rerank("local"), together=True)
    assert "rerank" in raised.value.arguments
