"""Diffusion against its sum of random walks."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.index.rerank.diffusion import diffused_scores
from tests.unit_vectors import unit


def walked_scores(query: np.ndarray, candidates: np.ndarray, neighbors: int) -> np.ndarray:
    """(1 - alpha) sum of (alpha S)^t y over 500 steps, with S filled pair by pair."""
    count = len(candidates)
    cosines = np.maximum(candidates.astype(np.float64) @ candidates.T.astype(np.float64), 0)
    nearest = [
        sorted((each for each in range(count) if each != row), key=lambda each: (-np.float32(cosines[row, each]), each))
        for row in range(count)
    ]
    weights = np.zeros((count, count))
    for row in range(count):
        for each in nearest[row][:neighbors]:
            if row in nearest[each][:neighbors]:
                weights[row, each] = cosines[row, each] ** 8
    degrees = weights.sum(1)
    spread = np.zeros_like(weights)
    for row, column in zip(*np.nonzero(weights), strict=True):
        spread[row, column] = weights[row, column] / np.sqrt(degrees[row] * degrees[column])
    step = np.zeros(count)
    step[:5] = np.maximum(candidates[:5].astype(np.float64) @ query, 0) ** 8
    total = np.zeros(count)
    for _ in range(500):
        total, step = total + 0.1 * step, 0.9 * spread @ step
    return total


@pytest.mark.parametrize(("count", "neighbors"), [(30, 4), (6, 5), (2, 1)])
def test_equal_to_walks(count: int, neighbors: int) -> None:
    rng = np.random.default_rng(count)
    query, candidates = unit(rng.random((1, 8)))[0], unit(rng.random((count, 8)))
    candidates = candidates[np.argsort(-(candidates @ query))]
    found = diffused_scores(query, candidates, neighbors)
    assert np.abs(found - walked_scores(query, candidates, neighbors)).max() < 1e-6


def test_candidates_without_connections_score_what_they_start_with() -> None:
    candidates = np.eye(3, dtype=np.float32)
    assert np.allclose(diffused_scores(candidates[0], candidates, 1), [0.1, 0, 0])
