"""How sure a mean over seeds is: Student's t, and its paired form for two arms that share seeds.

The interval is of the mean over other seeds like these: mean +- t(0.975, n - 1) * s / sqrt(n) for n runs with the
sample standard deviation s (Student, "The probable error of a mean", Biometrika 1908). Paired: the same of differences
by seed, in which what both runs of a seed share (images held out, initial weights, order) cancels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from sop_faiss.bootstrap import LEVEL, Interval


def t_probability(t: float, degrees: int) -> float:
    """Return the probability that |T| < t for Student's T, exactly (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    Args:
        t: 0 or more.
        degrees: of freedom, 1 or more.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine, first = math.cos(angle), degrees % 2
    term, total = cosine**first, 0.0
    for power in range(first, degrees - 1, 2):  # powers of the cosine: 1, 3, ..., or 0, 2, ..., up to degrees - 2
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    if first == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)


@functools.cache
def t_quantile(degrees: int) -> float:
    """Return t with P(|T| < t) = 0.95, by bisection."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < LEVEL:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < LEVEL else (low, middle)
    return (low + high) / 2


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean over seeds and its 95 % interval; NaN as the bounds of a single value, which has none.

    Raises:
        ValueError: there is no value.
    """
    if not len(values):
        raise ValueError("no run has this score")
    numbers = np.asarray(values, np.float64)
    mean = float(numbers.mean())
    if len(numbers) == 1:
        return Interval(mean, math.nan, math.nan)
    half = t_quantile(len(numbers) - 1) * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    return Interval(mean, mean - half, mean + half)


def paired_interval(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[Interval, int]:
    """Return how much higher the second is than the first, over the seeds that both have, and their number.

    Args:
        first: seed -> score.
        second: seed -> score.

    Raises:
        ValueError: they share no seed.
    """
    shared = sorted(first.keys() & second.keys())
    return mean_interval([second[seed] - first[seed] for seed in shared]), len(shared)
