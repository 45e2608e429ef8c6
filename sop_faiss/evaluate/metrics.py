"""Retrieval metrics of the revisited Oxford/Paris protocol, in pure numpy and without a sort of the gallery.

Source: Radenovic, Iscen, Tolias, Avrithis, Chum, "Revisiting Oxford and Paris", CVPR 2018. A query's gallery falls into
relevant, ignored (junk) and all other images. Ignored images are taken out of the ranking before anything is measured.

Every metric follows from the *ranks* of the relevant images alone. A rank is a count, namely of the kept gallery images
above it, so one pass over the similarities gives it exactly. Images of equal similarity keep the gallery's order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float32, Int64, UInt64

from sop_faiss.errors import FeatureError

_SIGN_BIT = np.uint32(0x80000000)


def order_keys(similarities: Float32[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Return one integer per gallery image; rising keys are the ranking (falling similarity, then rising position).

    The upper half of a key is the bit pattern of the float, turned so that larger floats give smaller integers; the
    lower half is the position. No two keys are equal, so the ranking is a total order: a stable sort's, found without
    sorting.

    Raises:
        FeatureError: a similarity is NaN.
    """
    if np.isnan(similarities).any():
        raise FeatureError("similarities hold NaN, so there is no ranking: extract the features again")
    bits = (similarities + np.float32(0)).view(np.uint32)  # adding 0 makes -0.0 and 0.0 one value
    rising = np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)
    return (~rising).astype(np.uint64) << np.uint64(32) | np.arange(len(bits), dtype=np.uint64)


def ranks_of_relevant(
    similarities: Float32[np.ndarray, " n"], relevant: Int64[np.ndarray, " r"], ignored: Int64[np.ndarray, " i"]
) -> Int64[np.ndarray, " r"]:
    """Return the zero-based ranks of the relevant images, rising, in the ranking without the ignored images.

    Args:
        similarities: of one query to the whole gallery; larger is closer.
        relevant: gallery positions, no position twice.
        ignored: gallery positions, none of them relevant.
    """
    keys = order_keys(similarities)
    relevant_keys = np.sort(keys[relevant])
    kept_keys = np.delete(keys, ignored)
    # A kept image ranks above exactly those relevant images whose key is larger than its own.
    first_below = np.searchsorted(relevant_keys, kept_keys, side="right")
    return np.cumsum(np.bincount(first_below, minlength=len(relevant) + 1)[: len(relevant)], dtype=np.int64)


def in_ranking_order(
    similarities: Float32[np.ndarray, " n"], positions: Int64[np.ndarray, " r"]
) -> Int64[np.ndarray, " r"]:
    """Sort gallery positions into the order of the ranking: the j-th belongs to the j-th of `ranks_of_relevant`."""
    return np.asarray(positions[np.argsort(order_keys(similarities)[positions])])


def top_positions(
    similarities: Float32[np.ndarray, " n"], ignored: Int64[np.ndarray, " i"], count: int
) -> Int64[np.ndarray, " t"]:
    """Return the positions of the first `count` gallery images of the ranking without the ignored ones, or of all."""
    keys = np.delete(order_keys(similarities), ignored)
    if count < len(keys):
        keys = np.partition(keys, count)[:count]
    return (np.sort(keys) & np.uint64(0xFFFFFFFF)).astype(np.int64)


def average_precision(ranks: Int64[np.ndarray, " r"], relevant_count: int) -> float:
    """Return the area under the precision-recall curve by trapezoids, 0..1.

    The j-th relevant image (from 0) at rank t adds a step of recall 1/relevant_count, with the mean of the precision
    just before it, j/t (1 at rank 0), and just after it, (j + 1)/(t + 1).

    Args:
        ranks: zero-based ranks of the relevant images that were found, rising.
        relevant_count: all relevant images of the query, also those that a cut ranking does not hold; at least 1.
    """
    found = np.arange(len(ranks))
    precision_before = np.where(ranks == 0, 1.0, found / np.maximum(ranks, 1))
    precision_after = (found + 1) / (ranks + 1)
    return float((precision_before + precision_after).sum() / (2 * relevant_count))


def standard_average_precision(ranks: Int64[np.ndarray, " r"], relevant_count: int) -> float:
    """Return the non-interpolated average precision, 0..1: the mean of the precision at each relevant image.

    It is that of scikit-learn and TREC; never smaller than `average_precision`, the trapezoids of the same ranking, and
    equal only if no wrong image comes before a relevant one. An image that was not found counts as 0.

    Args:
        ranks: zero-based ranks of the relevant images that were found, rising.
        relevant_count: all relevant images of the query; at least 1.
    """
    return float(((np.arange(len(ranks)) + 1) / (ranks + 1)).sum() / relevant_count)


def average_precision_at(ranks: Int64[np.ndarray, " r"], relevant_count: int, k: int) -> float:
    """Return AP@k, 0..1: the precision at each relevant image among the first k, summed, over min(relevant_count, k).

    It is the metric of Google Landmarks v2; source: Weyand, Araujo, Cao, Sim, CVPR 2020.
    """
    return standard_average_precision(ranks[ranks < k], min(relevant_count, k))


def tied_average_precision_at(
    ranks: Int64[np.ndarray, " r"], reached: Int64[np.ndarray, " r"], relevant_count: int, k: int
) -> float:
    """Return AP@k of a ranking in which images of equal similarity are one threshold, as in scikit-learn.

    A relevant image counts with the precision after the last image of its similarity among the first k. Without ties
    this is `average_precision_at`. Source: the evaluation of ILIAS (Kordopatis-Zilos et al., CVPR 2025).

    Args:
        ranks: zero-based ranks of the relevant images that were found, rising.
        reached: of each, how many images are at least as similar.
        relevant_count: all relevant images of the query; at least 1.
        k: images of the ranking that are kept.
    """
    ends = np.minimum(reached[ranks < k], k)
    return float((np.searchsorted(ranks, ends) / ends).sum() / min(relevant_count, k))


def first_precision(ranks: Int64[np.ndarray, " r"], relevant_count: int, k: int) -> float:
    """Return the share of relevant images among the first min(relevant_count, k), 0..1: MP@k of UnED.

    Source: Ypsilantis et al., "Towards Universal Image Embeddings", ICCV 2023.
    """
    return r_precision(ranks, min(relevant_count, k))


def precision_at(ranks: Int64[np.ndarray, " r"], k: int) -> float:
    """Return the share of relevant images among the first k, 0..1; k shrinks to the place of the last relevant one.

    So a query with fewer than k relevant images can still reach 1. A ranking that holds none scores 0.
    """
    if len(ranks) == 0:
        return 0.0
    shrunk_k = min(int(ranks[-1]) + 1, k)
    return int(np.searchsorted(ranks, shrunk_k)) / shrunk_k


def recall_at(ranks: Int64[np.ndarray, " r"], k: int) -> float:
    """Return 1 if a relevant image is among the first k of the ranking, else 0: Recall@k of metric learning."""
    return float(len(ranks) > 0 and ranks[0] < k)


def recall_at_1(ranks: Int64[np.ndarray, " r"]) -> float:
    """Return 1 if the first image of the ranking is relevant, else 0."""
    return recall_at(ranks, 1)


def r_precision(ranks: Int64[np.ndarray, " r"], relevant_count: int) -> float:
    """Return the share of relevant images among the first R, 0..1, where R is how many are relevant (at least 1)."""
    return int(np.searchsorted(ranks, relevant_count)) / relevant_count


def average_precision_at_r(ranks: Int64[np.ndarray, " r"], relevant_count: int) -> float:
    """Return mAP@R of one query, 0..1: the precision at each relevant image among the first R, summed, over R.

    Source: Musgrave, Belongie, Lim, "A Metric Learning Reality Check", ECCV 2020, equation 2.
    """
    return standard_average_precision(ranks[ranks < relevant_count], relevant_count)


def ndcg(ranks: Int64[np.ndarray, " r"], relevant_count: int) -> float:
    """Return the normalized discounted cumulative gain over the complete ranking, 0..1; a relevant image gains 1.

    Source: Jarvelin and Kekalainen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 2002; the discount of
    rank t (from 0) is log2(t + 2).
    """
    ideal = (1 / np.log2(np.arange(relevant_count) + 2)).sum()
    return float((1 / np.log2(ranks + 2)).sum() / ideal)


def mean_percent(scores: Iterable[float]) -> float:
    """Return the mean over the counted queries, in percent.

    Raises:
        ValueError: there is no score to average.
    """
    values = list(scores)
    if not values:
        raise ValueError("no query was counted")
    return 100.0 * float(np.mean(values))
