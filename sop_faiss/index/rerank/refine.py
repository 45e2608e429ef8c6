"""Global re-ranking: the features of the candidates refined by their neighbors, the query's by the best candidates.

Source: Shao, Chen, Karpur, Cui, Araujo, Cao, "Global Features are All You Need for Image Retrieval and Reranking", ICCV
2023 (SuperGlobal), section 3.3 and its released code (`MDescAug.py`, `RerankwMDA.py`), from which the details are:

1. each candidate becomes the weighted mean of itself (weight 1) and its K nearest other candidates (weight beta times
   their similarity); it is not scaled to unit norm again;
2. a first score is its product with the query;
3. the expanded query is the largest value, per component, of the K + 1 refined candidates of the best first score (the
   query itself is not among them, in the code), and a second score is the product with that;
4. the candidates are ordered by the mean of both scores.

`Departs:` a neighbor of negative similarity has weight 0, so that weights never cancel.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32


def refined_scores(
    query: Float32[np.ndarray, " d"], candidates: Float32[np.ndarray, "m d"], neighbors: int, beta: float
) -> Float32[np.ndarray, " m"]:
    """Score the candidates of a query by their refined features; larger is better.

    Args:
        query: a unit row.
        candidates: unit rows, nearest first; of equal ones the earlier counts as the nearer.
        neighbors: K, below m.
        beta: weight of a neighbor, times its similarity.
    """
    own = np.arange(len(candidates))
    similarities = candidates @ candidates.T
    similarities[own, own] = 4  # above all cosines: itself first, before copies of it
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, : neighbors + 1]
    weights = np.float32(beta) * np.maximum(np.take_along_axis(similarities, nearest, 1), 0)
    weights[:, 0] = 1
    mixing = np.zeros_like(similarities)
    np.put_along_axis(mixing, nearest, weights, 1)
    refined = mixing @ candidates / weights.sum(1, keepdims=True)
    first = refined @ query
    best = np.argsort(-first, kind="stable")[: neighbors + 1]
    return np.asarray((first + refined @ refined[best].max(axis=0)) / 2)
