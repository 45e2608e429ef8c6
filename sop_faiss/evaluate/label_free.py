"""Numbers of an encoder that need no labels, from its features of two views of each image.

Which of them say anything about scores with labels is measured in docs/metrics.md.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float32, Float64

from sop_faiss.bootstrap import Score
from sop_faiss.train.log.embedding_spread import rankme

LABEL_FREE = ("rankme", "lidar", "alpha_req", "assignment_entropy")
"""What `label_free_numbers` returns, in order."""
UNITS = {"rankme": "directions", "lidar": "directions", "alpha_req": "exponent"}
"""The units of the scores that are not in percent."""

_TEMPERATURE = 0.07
"""That of the teacher after its warm-up, and of the weights in k-NN."""
_WITHIN = 1e-4
"""Added to the within-image covariance, as a share of its mean eigenvalue."""
_FIRST, _LAST = 5, 50
"""Ranks of the eigenvalues that the exponent is fitted to: the first few are of a few outstanding directions."""
_CONSTANT = 1e-10
"""Of unit rows in float32 a smaller variance is rounding."""
_ROWS = 512


def label_free_numbers(first: Float32[np.ndarray, "n d"], second: Float32[np.ndarray, "n d"]) -> dict[str, Score]:
    """Return all numbers of `LABEL_FREE`; those that are not a mean over images have no value of each image.

    Args:
        first: unit features of one view of each image.
        second: of another view of the same images, in the same order.
    """
    entropies, none = assignment_entropies(first, second), np.empty(0)
    return {
        "rankme": Score(rankme(torch.from_numpy(first)), none, UNITS["rankme"]),
        "lidar": Score(lidar(np.stack([first, second], axis=1)), none, UNITS["lidar"]),
        "alpha_req": Score(alpha_req(first), none, UNITS["alpha_req"]),
        "assignment_entropy": Score(float(entropies.mean()), entropies),
    }


def lidar(views: Float32[np.ndarray, "n q d"]) -> float:
    """Return LiDAR: the effective rank of the linear discriminant analysis whose classes are the images.

    With the covariance B of the images' means and the mean covariance W of the views around them, it is the
    exponential of the entropy of the eigenvalues of W^-1/2 B W^-1/2 over their sum: from 1 to d. Directions in which
    views of one image differ as much as images do count little. Source: Thilak et al., "LiDAR: Sensing Linear Probing
    Performance in Joint Embedding SSL Architectures", 2023, arXiv 2312.04000, section 4.
    Departs: the paper takes 10 or 50 views and adds 1e-4 to W's diagonal; ours adds 1e-4 of W's mean eigenvalue, so
    that the number does not depend on the scale of the features.

    Returns:
        1 for a constant output.
    """
    rows = views.astype(np.float64)
    means = rows.mean(axis=1)
    inside = (rows - means[:, None]).reshape(-1, rows.shape[2])
    around = means - means.mean(axis=0)
    if np.square(around).sum() < _CONSTANT * len(rows):
        return 1.0
    within = inside.T @ inside / (len(rows) * (rows.shape[1] - 1))
    values, vectors = np.linalg.eigh(within)
    scale = max(float(values.mean()), _CONSTANT / len(values))
    whitened = around @ (vectors / np.sqrt(np.maximum(values, 0.0) + _WITHIN * scale))
    return _effective_count(_squared_singular_values(whitened))


def _squared_singular_values(rows: Float64[np.ndarray, "n d"]) -> Float64[np.ndarray, " m"]:
    """Return them in falling order, of the smaller Gram matrix."""
    gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
    return np.linalg.eigvalsh(gram)[::-1]


def _effective_count(values: Float64[np.ndarray, " m"]) -> float:
    shares = values[values > 0] / values.sum()
    return math.exp(-float((shares * np.log(shares)).sum()))


def alpha_req(rows: Float32[np.ndarray, "n d"]) -> float:
    """Return alpha-ReQ: how fast the eigenvalues of the features' covariance fall, as the exponent of a power law.

    It is minus the slope of the logarithm of the eigenvalues, in falling order, over the logarithm of their rank, by
    least squares. The source expects the best features near 1; larger: few directions, smaller: noise in many. Source:
    Agrawal et al., "alpha-ReQ: Assessing Representation Quality in Self-Supervised Learning by measuring eigenspectrum
    decay", NeurIPS 2022. Here it is fitted to ranks 5 to 50.

    Returns:
        NaN for a constant output, and of fewer than ten eigenvalues that are not 0.
    """
    centered = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    values = _squared_singular_values(centered) / len(rows)
    values = values[values > _CONSTANT * max(1e-3, float(values.sum()))][:_LAST]
    if values.sum() < _CONSTANT or len(values) < 2 * _FIRST:
        return math.nan
    ranks = np.log(np.arange(_FIRST, len(values) + 1))
    return -float(np.polyfit(ranks, np.log(values[_FIRST - 1 :]), 1)[0])


def assignment_entropies(
    first: Float32[np.ndarray, "n d"], second: Float32[np.ndarray, "n d"]
) -> Float64[np.ndarray, " n"]:
    """Return how undecided each first view is among the second views of all images, in percent.

    It is the entropy of softmax(similarities / 0.07) over ln n: SOP's assignment (section 3) with the second views as
    anchors without supports. 0: all weight on one image; 100: all images are alike.
    """
    found = np.empty(len(first))
    for start in range(0, len(first), _ROWS):
        part = slice(start, start + _ROWS)
        logits = first[part].astype(np.float64) @ second.T.astype(np.float64) / _TEMPERATURE
        logits -= logits.max(axis=1, keepdims=True)
        weights = np.exp(logits)
        sums = weights.sum(axis=1)
        found[part] = np.log(sums) - (weights * logits).sum(axis=1) / sums  # -sum p log p, with p = weights / sums
    return 100.0 * found / math.log(len(first))
