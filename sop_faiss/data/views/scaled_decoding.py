"""JPEGs decoded at a fraction of their size, if every crop allows it (`data.scaled_decoding`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from sop_faiss.data.images.decode import open_image, size_problem
from sop_faiss.data.images.jpeg import decode_plain_jpeg, plain_jpeg_size
from sop_faiss.data.views.crops import CropBox
from sop_faiss.errors import DataError

_DENOMINATORS = (8, 4, 2)
_ORIENTATION = 0x0112  # EXIF tag; 5 to 8 are turned by 90 degrees


def upright_jpeg_size(encoded: bytes, max_pixels: int) -> tuple[int, int] | None:
    """Return height and width, upright, of a JPEG that can be decoded at a fraction; None for any other file."""
    size = plain_jpeg_size(encoded)
    if size is None or size_problem(*size, max_pixels):
        return None
    width, height = size
    try:
        turned = open_image(encoded, max_pixels).getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except (DataError, SyntaxError, ValueError, OSError, KeyError, TypeError):  # damaged EXIF
        return None
    return (width, height) if turned else (height, width)


def scale_denominator(height: int, width: int, crops: Sequence[tuple[CropBox, int]]) -> int:
    """Return the largest of 8, 4, 2 and 1 at which the sides of every crop have at least its view's pixels; else 1.

    Args:
        height: of the whole image, in pixels.
        width: of the whole image, in pixels.
        crops: box in the whole image, and side of its view, in pixels.
    """
    for denominator in _DENOMINATORS:
        smaller = -(-height // denominator), -(-width // denominator)
        scaled = [(scale_box(box, (height, width), smaller), side) for box, side in crops]
        if all(min(box.height, box.width) >= side for box, side in scaled):
            return denominator
    return 1


def scale_box(box: CropBox, whole: tuple[int, int], scaled: tuple[int, int]) -> CropBox:
    """Return the box in the scaled image that is nearest to `box` in the whole one; sizes are (height, width)."""
    top, bottom = (round(row * scaled[0] / whole[0]) for row in (box.top, box.top + box.height))
    left, right = (round(column * scaled[1] / whole[1]) for column in (box.left, box.left + box.width))
    return CropBox(top, left, bottom - top, right - left)


def decode_scaled(encoded: bytes, size: tuple[int, int], denominator: int) -> UInt8[np.ndarray, "h w 3"] | None:
    """Decode the image at a fraction of its size; None if it is damaged, or turned differently than `size` says.

    Args:
        encoded: a file with an `upright_jpeg_size`.
        size: that size.
        denominator: 2, 4 or 8.
    """
    image = decode_plain_jpeg(encoded, denominator)
    wanted = tuple(-(-side // denominator) for side in size)
    return image if image is not None and image.shape[:2] == wanted else None
