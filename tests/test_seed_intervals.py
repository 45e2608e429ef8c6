"""Means over seeds and their intervals, against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sop_faiss.evaluate.seed_intervals import mean_interval, paired_interval, t_probability, t_quantile

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 6, 9, 10, 30, 99, 1000])
def test_quantiles_and_probabilities_are_scipys(degrees):
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-10)
    for t in (0.0, 0.3, 1.0, 2.5, 40.0):
        assert t_probability(t, degrees) == pytest.approx(2 * stats.t.cdf(t, degrees) - 1, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_the_interval_of_a_mean_is_scipys(count):
    values = np.random.default_rng(count).normal(60, 3, count)
    found = mean_interval(list(values))
    wanted = stats.t.interval(0.95, count - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(wanted, rel=1e-10)
    assert found.mean == pytest.approx(values.mean())


def test_one_value_has_no_interval_and_none_is_an_error():
    found = mean_interval([70.0])
    assert found.mean == 70 and math.isnan(found.low) and math.isnan(found.high)
    with pytest.raises(ValueError, match="no run"):
        mean_interval([])


def test_pairs_are_of_the_same_seed():
    """What both arms of a seed share cancels, and a seed that one of them lacks does not count."""
    first = {0: 50.0, 1: 70.0, 2: 60.0, 7: 99.0}
    second = {2: 62.0, 1: 71.0, 0: 53.0}
    found, shared = paired_interval(first, second)
    wanted = stats.ttest_rel([53, 71, 62], [50, 70, 60]).confidence_interval(0.95)
    assert shared == 3 and found.mean == pytest.approx(2.0)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), rel=1e-10)
    with pytest.raises(ValueError, match="no run"):
        paired_interval({0: 1.0}, {1: 1.0})
