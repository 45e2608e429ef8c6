"""How well masks of a video's object match the annotated ones: region similarity J and boundary accuracy F.

Source: Perazzi et al., "A Benchmark Dataset and Evaluation Methodology for Video Object Segmentation", CVPR 2016, and
the evaluator of DAVIS 2017, which these numbers equal.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import Bool, Float64, UInt8

_TOLERANCE = 0.008
"""Boundaries this far apart still match, as a share of the image's diagonal, rounded up to pixels."""
_GOOD = 0.5
"""Recall is the share of frames above this."""
_QUARTERS = 4
"""Decay is the mean of the first quarter of the frames less that of the last."""


class FrameStatistics(NamedTuple):
    """Of the J or F of an object's frames."""

    mean: float
    recall: float
    decay: float


def region_similarity(mask: Bool[np.ndarray, "h w"], truth: Bool[np.ndarray, "h w"]) -> float:
    """Return J: intersection over union; 1 where both are empty."""
    union = np.count_nonzero(mask | truth)
    return np.count_nonzero(mask & truth) / union if union else 1.0


def boundary_accuracy(mask: Bool[np.ndarray, "h w"], truth: Bool[np.ndarray, "h w"]) -> float:
    """Return F: the harmonic mean of the precision and recall of the mask's boundary pixels.

    A pixel of one boundary is right if the other boundary is at most 0.8 % of the image's diagonal away. Where one has
    no boundary and the other has, it is 0; where neither has, 1.
    """
    found, wanted = _boundary(mask), _boundary(truth)
    left, top, width, height = cv2.boundingRect(found | wanted)  # distances are between pixels in this rectangle only
    found, wanted = (each[top : top + height, left : left + width] for each in (found, wanted))
    counts = np.count_nonzero(found), np.count_nonzero(wanted)
    if not all(counts):
        return float(counts[0] == counts[1])
    disk = _disk(math.ceil(_TOLERANCE * np.linalg.norm(mask.shape)))
    precision = np.count_nonzero(found & cv2.dilate(wanted, disk)) / counts[0]
    recall = np.count_nonzero(wanted & cv2.dilate(found, disk)) / counts[1]
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _boundary(mask: Bool[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w"]:
    """Pixels that differ from their neighbor to the right, below, or both; the image's border is not a boundary."""
    padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
    right, below, diagonal = padded[:-1, 1:], padded[1:, :-1], padded[1:, 1:]
    return ((mask != right) | (mask != below) | (mask != diagonal)).astype(np.uint8)


@functools.cache
def _disk(radius: int) -> UInt8[np.ndarray, "s s"]:
    offsets = np.arange(-radius, radius + 1) ** 2
    return (offsets[:, None] + offsets <= radius**2).astype(np.uint8)


def frame_statistics(values: Float64[np.ndarray, " frames"]) -> FrameStatistics:
    """Return mean, recall and decay of the J or F of one object in the frames that count.

    `Departs:` the evaluator of DAVIS counts frames in 8 bits, so its decay of more than 256 frames is of other ones.

    Raises:
        ValueError: there is no frame.
    """
    if not len(values):
        raise ValueError("no frame was counted")
    # The official bounds: quarters share a frame, and halves are rounded up but for the error of a float.
    bounds = np.round(np.linspace(1, len(values), _QUARTERS + 1) + 1e-10).astype(np.int64) - 1
    first, last = values[: bounds[1] + 1], values[bounds[-2] :]
    return FrameStatistics(
        float(values.mean()), float((values > _GOOD).mean()), float(first.mean()) - float(last.mean())
    )
