"""Query expansion and database augmentation against loops."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.expansion import Expansion, augment_database, expand_queries
from tests.unit_vectors import unit


def loop_expand(row: np.ndarray, others: np.ndarray, count: int, alpha: float) -> np.ndarray:
    similarities = others.astype(np.float64) @ row
    nearest = sorted(range(len(others)), key=lambda place: (-np.float32(similarities[place]), place))[:count]
    total = row.astype(np.float64)
    for place in nearest:
        total = total + max(similarities[place], 0.0) ** alpha * others[place]
    return np.asarray(total / np.linalg.norm(total))


def features() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return unit(rng.standard_normal((4, 6))), unit(rng.standard_normal((50, 6)) + 0.3)


@pytest.mark.parametrize(("count", "alpha"), [(1, 3.0), (5, 0.0), (50, 2.5)])
def test_queries_equal_to_a_loop(count: int, alpha: float) -> None:
    queries, gallery = features()
    wanted = np.stack([loop_expand(query, gallery, count, alpha) for query in queries])
    assert np.abs(expand_queries(queries, gallery, count, alpha) - wanted).max() < 1e-6
    split = expand_queries(queries, gallery[:20], count, alpha, iter([gallery[20:21], gallery[21:]]))
    assert np.abs(split - wanted).max() < 1e-6


def test_database_equal_to_a_loop() -> None:
    _, gallery = features()
    wanted = np.stack([loop_expand(row, np.delete(gallery, place, 0), 4, 3.0) for place, row in enumerate(gallery)])
    assert np.abs(augment_database(gallery, 4, 3.0) - wanted).max() < 1e-6


def test_copies_in_the_database_are_others() -> None:
    """Three equal rows: each has the two others as its nearest, and stays what it is."""
    gallery = unit(np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]]))
    assert np.abs(augment_database(gallery, 2, 1.0)[:3] - gallery[:3]).max() < 1e-7


def test_expansion_moves_a_query_towards_what_it_found() -> None:
    gallery = unit(np.array([[1, 0.2, 0], [1, 0.3, 0], [0, 0, 1]]))
    query = unit(np.array([[1.0, 0, 0.1]]))
    expanded = expand_queries(query, gallery, 2, 3.0)
    assert (gallery[:2] @ expanded[0] > gallery[:2] @ query[0]).all()


def test_impossible_numbers() -> None:
    queries, gallery = features()
    with pytest.raises(ConfigError, match="query_neighbors=51"):
        expand_queries(queries, gallery, 51, 3.0)
    with pytest.raises(ConfigError, match="database_neighbors=50"):
        augment_database(gallery, 50, 3.0)
    for field, value in (("query_neighbors", -1), ("query_alpha", float("nan")), ("database_alpha", -1.0)):
        expansion = Expansion(**{field: value})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="wanted 0 or more"):
            expansion.check()
