"""Cosine similarities of every query to a whole gallery, and the check that must stand before them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32

from sop_faiss.errors import FeatureError

__all__ = ["require_unit_rows", "similarity_rows"]

TOLERANCE = 1e-3
"""Allowed departure of a row's norm from 1: twice what rounding to float16 can do."""


def require_unit_rows(features: Float32[np.ndarray, "n d"], name: str) -> None:
    """Check that every row is a finite vector of norm 1.

    Args:
        features: one vector per row.
        name: what they are, in the plural, for the message.

    Raises:
        FeatureError: a row is NaN, infinite, zero or of another norm.
    """
    norms = np.sqrt(np.einsum("nd,nd->n", features, features, dtype=np.float64))
    wrong = ~(np.abs(norms - 1) <= TOLERANCE)  # NaN is wrong as well
    if not wrong.any():
        return
    first = int(np.argmax(wrong))
    norm = norms[first]
    kind = "NaN or infinite" if not np.isfinite(norm) else "zero" if norm == 0 else f"of norm {norm:.4g}"
    raise FeatureError(
        f"{name}: {int(wrong.sum())} of {len(features)} rows are not unit vectors (row {first} is {kind}); "
        "extract them again, and divide each by its norm"
    )


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
        queries: one query per row.
        gallery: one image per row.
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
