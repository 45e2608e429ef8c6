"""A search of a FAISS index whose candidates are compared by vectors on disk."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.neighbors.disk.codes_on_disk import CodesOnDisk


def reranked(
    index: Any, queries: Float32[np.ndarray, "q d"], asked: int, on_disk: CodesOnDisk | None, parameters: Any = None
) -> tuple[Float32[np.ndarray, "q a"], Int64[np.ndarray, "q a"]]:
    """Find rows of large inner product with each query, nearest first; -1 where there are fewer.

    Args:
        index: FAISS's; one that re-ranks where `on_disk` is given.
        queries: contiguous.
        asked: how many rows.
        on_disk: what the candidates are compared by; None: FAISS searches alone.
        parameters: FAISS's, of this search.
    """
    if on_disk is None:
        similarities, rows = index.search(queries, asked, params=parameters)
        return similarities, rows
    times, inner = index.k_factor, None
    if parameters is not None:
        times, inner = parameters.k_factor, parameters.base_index_params
    base = faiss.downcast_index(index.base_index)
    candidates = base.search(queries, min(int(index.ntotal), int(asked * times)), params=inner)[1]
    similarities = np.full((len(queries), asked), -np.inf, np.float32)
    rows = np.full((len(queries), asked), -1, np.int64)
    for number, query in enumerate(queries):
        found = candidates[number][candidates[number] >= 0]
        scores = on_disk.vectors(found) @ query
        best = np.argsort(-scores, kind="stable")[:asked]
        similarities[number, : len(best)], rows[number, : len(best)] = scores[best], found[best]
    return similarities, rows
