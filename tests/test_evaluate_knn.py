"""Weighted k-NN against a loop, and the cases on which such classifiers break: one query, k > n, odd labels, ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sop_faiss.errors import ConfigError, DataError, FeatureError
from sop_faiss.evaluate import knn
from sop_faiss.evaluate.knn import knn_scores
from sop_faiss.evaluate.knn_choices import used_ks
from sop_faiss.unit_rows import require_unit_rows
from tests.unit_vectors import unit


def metrics_of(*arguments, **options) -> dict[str, float]:
    return knn_scores(*arguments, **options).metrics


def loop_knn(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray, k: int, temperature: float
) -> tuple[float, float]:
    """Top-1 and top-5 in percent: one query after the other, a dictionary of votes, a sort."""
    top1 = top5 = 0
    for query, truth in zip(test.tolist(), test_labels.tolist(), strict=True):
        similarities = [math.fsum(a * b for a, b in zip(query, row, strict=True)) for row in train.tolist()]
        nearest = sorted(range(len(train)), key=lambda row: (-np.float32(similarities[row]), row))[:k]
        votes: dict[int, float] = {}
        for row in nearest:
            label = int(train_labels[row])
            votes[label] = votes.get(label, 0.0) + math.exp(similarities[row] / temperature)
        # votes that are equal on paper may differ in the last bits here
        ranked = sorted(votes, key=lambda label: (-float(f"{votes[label]:.9e}"), label))
        top1 += truth in ranked[:1]
        top5 += truth in ranked[:5]
    return 100 * top1 / len(test), 100 * top5 / len(test)


@st.composite
def knn_cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random, tied or repeated unit rows whose products are exact or far apart, and labels with gaps."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, queries = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    labels = np.array(draw(st.lists(st.integers(-3, 10**12), min_size=1, max_size=9, unique=True)))
    if draw(st.booleans()):
        train, test = unit(rng.standard_normal((count, 8))), unit(rng.standard_normal((queries, 8)))
    else:  # corners of a cube: many ties, exact in float32
        train, test = (np.sign(rng.standard_normal((n, 4))).astype(np.float32) / 2 for n in (count, queries))
    if draw(st.booleans()):
        train = train[rng.integers(0, count, count)]
    return train, rng.choice(labels, count), test, rng.choice(labels, queries)


@settings(max_examples=150)
@given(knn_cases(), st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True))
def test_equal_to_the_loop(case: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], ks: list[int]) -> None:
    train, train_labels, test, test_labels = case
    got = metrics_of(train, train_labels, test, test_labels, ks)
    for k in ks:
        top1, top5 = loop_knn(train, train_labels, test, test_labels, k, 0.07)
        assert got[f"top1_k{k}"] == pytest.approx(top1)
        assert got[f"top5_k{k}"] == pytest.approx(top5)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    train, test = unit(rng.standard_normal((60, 6))), unit(rng.standard_normal((23, 6)))
    labels, truth = rng.integers(0, 7, 60), rng.integers(0, 7, 23)
    whole = metrics_of(train, labels, test, truth)
    monkeypatch.setattr(knn, "QUERY_BLOCK", 5)
    assert metrics_of(train, labels, test, truth) == whole


def test_votes_by_hand() -> None:
    """One near neighbor of class 7 against two farther ones of class 3: the temperature decides."""
    train = unit(np.array([[1.0, 0.0], [0.9, math.sqrt(1 - 0.81)], [0.9, -math.sqrt(1 - 0.81)]]))
    labels, query, truth = np.array([7, 3, 3]), unit(np.array([[1.0, 0.0]])), np.array([7])
    assert metrics_of(train, labels, query, truth, (3,), temperature=0.07)["top1_k3"] == 100.0  # e^1.43 > 2
    assert metrics_of(train, labels, query, truth, (3,), temperature=0.5)["top1_k3"] == 0.0  # e^0.2 < 2
    assert metrics_of(train, labels, query, truth, (3,), temperature=1e-4)["top1_k3"] == 100.0  # no overflow
    assert metrics_of(train, labels, query, truth, (1,), temperature=0.5)["top1_k1"] == 100.0


def test_equal_votes_go_to_the_smaller_label() -> None:
    train = unit(np.ones((2, 4)))
    query = unit(np.ones((1, 4)))
    assert metrics_of(train, np.array([9, 4]), query, np.array([4]), (2,))["top1_k2"] == 100.0
    assert metrics_of(train, np.array([9, 4]), query, np.array([9]), (2,))["top1_k2"] == 0.0
    assert metrics_of(train, np.array([9, 4]), query, np.array([9]), (1,))["top1_k1"] == 100.0  # the first row


def test_of_rows_that_tie_for_the_last_place_the_first_counts() -> None:
    """Row 3 is nearest; rows 0, 1, 2 tie for the second place, and it is row 0 that gets it."""
    corners = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [1, 1, 1, 1], [-1, -1, -1, -1]], np.float32) / 2
    query = corners[3:4]
    for truth, wanted in ((5, 100.0), (6, 0.0), (7, 0.0)):
        scores = metrics_of(corners, np.array([5, 6, 7, 8, 9]), query, np.array([truth]), (2,))
        assert scores["top5_k2"] == wanted


def test_a_class_without_a_neighbor_is_never_predicted() -> None:
    train, query = unit(np.eye(4)), unit(np.eye(4)[:1])
    scores = metrics_of(train, np.array([1, 2, 3, 0]), query, np.array([0]), (2,))
    assert scores == {"top1_k2": 0.0, "top5_k2": 0.0}
    scores = metrics_of(train, np.array([1, 2, 3, 0]), query, np.array([99]), (4,))  # a class never seen in training
    assert scores == {"top1_k4": 0.0, "top5_k4": 0.0}


def test_k_above_n_uses_all_rows() -> None:
    train = unit(np.eye(3))
    labels = np.array([0, 1, 1])
    scores = metrics_of(train, labels, train, labels)
    assert used_ks((10, 20, 100, 200), 3) == {10: 3, 20: 3, 100: 3, 200: 3}
    assert set(scores) == {f"top{top}_k{k}" for top in (1, 5) for k in (10, 20, 100, 200)}
    assert scores["top1_k10"] == scores["top1_k200"] == 100.0


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, 2.0])
def test_rows_that_are_not_unit_vectors(value: float) -> None:
    good = unit(np.eye(3))
    bad = good.copy()
    bad[1] *= np.float32(value) if value != np.inf else 1
    bad[1, 1] = value
    labels = np.arange(3)
    for train, test in ((bad, good), (good, bad)):
        with pytest.raises(FeatureError, match=r"1 of 3 rows are not unit vectors \(row 1") as caught:
            metrics_of(train, labels, test, labels, (1,))
        assert "\n" not in str(caught.value)


def test_float16_storage_is_close_enough_to_unit() -> None:
    rows = unit(np.random.default_rng(0).standard_normal((50, 384))).astype(np.float16).astype(np.float32)
    require_unit_rows(rows, "rows")


def test_impossible_choices() -> None:
    rows, labels = unit(np.eye(3)), np.arange(3)
    for ks in ((), (0,), (5, -1)):
        with pytest.raises(ConfigError, match="at least"):
            metrics_of(rows, labels, rows, labels, ks)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="temperature"):
            metrics_of(rows, labels, rows, labels, (1,), temperature)
    for train, test in ((rows[:0], rows), (rows, rows[:0])):
        with pytest.raises(DataError, match="wanted some"):
            metrics_of(train, labels[: len(train)], test, labels[: len(test)], (1,))


def test_predictions_are_what_the_accuracies_count() -> None:
    rng = np.random.default_rng(3)
    train, test = unit(rng.standard_normal((60, 6))), unit(rng.standard_normal((23, 6)))
    labels, truth = rng.integers(-4, 7, 60), rng.integers(-4, 7, 23)
    scores = knn.knn_scores(train, labels, test, truth, (1, 7, 60))
    for k in (1, 7, 60):
        assert 100 * (scores.predicted[k] == truth).mean() == pytest.approx(scores.metrics[f"top1_k{k}"])
    assert scores.predicted[1].tolist() == labels[(test @ train.T).argmax(1)].tolist()
