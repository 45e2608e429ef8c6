"""Mean cosine, RankMe and the views' AUC against plain loops, and the bounds that docs/metrics.md names."""

from __future__ import annotations

import math

import pytest
import torch

from sop_faiss.train.log.embedding_spread import mean_cosine, rankme, view_auc
from tests.unit_vectors import random_unit as unit


@pytest.mark.parametrize(("count", "dim"), [(2, 3), (7, 4), (5, 9)])
def test_mean_cosine_is_that_of_all_pairs(count, dim):
    rows = unit(count, dim)
    cosines = [float(rows[i] @ rows[j]) for i in range(count) for j in range(count) if i != j]
    assert mean_cosine(rows) == pytest.approx(sum(cosines) / len(cosines), abs=1e-6)


@pytest.mark.parametrize(("count", "dim"), [(1, 3), (7, 4), (5, 9), (30, 30)])
def test_rankme_is_that_of_the_singular_values(count, dim):
    rows = unit(count, dim, seed=3)
    singular = torch.linalg.svdvals(rows.double())
    shares = [float(value / singular.sum()) for value in singular]
    assert rankme(rows) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-6)


def test_view_auc_is_that_of_all_pairs():
    one, other = unit(9, 3, seed=1), unit(9, 3, seed=2)
    other[:5] = one[:5]
    other[6] = other[8] = one[8]  # a tie
    wins = []
    for i in range(9):
        for j in range(9):
            if i != j:
                own, its = (float(one[i].double() @ other[k].double()) for k in (i, j))
                wins.append(1.0 if own > its else 0.5 if own == its else 0.0)
    assert view_auc(one, other) == pytest.approx(sum(wins) / len(wins), abs=1e-12)


def test_a_constant_output():
    rows = unit(1, 16).expand(40, 16)
    assert mean_cosine(rows) == pytest.approx(1.0, abs=1e-6)
    assert rankme(rows) == pytest.approx(1.0, abs=1e-3)
    assert view_auc(rows, rows) == pytest.approx(0.5, abs=0.02)


def test_equal_singular_values_and_views_that_agree():
    rows = torch.eye(12)
    assert rankme(rows) == pytest.approx(12.0)
    assert rankme(torch.cat([rows, rows])) == pytest.approx(12.0)
    assert mean_cosine(rows) == 0.0
    assert view_auc(rows, rows) == 1.0


@pytest.mark.parametrize(("count", "dim", "share"), [(256, 64, 0.967), (256, 256, 0.803), (64, 256, 0.967)])
def test_random_directions(count, dim, share):
    """The ceilings that the documentation gives, and their spread over seeds."""
    for seed in range(3):
        rows = unit(count, dim, seed=seed)
        assert rankme(rows) == pytest.approx(share * min(count, dim), rel=0.02)
        assert abs(mean_cosine(rows)) < 4 / (count * dim**0.5)
    assert view_auc(unit(256, dim, seed=5), unit(256, dim, seed=6)) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 256))


def test_numbers_that_there_are_none_of():
    spoiled = unit(5, 4)
    spoiled[2, 1] = math.inf
    for rows in (spoiled, torch.empty(0, 4)):
        assert math.isnan(mean_cosine(rows)) and math.isnan(rankme(rows)) and math.isnan(view_auc(rows, rows))
    one = unit(1, 4)
    assert math.isnan(mean_cosine(one)) and math.isnan(view_auc(one, one))
    assert rankme(one) == pytest.approx(1.0)
