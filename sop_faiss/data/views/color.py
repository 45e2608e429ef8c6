"""The color augmentation of one view: its random draws, and its application in uint8 with OpenCV (docs/method.md, 1).

Drawing and applying are separate, so that the device can apply the draws to whole batches (`device_color`).
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.fast_random import uniform

_LEVELS = np.arange(256, dtype=np.float32)
_SOLARIZED = np.where(_LEVELS >= 128, 255 - _LEVELS, _LEVELS).astype(np.uint8)
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as PIL's mode L
_GRAY = np.tile(_LUMA, (3, 1))
_CUT = -0.499  # added before OpenCV rounds, to truncate as PIL's blends do; rounding would differ from PIL by 1 level


class Colors(NamedTuple):
    """The draws for the colors of a view; the defaults change nothing."""

    brightness: float = 1.0
    """Factor."""
    contrast: float = 1.0
    """Factor on the difference from the mean gray."""
    saturation: float = 1.0
    """Factor on the difference from the pixel's gray."""
    hue: float = 0.0
    """Shift in turns of the color circle."""
    first: float = 0
    """The four above are applied in this order: 0 is brightness, 3 hue."""
    second: float = 1
    third: float = 2
    fourth: float = 3
    gray: float = 0
    """1: the view becomes gray."""
    blur_sigma: float = 0.0
    """Standard deviation in pixels; 0: no blur."""
    solarize: float = 0
    """1: levels of 128 and more are inverted."""


UNCHANGED = Colors()
"""The draws of a view whose colors are not changed."""
COLUMNS = {name: column for column, name in enumerate(Colors._fields)}
"""The column of each in a batch's table of colors."""


def draw_colors(index: int, config: ViewsConfig, generator: np.random.Generator) -> Colors:
    """Draw jitter, gray, blur and solarization, with the settings for this view.

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
    """Return the radius of a blur in pixels: OpenCV's own choice for 8 bits, about three standard deviations."""
    return (round(6 * sigma + 1) | 1) // 2


def augment_colors(view: UInt8[np.ndarray, "h w 3"], colors: Colors) -> None:
    """Change an RGB view in place, as drawn. Each step gives integer levels, rounded or truncated as in PIL."""
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
    """Blur with float weights: exactly rounded, two to three times as fast as `cv2.GaussianBlur` in fixed point."""
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
