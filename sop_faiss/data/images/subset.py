"""Some images of a source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.source import ImageSource

__all__ = ["ImageSubset"]


class ImageSubset:
    """Some images of a source, with the keys and labels that they have in it.

    Args:
        source: all images.
        positions: which of them, in the order wanted.
    """

    def __init__(self, source: ImageSource, positions: Sequence[int]) -> None:
        self._source = source
        self._positions = list(positions)
        self.description = source.description
        self.keys: list[str] = [source.keys[position] for position in self._positions]
        self.class_names: list[str] | None = source.class_names
        self.labels: Int64[np.ndarray, " n"] | None = None if source.labels is None else source.labels[self._positions]
        self.root: Path = source.root

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, position: int) -> bytes:
        """Read the encoded bytes of one image; errors as of the source."""
        return self._source.read(self._positions[position])

    def source_of(self, position: int) -> str:
        """Return the shard of an image relative to `root`, or "" for an image that is a file."""
        return self._source.source_of(self._positions[position])

    def member_of(self, position: int) -> str:
        """Return the tar member, or the file relative to `root`."""
        return self._source.member_of(self._positions[position])

    def offset_of(self, position: int) -> int:
        """Return where the image begins in its shard, in bytes; 0 for an image that is a file."""
        return self._source.offset_of(self._positions[position])
