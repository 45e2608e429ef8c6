"""Vectors of images and of their parts, searched as one: an image counts by the most similar of its vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int64, Integer

from sop_faiss.neighbors.disk.factories import VectorIndex
from sop_faiss.neighbors.exact import NearestRows


class NearestParts(NamedTuple):
    """As `NearestRows`, with the part of each row that is as similar."""

    similarities: Float32[np.ndarray, "q k"]
    rows: Int64[np.ndarray, "q k"]
    parts: Int64[np.ndarray, "q k"]
    """Numbers of parts; -1: all of the row."""


class VectorsWithParts:
    """The vectors of an index, and those of parts of its rows; searched like a `VectorIndex`.

    Args:
        whole: one vector for each row.
        parts: vectors of parts.
        owners: row that each part is of; -1 for one that is not to be found.
        numbers: number of each part in its row, 0 or more.
    """

    def __init__(
        self,
        whole: VectorIndex,
        parts: VectorIndex,
        owners: Integer[np.ndarray, " p"],
        numbers: Integer[np.ndarray, " p"],
    ) -> None:
        self._whole, self._parts, self._owners, self._numbers = whole, parts, owners, numbers
        self._found = None if (owners >= 0).all() else np.flatnonzero(owners >= 0)
        self._most = int(np.bincount(owners[owners >= 0], minlength=1).max())
        """Parts of one row."""

    def features(self, rows: Int64[np.ndarray, " m"]) -> Float32[np.ndarray, "m d"]:
        """Copy the vectors of some rows, not of their parts."""
        return self._whole.features(rows)

    def search(
        self, queries: Float32[np.ndarray, "q d"], k: int, among: Int64[np.ndarray, " m"] | None = None
    ) -> NearestParts:
        """Find the k rows of largest similarity of the row or one of its parts; arguments and errors as of `FlatIndex`.

        Exact where both kinds of vectors are: a row that is among the k nearest by a part has fewer than k others, with
        all their parts, before that part.
        """
        whole = self._whole.search(queries, k, among)
        counted = self._found if among is None else np.flatnonzero(np.isin(self._owners, among))
        wanted = min(k * self._most, self._parts.count if counted is None else len(counted))
        if not wanted or not len(queries):
            return NearestParts(*whole, np.full_like(whole.rows, -1))
        parts = self._parts.search(queries, wanted, counted)
        pairs = zip(zip(*whole, strict=True), zip(*parts, strict=True), strict=True)
        lines = [self._merged(NearestRows(*one), NearestRows(*other), k) for one, other in pairs]
        return NearestParts(*(np.concatenate(column) for column in zip(*lines, strict=True)))

    def search_above(self, queries: Float32[np.ndarray, "q d"], similarity: float) -> list[NearestParts]:
        """Find all rows that reach a similarity, or a part of which does; arguments and errors as of `FlatIndex`."""
        found = zip(
            self._whole.search_above(queries, similarity), self._parts.search_above(queries, similarity), strict=True
        )
        lines = [tuple(NearestRows(each.similarities[0], each.rows[0]) for each in pair) for pair in found]
        return [self._merged(whole, parts) for whole, parts in lines]

    def _merged(self, whole: NearestRows, parts: NearestRows, k: int | None = None) -> NearestParts:
        """Merge the rows found for one query with the parts; ties: lowest row, complete before part."""
        owners = np.concatenate([whole.rows, self._owners[parts.rows]])
        numbers = np.concatenate([np.full(len(whole.rows), -1), self._numbers[parts.rows]])
        similarities = np.concatenate([whole.similarities, parts.similarities])
        order = np.lexsort((numbers, owners, -similarities))
        order = order[owners[order] >= 0]
        first = np.sort(np.unique(owners[order], return_index=True)[1])
        chosen = order[first][:k]
        return NearestParts(similarities[None, chosen], owners[None, chosen], numbers[None, chosen])
