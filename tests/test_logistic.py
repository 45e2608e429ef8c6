"""Logistic regression on frozen features against a solver of its own."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate.logistic import logistic_regression
from sop_faiss.evaluate.logistic_choices import LogisticChoices


def blobs(seed: int, per_class: int, classes: int = 3, dim: int = 6) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    centers = np.random.default_rng(99).normal(size=(classes, dim))
    labels = np.repeat(np.arange(classes), per_class)
    rows = centers[labels] + generator.normal(size=(len(labels), dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


def slow_predictions(rows: np.ndarray, labels: np.ndarray, queries: np.ndarray, penalty: float) -> np.ndarray:
    """Mean cross-entropy + penalty/2 |W|^2 with a free intercept, minimized by scipy from its definition."""
    classes, (count, dim) = labels.max() + 1, rows.shape

    def loss(flat: np.ndarray) -> float:
        weights, bias = flat[: classes * dim].reshape(classes, dim), flat[classes * dim :]
        logits = rows @ weights.T + bias
        peak = logits.max(1, keepdims=True)
        normalizer = np.log(np.exp(logits - peak).sum(1)) + peak[:, 0]
        return float((normalizer - logits[np.arange(count), labels]).mean() + penalty / 2 * (weights**2).sum())

    found = minimize(loss, np.zeros(classes * (dim + 1)), method="BFGS").x
    return (queries @ found[: classes * dim].reshape(classes, dim).T + found[classes * dim :]).argmax(1)


def test_predictions_are_those_of_a_minimum_found_otherwise() -> None:
    (rows, labels), (queries, truth) = blobs(0, 30), blobs(1, 40)
    for penalty in (1e-3, 1e-1):
        scores = logistic_regression(rows, labels, queries, truth, LogisticChoices((penalty,)))
        expected = slow_predictions(rows.astype(np.float64), labels, queries, penalty)
        assert (scores.predicted == expected).mean() > 0.99  # a row on a border may differ
        assert scores.metrics["top1"] == pytest.approx(100 * (scores.predicted == truth).mean())


def test_the_penalty_is_chosen_on_held_out_training_images_alone() -> None:
    (rows, labels), (queries, truth) = blobs(0, 60), blobs(1, 40)
    scores = logistic_regression(rows, labels, queries, truth)
    wrong = logistic_regression(rows, labels, queries, (truth + 1) % 3)
    assert scores.chosen == wrong.chosen and scores.held_out_top1 == wrong.held_out_top1
    assert scores.held_out_images == 18 and scores.metrics["top1"] > 60
    assert scores.held_out_top1[scores.chosen] == max(scores.held_out_top1.values())


def test_two_classes_and_any_class_numbers() -> None:
    rows, labels = blobs(0, 40, classes=2)
    numbers = np.array([7, -3])[labels]
    scores = logistic_regression(rows, numbers, rows, numbers, LogisticChoices((1e-4,)))
    assert set(scores.predicted) == {7, -3} and scores.metrics["top1"] > 80 and "top5" not in scores.metrics


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"penalties": ()}, "penalties"),
        ({"penalties": (0.1, 0.1)}, "penalties"),
        ({"penalties": (float("nan"),)}, "penalties"),
        ({"iterations": 0}, "iterations"),
        ({"held_out": 1.0}, "held_out"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_choices(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LogisticChoices(**changes).check()
    assert raised.value.arguments == (named,)


def test_data_that_cannot_be_fitted() -> None:
    rows, labels = blobs(0, 5)
    with pytest.raises(DataError, match="one class"):
        logistic_regression(rows, np.zeros_like(labels), rows, labels)
    with pytest.raises(DataError, match="one training image"):
        logistic_regression(rows[::5], labels[::5], rows, labels)
    with pytest.raises(FeatureError):
        logistic_regression(rows * 2, labels, rows, labels)
    with pytest.raises(DataError, match="0 test rows"):
        logistic_regression(rows, labels, rows[:0], labels[:0])
