"""The fast path for ordinary JPEGs: the size from the header, the pixels from OpenCV."""

from __future__ import annotations

import re
import struct

import cv2
import numpy as np
from jaxtyping import UInt8

_FLAGS = {  # the names with COLOR in them mean BGR, and exclude RGB
    1: cv2.IMREAD_COLOR_RGB,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2 | cv2.IMREAD_COLOR_RGB,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4 | cv2.IMREAD_COLOR_RGB,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_COLOR_RGB,
}
_MARKER_IN_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # neither stuffing, fill nor restart (ITU T.81, B.1.1.2)


def plain_jpeg_size(encoded: bytes) -> tuple[int, int] | None:
    """Return width and height of a JPEG that OpenCV decodes as PIL does; None for any other file.

    Such a JPEG has 8 bits, gray or YCbCr, and one scan that runs to the end mark. A cut file, or one with a stray
    marker in its scan, is excluded: OpenCV fills what is missing with gray instead of failing. Only the marker
    segments up to the scan (ITU T.81, B.2) are walked, and the scan is searched for its end; no pixel is decoded.
    """
    if encoded[:2] != b"\xff\xd8":
        return None
    size = None
    position = 2
    while position + 10 <= len(encoded) and encoded[position] == 0xFF:
        marker = encoded[position + 1]
        length = int.from_bytes(encoded[position + 2 : position + 4], "big")
        if marker in (0xC0, 0xC1):  # baseline and extended sequential frames
            if size is not None or encoded[position + 4] != 8 or encoded[position + 9] not in (1, 3):
                return None
            height, width = struct.unpack_from(">HH", encoded, position + 5)
            size = (width, height)
        elif marker == 0xDA:
            end = _MARKER_IN_SCAN.search(encoded, position + 2 + length)
            return size if end is not None and encoded[end.start() + 1] == 0xD9 else None
        elif marker == 0xE1 and encoded.find(b"tiff:Orientation", position, position + length) >= 0:
            return None  # PIL applies an orientation in XMP, OpenCV only one in EXIF
        elif (0xC2 <= marker <= 0xCF and marker != 0xC4) or marker < 0xC0 or length < 2:
            return None  # progressive (several scans), lossless, arithmetic; fill bytes; damaged
        position += 2 + length
    return None


def decode_plain_jpeg(encoded: bytes, denominator: int = 1) -> UInt8[np.ndarray, "h w 3"] | None:
    """Decode a JPEG that has a `plain_jpeg_size`, to exactly the pixels that PIL gives, but faster.

    Returns None if OpenCV finds the file damaged; PIL then says how.

    Args:
        encoded: the file.
        denominator: 1, 2, 4 or 8; sides are divided by it (rounded up) in the decoder's cosine transform.
    """
    try:
        return cv2.imdecode(np.frombuffer(encoded, np.uint8), _FLAGS[denominator])
    except cv2.error:  # more pixels than OpenCV's own limit
        return None
