"""Multi-crop views of one image in uint8 on the CPU (docs/method.md, 1; iBOT's augmentations).

Every view has its own generator, keyed by (seed, epoch, image, view): a view is a pure function of these four,
whatever process or thread makes it and whenever. Its parameters are drawn first, from the size of the image alone;
then it is made.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
import torch
from jaxtyping import UInt8

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.color import Colors, augment_colors, draw_colors
from sop_faiss.data.views.fast_random import philox, uniform

_CROP_TRIES = 10


class CropBox(NamedTuple):
    """Pixels of a crop: `top` and `left` inclusive, with its size."""

    top: int
    left: int
    height: int
    width: int


class View(NamedTuple):
    """The draws for one view of an image."""

    angle: float
    """Rotation about the center, radians."""
    shear: float
    """Tangent of the shearing angle."""
    box: CropBox
    """In the rotated and sheared image."""
    flipped: bool
    colors: Colors


def view_generator(seed: int, epoch: int, image_id: int, view: int) -> np.random.Generator:
    """Make the generator of one view of one image in one epoch."""
    return philox((seed, epoch), (0, 0, view, image_id))  # the lowest word counts the draws


def draw_crop(
    height: int, width: int, scale: tuple[float, float], aspect: tuple[float, float], generator: np.random.Generator
) -> CropBox:
    """Draw a box of random area and aspect inside the image; the largest central one if ten draws do not fit.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        scale: area of the box as a fraction of the image, uniform.
        aspect: width over height, log-uniform.
        generator: the view's own.
    """
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(_CROP_TRIES):
        area = height * width * uniform(generator, *scale)
        ratio = math.exp(uniform(generator, low, high))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(generator.integers(height - box_height + 1))
            left = int(generator.integers(width - box_width + 1))
            return CropBox(top, left, box_height, box_width)
    ratio = min(max(width / height, aspect[0]), aspect[1])
    box_width, box_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    return CropBox((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def _resize_into(image: UInt8[np.ndarray, "h w 3"], box: CropBox, out: UInt8[np.ndarray, "side side 3"]) -> None:
    """Resize by antialiased bicubic, into `out`. The order of unsqueeze and permute keeps torch on channels-last."""
    crop = image[box.top : box.top + box.height, box.left : box.left + box.width]
    source = torch.from_numpy(crop).unsqueeze(0).permute(0, 3, 1, 2)
    target = torch.from_numpy(out).unsqueeze(0).permute(0, 3, 1, 2)
    torch.ops.aten._upsample_bicubic2d_aa.out(source, list(out.shape[:2]), False, None, None, out=target)


def _tilt(image: UInt8[np.ndarray, "h w 3"], angle: float, shear: float) -> UInt8[np.ndarray, "h w 3"]:
    """Rotate and shear about the center; the border pixels are repeated."""
    height, width = image.shape[:2]
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin + shear * cos], [sin, cos + shear * sin]])
    center = np.array([(width - 1) / 2, (height - 1) / 2])
    matrix = np.column_stack([linear, center - linear @ center])
    return cv2.warpAffine(image, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


def draw_view(height: int, width: int, index: int, config: ViewsConfig, generator: np.random.Generator) -> View:
    """Draw view number `index` (global ones first) of an image of this size.

    Args:
        height: of the image, in pixels.
        width: of the image, in pixels.
        index: its place among the views, on which the size of the crop, blur and solarization depend.
        config: probabilities, strengths and sizes.
        generator: the view's own.
    """
    angle = shear = 0.0
    if config.max_rotation_degrees or config.max_shear_degrees:
        angle = math.radians(uniform(generator, -config.max_rotation_degrees, config.max_rotation_degrees))
        shear = math.tan(math.radians(uniform(generator, -config.max_shear_degrees, config.max_shear_degrees)))
    scale = config.global_scale if index < config.global_count else config.local_scale
    box = draw_crop(height, width, scale, config.aspect, generator)
    flipped = generator.random() < config.flip
    return View(angle, shear, box, flipped, draw_colors(index, config, generator))


def write_view(
    image: UInt8[np.ndarray, "h w 3"], view: View, out: UInt8[np.ndarray, "side side 3"], *, colored: bool = True
) -> None:
    """Make a view of the image for which it was drawn.

    Args:
        image: RGB.
        view: as drawn.
        out: contiguous memory for the view, whose side it sets.
        colored: whether its colors are changed here; if not, the device changes them.
    """
    if view.angle or view.shear:
        image = _tilt(image, view.angle, view.shear)
    if view.flipped:
        crop = np.empty_like(out)
        _resize_into(image, view.box, crop)
        cv2.flip(crop, 1, dst=out)
    else:
        _resize_into(image, view.box, out)
    if colored:
        augment_colors(out, view.colors)
