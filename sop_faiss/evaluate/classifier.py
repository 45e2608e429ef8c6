"""What classifiers on features have in common: what they can learn from, and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import DataError
from sop_faiss.unit_rows import require_unit_rows


@dataclass(frozen=True)
class ChosenScores:
    """What a classifier found, with a setting that held-out training images chose.

    Attributes:
        metrics: `top1`, and `top5` where there are five classes or more; percent.
        predicted: class of each test row.
        chosen: value of the setting: the learning rate, or the penalty.
        held_out_top1: of each value on the held-out training images, percent.
        held_out_images: how many those are.
    """

    metrics: dict[str, float]
    predicted: Int64[np.ndarray, " q"]
    chosen: float
    held_out_top1: dict[float, float]
    held_out_images: int


def require_classes(
    what: str,
    train_features: Float32[np.ndarray, "n d"],
    train_labels: Int64[np.ndarray, " n"],
    test_features: Float32[np.ndarray, "q d"],
) -> tuple[Int64[np.ndarray, " classes"], Int64[np.ndarray, " n"]]:
    """Return the classes of the training images in rising order, and the place of each image's class among them.

    Args:
        what: the classifier, for messages.
        train_features: unit rows.
        train_labels: class of each; any integers.
        test_features: unit rows.

    Raises:
        DataError: there are no images, or fewer than two classes.
        FeatureError: rows are not finite unit vectors.
    """
    if len(train_features) == 0 or len(test_features) == 0:
        raise DataError(f"{what} with {len(train_features)} training and {len(test_features)} test rows")
    require_unit_rows(train_features, "training features")
    require_unit_rows(test_features, "test features")
    classes, targets = np.unique(train_labels, return_inverse=True)
    if len(classes) < 2:
        raise DataError("all training images are of one class: a classifier needs two or more")
    return classes, targets


def top_metrics(ranked: Int64[np.ndarray, "q shown"], truth: Int64[np.ndarray, " q"], classes: int) -> dict[str, float]:
    """Return `top1`, and `top5` where there are five classes or more, in percent.

    Args:
        ranked: of each test image up to five classes, best first.
        truth: its class.
        classes: how many the training images have.
    """
    right = ranked == truth[:, None]
    metrics = {"top1": 100.0 * float(right[:, 0].mean())}
    if classes >= 5:
        metrics["top5"] = 100.0 * float(right.any(axis=1).mean())
    return metrics
