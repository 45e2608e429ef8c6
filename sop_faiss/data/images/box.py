"""Parts of images: the inside of a box."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from sop_faiss.data.images.decode import MAX_PIXELS, decode_image
from sop_faiss.errors import ConfigError, DataError

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the upright image; or, none of them above 1, in shares of its sides."""

WHOLE: Box = (0, 0, 1, 1)
"""All of an image, in shares."""


def box_text(box: Sequence[float]) -> str:
    """Write a box in shares of the sides as `parse_box` reads it."""
    return ",".join(f"{each:.4g}" for each in box)


def is_part(box: Sequence[float] | None) -> bool:
    """Return whether a box in shares is of less than the complete image."""
    return box is not None and tuple(box) != WHOLE


def parse_box(text: str) -> Box:
    """Parse `left,top,right,bottom`.

    Raises:
        ConfigError: it is not four numbers that make a box.
    """
    try:
        return require_box([float(part) for part in text.split(",")], text)
    except ValueError:
        return require_box([], text)


def require_box(numbers: Sequence[float], text: str) -> Box:
    """Return four numbers as a box; `text` is for the message.

    Raises:
        ConfigError: they do not make a box.
    """
    left, top, right, bottom = numbers if len(numbers) == 4 else [math.nan] * 4
    if not (0 <= left < right < math.inf and 0 <= top < bottom < math.inf):
        raise ConfigError(
            f"`box={text[:80]}`: wanted left,top,right,bottom, as 40,60,200,180 in pixels or 0.1,0.2,0.5,0.9 in shares "
            "of the image's sides, left < right and top < bottom"
        )
    return left, top, right, bottom


def encoded_part(encoded: bytes, box: Box, name: str, max_pixels: int = MAX_PIXELS, top_value: float = 0.0) -> bytes:
    """Return the part of an encoded image inside a box, encoded without loss.

    Args:
        encoded: the image.
        box: the part.
        name: of the image, for errors.
        max_pixels: as of `decode_image`.
        top_value: as of `decode_image`.

    Raises:
        DataError: the image cannot be read.
        ConfigError: the box is not inside it.
    """
    pixels = decode_image(encoded, max_pixels, top_value)
    height, width = pixels.shape[:2]
    left, top, right, bottom = box
    if max(box) <= 1:
        left, top, right, bottom = left * width, top * height, right * width, bottom * height
    if right > width or bottom > height or round(left) >= round(right) or round(top) >= round(bottom):
        raise ConfigError(
            f"`box={','.join(f'{each:g}' for each in box)}` is not inside {name}, which has {width} x {height} pixels: "
            "wanted left,top,right,bottom with a pixel or more between them"
        )
    part = io.BytesIO()
    Image.fromarray(crop_to_box(pixels, (left, top, right, bottom))).save(part, "PNG", compress_level=1)
    return part.getvalue()


def crop_to_box(image: UInt8[np.ndarray, "h w 3"], box: Box) -> UInt8[np.ndarray, "ch cw 3"]:
    """Cut out the part of an image inside a box, whose corners are rounded to whole pixels and clipped to the image.

    Raises:
        DataError: nothing of the box is inside the image (first word `outside`).
    """
    height, width = image.shape[:2]
    x1, y1, x2, y2 = (round(value) for value in box)
    part = image[y1 : min(y2, height), x1 : min(x2, width)]
    if part.size == 0:
        raise DataError(f"box {list(box)} is outside its image of {width} x {height} px: wrong gnd or image?")
    return np.ascontiguousarray(part)
