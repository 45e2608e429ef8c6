"""Training images of a detector, mirrored and cropped: a pure function of the seed, the epoch and the image."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from sop_faiss.distributed import derive_seed
from sop_faiss.evaluate.sets.coco_set import CocoSet, Instances
from sop_faiss.evaluate.trained.detect_choices import DetectChoices

Target = dict[str, Tensor]
"""Of an image, as torchvision names it: `boxes`, `labels` and `masks`."""
_CROP_SIDES = (400 / 800, 500 / 800, 600 / 800)
"""Shorter sides at which DETR's recipe crops, relative to the size."""
_CROPPED = (384 / 800, 600 / 800)
"""The least and the most of a side that stays."""


def image_tensor(pixels: UInt8[np.ndarray, "h w 3"]) -> Float32[Tensor, "3 h w"]:
    """Return an image as torchvision's detectors take it: values of 0 to 1."""
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def training_image(
    data: CocoSet, choices: DetectChoices, key: tuple[int, ...], pixels: UInt8[np.ndarray, "h w 3"], row: int
) -> tuple[Float32[Tensor, "3 rows columns"], Target]:
    """Make the input of a detector: mirrored and cropped at random; the detector resizes it.

    Args:
        data: where the image is from.
        choices: `flip`, `crop` and the size.
        key: what the draws depend on, besides the row.
        pixels: of the image.
        row: of the image.

    Raises:
        DataError: the image is not as large as the annotations say.
    """
    data.check_size(pixels, row)
    found = data.instances(row)
    draw = np.random.default_rng(derive_seed("image", *key, row))
    if draw.random() < choices.flip:
        pixels, found = _mirrored(pixels, found)
    if draw.random() < choices.crop:
        pixels, found = _cropped(pixels, found, choices, draw)
    target = {"boxes": found.boxes, "labels": found.labels, "masks": np.ascontiguousarray(found.masks)}
    image = image_tensor(np.ascontiguousarray(pixels))
    return image, {name: torch.from_numpy(value) for name, value in target.items()}


def _mirrored(pixels: UInt8[np.ndarray, "h w 3"], found: Instances) -> tuple[UInt8[np.ndarray, "h w 3"], Instances]:
    boxes = found.boxes.copy()
    boxes[:, [0, 2]] = pixels.shape[1] - found.boxes[:, [2, 0]]
    return pixels[:, ::-1], Instances(boxes, found.labels, found.masks[:, :, ::-1])


def _cropped(
    pixels: UInt8[np.ndarray, "h w 3"], found: Instances, choices: DetectChoices, draw: np.random.Generator
) -> tuple[UInt8[np.ndarray, "rows columns 3"], Instances]:
    """Crop as if the image had first been resized to one of three shorter sides, and the cut had been made there."""
    shorter, longer = sorted(pixels.shape[:2])
    scale = min(choices.size * draw.choice(_CROP_SIDES) / shorter, choices.longest / longer)
    place = []
    for side in pixels.shape[:2]:
        least, most = (min(side, max(1, round(share * choices.size / scale))) for share in _CROPPED)
        length = int(draw.integers(least, most + 1))
        start = int(draw.integers(0, side - length + 1))
        place.append((start, start + length))
    (top, bottom), (left, right) = place
    boxes = np.clip(found.boxes, (left, top, left, top), (right, bottom, right, bottom)) - (left, top, left, top)
    kept = (boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf) >= 1  # pixel
    masks = found.masks[kept, top:bottom, left:right]
    return pixels[top:bottom, left:right], Instances(boxes[kept].astype(np.float32), found.labels[kept], masks)
