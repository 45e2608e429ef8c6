"""How well numbers without labels choose: known answers, and SciPy's rank correlations."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from sop_faiss.evaluate.stopping import merit, rank_correlations, when_to_stop, which_run


def test_rank_correlations_are_those_of_the_repeated_pairs() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, 12).astype(float), rng.standard_normal(12).round(1)
    often = rng.multinomial(12, np.full(12, 1 / 12), 20)
    rho, tau = rank_correlations(x, y, often)
    for number, counts in enumerate(often):
        a, b = np.repeat(x, counts), np.repeat(y, counts)
        assert rho[number] == pytest.approx(scipy.stats.spearmanr(a, b).statistic)
        assert tau[number] == pytest.approx(scipy.stats.kendalltau(a, b).statistic)


def test_equal_values_have_no_correlation() -> None:
    rho, tau = rank_correlations(np.ones(5), np.arange(5.0), np.ones((1, 5), np.int64))
    assert np.isnan(rho).all() and np.isnan(tau).all()


def test_a_perfect_number_keeps_the_best_run() -> None:
    scores = np.array([31.0, 35.0, 28.0, 33.0])
    found = which_run(scores**2, scores)
    assert found is not None and found.runs == 4
    for interval, value in ((found.spearman, 1), (found.kendall, 1), (found.regret, 0)):
        assert (interval.mean, interval.low, interval.high) == pytest.approx((value, value, value))


def test_a_reversed_number_keeps_the_worst_run() -> None:
    scores = np.array([31.0, 35.0, 28.0, 33.0])
    found = which_run(-scores, scores)
    assert found is not None
    assert (found.spearman.mean, found.kendall.mean, found.regret.mean) == pytest.approx((-1, -1, 7))
    assert found.regret.low >= 0 and found.regret.high <= 7


def test_a_number_of_chance_has_an_interval_around_no_correlation() -> None:
    rng = np.random.default_rng(1)
    found = which_run(rng.standard_normal(30), rng.standard_normal(30))
    assert found is not None and found.spearman.low < 0 < found.spearman.high


def test_runs_without_the_number_are_left_out() -> None:
    scores = np.array([31.0, 35.0, 28.0, 33.0, 99.0])
    found = which_run(np.array([1.0, 3.0, 0.0, 2.0, np.nan]), scores)
    assert found is not None and found.runs == 4 and found.regret.mean == 0
    assert which_run(np.array([1.0, 2.0, np.nan]), np.arange(3.0)) is None


def test_stopping_is_judged_by_the_best_the_last_and_the_first_step() -> None:
    runs = [(np.array([0.0, 2.0, 1.0]), np.array([20.0, 30.0 + seed, 32.0 + 2 * seed])) for seed in range(3)]
    found = when_to_stop(runs)
    assert found is not None and found.runs == 3
    assert found.regret.mean == pytest.approx(3) and (found.regret.low, found.regret.high) == pytest.approx((2, 4))
    assert found.over_last.mean == pytest.approx(-3) and found.over_first.mean == pytest.approx(11)
    assert found.spearman.mean == pytest.approx(0.5)


def test_a_step_without_the_number_is_not_picked_but_counts() -> None:
    runs = [(np.array([np.nan, 1.0, 2.0]), np.array([40.0, 30.0, 31.0]))] * 3
    found = when_to_stop(runs)
    assert found is not None and (found.regret.mean, found.over_first.mean) == pytest.approx((9, -9))
    assert when_to_stop(runs[:2]) is None
    assert when_to_stop([(np.array([np.nan, np.nan, 2.0]), np.arange(3.0))] * 3) is None


def test_of_equal_merits_the_earlier_step_is_picked() -> None:
    found = when_to_stop([(np.array([1.0, 1.0]), np.array([5.0, 9.0]))] * 3)
    assert found is not None and found.regret.mean == 4 and np.isnan(found.spearman.mean)


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [("rankme", [1, 5, 3], 1), ("alpha_req", [0.2, 2.5, 1.4], 2), ("assignment_entropy", [50, 70, 40], 2)],
)
def test_merit_turns_a_number_so_that_larger_is_expected_to_be_better(
    name: str, values: list[float], best: int
) -> None:
    assert merit(name, np.array(values, float)).argmax() == best
