"""Images found by the best of their vectors, against brute force over all of them."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import VectorIndex, empty_index
from sop_faiss.neighbors.disk.with_parts import NearestParts, VectorsWithParts

D, IMAGES, PARTS = 16, 60, 5


def unit(rng: np.random.Generator, count: int) -> np.ndarray:
    made = rng.standard_normal((count, D)).astype(np.float32)
    return np.asarray(made / np.linalg.norm(made, axis=1, keepdims=True), np.float32)


def filled(factory: str, rows: np.ndarray) -> VectorIndex:
    index = empty_index(factory, D)
    if isinstance(index, ApproximateIndex):
        index.train(rows)
    index.add(rows)
    return index


def brute_force(
    queries: np.ndarray, whole: np.ndarray, parts: np.ndarray, owners: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each query and image the best similarity, and the number of the first part that has it, -1 for all of it."""
    best = (queries.astype(np.float64) @ whole.T.astype(np.float64)).astype(np.float32)
    part = np.full(best.shape, -1)
    products = (queries.astype(np.float64) @ parts.T.astype(np.float64)).astype(np.float32)
    for place in np.lexsort((numbers, owners)):
        owner = owners[place]
        if owner >= 0:
            better = products[:, place] > best[:, owner]
            best[better, owner], part[better, owner] = products[better, place], numbers[place]
    return best, part


@pytest.fixture(scope="module")
def case() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    whole, parts, queries = unit(rng, IMAGES), unit(rng, IMAGES * PARTS), unit(rng, 7)
    order = rng.permutation(len(parts))  # as after changes
    owners, numbers = np.repeat(np.arange(IMAGES), PARTS)[order], np.tile(np.arange(PARTS), IMAGES)[order]
    parts[owners == 11] = whole[11]  # ties of a part and all of it
    owners[owners == 17] = -1  # an image that is gone
    return queries, whole, parts, owners, numbers


def assert_line(found: NearestParts, line: int, wanted: list[int], best: np.ndarray, part: np.ndarray) -> None:
    assert found.rows[line].tolist() == wanted
    assert np.allclose(found.similarities[line], best[wanted], atol=1e-6)
    assert found.parts[line].tolist() == part[wanted].tolist()


@pytest.mark.parametrize("k", [1, 3, IMAGES])
@pytest.mark.parametrize("among", [False, True])
def test_the_k_nearest_images_by_any_of_their_vectors(case: tuple[np.ndarray, ...], k: int, among: bool) -> None:
    queries, whole, parts, owners, numbers = case
    best, part = brute_force(*case)
    merged = VectorsWithParts(filled("Flat", whole), filled("Flat", parts), owners, numbers)
    rows = np.arange(0, IMAGES, 2) if among else np.arange(IMAGES)
    k = min(k, len(rows))
    found = merged.search(queries, k, rows if among else None)
    for line in range(len(queries)):
        order = rows[np.argsort(-best[line, rows], kind="stable")][:k]
        assert_line(found, line, order.tolist(), best[line], part[line])


def test_all_above_a_similarity(case: tuple[np.ndarray, ...]) -> None:
    queries, whole, parts, owners, numbers = case
    best, part = brute_force(*case)
    merged = VectorsWithParts(filled("Flat", whole), filled("Flat", parts), owners, numbers)
    for line, found in enumerate(merged.search_above(queries, 0.4)):
        order = np.argsort(-best[line], kind="stable")
        wanted = order[best[line, order] >= 0.4].tolist()
        assert wanted
        assert_line(found, 0, wanted, best[line], part[line])


def test_an_image_that_no_part_is_left_of(case: tuple[np.ndarray, ...]) -> None:
    queries, whole, parts, owners, numbers = case
    merged = VectorsWithParts(filled("Flat", whole), filled("Flat", parts), owners, numbers)
    found = merged.search(queries, 1, np.array([17]))
    assert found.rows.tolist() == [[17]] * len(queries)
    assert (found.parts == -1).all()
    with pytest.raises(ConfigError):
        merged.search(queries, 2, np.array([17]))


def test_compressed_vectors_find_nearly_the_same(case: tuple[np.ndarray, ...]) -> None:
    queries, whole, parts, owners, numbers = case
    best, _ = brute_force(*case)
    merged = VectorsWithParts(filled("SQ8", whole), filled("IVF4,SQ8", parts), owners, numbers)
    found = merged.search(queries, 5)
    for line in range(len(queries)):
        assert len(set(found.rows[line].tolist())) == 5
        assert (np.diff(found.similarities[line]) <= 0).all()
        assert (found.similarities[line] <= best[line, found.rows[line]] + 0.05).all()
