"""Metrics: cases worked out by hand, and a literal sort-based oracle over random, tied and perfect rankings."""

from __future__ import annotations

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sop_faiss.errors import FeatureError
from sop_faiss.evaluate.metrics import (
    average_precision,
    average_precision_at_r,
    mean_percent,
    ndcg,
    order_keys,
    precision_at,
    r_precision,
    ranks_of_relevant,
    recall_at,
    recall_at_1,
    standard_average_precision,
    top_positions,
)
from tests import oracle_metrics as oracle


def ranks(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("found", "relevant_count", "expected"),
    [
        (ranks(0), 1, 1.0),
        (ranks(0, 1, 2), 3, 1.0),
        (ranks(1), 1, (0 / 1 + 1 / 2) / 2),
        (ranks(0, 2), 2, ((1 + 1) / 2 + (1 / 2 + 2 / 3) / 2) / 2),
        (ranks(2, 5), 2, ((0 / 2 + 1 / 3) / 2 + (1 / 5 + 2 / 6) / 2) / 2),
        (ranks(0), 4, 1 / 4),  # a cut ranking: three relevant images are not in it
        (ranks(), 3, 0.0),
    ],
)
def test_average_precision_by_hand(found: np.ndarray, relevant_count: int, expected: float) -> None:
    assert average_precision(found, relevant_count) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("found", "k", "expected"),
    [
        (ranks(0), 1, 1.0),
        (ranks(0), 10, 1.0),  # one relevant image, first: k shrinks to 1
        (ranks(3), 10, 1 / 4),  # k shrinks to 4
        (ranks(0, 3), 10, 2 / 4),
        (ranks(0, 30), 10, 1 / 10),  # the last is beyond k: k stays
        (ranks(0, 1, 9), 10, 3 / 10),
        (ranks(0, 1, 10), 10, 2 / 10),
        (ranks(), 5, 0.0),
    ],
)
def test_precision_at_by_hand(found: np.ndarray, k: int, expected: float) -> None:
    assert precision_at(found, k) == pytest.approx(expected, abs=1e-15)


def test_ignored_images_leave_the_ranking() -> None:
    similarities = floats(0.9, 0.8, 0.7, 0.6, 0.5)
    assert ranks_of_relevant(similarities, ranks(2, 4), ranks()).tolist() == [2, 4]
    assert ranks_of_relevant(similarities, ranks(4, 2), ranks(0, 3)).tolist() == [1, 2]
    assert ranks_of_relevant(similarities, ranks(2), ranks(0, 1, 3, 4)).tolist() == [0]


def test_equal_similarities_stand_in_gallery_order() -> None:
    tied = floats(0.5, 0.5, 0.5, 0.5)
    assert ranks_of_relevant(tied, ranks(2), ranks()).tolist() == [2]
    assert ranks_of_relevant(tied, ranks(2), ranks(0)).tolist() == [1]
    assert top_positions(tied, ranks(), 3).tolist() == [0, 1, 2]
    signed_zeros = floats(-0.0, 0.0, -0.0)
    assert top_positions(signed_zeros, ranks(), 3).tolist() == [0, 1, 2]


def test_order_of_extreme_similarities() -> None:
    extremes = floats(-np.inf, 1e-45, -1e-45, 3e38, np.inf, 0, -3e38)
    assert top_positions(extremes, ranks(), 7).tolist() == [4, 3, 1, 5, 2, 6, 0]


def test_top_positions_beyond_the_gallery() -> None:
    assert top_positions(floats(0.1, 0.3, 0.2), ranks(1), 10).tolist() == [2, 0]
    assert top_positions(floats(0.1), ranks(), 0).tolist() == []


def test_recall_at_1() -> None:
    assert recall_at_1(ranks(0, 7)) == 1.0
    assert recall_at_1(ranks(1)) == 0.0
    assert recall_at_1(ranks()) == 0.0


def test_nan_has_no_ranking() -> None:
    with pytest.raises(FeatureError, match="NaN"):
        order_keys(floats(0.1, float("nan")))


def test_mean_of_no_query() -> None:
    assert mean_percent([0.25, 0.75]) == 50.0
    with pytest.raises(ValueError, match="no query"):
        mean_percent([])


@st.composite
def ranked_cases(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int]]:
    """Similarities with many ties, and disjoint relevant (at least one) and ignored positions."""
    count = draw(st.integers(1, 40))
    values = st.sampled_from([-1.0, -0.0, 0.0, 0.25, 0.5, 1.0]) | st.floats(-1, 1, width=32)
    similarities = draw(arrays.arrays(np.float32, count, elements=values))
    shuffled = draw(st.permutations(range(count)))
    relevant_count = draw(st.integers(1, count))
    ignored_count = draw(st.integers(0, count - relevant_count))
    return similarities, shuffled[:relevant_count], shuffled[relevant_count : relevant_count + ignored_count]


@given(ranked_cases())
def test_counting_equals_sorting(case: tuple[np.ndarray, list[int], list[int]]) -> None:
    similarities, relevant, ignored = case
    ranked = oracle.ranking(similarities.tolist(), ignored)
    found = ranks_of_relevant(similarities, np.array(relevant, np.int64), np.array(ignored, np.int64))
    assert found.tolist() == sorted(ranked.index(position) for position in relevant)
    assert top_positions(similarities, np.array(ignored, np.int64), 5).tolist() == ranked[:5]


@given(ranked_cases(), st.sampled_from([1, 5, 10, 100]))
def test_scores_equal_the_walk_down_the_list(case: tuple[np.ndarray, list[int], list[int]], k: int) -> None:
    similarities, relevant, ignored = case
    ranked = oracle.ranking(similarities.tolist(), ignored)
    found = ranks_of_relevant(similarities, np.array(relevant, np.int64), np.array(ignored, np.int64))
    assert average_precision(found, len(relevant)) == pytest.approx(
        oracle.average_precision(ranked, relevant), abs=1e-12
    )
    assert precision_at(found, k) == pytest.approx(oracle.precision_at(ranked, relevant, k), abs=1e-12)


@given(ranked_cases())
def test_scores_are_shares_and_perfect_rankings_score_one(case: tuple[np.ndarray, list[int], list[int]]) -> None:
    similarities, relevant, ignored = case
    found = ranks_of_relevant(similarities, np.array(relevant, np.int64), np.array(ignored, np.int64))
    assert 0 <= average_precision(found, len(relevant)) <= 1 + 1e-12
    perfect = similarities.copy()
    perfect[relevant] = 2.0
    found = ranks_of_relevant(perfect, np.array(relevant, np.int64), np.array(ignored, np.int64))
    assert average_precision(found, len(relevant)) == pytest.approx(1.0)
    assert precision_at(found, 10) == recall_at_1(found) == 1.0


def test_metrics_of_plain_sets_by_hand() -> None:
    """Three relevant images, at ranks 0, 2 and 5 (from 0)."""
    found = ranks(0, 2, 5)
    assert [recall_at(found, k) for k in (1, 5)] == [1.0, 1.0]
    assert [recall_at(ranks(2), k) for k in (1, 2, 3)] == [0.0, 0.0, 1.0]
    assert r_precision(found, 3) == 2 / 3
    assert average_precision_at_r(found, 3) == pytest.approx((1 / 1 + 2 / 3) / 3)
    gain = 1 + 1 / np.log2(4) + 1 / np.log2(7)
    assert ndcg(found, 3) == pytest.approx(gain / (1 + 1 / np.log2(3) + 1 / np.log2(4)))
    perfect = ranks(0, 1, 2)
    assert (r_precision(perfect, 3), average_precision_at_r(perfect, 3), ndcg(perfect, 3)) == pytest.approx((1, 1, 1))


@given(st.lists(st.booleans(), min_size=1, max_size=30).filter(any))
def test_metrics_of_plain_sets_against_scikit_learn_and_walks(relevant: list[bool]) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    found, count = np.flatnonzero(relevant).astype(np.int64), sum(relevant)
    if len(relevant) > 1:
        falling = -np.arange(len(relevant), dtype=np.float64)
        assert ndcg(found, count) == pytest.approx(sklearn.ndcg_score([relevant], [falling]))
    assert r_precision(found, count) == sum(relevant[:count]) / count
    if len(relevant) > 1:
        standard = sklearn.average_precision_score(relevant, falling)
        assert standard_average_precision(found, count) == pytest.approx(standard)
        assert average_precision(found, count) <= standard_average_precision(found, count) + 1e-12
    assert standard_average_precision(found[:1], count) == pytest.approx(1 / (found[0] + 1) / count)
    walked = sum(sum(relevant[: place + 1]) / (place + 1) for place in range(count) if relevant[place]) / count
    assert average_precision_at_r(found, count) == pytest.approx(walked)
