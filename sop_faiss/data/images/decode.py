"""Decode an image as a person sees it: upright RGB, of bounded size."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from sop_faiss.data.images.deep_grayscale import DeepImage, deep_to_rgb, measure_deep
from sop_faiss.data.images.heif import is_heif, open_heif
from sop_faiss.data.images.jpeg import decode_plain_jpeg, plain_jpeg_size
from sop_faiss.errors import DataError

MAX_PIXELS = 64_000_000
"""Largest image that is decoded, width times height."""
MAX_ASPECT = 200
"""Largest ratio of an image's longer to its shorter side: a line of pixels shows nothing, and resizing its short side
to a network's input size would make it enormous."""

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # never EPS: PIL runs a program for it
_OPENING = threading.Lock()  # warnings.catch_warnings affects the whole process, so one thread at a time
os.register_at_fork(after_in_child=lambda: globals().update(_OPENING=threading.Lock()))


def drop_reason(error: DataError) -> str:
    """Return the reason why an image is bad, to count by: the first word of what `read` and `decode_image` raise."""
    return str(error).split(maxsplit=1)[0].rstrip(":")


class Decoded(NamedTuple):
    """An image, and what its file says about it."""

    format: str | None  # as PIL names it
    image: Image.Image  # RGB
    deep: DeepImage | None  # of grayscale of more than 8 bits


def decode_image(encoded: bytes, max_pixels: int = MAX_PIXELS, top_value: float = 0.0) -> UInt8[np.ndarray, "h w 3"]:
    """Decode one image to RGB as a person sees it.

    EXIF orientation is applied, transparency is composited on white, palettes, CMYK, gray and 16 bits are converted; of
    an animation the first frame is taken, of a HEIC file its primary image.

    Args:
        encoded: the bytes of a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM, AVIF or HEIC file.
        max_pixels: larger images are refused before anything is decoded.
        top_value: white in grayscale of more than 8 bits; 0: what the file states, else the largest value of its type.

    Raises:
        DataError: the first word is the reason: `empty`, `not-an-image`, `no-heic-reader`, `too-many-pixels`,
            `elongated`, `truncated`, `damaged`.
    """
    size = plain_jpeg_size(encoded)
    if size is not None and not size_problem(*size, max_pixels):
        pixels = decode_plain_jpeg(encoded)
        if pixels is not None:
            return pixels
    return np.array(decode_pillow(encoded, max_pixels, top_value))  # a copy, as PIL's own memory is read-only


def decode_pillow(encoded: bytes, max_pixels: int = MAX_PIXELS, top_value: float = 0.0) -> Image.Image:
    """Decode as `decode_image`, to a PIL image of mode RGB; this is the slow path, and the reference."""
    return decode_whole(encoded, max_pixels, top_value).image


def decode_whole(encoded: bytes, max_pixels: int = MAX_PIXELS, top_value: float = 0.0) -> Decoded:
    """Decode as `decode_pillow`, and say what the file is."""
    if not encoded:
        raise DataError("empty: no bytes")
    return _converted(open_image(encoded, max_pixels), top_value)


def rgb_of_pillow(image: Image.Image, top_value: float = 0.0) -> Image.Image:
    """Convert a PIL image to RGB as `decode_pillow` does a file; the image itself is at most loaded.

    Raises:
        DataError: as `decode_image`.
    """
    problem = size_problem(*image.size, MAX_PIXELS)
    if problem:
        raise DataError(problem)
    return _converted(image, top_value).image


def _converted(image: Image.Image, top_value: float) -> Decoded:
    try:
        image.load()
        deep = measure_deep(image, top_value)
        upright = _upright(image)
        return Decoded(image.format, _to_rgb(upright) if deep is None else deep_to_rgb(upright, deep.white), deep)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise _damage(error) from None


def _damage(error: Exception) -> DataError:
    """Say what PIL found wrong; its decoders raise OSError, SyntaxError, ValueError, struct.error, ... on bad bytes."""
    reason = " ".join(str(error).split())[:100]
    cut = any(word in reason.lower() for word in ("truncated", "incomplete", "unexpected end", "not processed"))
    return DataError(f"{'truncated' if cut else 'damaged'}: {reason or type(error).__name__}")


def open_image(encoded: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read the header of one image, for its format and size; nothing is decoded.

    Raises:
        DataError: `not-an-image`, `no-heic-reader`, `too-many-pixels`, `elongated`, `truncated` in the header, or
            `damaged`, as one that has no pixels.
    """
    try:
        with quiet():
            if is_heif(encoded):
                image = open_heif(encoded)
            else:
                image = Image.open(io.BytesIO(encoded), formats=_known_formats())
    except Image.DecompressionBombError:
        raise DataError(f"too-many-pixels: wanted at most {max_pixels}") from None
    except UnidentifiedImageError:
        raise DataError("not-an-image: the bytes are not an image of a known format") from None
    except (DataError, MemoryError):
        raise
    except Exception as error:
        raise _damage(error) from None
    problem = size_problem(*image.size, max_pixels)
    if problem:
        raise DataError(problem)
    return image


def size_problem(width: int, height: int, max_pixels: int) -> str:
    """Say why an image of this size is not decoded; "" if it is. Training, encoding and checking share this rule.

    Args:
        width: in pixels, as in the header.
        height: in pixels.
        max_pixels: the most that are accepted.
    """
    if width * height > max_pixels:
        return f"too-many-pixels: {width} x {height}, wanted at most {max_pixels}"
    if width * height == 0:
        return "damaged: no pixels"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"elongated: {width} x {height}, wanted a longer side of at most {MAX_ASPECT} times the shorter"
    return ""


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """Return the formats that this PIL was built with: WebP and AVIF need libraries."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence PIL's warnings (odd EXIF, many pixels), whose important cases are errors here. One thread at a time."""
    with _OPENING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation of a loaded image; damaged EXIF does not make the image unusable."""
    if image.format == "HEIF":  # upright as decoded, by its own turns: its EXIF only repeats them
        return image.copy()
    with quiet(), contextlib.suppress(Exception):
        return ImageOps.exif_transpose(image)
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
