"""Which images of an index are one file under several names, which are links, and which have the same bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sop_faiss.errors import DataError
from sop_faiss.features.file_states import FileStates
from sop_faiss.index.images import IndexImages
from sop_faiss.paths import real_path


@dataclass(frozen=True)
class ImageFiles:
    """The files of an index's images as they are now."""

    images: IndexImages
    states: FileStates
    """What was read of each image: a file of that size and time is not read again."""
    _status: dict[int, os.stat_result | None] = field(default_factory=dict)

    def repeated(self, rows: Sequence[int]) -> set[int]:
        """Return the rows whose file another of these rows has already: links to it, symbolic or hard.

        Of several names of a file the one that no symbolic link leads through counts, of several of these the first.
        """
        names: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            status = self._stat(row)
            if status is not None:
                names.setdefault((status.st_dev, status.st_ino), []).append(row)
        repeated: set[int] = set()
        for same in names.values():
            if len(same) > 1:
                repeated |= set(same) - {min(same, key=lambda row: (self._is_through_link(row), row))}
        return repeated

    def is_link(self, row: int) -> bool:
        """Return whether an image's name is a symbolic link: without its target nothing is left of it."""
        path = self._path(row)
        return path is not None and os.path.islink(path)  # noqa: PTH114  (pathlib's raises at a NUL)

    def digest(self, row: int) -> bytes:
        """Return the sha256 of an image's bytes; empty if it cannot be read now."""
        known, status = self.states[row], self._stat(row)
        in_shard = self._path(row) is None
        if known.digest and (in_shard or (status and known[:2] == (status.st_size, status.st_mtime_ns))):
            return known.digest
        try:
            return hashlib.sha256(self.images.read(row)).digest()
        except DataError:
            return b""

    def _path(self, row: int) -> Path | None:
        """Return the file of an image; None in a shard."""
        path, member = self.images.place(row)
        return None if member else Path(path)

    def _stat(self, row: int) -> os.stat_result | None:
        if row not in self._status:
            path = self._path(row)
            try:
                self._status[row] = None if path is None else path.stat()
            except (OSError, ValueError):  # ValueError: a NUL in it
                self._status[row] = None
        return self._status[row]

    def _is_through_link(self, row: int) -> bool:
        path = self._path(row)
        below = None if path is None else real_path(self.images.root) / path.relative_to(self.images.root)
        return below is not None and real_path(below) != below
