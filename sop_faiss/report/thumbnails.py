"""Images as small data URIs, for self-contained pages."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image, ImageDraw

from sop_faiss.data.images.decode import decode_pillow
from sop_faiss.errors import DataError

LEAST_SIDE, _MOST_SIDE = 120, 640
"""Longest side of a thumbnail in pixels: on a page of very many images, and of few, which open large."""
_PAGE_PIXELS = 20e6  # of all images of a page together: about 5 MB of JPEG

_BOX_DARK, _BOX_LIGHT = (20, 20, 20), (255, 214, 10)
_TINY_PIXELS = 64
"""Images up to this side are not resized, and are shown enlarged with hard pixel edges."""


@dataclass(frozen=True)
class Thumbnail:
    """A small JPEG, or the reason why there is none."""

    uri: str
    """`data:image/jpeg;base64,...`, empty if the image could not be read."""
    width: int
    """Pixels; 0 if the image could not be read."""
    height: int
    tiny: bool
    """Whether the image itself has at most a few dozen pixels per side."""
    problem: str
    """Why the image could not be read; empty if it could."""
    whole: tuple[int, int] = (0, 0)
    """Width and height of the image itself; 0 if it could not be read."""
    file_bytes: int = 0
    """Length of its file; 0 if it could not be read."""


def side_for(images: int) -> int:
    """Choose the longest side of the thumbnails of a page, by their number: few are large, many keep the page small."""
    return int(min(max((_PAGE_PIXELS / max(1, images)) ** 0.5, LEAST_SIDE), _MOST_SIDE))


def make_thumbnail(
    encoded: bytes, side: int = LEAST_SIDE, box: tuple[float, float, float, float] | None = None
) -> Thumbnail:
    """Shrink one encoded image; if it cannot be decoded, the reason is returned instead of raised.

    Args:
        encoded: the bytes of its file.
        side: pixels of the thumbnail's longer side, at most.
        box: x1, y1, x2, y2 of an outline to draw, in pixels of the image, or in shares of its sides as of `Box`.
    """
    try:
        image = decode_pillow(encoded)
    except DataError as error:
        return missing_thumbnail(error)
    tiny = max(image.size) <= _TINY_PIXELS
    whole = image.size
    _shrink(image, side)
    if box is not None and max(box) <= 1:
        box = box[0] * whole[0], box[1] * whole[1], box[2] * whole[0], box[3] * whole[1]
    if box is not None:
        _draw_box(image, box, whole)
    uri = "data:image/jpeg;base64," + base64.b64encode(_as_jpeg(image, tiny)).decode("ascii")
    return Thumbnail(uri, *image.size, tiny=tiny, problem="", whole=whole, file_bytes=len(encoded))


def shrink_image(encoded: bytes, side: int) -> bytes:
    """Shrink one encoded image to a JPEG of at most `side` pixels per side, without metadata (place, camera).

    Raises:
        DataError: it cannot be decoded.
    """
    image = decode_pillow(encoded)
    tiny = max(image.size) <= _TINY_PIXELS
    _shrink(image, side)
    return _as_jpeg(image, tiny)


def _shrink(image: Image.Image, side: int) -> None:
    image.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=3.0)


def _as_jpeg(image: Image.Image, tiny: bool) -> bytes:
    stream = io.BytesIO()
    image.info.clear()
    image.save(stream, "JPEG", quality=92 if tiny else 75, subsampling=0 if tiny else 2, optimize=True)
    return stream.getvalue()


def _draw_box(thumbnail: Image.Image, box: tuple[float, float, float, float], whole: tuple[int, int]) -> None:
    """Draw a box given in the whole image: a light line on a dark one, visible on any image."""
    across, down = thumbnail.width / whole[0], thumbnail.height / whole[1]
    x1, x2 = (min(max(round(x * across), 0), thumbnail.width - 1) for x in (box[0], box[2] - 1))
    y1, y2 = (min(max(round(y * down), 0), thumbnail.height - 1) for y in (box[1], box[3] - 1))
    draw = ImageDraw.Draw(thumbnail)
    line = max(1, round(max(thumbnail.size) / LEAST_SIDE))  # still visible where the thumbnail is shown smaller
    for inset, color in ((0, _BOX_DARK), (line, _BOX_LIGHT)):
        if x2 - inset >= x1 + inset and y2 - inset >= y1 + inset:
            draw.rectangle((x1 + inset, y1 + inset, x2 - inset, y2 - inset), outline=color, width=line)


def missing_thumbnail(error: DataError) -> Thumbnail:
    """Make the placeholder of an image that cannot be read."""
    return Thumbnail("", 0, 0, tiny=False, problem=str(error))
