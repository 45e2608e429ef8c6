"""SuperGlobal's re-ranking against loops over images."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.index.rerank.refine import refined_scores
from tests.unit_vectors import unit


def loop_scores(query: np.ndarray, candidates: np.ndarray, neighbors: int, beta: float) -> np.ndarray:
    rows = candidates.astype(np.float64)
    refined = []
    for place, row in enumerate(rows):
        others = [each for each in range(len(rows)) if each != place]
        others.sort(key=lambda each: (-float(rows[each] @ row), each))
        total, weights = row.copy(), 1.0
        for each in others[:neighbors]:
            weight = beta * max(0.0, float(rows[each] @ row))
            total, weights = total + weight * rows[each], weights + weight
        refined.append(total / weights)
    first = [float(row @ query) for row in refined]
    best = sorted(range(len(rows)), key=lambda place: (-first[place], place))[: neighbors + 1]
    expanded = [max(refined[place][column] for place in best) for column in range(rows.shape[1])]
    return np.array([(value + float(row @ expanded)) / 2 for value, row in zip(first, refined, strict=True)])


@pytest.mark.parametrize("shift", [0.0, 0.6])
@pytest.mark.parametrize(("count", "neighbors", "beta"), [(40, 4, 1.0), (12, 9, 0.15), (3, 2, 0.5), (2, 1, 0.0)])
def test_equal_to_loops(count: int, neighbors: int, beta: float, shift: float) -> None:
    rng = np.random.default_rng(count)
    query, candidates = unit(rng.random((1, 8)))[0], unit(rng.random((count, 8)) - shift)
    found = refined_scores(query, candidates, neighbors, beta)
    assert np.abs(found - loop_scores(query, candidates, neighbors, beta)).max() < 1e-5


def test_an_image_is_its_own_first_neighbor_among_copies() -> None:
    candidates = unit(np.array([[1.0, 0.2], [1.0, 0.2], [1.0, 0.2], [0.1, 1.0]]))
    scores = refined_scores(candidates[0], candidates, 2, 1.0)
    assert np.ptp(scores[:3]) < 1e-6
    assert scores[3] < scores[0]


def test_a_neighbor_of_the_first_comes_before_a_stranger() -> None:
    """Both are as far from the query; one is next to the image that the query found first."""
    candidates = unit(np.array([[1, 0.3, 0.0], [0.5, 0.866, 0.0], [0.5, 0.0, 0.866]]))
    query = unit(np.array([[1.0, 0.0, 0.0]]))[0]
    scores = refined_scores(query, candidates, 1, 1.0)
    assert scores[1] > scores[2]
