"""Crops to train on and images to test on, with the classes of their pixels: mmsegmentation's pipeline for ADE20K."""

from __future__ import annotations

import cv2
import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torchvision.transforms import v2

from sop_faiss.distributed import derive_seed
from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.segment_score import VOID
from sop_faiss.evaluate.trained.training_batches import seeded
from sop_faiss.model.encoders.preprocess import Preprocess

_LONGEST = 4
"""Sides: the longer one is at most this multiple of the size (2,048 of 512)."""
_MOST_OF_A_CLASS = 0.75
_TRIES = 10
"""Crops that are drawn until no class has more than that share of one's annotated pixels."""


def resized(height: int, width: int, size: float) -> tuple[int, int]:
    """Return an image's height and width when its shorter side is `size`, or its longer one four times that."""
    factor = min(size / min(height, width), _LONGEST * size / max(height, width))
    return max(1, int(height * factor + 0.5)), max(1, int(width * factor + 0.5))


def whole_input(
    pixels: UInt8[np.ndarray, "h w 3"], preprocess: Preprocess, size: int
) -> Float32[Tensor, "3 rows columns"]:
    """Resize a test image, and normalize it."""
    rows, columns = resized(pixels.shape[0], pixels.shape[1], float(size))
    image = cv2.resize(pixels, (columns, rows), interpolation=cv2.INTER_LINEAR)
    return preprocess.normalize(torch.from_numpy(image)[None])[0]


def training_crop(
    pixels: UInt8[np.ndarray, "h w 3"],
    mask: UInt8[np.ndarray, "h w"],
    preprocess: Preprocess,
    choices: SegmentChoices,
    *key: int | str,
) -> Float32[Tensor, "4 size size"]:
    """Draw a crop: three normalized channels, and the class of each pixel as the fourth; borders are 0 and void.

    Args:
        pixels: of the image.
        mask: classes.
        preprocess: of the encoder, which normalizes.
        choices: as of `SegmentChoices.filled`.
        key: what the draws depend on.
    """
    rng = np.random.default_rng(derive_seed(*key))
    scale = rng.uniform(choices.min_scale, choices.max_scale)
    rows, columns = resized(mask.shape[0], mask.shape[1], choices.size * scale)
    mask = cv2.resize(mask, (columns, rows), interpolation=cv2.INTER_NEAREST)  # type: ignore[assignment]
    for _ in range(_TRIES + 1):
        top, left = (int(rng.integers(0, max(0, side - choices.size) + 1)) for side in (rows, columns))
        part = np.s_[top : top + choices.size, left : left + choices.size]
        counts = np.bincount(mask[part].flatten(), minlength=256)[:VOID]
        if counts.max() < _MOST_OF_A_CLASS * counts.sum():
            break
    image = cv2.resize(pixels, (columns, rows), interpolation=cv2.INTER_LINEAR)[part]
    mask = mask[part]
    if rng.random() < choices.flip:
        image, mask = image[:, ::-1], mask[:, ::-1]
    crop = torch.from_numpy(np.ascontiguousarray(image))
    if choices.distort:
        with seeded(*key, "colors"):
            crop = v2.RandomPhotometricDistort(p=choices.distort)(crop.permute(2, 0, 1)).permute(1, 2, 0)
    made = torch.zeros(4, choices.size, choices.size)
    made[3] = VOID
    made[:3, : mask.shape[0], : mask.shape[1]] = preprocess.normalize(crop[None])[0]
    made[3, : mask.shape[0], : mask.shape[1]] = torch.from_numpy(np.ascontiguousarray(mask))
    return made
