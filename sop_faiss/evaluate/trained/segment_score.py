"""Scores of semantic segmentation: mean intersection over union, mean and overall accuracy, as mmsegmentation has them.

Areas are added over all images before anything is divided. A class that is neither in a mask nor predicted is left out
of the mean of intersections over unions, and one that is in no mask out of the mean accuracy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from sop_faiss.bootstrap import Interval, bootstrap_of_sums

VOID = 255
"""Pixels of no class, which do not count."""
_INTERVAL_RESAMPLES = 2_000
"""Of the images: each takes the areas of all classes."""


class Scores(NamedTuple):
    """Scores in percent."""

    miou: float
    macc: float
    aacc: float


def count_areas(
    found: UInt8[np.ndarray, "h w"], truth: UInt8[np.ndarray, "h w"], classes: int
) -> Int64[np.ndarray, "3 c"]:
    """Count an image's pixels by class: right, predicted and annotated; those that are void in `truth` do not count."""
    counts = truth != VOID
    kinds = (truth[counts & (found == truth)], found[counts], truth[counts])
    return np.stack([np.bincount(kind, minlength=classes) for kind in kinds])


def constant_areas(annotated: Int64[np.ndarray, "n c"], number: int) -> Int64[np.ndarray, "n 3 c"]:
    """Return the areas of one class predicted everywhere."""
    areas = np.zeros((len(annotated), 3, annotated.shape[1]), np.int64)
    areas[:, 0, number], areas[:, 1, number] = annotated[:, number], annotated.sum(1)
    areas[:, 2] = annotated
    return areas


def class_scores(areas: Int64[np.ndarray, "3 c"]) -> Float64[np.ndarray, "2 c"]:
    """Return each class's intersection over union and accuracy, of 1; NaN where it has no area."""
    right, predicted, annotated = areas.astype(np.float64)
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.stack([right / (predicted + annotated - right), right / annotated])


def score_areas(areas: Int64[np.ndarray, "3 c"]) -> Scores:
    """Return the scores of areas that were added over images, of which one pixel or more counts."""
    union, accuracy = class_scores(areas)
    overall = areas[0].sum() / areas[2].sum()
    return Scores(*(100.0 * float(value) for value in (np.nanmean(union), np.nanmean(accuracy), overall)))


def miou_interval(areas: Int64[np.ndarray, "n 3 c"]) -> Interval:
    """Return the 95 % bootstrap interval of the mean intersection over union, of images with a pixel that counts."""
    counted = areas[areas[:, 2].any(1)].reshape(-1, areas[0].size).astype(np.float64)

    def miou(sums: Float64[np.ndarray, "r k"]) -> Float64[np.ndarray, " r"]:
        right, predicted, annotated = sums.reshape(len(sums), 3, -1).transpose(1, 0, 2)
        union = predicted + annotated - right
        means: Float64[np.ndarray, " r"] = (right / np.maximum(union, 1)).sum(1) / (union > 0).sum(1)
        return 100.0 * means

    return bootstrap_of_sums(counted, miou, _INTERVAL_RESAMPLES)
