"""Scores of segmentation against a loop over pixels, which shares nothing with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.evaluate.trained.segment_score import (
    VOID,
    class_scores,
    constant_areas,
    count_areas,
    miou_interval,
    score_areas,
)


def slow_scores(pairs: list[tuple[np.ndarray, np.ndarray]], classes: int) -> tuple[float, float, float]:
    """mIoU, mAcc and aAcc by the definition, pixel by pixel."""
    confusion = [[0] * classes for _ in range(classes)]  # annotated, predicted
    for found, truth in pairs:
        for one, other in zip(found.flat, truth.flat, strict=True):
            if other != VOID:
                confusion[other][one] += 1
    unions, accuracies, right, total = [], [], 0, 0
    for label in range(classes):
        hit = confusion[label][label]
        annotated = sum(confusion[label])
        predicted = sum(row[label] for row in confusion)
        if annotated + predicted > 0:
            unions.append(hit / (annotated + predicted - hit))
        if annotated:
            accuracies.append(hit / annotated)
        right, total = right + hit, total + annotated
    return 100 * sum(unions) / len(unions), 100 * sum(accuracies) / len(accuracies), 100 * right / total


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 7), st.floats(0, 1))
def test_scores_are_those_of_a_loop(seed: int, classes: int, images: int, side: int, void: float) -> None:
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(images):  # some classes are in no mask, some never predicted
        found, truth = (rng.integers(0, rng.integers(1, classes + 1), (side, side), np.uint8) for _ in range(2))
        truth[rng.random((side, side)) < void] = VOID
        pairs.append((found, truth))
    pairs[0][1][0, 0] = 0  # one counts
    areas = np.stack([count_areas(found, truth, classes) for found, truth in pairs])
    assert score_areas(areas.sum(0)) == pytest.approx(slow_scores(pairs, classes), abs=1e-9)
    constant = [(np.full_like(truth, classes - 1), truth) for _, truth in pairs]
    floor = score_areas(constant_areas(areas[:, 2], classes - 1).sum(0))
    assert floor == pytest.approx(slow_scores(constant, classes), abs=1e-9)


def test_one_pixel_and_absent_classes() -> None:
    areas = count_areas(np.array([[1]], np.uint8), np.array([[1]], np.uint8), 3)
    assert score_areas(areas) == (100.0, 100.0, 100.0)
    assert np.isnan(class_scores(areas)[:, [0, 2]]).all()
    wrong = count_areas(np.array([[2]], np.uint8), np.array([[1]], np.uint8), 3)
    assert score_areas(wrong) == (0.0, 0.0, 0.0)
    both = areas + wrong  # 2 is in no mask but predicted: its union counts, its accuracy does not
    assert score_areas(both) == (25.0, 50.0, 50.0)
    assert not count_areas(np.array([[2]], np.uint8), np.array([[VOID]], np.uint8), 3).any()


def test_the_interval_is_of_images_drawn_again() -> None:
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 3, (30, 8, 8), np.uint8)
    found = np.where(rng.random(truth.shape) < np.linspace(0, 1, 30)[:, None, None], truth, 0).astype(np.uint8)
    areas = np.stack([count_areas(*pair, 3) for pair in zip(found, truth, strict=True)])
    interval = miou_interval(areas)
    assert interval.mean == pytest.approx(score_areas(areas.sum(0)).miou)
    slow = [score_areas(areas[rng.integers(0, 30, 30)].sum(0)).miou for _ in range(2000)]
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])), abs=1.0)
    void = np.concatenate([areas, np.zeros_like(areas[:5])])
    assert miou_interval(void) == interval
    assert miou_interval(areas[:1]).low == pytest.approx(miou_interval(areas[:1]).high)
