"""Met's classifier and GAP, against a literal walk over neighbors and answers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sop_faiss.errors import DataError
from sop_faiss.evaluate.neighbor_classes import (
    NEIGHBORS,
    classify,
    classify_by_neighbors,
    global_average_precision,
)
from sop_faiss.evaluate.sets.ground_truth import NO_CLASS, Classes


def slow_answer(labels: list[int], similarities: list[float], count: int, sharpness: float) -> tuple[int, float]:
    best: dict[int, float] = {}
    for label, similarity in zip(labels, similarities, strict=True):
        best[label] = max(best.get(label, 0.0), similarity)
    total = math.fsum(math.exp(sharpness * value) for value in best.values()) + count - len(best)
    winner = min(best, key=lambda label: (-best[label], label))
    return winner, math.exp(sharpness * best[winner]) / total


def slow_gap(right: list[bool], confidence: list[float], positives: int) -> float:
    seen, total = 0, 0.0
    for place, query in enumerate(sorted(range(len(right)), key=lambda query: -confidence[query]), start=1):
        if right[query]:
            seen += 1
            total += seen / place
    return total / positives


def draw(seed: int, tied: bool = False) -> tuple[np.ndarray, np.ndarray, Classes]:
    """40 queries, a quarter of them of no class, in a gallery of 80; the nearest 50 of each."""
    rng = np.random.default_rng(seed)
    classes = Classes(
        gallery=rng.integers(3, 15, 80),
        queries=np.where(np.arange(40) % 4 == 0, NO_CLASS, rng.integers(3, 15, 40)),
        validation=np.arange(40) % 2 == 0,
    )
    similarities = rng.uniform(-1, 1, (40, 80)).astype(np.float32) + (classes.queries[:, None] == classes.gallery) * 0.3
    similarities = np.round(similarities, 1 if tied else 7).astype(np.float32)
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :NEIGHBORS]
    return order, np.take_along_axis(similarities, order, 1), classes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharpness", [0.01, 5.0, 500.0])
def test_answers_and_gap_equal_the_oracle(sharpness: float, tied: bool) -> None:
    positions, similarities, classes = draw(0, tied)
    for k in (1, 3, 50):
        labels = classes.gallery[positions[:, :k]]
        predicted, confidence = classify(labels, similarities[:, :k], 12, sharpness)
        slow = [
            slow_answer(own.tolist(), row[:k].tolist(), 12, sharpness)
            for own, row in zip(labels, similarities, strict=True)
        ]
        assert predicted.tolist() == [label for label, _ in slow]
        assert confidence == pytest.approx(np.array([value for _, value in slow]), rel=1e-12)
        right = (predicted == classes.queries) & (classes.queries != NO_CLASS)
        wanted = slow_gap(right.tolist(), confidence.tolist(), 30)
        assert global_average_precision(right, confidence, 30) == pytest.approx(wanted, abs=1e-12)


def test_k_and_sharpness_are_chosen_on_validation_queries_alone() -> None:
    positions, similarities, classes = draw(1)
    found = classify_by_neighbors(positions, similarities, classes)
    chosen = found.chosen["chosen_on_validation"]
    grid = {}
    for k in (1, 2, 3, 5, 7, 10, 15, 20, 50):
        for sharpness in (0.01, 0.1, 1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 50.0, 100.0, 500.0):
            own = classes.validation
            predicted, confidence = classify(classes.gallery[positions[own, :k]], similarities[own, :k], 12, sharpness)
            right = (predicted == classes.queries[own]) & (classes.queries[own] != NO_CLASS)
            grid[k, sharpness] = slow_gap(right.tolist(), confidence.tolist(), int((classes.queries[own] >= 0).sum()))
    assert grid[chosen["neighbors"], chosen["sharpness"]] == pytest.approx(max(grid.values()))
    assert chosen["validation_GAP"] == pytest.approx(100 * max(grid.values()))
    changed = np.where(classes.validation, classes.queries, NO_CLASS)  # other test queries do not change the choice
    changed[1] = 3
    again = classify_by_neighbors(positions, similarities, Classes(classes.gallery, changed, classes.validation))
    assert again.chosen == found.chosen and again.metrics != found.metrics


def test_a_confident_answer_to_a_query_without_a_class_costs_gap_but_not_gap_of_known_queries() -> None:
    """Test: one query of class 7 with 0.5, one of none with 0.9; validation: the same, answered well."""
    classes = Classes(np.array([7, 8]), np.array([7, NO_CLASS, 7]), np.array([False, False, True]))
    positions = np.array([[0, 1], [0, 1], [0, 1]])
    similarities = np.array([[0.5, 0.1], [0.9, 0.1], [0.9, 0.1]], np.float32)
    metrics = classify_by_neighbors(positions, similarities, classes).metrics
    assert metrics == {"GAP": 50.0, "GAP-": 100.0, "ACC": 100.0}


def test_no_query_of_a_class() -> None:
    classes = Classes(np.array([7]), np.array([NO_CLASS, 7]), np.array([True, False]))
    with pytest.raises(DataError, match="validation"):
        classify_by_neighbors(np.zeros((2, 1), np.int64), np.ones((2, 1), np.float32), classes)
