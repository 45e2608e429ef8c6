"""How well images find each other: every image is a query among all others; with or without a whitening.

A whitening is scored on queries that it was not learned from: images are halved, that of one half whitens everything
for the queries of the other. In use, too, it is learned from the gallery and not from the queries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from sop_faiss.evaluate.metrics import ranks_of_relevant
from sop_faiss.neighbors.similarity import similarity_rows

_SEED = 0
"""Of the halves."""

Metric = Callable[[Int64[np.ndarray, " r"], int], float]
Learn = Callable[[Float32[np.ndarray, "m d"]], Callable[[np.ndarray], np.ndarray]]


def queries_of(labels: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Return which rows have another of the same label."""
    _, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.asarray(counts[place] > 1)


def found_others(
    features: Float32[np.ndarray, "n d"],
    labels: Int64[np.ndarray, " n"],
    metric: Metric,
    queries: Bool[np.ndarray, " n"] | None = None,
) -> Float64[np.ndarray, " q"]:
    """Return the score of each query, in percent: relevant are the others of its label, and itself is left out.

    Args:
        features: unit rows.
        labels: any integers.
        metric: of the ranks of the relevant rows, and their number.
        queries: which rows are queries, each with another of its label; None: all that have one.
    """
    asked = np.flatnonzero(queries_of(labels) if queries is None else queries)
    scores = np.empty(len(asked))
    for place, (query, similarities) in enumerate(zip(asked, similarity_rows(features[asked], features), strict=True)):
        same = np.flatnonzero(labels == labels[query])
        relevant = same[same != query]
        ranks = ranks_of_relevant(similarities, relevant, np.array([query]))
        scores[place] = 100 * metric(ranks, len(relevant))
    return scores


def found_others_whitened(
    features: Float32[np.ndarray, "n d"],
    labels: Int64[np.ndarray, " n"],
    metric: Metric,
    images: Int64[np.ndarray, " n"],
    learn: Learn,
) -> Float64[np.ndarray, " q"]:
    """Return the same with each query whitened by a whitening of the half of the images that it is not in.

    Args:
        features: unit rows.
        labels: any integers.
        metric: as of `found_others`.
        images: number of the image of each row: all views of one are in one half.
        learn: returns the map of a whitening that is learned from rows.
    """
    half = np.random.default_rng(_SEED).permutation(images.max() + 1)[images] % 2
    asked = queries_of(labels)
    scores = np.empty(len(features))
    for part in (0, 1):
        whitened = learn(features[half != part])(features)
        queries = asked & (half == part)
        scores[queries] = found_others(whitened, labels, metric, queries)
    return scores[asked]
