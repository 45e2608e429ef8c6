"""What has changed in a folder since its images were indexed: by size and time, and by content where these differ."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import DataError
from sop_faiss.features.file_states import FileState, FileStates, change_time
from sop_faiss.index.store import IdTable
from sop_faiss.progress import ProgressCallback

__all__ = ["FolderChanges", "find_changes"]

_THREADS = 8


@dataclass(frozen=True)
class FolderChanges:
    """How an index is made equal to a folder. Rows are of the index, positions of the folder's images."""

    source: FileSource
    """All images of the folder."""
    kept_rows: Int64[np.ndarray, " n"]
    """Rows whose images are unchanged, rising."""
    kept_positions: list[int]
    """The same images in the folder."""
    kept_states: FileStates
    """What is known of them now."""
    added: list[int]
    """Positions of images that the index does not have."""
    changed: list[int]
    """Positions of images with another content than the index's of that name."""
    removed: list[int]
    """Rows of images that are gone."""

    @property
    def to_embed(self) -> list[int]:
        """Return the positions of the images whose features are needed."""
        return sorted(self.added + self.changed)


def find_changes(
    ids: IdTable, states: FileStates, root: Path, source: FileSource, *, progress: ProgressCallback | None = None
) -> FolderChanges:
    """Compare an index of image files with a folder.

    Images are the same if their path is, or their path in the folder where all have moved. An image of which nothing
    is known, as in an index of an earlier version, counts as unchanged; its file is read so that it is known later.

    Args:
        ids: of the index; none of its images is in a shard.
        states: what was read of each.
        root: the folder that its members are relative to.
        source: the images of the folder now.
        progress: called with files read and their total, where some must be.
    """
    positions = {source.member_of(position): position for position in range(len(source))}
    there = [positions.get(name) for name in _names_in(ids.members, root, source.root, positions.keys())]
    pairs = [(row, position) for row, position in enumerate(there) if position is not None]
    times = {position: _stat(source, position) for _, position in pairs}
    known = {row: states[row] for row, _ in pairs}
    doubted = [(row, at) for row, at in pairs if known[row].digest == b"" or known[row][:2] != times[at]]
    digests = _read(source, [position for _, position in doubted], progress)
    changed = []
    for row, position in doubted:
        digest = digests[position]
        if digest is None or known[row].digest not in (b"", digest):
            changed.append(position)
        else:
            known[row] = FileState(*times[position], digest)
    replaced, taken = set(changed), {position for _, position in pairs}
    kept = [(row, position) for row, position in pairs if position not in replaced]
    return FolderChanges(
        source=source,
        kept_rows=np.array([row for row, _ in kept], np.int64),
        kept_positions=[position for _, position in kept],
        kept_states=FileStates.of([known[row] for row, _ in kept]),
        added=[position for position in range(len(source)) if position not in taken],
        changed=changed,
        removed=[row for row, position in enumerate(there) if position is None],
    )


def _names_in(members: Sequence[str], root: Path, folder: Path, present: Set[str]) -> list[str]:
    """Return what the members are called in a folder: where they were, or, if that finds more, after a move of all."""
    if root == folder:
        return list(members)
    in_place = [os.path.relpath(root / member, folder) for member in members]
    return max(in_place, list(members), key=lambda names: sum(name in present for name in names))


def _stat(source: FileSource, position: int) -> tuple[int, int]:
    """Return size and time of a file; -1 where it cannot be reached."""
    try:
        size = (source.root / source.members[position]).stat().st_size
    except (OSError, ValueError):
        return -1, -1
    return size, change_time(source, position)


def _read(source: FileSource, positions: Sequence[int], progress: ProgressCallback | None) -> dict[int, bytes | None]:
    """Return the sha256 of some files; None for one that cannot be read."""

    def digest_of(position: int) -> bytes | None:
        try:
            return hashlib.sha256(source.read(position)).digest()
        except DataError:
            return None

    found: dict[int, bytes | None] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hash") as pool:
        for position, digest in zip(positions, pool.map(digest_of, positions), strict=True):
            found[position] = digest
            if progress is not None:
                progress(len(found), len(positions))
    return found
