"""Queries that are parts of images: `sop-index search --box`."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.data.images.box import Box, encoded_part
from sop_faiss.data.images.listing import FileSource


@dataclass(eq=False)
class BoxedFiles(FileSource):
    """Image files of which only the part inside a box is seen."""

    box: Box = (0, 0, 1, 1)
    top_value: float = 0.0

    def read(self, position: int) -> bytes:
        """Return that part of an image; errors as of `encoded_part`."""
        return encoded_part(super().read(position), self.box, self.keys[position], top_value=self.top_value)


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
