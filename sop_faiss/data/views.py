"""Multi-crop views of one picture in uint8 on the CPU (design 2.1 and 6.4; iBOT's augmentations).

Every view has a generator of its own, keyed by (seed, epoch, image, view): a view is a pure function of these four,
whatever process makes it and whenever.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
import torch
from jaxtyping import UInt8

from sop_faiss.config import ViewsConfig

__all__ = ["Box", "augment_colours", "draw_crop", "view_generator", "write_view"]

_CROP_TRIES = 10


class Box(NamedTuple):
    """Pixels of a crop: `top` and `left` inclusive, with its size."""

    top: int
    left: int
    height: int
    width: int


def view_generator(seed: int, epoch: int, image_id: int, view: int) -> np.random.Generator:
    """The generator of one view of one image in one epoch."""
    counter = np.array([0, 0, view, image_id], dtype=np.uint64)  # the low word counts what is drawn
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter))


def draw_crop(
    height: int, width: int, scale: tuple[float, float], aspect: tuple[float, float], generator: np.random.Generator
) -> Box:
    """A box of random area and aspect inside the picture; the largest central one when ten draws do not fit.

    Args:
        height: of the picture, in pixels.
        width: of the picture, in pixels.
        scale: area of the box as a share of the picture, uniform.
        aspect: width over height, log-uniform.
        generator: the view's own.
    """
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(_CROP_TRIES):
        area = height * width * generator.uniform(*scale)
        ratio = math.exp(generator.uniform(low, high))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(generator.integers(height - box_height + 1))
            left = int(generator.integers(width - box_width + 1))
            return Box(top, left, box_height, box_width)
    ratio = min(max(width / height, aspect[0]), aspect[1])
    box_width, box_height = min(width, round(height * ratio)), min(height, round(width / ratio))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def _resize_into(picture: UInt8[np.ndarray, "h w 3"], box: Box, out: UInt8[np.ndarray, "side side 3"]) -> None:
    """Antialiased bicubic, straight into `out`. The order of unsqueeze and permute keeps torch on channels-last."""
    crop = picture[box.top : box.top + box.height, box.left : box.left + box.width]
    source = torch.from_numpy(crop).unsqueeze(0).permute(0, 3, 1, 2)
    target = torch.from_numpy(out).unsqueeze(0).permute(0, 3, 1, 2)
    torch.ops.aten._upsample_bicubic2d_aa.out(source, list(out.shape[:2]), False, None, None, out=target)


def _tilt(
    picture: UInt8[np.ndarray, "h w 3"], config: ViewsConfig, generator: np.random.Generator
) -> UInt8[np.ndarray, "h w 3"]:
    """Rotate and shear about the centre; the border is continued."""
    angle = math.radians(generator.uniform(-config.max_rotation_degrees, config.max_rotation_degrees))
    shear = math.tan(math.radians(generator.uniform(-config.max_shear_degrees, config.max_shear_degrees)))
    height, width = picture.shape[:2]
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin + shear * cos], [sin, cos + shear * sin]])
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    matrix = np.column_stack([linear, centre - linear @ centre])
    return cv2.warpAffine(picture, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


def _table(values: np.ndarray) -> UInt8[np.ndarray, " 256"]:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


_LEVELS = np.arange(256, dtype=np.float32)
_SOLARIZED = _table(np.where(_LEVELS >= 128, 255 - _LEVELS, _LEVELS))


def _grey(view: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h w 3"]:
    return cv2.cvtColor(cv2.cvtColor(view, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def _jitter(
    view: UInt8[np.ndarray, "h w 3"], config: ViewsConfig, generator: np.random.Generator
) -> UInt8[np.ndarray, "h w 3"]:
    """Brightness, contrast, saturation and hue in random order."""
    factors = [
        generator.uniform(max(0.0, 1.0 - strength), 1.0 + strength)
        for strength in (config.brightness, config.contrast, config.saturation)
    ]
    hue_shift = generator.uniform(-config.hue, config.hue)
    for which in generator.permutation(4):
        if which == 0 and config.brightness:
            view = cv2.LUT(view, _table(_LEVELS * factors[0]))
        elif which == 1 and config.contrast:
            mean = float(cv2.mean(cv2.cvtColor(view, cv2.COLOR_RGB2GRAY))[0])
            view = cv2.LUT(view, _table(_LEVELS * factors[1] + round(mean) * (1.0 - factors[1])))
        elif which == 2 and config.saturation:
            view = cv2.addWeighted(view, factors[2], _grey(view), 1.0 - factors[2], 0.0)
        elif which == 3 and config.hue:
            hsv = cv2.cvtColor(view, cv2.COLOR_RGB2HSV_FULL)
            hsv[..., 0] += np.uint8(round(hue_shift * 255) % 256)  # hue is a circle of 256: it wraps
            view = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    return view


def augment_colours(
    view: UInt8[np.ndarray, "h w 3"], index: int, config: ViewsConfig, generator: np.random.Generator
) -> UInt8[np.ndarray, "h w 3"]:
    """Jitter, grey, blur and solarize a view, as its place among the views prescribes.

    Args:
        view: RGB.
        index: number of the view; global ones first.
        config: probabilities and strengths.
        generator: the view's own.
    """
    is_global = index < config.global_count
    blur = config.blur_local if not is_global else config.blur_global1 if index == 0 else config.blur_global2
    if generator.random() < config.jitter:
        view = _jitter(view, config, generator)
    if generator.random() < config.grey:
        view = _grey(view)
    if generator.random() < blur:
        view = cv2.GaussianBlur(view, (0, 0), generator.uniform(*config.blur_sigma))
    if is_global and index > 0 and generator.random() < config.solarize_global2:
        view = cv2.LUT(view, _SOLARIZED)
    return view


def write_view(
    picture: UInt8[np.ndarray, "h w 3"],
    index: int,
    config: ViewsConfig,
    generator: np.random.Generator,
    out: UInt8[np.ndarray, "side side 3"],
) -> None:
    """Make view number `index` of a picture and write it into `out`, whose side says its size."""
    scale = config.global_scale if index < config.global_count else config.local_scale
    if config.max_rotation_degrees or config.max_shear_degrees:
        picture = _tilt(picture, config, generator)
    box = draw_crop(picture.shape[0], picture.shape[1], scale, config.aspect, generator)
    _resize_into(picture, box, out)
    if generator.random() < config.flip:
        out[:] = cv2.flip(out, 1)
    coloured = augment_colours(out, index, config, generator)
    if coloured is not out:
        out[:] = coloured
