"""Every image a query among all others, against plain sorting."""

from __future__ import annotations

import numpy as np

from sop_faiss.evaluate.leave_one_out import found_others, found_others_whitened, queries_of
from sop_faiss.evaluate.metrics import average_precision, recall_at_1


def unit_rows(count: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, 6))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def slow_scores(features: np.ndarray, labels: np.ndarray) -> dict[int, tuple[float, float]]:
    """By sorting; AP by trapezoids, and whether the first is right."""
    scores = {}
    for query in range(len(labels)):
        others = [row for row in range(len(labels)) if row != query]
        order = sorted(others, key=lambda row: -float(features[query].astype(float) @ features[row].astype(float)))
        right = [labels[row] == labels[query] for row in order]
        if not any(right):
            continue
        area = 0.0
        for place, hit in enumerate(right):
            if hit:
                before = sum(right[:place]) / place if place else 1.0
                area += (before + sum(right[: place + 1]) / (place + 1)) / 2
        scores[query] = 100 * area / sum(right), 100.0 * right[0]
    return scores


def test_scores_are_those_of_sorting() -> None:
    features, labels = unit_rows(30), np.random.default_rng(1).integers(0, 9, 30)
    labels[0] = 77  # alone: no query, but found by others
    slow = slow_scores(features, labels)
    assert queries_of(labels).tolist() == [row in slow for row in range(30)]
    np.testing.assert_allclose(found_others(features, labels, average_precision), [each[0] for each in slow.values()])
    firsts = found_others(features, labels, lambda ranks, _: recall_at_1(ranks))
    np.testing.assert_allclose(firsts, [each[1] for each in slow.values()])


def test_no_query_is_whitened_by_a_map_that_was_learned_from_it() -> None:
    features, labels = unit_rows(40), np.arange(40) % 8
    images = np.arange(40) % 20  # two views of each
    learned: list[set[int]] = []
    numbers = {row.tobytes(): number for number, row in enumerate(features)}

    def learn(rows: np.ndarray):
        learned.append({int(images[numbers[row.tobytes()]]) for row in rows})
        return lambda all_rows: all_rows

    found = found_others_whitened(features, labels, average_precision, images, learn)
    np.testing.assert_array_equal(found, found_others(features, labels, average_precision))
    assert learned[0] | learned[1] == set(range(20)) and not learned[0] & learned[1]


def test_each_half_is_scored_in_the_space_of_the_other() -> None:
    features, labels = unit_rows(24), np.arange(24) % 4
    images = np.arange(24)

    def learn(rows: np.ndarray):
        turn = np.diag(rows.mean(0) + 1).astype(np.float32)

        def apply(all_rows: np.ndarray) -> np.ndarray:
            turned = all_rows @ turn
            return turned / np.linalg.norm(turned, axis=1, keepdims=True)

        return apply

    half = np.random.default_rng(0).permutation(24) % 2
    wanted = np.empty(24)
    for part in (0, 1):
        everything = found_others(learn(features[half != part])(features), labels, average_precision)
        wanted[half == part] = everything[half == part]
    np.testing.assert_array_equal(found_others_whitened(features, labels, average_precision, images, learn), wanted)
