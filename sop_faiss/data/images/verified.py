"""Pictures of a source that are decoded whole to be sure of them, as packing and checking do."""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image

from sop_faiss.data.images.decode import decode_whole
from sop_faiss.data.images.deep_grayscale import DeepImage
from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import DataError

__all__ = ["WholePicture", "picture_name", "read_whole"]


class WholePicture(NamedTuple):
    """A picture that is good."""

    encoded: bytes
    format: str | None  # as PIL names it
    picture: Image.Image  # RGB
    deep: DeepImage | None  # of grayscale of more than 8 bits


def read_whole(source: ImageSource, position: int, max_pixels: int, top_value: float) -> WholePicture | DataError:
    """Read and decode one picture, or return what is wrong with it; the first word is the reason."""
    try:
        encoded = source.read(position)
        return WholePicture(encoded, *decode_whole(encoded, max_pixels, top_value))
    except DataError as error:
        return error


def picture_name(source: ImageSource, position: int) -> str:
    """What reports call a picture: its file, or its member and the shard."""
    shard = source.source_of(position)
    return source.member_of(position) + (f" in {shard}" if shard else "")
