"""The colors of one view: what is drawn, and how it is done in uint8 with OpenCV (docs/method.md, 1).

Drawing and doing are apart, so that the device can do for whole batches what was drawn here (`device_color`).
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.fast_random import uniform

__all__ = ["COLUMNS", "UNCHANGED", "Colors", "augment_colors", "blur_reach", "draw_colors"]

_LEVELS = np.arange(256, dtype=np.float32)
_SOLARIZED = np.where(_LEVELS >= 128, 255 - _LEVELS, _LEVELS).astype(np.uint8)
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as PIL's mode L
_GRAY = np.tile(_LUMA, (3, 1))
_CUT = -0.499  # added before OpenCV rounds: decimals are cut off, as in PIL's blends; rounding would be 1 level off PIL


class Colors(NamedTuple):
    """What was drawn for the colors of a view; as it stands, nothing is changed."""

    brightness: float = 1.0
    """Factor."""
    contrast: float = 1.0
    """Factor on the difference from the mean gray."""
    saturation: float = 1.0
    """Factor on the difference from the pixel's gray."""
    hue: float = 0.0
    """Shift in turns of the color circle."""
    first: float = 0
    """The four above are done in this order: 0 is brightness, 3 hue."""
    second: float = 1
    third: float = 2
    fourth: float = 3
    gray: float = 0
    """1: color is dropped."""
    blur_sigma: float = 0.0
    """Standard deviation in pixels; 0: no blur."""
    solarize: float = 0
    """1: levels of 128 and more are inverted."""


UNCHANGED = Colors()
"""The parameters of a view whose colors are left alone."""
COLUMNS = {name: column for column, name in enumerate(Colors._fields)}
"""Where each stands in a row of a batch's table."""


def draw_colors(index: int, config: ViewsConfig, generator: np.random.Generator) -> Colors:
    """Draw jitter, gray, blur and solarization, as the place of a view among the views prescribes.

    Args:
        index: number of the view; global ones first.
        config: probabilities and strengths.
        generator: the view's own.
    """
    is_global = index < config.global_count
    blur = config.blur_local if not is_global else config.blur_global1 if index == 0 else config.blur_global2
    jitter: tuple[float, ...] = UNCHANGED[:8]
    if generator.random() < config.jitter:
        factors = [
            uniform(generator, max(0.0, 1.0 - strength), 1.0 + strength)
            for strength in (config.brightness, config.contrast, config.saturation)
        ]
        hue = uniform(generator, -config.hue, config.hue)
        jitter = (*factors, hue, *generator.permutation(4).tolist())
    gray = generator.random() < config.gray
    sigma = uniform(generator, *config.blur_sigma) if generator.random() < blur else 0.0
    solarize = is_global and index > 0 and generator.random() < config.solarize_global2
    return Colors._make((*jitter, gray, sigma, solarize))


def blur_reach(sigma: float) -> int:
    """Pixels on either side that a blur takes in: OpenCV's own choice for 8 bits, about three standard deviations."""
    return (round(6 * sigma + 1) | 1) // 2


def augment_colors(view: UInt8[np.ndarray, "h w 3"], colors: Colors) -> None:
    """Change an RGB view in place, as drawn. Each step leaves whole levels, rounded or cut off as PIL does."""
    for which in colors[4:8]:
        number = int(which)
        if colors[number] != UNCHANGED[number]:
            _STEPS[number](view, colors[number])
    if colors.gray:
        cv2.transform(view, _GRAY, dst=view)
    if colors.blur_sigma:
        _blur(view, colors.blur_sigma)
    if colors.solarize:
        cv2.LUT(view, _SOLARIZED, dst=view)


def _blur(view: UInt8[np.ndarray, "h w 3"], sigma: float) -> None:
    """With weights in float: rounded rightly, and two to three times as fast as `cv2.GaussianBlur` in fixed point."""
    weights = cv2.getGaussianKernel(2 * blur_reach(sigma) + 1, sigma, cv2.CV_32F)
    cv2.sepFilter2D(view, -1, weights, weights, dst=view, borderType=cv2.BORDER_REPLICATE)


def _brighten(view: UInt8[np.ndarray, "h w 3"], factor: float) -> None:
    cv2.addWeighted(view, factor, view, 0.0, _CUT, dst=view)


def _contrast(view: UInt8[np.ndarray, "h w 3"], factor: float) -> None:
    mean = round(float(_LUMA @ cv2.mean(view)[:3]))
    cv2.addWeighted(view, factor, view, 0.0, mean * (1.0 - factor) + _CUT, dst=view)


def _saturate(view: UInt8[np.ndarray, "h w 3"], factor: float) -> None:
    """Blend with the gray of each pixel."""
    matrix = np.full((3, 4), _CUT)
    matrix[:, :3] = factor * np.eye(3) + (1.0 - factor) * _LUMA
    cv2.transform(view, matrix, dst=view)


def _shift_hue(view: UInt8[np.ndarray, "h w 3"], turns: float) -> None:
    hsv = cv2.cvtColor(view, cv2.COLOR_RGB2HSV_FULL)
    shift = np.zeros(hsv.shape[1:], np.uint8)
    shift[:, 0] = int(turns * 255) % 256
    hsv += shift  # hue is a circle of 256: it wraps
    cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL, dst=view)


_STEPS = (_brighten, _contrast, _saturate, _shift_hue)
