"""Thumbnails of an index's images: made at the first request, the latest kept in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from sop_faiss.data.images.decode import drop_reason
from sop_faiss.errors import DataError
from sop_faiss.index.images import IndexImages
from sop_faiss.report.thumbnails import shrink_image
from sop_faiss.serve.refused import Refused

SIDES = {"small": 240, "large": 800}
"""Longest side in pixels, by name of the size."""


class Thumbnails:
    """JPEGs of rows; safe in threads.

    Args:
        images: of the index.
        max_bytes: of JPEGs kept; the one requested longest ago is dropped first.
    """

    def __init__(self, images: IndexImages, max_bytes: int) -> None:
        self.images = images
        self._room = max_bytes
        self._kept: OrderedDict[tuple[int, str], bytes] = OrderedDict()
        self._keeping = threading.Lock()

    def kept(self, row: int, size: str) -> bytes | None:
        """Return the JPEG if it is in memory."""
        with self._keeping:
            if (row, size) in self._kept:
                self._kept.move_to_end((row, size))
            return self._kept.get((row, size))

    def make(self, row: int, size: str) -> bytes:
        """Make and keep the JPEG.

        Raises:
            Refused: the image is missing or cannot be decoded (404); its path is not in the message.
        """
        try:
            jpeg = shrink_image(self.images.read(row), SIDES[size])
        except DataError as error:
            raise Refused(404, f"the image cannot be shown: {drop_reason(error)}") from None
        with self._keeping:
            self._room += len(self._kept.pop((row, size), b""))
            self._kept[row, size] = jpeg
            self._room -= len(jpeg)
            while self._room < 0:
                _, oldest = self._kept.popitem(last=False)
                self._room += len(oldest)
        return jpeg
