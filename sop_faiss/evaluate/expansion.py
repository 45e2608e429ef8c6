"""Query expansion and database augmentation: features made better by their neighbors, before anything is ranked.

alpha-QE: a query becomes itself plus its n nearest gallery images, each weighted by similarity^alpha, and of unit norm
again. Source: Radenovic, Tolias, Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019, section
3.2. Database augmentation does the same to each gallery image with its own n nearest others; source: Arandjelovic and
Zisserman, "Three things everyone should know to improve object retrieval", CVPR 2012, and Gordo et al. 2017.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.metrics import order_keys
from sop_faiss.neighbors.exact import nearest_rows
from sop_faiss.neighbors.similarity import round_products

_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class Expansion:
    """How features are expanded before ranking."""

    query_neighbors: int = 0
    """alpha-QE: nearest gallery images added to each query; 0 switches it off."""
    query_alpha: float = 3.0
    """Weight similarity^alpha; 0 is the plain mean (average query expansion)."""
    database_neighbors: int = 0
    """Database augmentation: nearest others added to each gallery image; 0 switches it off."""
    database_alpha: float = 3.0
    """Weight similarity^alpha of these neighbors."""

    def check(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one is below 0, or not finite.
        """
        for name in ("query_neighbors", "query_alpha", "database_neighbors", "database_alpha"):
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise ConfigError(f"`{name}={value}`: wanted 0 or more")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values; None for what is switched off."""
        query = {"neighbors": self.query_neighbors, "alpha": self.query_alpha}
        database = {"neighbors": self.database_neighbors, "alpha": self.database_alpha}
        return {
            "query_expansion": query if self.query_neighbors else None,
            "database_augmentation": database if self.database_neighbors else None,
        }


def augment_database(gallery: Float32[np.ndarray, "n d"], neighbors: int, alpha: float) -> Float32[np.ndarray, "n d"]:
    """Return each row plus its nearest others, weighted; of unit norm.

    Args:
        gallery: unit rows.
        neighbors: how many others, below n.
        alpha: of the weights.

    Raises:
        ConfigError: there are fewer others.
    """
    if neighbors >= len(gallery):
        raise ConfigError(f"`database_neighbors={neighbors}` of {len(gallery)} gallery images: wanted fewer")
    augmented = np.empty_like(gallery)
    for start in range(0, len(gallery), _BLOCK_ROWS):
        own = np.arange(start, min(start + _BLOCK_ROWS, len(gallery)))
        found = nearest_rows(gallery[own], gallery, neighbors + 1)
        # A row finds itself first, but for copies of it that come before: drop itself, or else the last.
        is_own = found.rows == own[:, None]
        place = np.where(is_own.any(axis=1), is_own.argmax(axis=1), neighbors)
        others = np.arange(neighbors + 1) != place[:, None]
        shape = (len(own), neighbors)
        augmented[own] = _combined(
            gallery[own], gallery[found.rows[others].reshape(shape)], found.similarities[others].reshape(shape), alpha
        )
    return augmented


def expand_queries(
    queries: Float32[np.ndarray, "q d"],
    gallery: Float32[np.ndarray, "n d"],
    neighbors: int,
    alpha: float,
    distractors: Iterable[Float32[np.ndarray, "_ d"]] = (),
) -> Float32[np.ndarray, "q d"]:
    """Return each query plus its nearest gallery images, weighted; of unit norm.

    Args:
        queries: unit rows.
        gallery: unit rows, all that can be found but for the distractors.
        neighbors: how many.
        alpha: of the weights.
        distractors: more of the gallery, in blocks; the gallery comes before them where similarities are equal.

    Raises:
        ConfigError: there are fewer images.
    """
    nearest = _Nearest(queries, neighbors)
    for block in itertools.chain([gallery], distractors):
        for start in range(0, len(block), _BLOCK_ROWS):
            nearest.add(block[start : start + _BLOCK_ROWS])
    if nearest.seen < neighbors:
        raise ConfigError(f"`query_neighbors={neighbors}` of {nearest.seen} gallery images: wanted no more")
    return _combined(queries, nearest.rows, nearest.similarities, alpha)


class _Nearest:
    """The nearest rows of a stream, exact, of equal ones the first; holds the rows themselves."""

    def __init__(self, queries: Float32[np.ndarray, "q d"], count: int) -> None:
        self._queries = queries
        self._exact = queries.astype(np.float64)
        self._count = count
        self.seen = 0
        self.similarities = np.empty((len(queries), 0), np.float32)
        self.rows = np.empty((len(queries), 0, queries.shape[1]), np.float32)

    def add(self, block: Float32[np.ndarray, "n d"]) -> None:
        """Search more rows, which come after all rows so far where similarities are equal."""
        found = round_products(self._exact @ block.astype(np.float64).T, self._queries, block)
        similarities, rows = [], []
        for query, own in enumerate(found):
            together = np.concatenate([self.similarities[query], own])
            keys = order_keys(together)
            if self._count < len(keys):
                keys = np.partition(keys, self._count)[: self._count]
            places = (np.sort(keys) & np.uint64(0xFFFFFFFF)).astype(np.int64)
            similarities.append(together[places])
            rows.append(self._rows_at(query, places, block))
        self.similarities, self.rows = np.stack(similarities), np.stack(rows)
        self.seen += len(block)

    def _rows_at(
        self, query: int, places: Int64[np.ndarray, " m"], block: Float32[np.ndarray, "n d"]
    ) -> Float32[np.ndarray, "m d"]:
        """Rows at places of the kept rows followed by the block."""
        kept = self.rows[query]
        rows = np.empty((len(places), block.shape[1]), np.float32)
        old = places < len(kept)
        rows[old], rows[~old] = kept[places[old]], block[places[~old] - len(kept)]
        return rows


def _combined(
    rows: Float32[np.ndarray, "n d"],
    others: Float32[np.ndarray, "n k d"],
    similarities: Float32[np.ndarray, "n k"],
    alpha: float,
) -> Float32[np.ndarray, "n d"]:
    """Rows plus weighted others, of unit norm. A row that cancels out, which only -1 copies could do, stays itself."""
    weights: Float64[np.ndarray, "n k"] = np.maximum(similarities.astype(np.float64), 0) ** alpha
    together = rows + np.einsum("nk,nkd->nd", weights, others.astype(np.float64))
    norms = np.linalg.norm(together, axis=1, keepdims=True)
    return np.where(norms > 1e-6, together / np.maximum(norms, 1e-6), rows).astype(np.float32)
