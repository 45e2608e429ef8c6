"""Exact k nearest rows of a gallery, by FAISS on the CPU, with ties in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError, FeatureError
from sop_faiss.neighbors.similarity import similarity_rows

_ROUNDING = 1e-6
"""More than the rounding error of a float32 product of unit rows."""


class NearestRows(NamedTuple):
    """Similarities (inner products) in falling order, and the rows they belong to; ties by rising row."""

    similarities: Float32[np.ndarray, "q k"]
    rows: Int64[np.ndarray, "q k"]


def in_fixed_order(similarities: Float32[np.ndarray, "q k"], rows: Int64[np.ndarray, "q k"]) -> NearestRows:
    """Sort each line by falling similarity, equal similarities by rising row."""
    order = np.lexsort((rows, -similarities), axis=1)
    return NearestRows(np.take_along_axis(similarities, order, 1), np.take_along_axis(rows, order, 1))


def require_k(k: int, count: int) -> None:
    """Raise ConfigError unless 1 <= k <= count."""
    if not 1 <= k <= count:
        raise ConfigError(f"k = {k} neighbors wanted from {count} rows: wanted 1 <= k <= {count}")


def require_dimension(queries: Float32[np.ndarray, "q d"], dimension: int, searched: str) -> None:
    """Raise FeatureError unless queries have the dimension of what is searched."""
    if queries.shape[1] != dimension:
        raise FeatureError(
            f"queries have dimension {queries.shape[1]}, the {searched} {dimension}: use one encoder for both"
        )


def nearest_rows(queries: Float32[np.ndarray, "q d"], gallery: Float32[np.ndarray, "n d"], k: int) -> NearestRows:
    """Return the k gallery rows of largest inner product with each query; exact, ties by rising row.

    FAISS keeps any of the rows that tie for the k-th place (repeated images, a collapsed encoder). Searching for one
    row more shows where that happens, and there the whole gallery is ranked.

    Args:
        queries: one query per row; finite.
        gallery: one gallery vector per row; finite.
        k: how many rows; 1 <= k <= n.

    Raises:
        ConfigError: k is outside 1..n.
        FeatureError: the dimensions differ, or a value is not finite.
    """
    require_k(k, len(gallery))
    require_dimension(queries, gallery.shape[1], "gallery")
    for name, matrix in (("queries", queries), ("gallery", gallery)):
        if not np.isfinite(matrix).all():
            raise FeatureError(f"{name} contain NaN or infinity: extract the features again")
    queries, gallery = np.ascontiguousarray(queries), np.ascontiguousarray(gallery)
    asked = min(k + 1, len(gallery))
    found = in_fixed_order(*faiss.knn(queries, gallery, asked, metric=faiss.METRIC_INNER_PRODUCT))
    similarities, rows = found.similarities[:, :k], found.rows[:, :k]
    if asked > k:
        near_tie = np.flatnonzero(found.similarities[:, k - 1] <= found.similarities[:, k] + _ROUNDING)
        for query, to_all in zip(near_tie, similarity_rows(queries[near_tie], gallery), strict=True):
            reached = np.flatnonzero(to_all >= np.partition(to_all, -k)[-k])  # in rising order
            rows[query] = reached[np.argsort(-to_all[reached], kind="stable")[:k]]
            similarities[query] = to_all[rows[query]]
    return NearestRows(similarities, rows)


def require_cosine(value: float, name: str) -> None:
    """Refuse a threshold of similarity that is not a cosine; `name` is for the message.

    Raises:
        ConfigError: it is out of range.
    """
    if not -1 <= value <= 1:
        raise ConfigError(f"{name} = {value}: wanted a cosine similarity from -1 to 1")
