"""Pictures as small data URIs, for pages that stand alone."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

from sop_faiss.data.decode import decode_pillow
from sop_faiss.errors import DataError

__all__ = ["THUMBNAIL_PIXELS", "Thumbnail", "make_thumbnail"]

THUMBNAIL_PIXELS = 120
"""Longest side of a thumbnail."""

_TINY_PIXELS = 64
"""Pictures up to this side are kept as they are and shown enlarged with hard pixel edges."""


@dataclass(frozen=True)
class Thumbnail:
    """A JPEG of at most `THUMBNAIL_PIXELS` a side, or the reason why there is none."""

    uri: str
    """`data:image/jpeg;base64,...`, empty if the picture could not be read."""
    width: int
    """Pixels; 0 if the picture could not be read."""
    height: int
    tiny: bool
    """The picture itself is no larger than a few dozen pixels."""
    problem: str
    """Why the picture could not be read; empty if it could."""


def make_thumbnail(encoded: bytes) -> Thumbnail:
    """Shrink one encoded picture; a picture that cannot be decoded becomes the reason, not an error."""
    try:
        picture = decode_pillow(encoded)
    except DataError as error:
        return missing_thumbnail(error)
    tiny = max(picture.size) <= _TINY_PIXELS
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.LANCZOS, reducing_gap=3.0)
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=92 if tiny else 75, subsampling=0 if tiny else 2, optimize=True)
    uri = "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
    return Thumbnail(uri, *picture.size, tiny=tiny, problem="")


def missing_thumbnail(error: DataError) -> Thumbnail:
    """What stands for a picture that cannot be read."""
    return Thumbnail("", 0, 0, tiny=False, problem=str(error))
