"""Searches among some rows, or with near-duplicates folded; and one query of several images.

A combined query is Rocchio's (1971): the mean of what is wanted, less a part of the mean of what is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError
from sop_faiss.index.found import Neighbors
from sop_faiss.index.search import FeatureIndex
from sop_faiss.neighbors.exact import require_cosine

_log = logging.getLogger(__name__)

MINUS_WEIGHT = 0.5
"""Of the mean of the unwanted images: images of one kind are alike, and all of it would leave little of the query."""
_LEAST_LENGTH = 1e-3
"""A shorter combined query is noise: the two sides are the same."""
_ROUNDING = 1e-6
"""Equal images have a similarity of 1 up to this."""
_MOST_FETCHED = 100_000
"""Neighbors of a query that are fetched to find k that differ, or all that reach a threshold among some rows."""


@dataclass(frozen=True)
class Narrowing:
    """Which of the nearest rows count."""

    among: Int64[np.ndarray, " m"] | None = None
    """Only these rows, rising; None: all."""
    unique: float | None = None
    """Fold a row into a nearer one from this cosine between the two on; None: all stay."""
    without: Int64[np.ndarray, " w"] | None = None
    """Rows that are not to be found."""


def without(narrowing: Narrowing | None, rows: Sequence[int]) -> Narrowing | None:
    """Return a narrowing that leaves out these rows, too."""
    if not len(rows):
        return narrowing
    narrowing = narrowing or Narrowing()
    before = () if narrowing.without is None else narrowing.without
    return replace(narrowing, without=np.unique(np.array([*before, *rows], np.int64)))


def reaching(line: Neighbors, threshold: float | None) -> Neighbors:
    """Return the neighbors of one query that reach a threshold."""
    if threshold is None:
        return line
    return line.of(np.flatnonzero(line.similarities[0].astype(np.float64) >= threshold).tolist())


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
    reorder: Callable[[Neighbors], Neighbors] | None = None,
    depth: int = 0,
) -> list[tuple[Neighbors, list[list[int]]]]:
    """Find the nearest rows that count, of each query; fewer than k where fewer count.

    Args:
        index: what to search.
        queries: unit features.
        k: how many; None: all that reach the threshold.
        threshold: leave out rows of a smaller similarity.
        narrowing: which rows count.
        reorder: puts the rows that count, of one query, into a new order, before near-duplicates are folded.
        depth: how many rows it is given at least, where that many count.

    Returns:
        For each query one line of neighbors, and of each neighbor the rows that are folded into it, nearest first.

    Raises:
        ConfigError: neither k nor a threshold is given, or one is out of range.
    """
    if narrowing.unique is not None:
        require_cosine(narrowing.unique, "unique")
    if k is not None:
        return [_nearest(index, query[None], k, threshold, narrowing, reorder, depth) for query in queries]
    if threshold is None:
        raise ConfigError("neither `k` nor `threshold` is given: wanted one of them")
    require_cosine(threshold, "threshold")
    lines = (_counting(line, threshold, narrowing) for line in _above(index, queries, threshold, narrowing.among))
    ordered = (line if reorder is None else reorder(line) for line in lines)
    return [_folded(index, line, len(index), narrowing.unique)[:2] for line in ordered]


def _above(
    index: FeatureIndex, queries: Float32[np.ndarray, "q d"], threshold: float, among: Int64[np.ndarray, " m"] | None
) -> list[Neighbors]:
    """Find what reaches the threshold, and maybe more; of rows that are few enough all are compared."""
    if among is not None and len(among) <= _MOST_FETCHED:
        return [index.search(query[None], len(among), among=among) for query in queries]
    if among is not None and index.manifest.factory != "Flat":
        _log.warning(
            "%d images may be found, more than %d: not all of them are compared, and some that reach the threshold may "
            "be missed",
            *(len(among), _MOST_FETCHED),
        )
    return index.search_above(queries, threshold)


def _nearest(
    index: FeatureIndex,
    query: Float32[np.ndarray, "1 d"],
    k: int,
    threshold: float | None,
    narrowing: Narrowing,
    reorder: Callable[[Neighbors], Neighbors] | None,
    depth: int,
) -> tuple[Neighbors, list[list[int]]]:
    """Search wider until k rows are chosen, or no further one can be."""
    left_out = 0 if narrowing.without is None else len(narrowing.without)
    most = len(index) if narrowing.among is None else len(narrowing.among)
    asked = max(k, depth) + left_out + (0 if narrowing.unique is None else k)
    while True:
        asked = min(asked, most)
        found = index.search(query, asked, among=narrowing.among)
        line = _counting(found, threshold, narrowing)
        chosen, folded, is_complete = _folded(index, line if reorder is None else reorder(line), k, narrowing.unique)
        is_below = threshold is not None and float(found.similarities[0, -1]) < threshold
        if is_complete or is_below or asked >= min(most, _MOST_FETCHED):
            return chosen, folded
        asked = min(4 * asked, _MOST_FETCHED)


def _counting(found: Neighbors, threshold: float | None, narrowing: Narrowing) -> Neighbors:
    """Return the neighbors of one query that count."""
    counts = np.ones(found.rows.shape[1], bool)
    if narrowing.among is not None:
        counts &= np.isin(found.rows[0], narrowing.among)
    if narrowing.without is not None:
        counts &= ~np.isin(found.rows[0], narrowing.without)
    return reaching(found.of(np.flatnonzero(counts).tolist()), threshold)


def _folded(
    index: FeatureIndex, line: Neighbors, k: int, unique: float | None
) -> tuple[Neighbors, list[list[int]], bool]:
    """Keep k neighbors that differ from all that are kept before; fold others into the first that they are like.

    Also say whether no further neighbor could change that.
    """
    if unique is None:
        kept = line.of(slice(k))
        return kept, [[] for _ in kept.keys[0]], len(line.keys[0]) >= k
    rows = line.rows[0].tolist()
    features = index.unit_features(rows)
    places: list[int] = []
    folded: list[list[int]] = []
    for place, row in enumerate(rows):
        alike = features[places] @ features[place] >= unique - _ROUNDING
        if alike.any():
            folded[int(alike.argmax())].append(row)
        elif len(places) == k:
            return line.of(places), folded, True
        else:
            places.append(place)
            folded.append([])
    return line.of(places), folded, False
