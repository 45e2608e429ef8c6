"""Images of a source that are verified by decoding all of their pixels, as packing and checking do."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image

from sop_faiss.data.images.decode import decode_whole
from sop_faiss.data.images.deep_grayscale import DeepImage
from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import DataError


class WholeImage(NamedTuple):
    """An image that can be used."""

    encoded: bytes
    format: str | None  # as PIL names it
    image: Image.Image  # RGB
    deep: DeepImage | None  # of grayscale of more than 8 bits


def read_whole(source: ImageSource, position: int, max_pixels: int, top_value: float) -> WholeImage | DataError:
    """Read and decode one image, or return what is wrong with it; the first word is the reason."""
    try:
        encoded = source.read(position)
        return WholeImage(encoded, *decode_whole(encoded, max_pixels, top_value))
    except DataError as error:
        return error


def image_name(source: ImageSource, position: int) -> str:
    """Name an image for reports: its file, or its member and the shard."""
    shard = source.source_of(position)
    return source.member_of(position) + (f" in {shard}" if shard else "")
