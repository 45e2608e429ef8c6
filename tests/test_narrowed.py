"""Near-duplicates folded, rows left out, several images as one query."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.narrowed import Narrowing, combined_query, search_narrowed
from sop_faiss.index.search import FeatureIndex
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


def slow(store: FeatureStore, query: np.ndarray, k: int | None, least: float, how: Narrowing) -> list[list[int]]:
    """Return each kept row with those folded into it, by going through all rows in order."""
    scores = (store.features.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    groups: list[list[int]] = []
    for row in np.lexsort((np.arange(len(scores)), -scores)).tolist():
        is_out = how.without is not None and row in how.without
        if is_out or scores[row] < least or (how.among is not None and row not in how.among):
            continue
        alike = [
            group
            for group in groups
            if how.unique is not None and store.features[group[0]] @ store.features[row] >= how.unique - 1e-6
        ]
        if alike:
            alike[0].append(row)
        elif k is not None and len(groups) == k:
            break
        else:
            groups.append([row])
    return groups


@pytest.mark.parametrize("k", [1, 5, 290, None])
@pytest.mark.parametrize("unique", [None, 0.7, 0.95, 1.0, -1.0])
@pytest.mark.parametrize("narrow", [False, True])
def test_as_going_through_all_rows(
    index: FeatureIndex, store: FeatureStore, k: int | None, unique: float | None, narrow: bool
) -> None:
    rng = np.random.default_rng(5)
    how = Narrowing(unique=unique)
    if narrow:
        how = replace(how, among=np.sort(rng.choice(300, 120, replace=False)), without=np.array([3, 17, 40]))
    queries = unit_rows(rng, 3, DIMENSION)
    threshold = 0.1 if k is None else None
    for query, (line, folded) in zip(queries, search_narrowed(index, queries, k, threshold, how), strict=True):
        wanted = slow(store, query, k, -2 if threshold is None else threshold, how)
        assert [[row, *others] for row, others in zip(line.rows[0].tolist(), folded, strict=True)] == wanted
        assert line.keys == [[store.keys[group[0]] for group in wanted]]
        assert line.labels is not None and line.labels.shape == line.similarities.shape == (1, len(wanted))


def test_approximate_indices_too(store: FeatureStore, tmp_path: Path) -> None:
    build_index(store, tmp_path / "index", IndexOptions("IVF4,Flat"))
    opened = FeatureIndex.open(tmp_path / "index")
    how = Narrowing(among=np.arange(0, 300, 2), unique=0.9)
    line, folded = search_narrowed(opened, store.features[:1], 10, None, how)[0]
    assert line.rows.shape == (1, 10) and (line.rows % 2 == 0).all() and any(folded)
    close = opened.features(line.rows[0].tolist()) @ opened.features(line.rows[0].tolist()).T
    assert (close[np.triu_indices(10, 1)] < 0.9).all()


@pytest.mark.parametrize("factory", ["PQ4x4", "IVF4,RaBitQ"])
def test_copies_are_folded_by_shortened_codes(tmp_path: Path, factory: str) -> None:
    store = spread_store()
    store.features[50:60] = store.features[50]
    build_index(store, tmp_path / "index", IndexOptions(factory))
    opened = FeatureIndex.open(tmp_path / "index")
    line, folded = search_narrowed(opened, store.features[50:51], 3, None, Narrowing(unique=0.999))[0]
    groups = [{line.keys[0][at], *(opened.ids.keys[row] for row in folded[at])} for at in range(line.rows.shape[1])]
    assert sum(not group.isdisjoint(store.keys[50:60]) for group in groups) == 1


def test_a_hundred_copies_are_one_result(tmp_path: Path) -> None:
    store = spread_store()
    store.features[50:250] = store.features[50]
    build_index(store, tmp_path / "index")
    how = Narrowing(unique=1.0)
    line, folded = search_narrowed(FeatureIndex.open(tmp_path / "index"), store.features[50:51], 3, None, how)[0]
    assert line.rows[0, 0] == 50 and len(folded[0]) >= 199 and line.rows.shape == (1, 3)


def test_combined_is_the_mean_less_a_part() -> None:
    rows = unit_rows(np.random.default_rng(0), 5, DIMENSION).astype(np.float64)
    expected = rows[:3].mean(0) - 0.5 * rows[3:].mean(0)
    found = combined_query(rows[:3].astype(np.float32), rows[3:].astype(np.float32))
    np.testing.assert_allclose(found[0], expected / np.linalg.norm(expected), atol=1e-6)
    np.testing.assert_allclose(combined_query(found)[0], found[0], atol=1e-6)


def test_combinations_that_are_nothing() -> None:
    rows = unit_rows(np.random.default_rng(0), 2, DIMENSION)
    with pytest.raises(ConfigError):
        combined_query(rows[:0])
    with pytest.raises(ConfigError):
        combined_query(rows, rows, weight=-1.0)
    with pytest.raises(ConfigError) as raised:
        combined_query(rows, rows, weight=1.0)
    assert raised.value.arguments == ("minus",)


@pytest.mark.parametrize(
    ("k", "threshold", "how"), [(3, None, Narrowing(unique=1.5)), (None, None, Narrowing()), (0, None, Narrowing())]
)
def test_impossible_searches(index: FeatureIndex, k: int | None, threshold: float | None, how: Narrowing) -> None:
    with pytest.raises(ConfigError):
        search_narrowed(index, unit_rows(np.random.default_rng(0), 1, DIMENSION), k, threshold, how)


@pytest.mark.parametrize("rows", [[3, 1], [1, 1], [-1, 2], [300]])
def test_among_is_checked(index: FeatureIndex, rows: list[int]) -> None:
    with pytest.raises(ConfigError):
        index.search(unit_rows(np.random.default_rng(0), 1, DIMENSION), 1, among=np.array(rows))
