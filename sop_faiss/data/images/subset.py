"""Some of a source's images as a source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.source import ImageSource


@dataclass(frozen=True)
class Subset:
    """The images of `source` at `positions`, in that order; an `ImageSource` itself."""

    source: ImageSource
    positions: Int64[np.ndarray, " m"]

    @property
    def description(self) -> str:
        """The complete source as the user named it."""
        return self.source.description

    @cached_property
    def keys(self) -> list[str]:
        """See `ImageSource.keys`."""
        return [self.source.keys[position] for position in self.positions]

    @cached_property
    def labels(self) -> Int64[np.ndarray, " m"] | None:
        """See `ImageSource.labels`."""
        return None if self.source.labels is None else self.source.labels[self.positions]

    @property
    def class_names(self) -> list[str] | None:
        """See `ImageSource.class_names`."""
        return self.source.class_names

    @property
    def root(self) -> Path:
        """See `ImageSource.root`."""
        return self.source.root

    def __len__(self) -> int:
        return len(self.positions)

    def read(self, position: int) -> bytes:
        """See `ImageSource.read`."""
        return self.source.read(int(self.positions[position]))

    def source_of(self, position: int) -> str:
        """See `ImageSource.source_of`."""
        return self.source.source_of(int(self.positions[position]))

    def member_of(self, position: int) -> str:
        """See `ImageSource.member_of`."""
        return self.source.member_of(int(self.positions[position]))

    def offset_of(self, position: int) -> int:
        """See `ImageSource.offset_of`."""
        return self.source.offset_of(int(self.positions[position]))
