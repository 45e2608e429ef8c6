"""Queries that are parts of images: `sop-index search --box`."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

from PIL import Image

from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.retrieval_set import crop_to_box

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels of the upright image; or, none of them above 1, in shares of its sides."""


@dataclass(eq=False)
class BoxedFiles(FileSource):
    """Image files of which only the part inside a box is seen."""

    box: Box = (0, 0, 1, 1)
    top_value: float = 0.0

    def read(self, position: int) -> bytes:
        """Return that part of an image, encoded without loss.

        Raises:
            DataError: the image cannot be read.
            ConfigError: the box is not inside it.
        """
        pixels = decode_image(super().read(position), top_value=self.top_value)
        height, width = pixels.shape[:2]
        left, top, right, bottom = self.box
        if max(self.box) <= 1:
            left, top, right, bottom = left * width, top * height, right * width, bottom * height
        if right > width or bottom > height or round(left) >= round(right) or round(top) >= round(bottom):
            raise ConfigError(
                f"`box={','.join(f'{each:g}' for each in self.box)}` is not inside {self.keys[position]}, which has "
                f"{width} x {height} pixels: wanted left,top,right,bottom with a pixel or more between them"
            )
        part = io.BytesIO()
        Image.fromarray(crop_to_box(pixels, (left, top, right, bottom))).save(part, "PNG", compress_level=1)
        return part.getvalue()


def parse_box(text: str) -> Box:
    """Parse `left,top,right,bottom`.

    Raises:
        ConfigError: it is not four numbers that make a box.
    """
    try:
        left, top, right, bottom = (float(part) for part in text.split(","))
    except ValueError:
        left = top = right = bottom = math.nan
    if not (0 <= left < right < math.inf and 0 <= top < bottom < math.inf):
        raise ConfigError(
            f"`box={text}`: wanted left,top,right,bottom, as 40,60,200,180 in pixels or 0.1,0.2,0.5,0.9 in shares of "
            "the image's sides, left < right and top < bottom"
        )
    return left, top, right, bottom


def boxed(files: FileSource, box: Box, top_value: float = 0.0) -> BoxedFiles:
    """Return the parts of image files inside a box, each of them checked.

    Raises:
        DataError: an image cannot be read.
        ConfigError: the box is not inside one of them.
    """
    parts = BoxedFiles(
        files.description, files.keys, files.labels, files.class_names, files.root, files.members, box, top_value
    )
    for position in range(len(parts)):
        parts.read(position)
    return parts
