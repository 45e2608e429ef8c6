"""The parts of images: overlapping crops by grids, cut out of the images of an index as they are read."""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from sop_faiss.data.images.box import Box, box_text, crop_to_box, parse_box
from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import ConfigError
from sop_faiss.index.images import IndexImages
from sop_faiss.index.search import FeatureIndex

DEFAULT_GRIDS = (3,)
_MOST_GRID = 10
_DECODED = 4
"""Images kept as pixels: the parts of one follow each other."""


def boxes_of_grids(grids: Sequence[int]) -> list[Box]:
    """Return the parts of an image: n x n boxes of each grid, neighbors of which overlap by half of a side.

    Args:
        grids: numbers n from 2 to 10. Of n = 3 a box has half of the image's sides, of any n 2 / (n + 1).

    Raises:
        ConfigError: a number is out of range, or given twice.
    """
    if not grids or len(set(grids)) < len(grids) or not all(2 <= grid <= _MOST_GRID for grid in grids):
        given = ",".join(str(grid) for grid in grids)
        raise ConfigError(
            f"`part_grid={given}`: wanted one or more different numbers from 2 to {_MOST_GRID}, as 3 or 2,4"
        )
    steps = [(grid, top, left) for grid in grids for top in range(grid) for left in range(grid)]
    corners = [(np.array([left, top, left + 2, top + 2]) / (grid + 1)).tolist() for grid, top, left in steps]
    return [parse_box(box_text(each)) for each in corners]


@dataclass(eq=False)
class PartSource:
    """The parts of images of an index, as a source of images."""

    index: FeatureIndex
    images: IndexImages
    rows: list[int]
    boxes: list[Box]
    known: list[bytes]
    """sha256 of each image of the index; empty if not known."""
    top_value: float
    labels: None = None
    class_names: None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    """sha256 of each image that was read."""

    def __post_init__(self) -> None:
        self.description = f"the parts of {self.index.directory}"
        self.root = self.images.root
        self.keys = [f"{box_text(box)} {self.index.ids.keys[row]}" for row in self.rows for box in self.boxes]
        self._decoded = functools.lru_cache(_DECODED)(self._decode)
        self._decoding = [threading.Lock() for _ in range(_DECODED)]

    def __len__(self) -> int:
        return len(self.keys)

    def row_of(self, position: int) -> int:
        """Return the row of the index that a part is of."""
        return self.rows[position // len(self.boxes)]

    def read(self, position: int) -> bytes:
        """Return a part, encoded without loss, of a pixel or more; errors as of `decode_image`."""
        row = self.row_of(position)
        with self._decoding[row % _DECODED]:  # by one thread, while the others wait for it
            pixels = self._decoded(row)
        sides = np.array(pixels.shape[1::-1])
        start, stop = np.array(self.boxes[position % len(self.boxes)]).reshape(2, 2) * sides
        start = np.minimum(np.round(start), sides - 1)
        stop = np.maximum(np.round(stop), start + 1)
        encoded = io.BytesIO()
        Image.fromarray(crop_to_box(pixels, (*start.tolist(), *stop.tolist()))).save(encoded, "PPM")
        return encoded.getvalue()

    def _decode(self, row: int) -> UInt8[np.ndarray, "h w 3"]:
        encoded, self.digests[row] = self.images.read_unchanged(row, self.known[row])
        return decode_image(encoded, top_value=self.top_value)

    def source_of(self, position: int) -> str:
        """Return the shard of the image, or "" for a file."""
        return self.index.ids.sources[self.row_of(position)]

    def member_of(self, position: int) -> str:
        """Return the file of the image, or its name in the shard."""
        return self.index.ids.members[self.row_of(position)]

    def offset_of(self, position: int) -> int:
        """Return 0: parts are in no shard."""
        return 0
