"""The new order of a query's candidates, by any of the methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.index.rerank.diffusion import diffused_scores
from sop_faiss.index.rerank.local import local_scores
from sop_faiss.index.rerank.refine import refined_scores
from sop_faiss.index.rerank.settings import Rerank


def order_by_features(
    settings: Rerank, query: Float32[np.ndarray, " d"], candidates: Float32[np.ndarray, "m d"]
) -> Int64[np.ndarray, " m"]:
    """Return the places of the candidates in their new order, by `global` or `diffusion`; ties keep the old order.

    Args:
        settings: which rule; of fewer candidates than it has neighbors, all are neighbors.
        query: a unit row.
        candidates: unit rows, nearest first.
    """
    neighbors = min(settings.neighbors_used, len(candidates) - 1)
    if neighbors < 1:
        return np.arange(len(candidates))
    if settings.method == "global":
        return _falling(refined_scores(query, candidates, neighbors, settings.beta_used))
    return _falling(diffused_scores(query, candidates, neighbors))


def order_by_tokens(
    settings: Rerank, query: Float32[np.ndarray, "t d"], candidates: Sequence[np.ndarray]
) -> Int64[np.ndarray, " m"]:
    """Return the places of the candidates in their new order, by `local`; ties keep the old order."""
    return _falling(local_scores(query, candidates, mutual=settings.mutual, one_way=settings.one_way))


def _falling(scores: np.ndarray) -> Int64[np.ndarray, " m"]:
    return np.argsort(-scores, kind="stable")
