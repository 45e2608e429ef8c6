"""Grayscale images of more than 8 bits: which value is white, and statistics of a set of them.

A file of 16 bits rarely states how many of them its camera or scanner uses, and one of floats hardly ever what white
is. So a user can set it (`top_value`); next comes what a TIFF states, then the largest value of the type. PNG's sBIT is
not used: PNG scales its samples to all 16 bits, however many of them are significant.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from sop_faiss.config.checks import require

_TIFF_BITS, _TIFF_TOP, _TIFF_SAMPLE_TOP = 258, 281, 341  # BitsPerSample, MaxSampleValue, SMaxSampleValue
_TYPE_TOP = 65535


@dataclass(frozen=True)
class DeepImage:
    """One image of more than 8 bits."""

    largest: float
    """The largest value in the image."""
    white: float
    """This value and larger ones become 255."""
    is_known: bool
    """Whether the setting or the file states what is white; otherwise it is the type's largest value."""


@dataclass
class DeepTally:
    """Statistics of the deep images of a set."""

    images: int = 0
    unknown: int = 0
    """Images for which neither the setting nor the file states what is white."""
    clipped: int = 0
    """Images with values above white."""
    largest: float = 0.0
    largest_unknown: float = 0.0
    white: tuple[float, float] | None = None
    """The lowest and the highest white."""

    def add(self, image: DeepImage | None) -> None:
        """Count one image; None is an image of 8 bits."""
        if image is None:
            return
        self.images += 1
        self.largest = max(self.largest, image.largest)
        self.clipped += image.largest > image.white
        low, high = self.white or (image.white, image.white)
        self.white = min(low, image.white), max(high, image.white)
        if not image.is_known:
            self.unknown += 1
            self.largest_unknown = max(self.largest_unknown, image.largest)

    def notices(self) -> list[str]:
        """Return what a user should know before the images are used, one line each."""
        found = []
        low, high = self.white or (0.0, 0.0)
        guess = max(255.0, 2.0 ** int(self.largest_unknown).bit_length() - 1)
        if self.unknown and high == _TYPE_TOP and guess < _TYPE_TOP:
            found.append(
                f"{self.unknown:,} deep grayscale images have no value above {self.largest_unknown:,.10g}, and "
                f"{_TYPE_TOP:,} is taken as white, so they are dark: if white is {guess:,.10g}, {_remedy(guess)}"
            )
        if self.clipped:
            found.append(
                f"{self.clipped:,} deep grayscale images have values above what is taken as white (up to "
                f"{self.largest:,.10g}; white is {high:,.10g}), which all become white: {_remedy(self.largest)}"
            )
        if low < high:
            found.append(
                f"the value of white differs between deep grayscale images, from {low:,.10g} to {high:,.10g}, and so "
                f"does their brightness: if it is the same in all, {_remedy(None)}"
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the tally as JSON values."""
        return asdict(self) | {"white": None if self.white is None else list(self.white)}


def _remedy(value: float | None) -> str:
    text = "VALUE" if value is None else f"{value:.10g}"
    return f"set `top_value={text}`, and data.top_value={text} in training"


def require_top_value(value: float) -> None:
    """Check a top value; 0 means none.

    Raises:
        ConfigError: it is negative or not finite.
    """
    require(0 <= value < math.inf, f"top_value = {value}: wanted the value of white, above 0, or 0 for the file's own")


def measure_deep(image: Image.Image, top_value: float) -> DeepImage | None:
    """Find what is white in a loaded image, as it came from its file; None for an image of 8 bits.

    Args:
        image: of any mode.
        top_value: white, set by the user; 0: the file's own.
    """
    if not image.mode.startswith(("I", "F")):
        return None
    values: np.ndarray = np.asarray(image)
    finite = values if image.mode != "F" else values[np.isfinite(values)]
    largest = float(finite.max(initial=0))
    if top_value:
        return DeepImage(largest, top_value, True)
    stated = _stated_top(image)
    if largest <= stated < math.inf:  # a statement that the file's own values contradict is ignored
        return DeepImage(largest, stated, True)
    usual = {"F": (1, 255, _TYPE_TOP), "I": (255, _TYPE_TOP)}.get(image.mode, (_TYPE_TOP,))
    return DeepImage(largest, float(next((top for top in usual if largest <= top), _TYPE_TOP)), False)


def _stated_top(image: Image.Image) -> float:
    """Return the largest value that a TIFF states it can have; 0 if it states none."""
    tags: Any = getattr(image, "tag_v2", {})
    for tag in (_TIFF_SAMPLE_TOP, _TIFF_TOP):
        values = np.atleast_1d(tags.get(tag, 0))
        if values.dtype.kind in "iuf" and values.size and values.max() > 1:  # 1, for floats, is assumed anyway
            return float(values.max())
    bits = np.atleast_1d(tags.get(_TIFF_BITS, 0))
    return float(2 ** int(bits[0]) - 1) if bits.size and 8 < bits[0] < 16 else 0.0


def deep_to_rgb(image: Image.Image, white: float) -> Image.Image:
    """Scale a deep image to 8 bits; values up to 0 become black, `white` and more become white.

    Integers keep their highest bits, as if 16 bits become 8 by the high byte.
    """
    values: np.ndarray = np.asarray(image)
    whole = image.mode != "F" and white >= 255
    scaled = np.nan_to_num(values.astype(np.float32), posinf=white) * np.float32(
        (256 if whole else 255) / (white + whole)
    )
    gray = np.clip(np.floor(scaled) if whole else np.round(scaled), 0, 255)
    return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
