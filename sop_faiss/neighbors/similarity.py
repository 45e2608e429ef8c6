"""Cosine similarities of every query to a whole gallery."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

__all__ = ["similarity_rows"]


def similarity_rows(
    queries: Float32[np.ndarray, "q d"],
    gallery: Float32[np.ndarray, "n d"],
    gallery_block: int = 16384,
    matrix_elements: int = 2**26,
) -> Iterator[Float32[np.ndarray, " n"]]:
    """Yield each query's inner products with the whole gallery.

    Products are taken in float64 and rounded to float32: a float32 product changes its last bit with the shape of the
    block it is computed in, which would move images of nearly equal similarity. Each product is computed once.

    Args:
        queries: one query per row, of unit norm (`require_unit_rows`).
        gallery: one image per row, likewise.
        gallery_block: gallery rows held in float64 at a time.
        matrix_elements: similarities held at a time, which sets how many queries go together.
    """
    query_block = max(1, matrix_elements // max(1, len(gallery)))
    for start in range(0, len(queries), query_block):
        block = queries[start : start + query_block].astype(np.float64)
        similarities = np.empty((len(block), len(gallery)), dtype=np.float32)
        for left in range(0, len(gallery), gallery_block):
            part = gallery[left : left + gallery_block].astype(np.float64)
            similarities[:, left : left + gallery_block] = block @ part.T
        yield from similarities
