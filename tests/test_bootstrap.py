"""Bootstrap intervals: reproducible, as wide as theory says, and paired where queries are shared."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss import bootstrap
from sop_faiss.bootstrap import (
    bootstrap_interval,
    bootstrap_of_sums,
    paired_difference,
    share_difference,
    share_interval,
)


def test_as_wide_as_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(50, 10, 400)
    found = bootstrap_interval(values)
    error = values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_the_same_every_time_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).uniform(0, 100, 70)
    whole = bootstrap_interval(values)
    assert bootstrap_interval(values) == whole
    assert bootstrap_interval(values, seed=1) != whole
    monkeypatch.setattr(bootstrap, "_INDICES", 70 * 1024)
    assert bootstrap_interval(values) == whole


def test_pairs_see_a_difference_that_intervals_do_not() -> None:
    rng = np.random.default_rng(0)
    first = rng.uniform(0, 100, 70)
    second = first + 1 + rng.normal(0, 2, 70)
    one, two = bootstrap_interval(first), bootstrap_interval(second)
    assert one.high > two.low  # the intervals overlap
    paired = paired_difference(first, second)
    assert paired.difference.low > 0 and paired.p_value < 0.01
    assert paired.better + paired.worse == 70 and paired.better > 40
    back = paired_difference(second, first)
    assert back.difference.mean == pytest.approx(-paired.difference.mean)


def test_a_difference_of_shares_is_that_of_its_paper() -> None:
    """Newcombe 1998, table II, column 10: 56 of 70 and 48 of 80; 9 of 10 and 3 of 10; 10 of 10 and 0 of 10."""
    for (one, of_one), (other, of_other), low, high in (
        ((56, 70), (48, 80), 5.24, 33.39),
        ((9, 10), (3, 10), 17.05, 80.90),
        ((10, 10), (0, 10), 60.75, 100.0),
    ):
        first, second = share_interval(100 * one / of_one, of_one), share_interval(100 * other / of_other, of_other)
        found = share_difference(first, second)
        assert found.mean == first.mean - second.mean
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.006)


def test_the_interval_of_a_share_is_where_its_score_test_ends() -> None:
    for percent, count in ((0.0, 5), (20.0, 10), (72.3, 94), (100.0, 1000)):
        found = share_interval(percent, count)
        for end in (found.low, found.high):
            if end in (0, 100):
                assert end == percent
                continue
            error = np.sqrt(end * (100 - end) / count)
            assert abs(percent - end) == pytest.approx(1.959964 * error, rel=1e-6)
        assert found.low <= found.mean <= found.high
    with pytest.raises(ValueError, match="counted"):
        share_interval(0.0, 0)


def test_no_difference() -> None:
    values = np.random.default_rng(0).uniform(0, 100, 20)
    paired = paired_difference(values, values)
    assert (paired.p_value, paired.better, paired.worse) == (1.0, 0, 0)
    assert (paired.difference.low, paired.difference.high) == (0.0, 0.0)


def test_p_values_of_equal_encoders_are_spread_evenly() -> None:
    rng = np.random.default_rng(0)
    pairs = (rng.normal(0, 1, (2, 50)) for _ in range(200))
    p = np.array([paired_difference(first, second, resamples=500).p_value for first, second in pairs])
    assert abs((p < 0.5).mean() - 0.5) < 0.12 and (p < 0.05).mean() < 0.12


def test_nothing_to_average() -> None:
    with pytest.raises(ValueError, match="no query"):
        bootstrap_interval(np.empty(0))


def test_sums_give_the_interval_of_their_mean() -> None:
    values = np.random.default_rng(3).random((70, 2))
    found = bootstrap_of_sums(values, lambda sums: sums[:, 0] / 70)
    mean = bootstrap_interval(values[:, 0])
    assert (found.mean, found.low, found.high) == pytest.approx((mean.mean, mean.low, mean.high))
    with pytest.raises(ValueError):
        bootstrap_of_sums(values[:0], lambda sums: sums[:, 0])
