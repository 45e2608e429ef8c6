"""How well a number without labels chooses: which of several runs to keep, and when to stop one.

A *merit* is the number, turned so that larger is expected to be better (`merit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from jaxtyping import Float64, Int64

from sop_faiss.bootstrap import LEVEL, SEED, Interval, bootstrap_interval

RESAMPLES = 2000
NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "view_recall_at_1": "highest",
        "rankme": "highest",
        "lidar": "highest",
        "alpha_req": "nearest to 1",
        "assignment_entropy": "lowest",
        "feature_rankme": "highest",
        "embedding_rankme": "highest",
        "view_auc": "highest",
        "feature_cosine": "lowest",
        "teacher_entropy_cls_over_lnK": "lowest",
        "loss_cls_over_lnK": "lowest",
    }
)
"""Numbers without labels, and which value the rule picks; the last six are those of a logged step."""


@dataclass(frozen=True)
class WhichRun:
    """What keeping the run of the highest merit gives; intervals are a bootstrap over the runs."""

    runs: int
    spearman: Interval
    """Rank correlation of merit and score."""
    kendall: Interval
    """tau-b."""
    regret: Interval
    """The best score minus that of the picked run."""


@dataclass(frozen=True)
class WhenToStop:
    """What stopping at the step of the highest merit gives, on average over runs; intervals as of `WhichRun`."""

    runs: int
    spearman: Interval
    """Rank correlation of merit and score over the steps of a run, of the runs that have one."""
    regret: Interval
    """The best score of the run minus that of the picked step."""
    over_last: Interval
    """The score of the picked step minus that of the last one."""
    over_first: Interval
    """The same, minus that of the first one."""


def merit(name: str, values: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return a number so that larger is expected to be better, by the rule in `NUMBERS`."""
    rule = NUMBERS.get(name, "highest")
    return -np.abs(values - 1.0) if rule == "nearest to 1" else -values if rule == "lowest" else values


def which_run(merits: Float64[np.ndarray, " r"], scores: Float64[np.ndarray, " r"]) -> WhichRun | None:
    """Judge a number by the runs that it would keep.

    Args:
        merits: of each run at its end; NaN: it has none, and the run is left out.
        scores: with labels, of the same runs.

    Returns:
        None for fewer than three runs.
    """
    known = np.isfinite(merits) & np.isfinite(scores)
    merits, scores, count = merits[known], scores[known], int(known.sum())
    if count < 3:
        return None
    rng = np.random.Generator(np.random.Philox(SEED))
    drawn = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES)
    often = np.concatenate([np.ones((1, count), np.int64), drawn])
    found = (*rank_correlations(merits, scores, often), _regrets(merits, scores, often))
    return WhichRun(count, *(_interval(values) for values in found))


def rank_correlations(
    x: Float64[np.ndarray, " n"], y: Float64[np.ndarray, " n"], often: Int64[np.ndarray, "r n"]
) -> tuple[Float64[np.ndarray, " r"], Float64[np.ndarray, " r"]]:
    """Return Spearman's rho and Kendall's tau-b of samples that have pair number i `often[:, i]` times.

    NaN where all values of a sample are equal. Ties have their mean rank: the mean rank of i among the sample is half
    the sum over j of sign(x_i - x_j), and a constant, so that both follow from the matrices of signs.
    """
    signs = [np.sign(values[:, None] - values[None, :]) for values in (x, y)]
    weights = often.astype(np.float64)
    ranks = [weights @ each.T for each in signs]  # their mean, weighted by `often`, is 0
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = _weighted(weights, *ranks) / np.sqrt(
            _weighted(weights, ranks[0], ranks[0]) * _weighted(weights, ranks[1], ranks[1])
        )
        both, only_x, only_y = (
            np.einsum("ri,ij,rj->r", weights, a * b, weights, optimize=True)
            for a, b in ((signs[0], signs[1]), (signs[0], signs[0]), (signs[1], signs[1]))
        )
        return rho, both / np.sqrt(only_x * only_y)


def _weighted(weights: np.ndarray, a: np.ndarray, b: np.ndarray) -> Float64[np.ndarray, " r"]:
    return np.asarray((weights * a * b).sum(axis=1))


def _regrets(
    merits: Float64[np.ndarray, " n"], scores: Float64[np.ndarray, " n"], often: Int64[np.ndarray, "r n"]
) -> Float64[np.ndarray, " r"]:
    best = np.where(often > 0, scores, -np.inf).max(axis=1)
    return np.asarray(best - scores[np.where(often > 0, merits, -np.inf).argmax(axis=1)])


def _interval(values: Float64[np.ndarray, " r"]) -> Interval:
    """Return the interval of a value: that of all runs comes first, then those of resamples."""
    resampled = values[1:][np.isfinite(values[1:])]
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if len(resampled) else (np.nan, np.nan)
    return Interval(float(values[0]), float(low), float(high))


def when_to_stop(
    runs: Sequence[tuple[Float64[np.ndarray, " m"], Float64[np.ndarray, " m"]]],
) -> WhenToStop | None:
    """Judge a number by the steps that it would stop runs at; of equal merits the earlier step is picked.

    Args:
        runs: merits and scores of each run at its steps, from the first to the last. A step without merit cannot be
            picked; it may be the best, the first or the last.

    Returns:
        None unless three runs have two or more steps with a merit.
    """
    found = []
    for merits, scores in runs:
        merits, scores = merits[np.isfinite(scores)], scores[np.isfinite(scores)]
        known = np.isfinite(merits)
        if known.sum() < 2:
            continue
        (rho,), _ = rank_correlations(merits[known], scores[known], np.ones((1, int(known.sum())), np.int64))
        picked = scores[np.where(known, merits, -np.inf).argmax()]
        found.append((rho, scores.max() - picked, picked - scores[-1], picked - scores[0]))
    if len(found) < 3:
        return None
    intervals = [values[np.isfinite(values)] for values in np.array(found).T]
    nothing = Interval(np.nan, np.nan, np.nan)
    return WhenToStop(
        len(found), *(bootstrap_interval(values, RESAMPLES) if len(values) else nothing for values in intervals)
    )
