"""How far apart vectors are: mean cosine, effective rank, and whether two views of an image find each other."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def mean_cosine(rows: Float[Tensor, "n d"]) -> float:
    """Return the mean cosine of all pairs of different rows: 1 for a constant output, about 0 for random directions.

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
    """Return RankMe (Garrido et al. 2023, arXiv 2210.02885): exp of the entropy of the normalized singular values.

    It is 1 if all rows are multiples of one, and min(n, d) if all singular values are equal. Squared singular values
    are eigenvalues of the smaller Gram matrix, which float64 computes precisely enough. It runs on the CPU, since there
    are only some hundred rows.

    Returns:
        NaN without rows, or where one is not finite.
    """
    rows = rows.double()
    gram = (rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows).cpu()
    if gram.numel() == 0 or not bool(gram.isfinite().all()):
        return math.nan  # the solver would raise
    singular = torch.linalg.eigvalsh(gram).clamp_min(0.0).sqrt()
    fractions = singular / singular.sum()
    return math.exp(-float(torch.xlogy(fractions, fractions).sum()))


def view_auc(one: Float[Tensor, "n d"], other: Float[Tensor, "n d"]) -> float:
    """Return the probability that two views of an image are more similar than views of two images; ties count half.

    It is the area under the ROC curve of that decision, averaged over images: 1 if each image's two views are the most
    similar, 0.5 if views say nothing about their image, for any number of images. If all images are the same, it is 0.5
    within about 1 / sqrt(12 n).

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
