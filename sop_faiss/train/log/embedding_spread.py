"""How far apart vectors lie: mean cosine, effective rank, and whether two views of an image find each other."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["mean_cosine", "rankme", "view_auc"]


def mean_cosine(rows: Float[Tensor, "n d"]) -> float:
    """Mean cosine of all pairs of different rows: 1 for a constant output, about 0 for random directions.

    Args:
        rows: unit norm.

    Returns:
        NaN for fewer than two rows, or where one is not finite.
    """
    count = len(rows)
    if count < 2:
        return math.nan
    total = float(rows.double().sum(0).square().sum())
    return (total - float(rows.double().square().sum())) / (count * (count - 1))


def rankme(rows: Float[Tensor, "n d"]) -> float:
    """RankMe (Garrido et al. 2023, arXiv 2210.02885): exp of the entropy of the singular values over their sum.

    From 1, where all rows are multiples of one, to min(n, d), where all singular values are equal. Squared singular
    values are eigenvalues of the smaller Gram matrix; in float64 that loses nothing that counts. On the CPU, since it
    is some hundred rows.

    Returns:
        NaN without rows, or where one is not finite.
    """
    rows = rows.double()
    gram = (rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows).cpu()
    if gram.numel() == 0 or not bool(gram.isfinite().all()):
        return math.nan  # the solver would raise
    singular = torch.linalg.eigvalsh(gram).clamp_min(0.0).sqrt()
    shares = singular / singular.sum()
    return math.exp(-float(torch.xlogy(shares, shares).sum()))


def view_auc(one: Float[Tensor, "n d"], other: Float[Tensor, "n d"]) -> float:
    """Probability that two views of an image are more alike than views of two images; ties count half.

    The area under the ROC curve for telling the one from the other, taken image by image: 1 where every image knows
    its own other view, 0.5 where views tell nothing about their image, on any number of images. For images that are
    all the same it is 0.5 within about 1 / sqrt(12 n).

    Args:
        one: a view of each image, unit norm.
        other: another view of each, in the same order.

    Returns:
        NaN for fewer than two images, or where a row is not finite.
    """
    count = len(one)
    similarities = one.double() @ other.double().T
    if count < 2 or not bool(similarities.isfinite().all()):
        return math.nan
    own = similarities.diagonal().unsqueeze(1)
    wins = float((own > similarities).sum()) + 0.5 * (float((own == similarities).sum()) - count)
    return wins / (count * (count - 1))
