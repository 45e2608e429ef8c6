"""Searches among some rows, or with near-duplicates folded; and one query of several images.

A combined query is Rocchio's (1971): the mean of what is wanted, less a part of the mean of what is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int64

from sop_faiss.errors import ConfigError
from sop_faiss.index.search import FeatureIndex, Neighbors, require_cosine

MINUS_WEIGHT = 0.5
"""Of the mean of the unwanted images: images of one kind are alike, and all of it would leave little of the query."""
_LEAST_LENGTH = 1e-3
"""A shorter combined query is noise: the two sides are the same."""
_ROUNDING = 1e-6
"""Equal images have a similarity of 1 up to this."""
_MOST_FETCHED = 100_000
"""Neighbors of a query that are fetched to find k that differ."""


@dataclass(frozen=True)
class Narrowing:
    """Which of the nearest rows count."""

    among: Int64[np.ndarray, " m"] | None = None
    """Only these rows, rising; None: all."""
    unique: float | None = None
    """Fold a row into a nearer one from this cosine between the two on; None: all stay."""
    without: Int64[np.ndarray, " w"] | None = None
    """Rows that are not to be found."""


def combined_query(
    wanted: Float32[np.ndarray, "n d"], unwanted: Float32[np.ndarray, "m d"] | None = None, weight: float = MINUS_WEIGHT
) -> Float32[np.ndarray, "1 d"]:
    """Combine unit features into one query: the mean of those wanted minus `weight` times that of those unwanted.

    Args:
        wanted: one or more.
        unwanted: None or empty: nothing is subtracted.
        weight: 0 or more.

    Raises:
        ConfigError: nothing is wanted, the weight is out of range, or the two sides cancel each other.
    """
    if not len(wanted) or not 0 <= weight < np.inf:
        raise ConfigError(f"{len(wanted)} images wanted, weight {weight}: wanted 1 image or more, and 0 or more")
    query = wanted.mean(0, dtype=np.float64)
    if unwanted is not None and len(unwanted):
        query -= weight * unwanted.mean(0, dtype=np.float64)
    length = float(np.linalg.norm(query))
    if length < _LEAST_LENGTH:
        raise ConfigError("the images of the query and those of `minus` cancel each other: name other ones")
    return (query / length).astype(np.float32)[None]


def search_narrowed(
    index: FeatureIndex,
    queries: Float32[np.ndarray, "q d"],
    k: int | None,
    threshold: float | None,
    narrowing: Narrowing,
) -> list[tuple[Neighbors, list[list[int]]]]:
    """Find the nearest rows that count, of each query; fewer than k where fewer count.

    Args:
        index: what to search.
        queries: unit features.
        k: how many; None: all that reach the threshold.
        threshold: leave out rows of a smaller similarity.
        narrowing: which rows count.

    Returns:
        For each query one line of neighbors, and of each neighbor the rows that are folded into it, nearest first.

    Raises:
        ConfigError: neither k nor a threshold is given, or one is out of range.
    """
    if narrowing.unique is not None:
        require_cosine(narrowing.unique, "unique")
    if k is None:
        if threshold is None:
            raise ConfigError("neither `k` nor `threshold` is given: wanted one of them")
        return [_chosen(index, found, len(index), narrowing)[0] for found in index.search_above(queries, threshold)]
    return [_nearest(index, query[None], k, threshold, narrowing) for query in queries]


def _nearest(
    index: FeatureIndex,
    query: Float32[np.ndarray, "1 d"],
    k: int,
    threshold: float | None,
    narrowing: Narrowing,
) -> tuple[Neighbors, list[list[int]]]:
    """Search wider until k rows are chosen, or no further one can be."""
    without = 0 if narrowing.without is None else len(narrowing.without)
    most = len(index) if narrowing.among is None else len(narrowing.among)
    asked = k + without + (0 if narrowing.unique is None else k)
    while True:
        asked = min(asked, most)
        found = index.search(query, asked, among=narrowing.among)
        chosen, is_complete = _chosen(index, found, k, narrowing)
        is_below = threshold is not None and float(found.similarities[0, -1]) < threshold
        if is_complete or is_below or asked >= min(most, _MOST_FETCHED):
            return chosen
        asked = min(4 * asked, _MOST_FETCHED)


def _chosen(
    index: FeatureIndex, found: Neighbors, k: int, narrowing: Narrowing
) -> tuple[tuple[Neighbors, list[list[int]]], bool]:
    """Choose at most k of the neighbors of one query, and say whether there would be another one."""
    rows = found.rows[0]
    counts: Bool[np.ndarray, " n"] = np.ones(len(rows), bool)
    if narrowing.among is not None:
        counts &= np.isin(rows, narrowing.among)
    if narrowing.without is not None:
        counts &= ~np.isin(rows, narrowing.without)
    places = np.flatnonzero(counts)
    folded: list[list[int]]
    if narrowing.unique is None:
        kept, folded = places[:k].tolist(), [[] for _ in places[:k]]
        is_complete = len(places) >= k
    else:
        kept, folded, is_complete = _folded(index, rows, places, k, narrowing.unique)
    line = Neighbors(
        found.similarities[:, kept],
        found.rows[:, kept],
        [[found.keys[0][place] for place in kept]],
        None if found.labels is None else found.labels[:, kept],
    )
    return (line, folded), is_complete


def _folded(
    index: FeatureIndex, rows: Int64[np.ndarray, " n"], places: Int64[np.ndarray, " p"], k: int, unique: float
) -> tuple[list[int], list[list[int]], bool]:
    """Keep places whose rows differ from all that are kept before; fold others into the first that they are like."""
    features = index.unit_features(rows[places].tolist())
    kept: list[int] = []
    folded: list[list[int]] = []
    for number, place in enumerate(places.tolist()):
        alike = features[kept] @ features[number] >= unique - _ROUNDING
        if alike.any():
            folded[int(alike.argmax())].append(int(rows[place]))
        elif len(kept) == k:
            return places[kept].tolist(), folded, True
        else:
            kept.append(number)
            folded.append([])
    return places[kept].tolist(), folded, False
