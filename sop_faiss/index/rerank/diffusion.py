"""Diffusion: similarity that spreads over the graph of a query's candidates, a baseline of re-ranking.

Source: Iscen, Tolias, Avrithis, Furon, Chum, "Efficient Diffusion on Region Manifolds: Recovering Small Objects with
Compact CNN Representations", CVPR 2017: f solves (I - alpha S) f = (1 - alpha) y with S = D^-1/2 W D^-1/2, W the
similarities to the power gamma of mutual nearest neighbors, and y those of the query to its nearest images.
`Departs:` the graph is that of the candidates alone (the paper's has all images, or the first found), one feature per
image, and solved directly instead of by conjugate gradients.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Float64

_GAMMA = 8.0
"""Power of the similarities: the paper has 3, for features whose cosines are smaller; chosen on held-out products."""
_ALPHA = 0.9
"""Share that goes on to the neighbors; the paper has 0.99 for graphs of all images."""
_QUERY_NEIGHBORS = 5
"""Candidates from which similarity spreads."""


def diffused_scores(
    query: Float32[np.ndarray, " d"], candidates: Float32[np.ndarray, "m d"], neighbors: int
) -> Float64[np.ndarray, " m"]:
    """Score the candidates of a query by diffusion; larger is better. A candidate that nothing reaches scores 0.

    Args:
        query: a unit row.
        candidates: unit rows, nearest first.
        neighbors: of each candidate in the graph, below m; only mutual ones are connected.
    """
    count = len(candidates)
    similarities = np.maximum(candidates @ candidates.T, 0).astype(np.float64)
    np.fill_diagonal(similarities, -1)
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, :neighbors]
    connected = np.zeros((count, count), bool)
    np.put_along_axis(connected, nearest, True, 1)
    weights = np.where(connected & connected.T, similarities, 0) ** _GAMMA
    degrees = weights.sum(1)
    scale = 1 / np.sqrt(np.where(degrees > 0, degrees, 1))
    start = np.zeros(count)
    first = min(_QUERY_NEIGHBORS, count)
    start[:first] = np.maximum(candidates[:first] @ query, 0).astype(np.float64) ** _GAMMA
    system = np.eye(count) - _ALPHA * weights * scale * scale[:, None]
    return np.linalg.solve(system, (1 - _ALPHA) * start)
