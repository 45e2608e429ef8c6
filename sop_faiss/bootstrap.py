"""How sure a mean over queries is: percentile bootstrap, and its paired form for two encoders on the same queries.

Queries are drawn with replacement as often as there are queries, and the mean is taken; of many such means the middle
95 % are the interval. Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 13 and 16;
paired over queries: Sakai, "Evaluating evaluation metrics based on the bootstrap", SIGIR 2006. The interval is about
other queries like these; it says nothing of another training run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 0

_INDICES = 2**22
"""Drawn positions held in memory at a time."""


class Score(NamedTuple):
    """A score in percent, and the value of each query (or image) that it is the mean of."""

    percent: float
    """In percent, or in `unit`."""
    each: Float64[np.ndarray, " q"]
    """Empty: it is not a mean, and nothing says how sure a difference is."""
    unit: str = "%"


@dataclass(frozen=True)
class Interval:
    """A mean and its interval, in the unit of the values."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Mean of (second - first) over the queries, its interval, and how often chance alone would give as much."""

    difference: Interval
    p_value: float
    """Two-sided: twice the share of resampled means on the other side of 0 (at least 1 / resamples)."""
    better: int
    """Queries on which the second is better."""
    worse: int


def bootstrap_interval(values: Float64[np.ndarray, " q"], resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """Return the mean of per-query values, and its 95 % interval; the same for the same values and seed.

    Raises:
        ValueError: there is no value.
    """
    if not len(values):
        raise ValueError("no query was counted")
    means = _resampled_means(values, resamples, seed)
    return _interval(values, means)


def bootstrap_of_sums(
    values: Float64[np.ndarray, "q k"],
    statistic: Callable[[Float64[np.ndarray, "r k"]], Float64[np.ndarray, " r"]],
    resamples: int = RESAMPLES,
) -> Interval:
    """Return what a statistic makes of the sums over queries, and its 95 % interval, for scores that are not means.

    Args:
        values: of each query.
        statistic: of rows of sums.
        resamples: of the queries.

    Raises:
        ValueError: there is no query.
    """
    if not len(values):
        raise ValueError("no query was counted")
    found = np.empty(resamples)
    for part, drawn in _resamples(len(values), resamples, SEED):
        often = np.stack([np.bincount(row, minlength=len(values)) for row in drawn])
        found[part] = statistic(often @ values)
    (of_all,) = statistic(values.sum(0, keepdims=True))
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(of_all), float(low), float(high))


def paired_difference(
    first: Float64[np.ndarray, " q"],
    second: Float64[np.ndarray, " q"],
    resamples: int = RESAMPLES,
    comparisons: int = 1,
) -> PairedDifference:
    """Measure how much better the second is than the first on the same queries, in the same order.

    Args:
        first: the value of each query.
        second: the same of the other.
        resamples: of the queries.
        comparisons: the interval is one of this many that all hold together in 95 % of cases (Bonferroni), as is
            needed where the best of several is chosen.

    Raises:
        ValueError: there is no value.
    """
    if not len(first):
        raise ValueError("no query was counted")
    differences = second - first
    means = _resampled_means(differences, resamples, SEED)
    # A mean of 0 counts half to either side, so that two equal encoders have p = 1.
    below = float((means < 0).mean() + (means == 0).mean() / 2)
    p_value = min(1.0, max(2 * min(below, 1 - below), 1 / resamples))
    return PairedDifference(
        _interval(differences, means, comparisons), p_value, int((differences > 0).sum()), int((differences < 0).sum())
    )


def share_interval(percent: float, count: int) -> Interval:
    """Return a share of a count in percent, such as an accuracy, and its 95 % interval.

    Wilson's, as one of yes and no needs no resampling: Wilson 1927, "Probable inference, the law of succession, and
    statistical inference", JASA 22.

    Args:
        percent: of the count, 0 to 100.
        count: 1 or more.

    Raises:
        ValueError: the count is 0.
    """
    if count < 1:
        raise ValueError("no query was counted")
    share, squared = percent / 100, NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = (squared * share * (1 - share) + squared**2 / 4) ** 0.5 / (1 + squared)
    return Interval(percent, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def share_difference(first: Interval, second: Interval) -> Interval:
    """Return first - second of two shares of different queries, as of `share_interval`, and its 95 % interval.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", Statistics in
    Medicine 17, method 10.
    """
    difference = first.mean - second.mean
    below = math.hypot(first.mean - first.low, second.high - second.mean)
    above = math.hypot(first.high - first.mean, second.mean - second.low)
    return Interval(difference, difference - below, difference + above)


def _interval(values: Float64[np.ndarray, " q"], means: Float64[np.ndarray, " r"], comparisons: int = 1) -> Interval:
    level = 1 - (1 - LEVEL) / comparisons
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def _resampled_means(values: Float64[np.ndarray, " q"], resamples: int, seed: int) -> Float64[np.ndarray, " r"]:
    means = np.empty(resamples)
    for part, drawn in _resamples(len(values), resamples, seed):
        means[part] = values[drawn].mean(axis=1)
    return means


def _resamples(count: int, resamples: int, seed: int) -> Iterator[tuple[slice, Int64[np.ndarray, "r q"]]]:
    """Draw queries with replacement, some resamples at a time."""
    rng = np.random.Generator(np.random.Philox(seed))
    step = max(1, _INDICES // count)
    for start in range(0, resamples, step):
        part = slice(start, min(resamples, start + step))
        yield part, rng.integers(0, count, (part.stop - start, count))
