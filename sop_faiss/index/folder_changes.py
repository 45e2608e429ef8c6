"""What has changed in a folder since its images were indexed: by size and time, and by content where these differ."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.listing import FileSource
from sop_faiss.errors import DataError
from sop_faiss.features.file_states import FileState, FileStates, file_status
from sop_faiss.index.contents import IndexContents
from sop_faiss.index.left_out import LeftOut
from sop_faiss.progress import ProgressCallback

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
    elsewhere: Int64[np.ndarray, " m"]
    """Rows of images that were added from elsewhere and are not of the folder, rising: they stay as they are."""
    left_out: list[LeftOut]
    """Images of the folder that are known to be unusable or were removed by the user, with unchanged files."""
    left_out_elsewhere: list[LeftOut]
    """Those that are not of the folder."""

    @property
    def rows_that_stay(self) -> Int64[np.ndarray, " n"]:
        """Return the rows of the images that are unchanged or from elsewhere."""
        return np.concatenate([self.kept_rows, self.elsewhere])

    @property
    def to_embed(self) -> list[int]:
        """Return the positions of the images whose features are needed."""
        return sorted(self.added + self.changed)


def find_changes(
    index: IndexContents, source: FileSource, *, again: bool = False, progress: ProgressCallback | None = None
) -> FolderChanges:
    """Compare an index with a folder.

    Images are the same if their path is, or their path in the folder where all have moved. An image of which nothing
    is known, as in an index of an earlier version, counts as unchanged; its file is read so that it is known later.

    Args:
        index: where it names its folder, images that are neither in that one nor in `source` are from elsewhere.
        source: the images of the folder now.
        again: count images as added although they are known to be unusable, or were removed by the user.
        progress: called with files read and their total, where some must be.
    """
    positions = {source.member_of(position): position for position in range(len(source))}
    name_of = _naming(index, source.root, positions.keys())
    names = [name_of(*place) for place in zip(index.ids.sources, index.ids.members, strict=True)]
    pairs = [(row, positions[name]) for row, name in enumerate(names) if name in positions]
    times = {position: file_status(source, position) for _, position in pairs}
    known = {row: index.states[row] for row, _ in pairs}
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
    named = [(each, name_of(each.source, each.member)) for each in index.left_out]
    there = {positions[name]: each for each, name in named if name in positions}
    left_out = {} if again else _unchanged(source, {at: each for at, each in there.items() if at not in taken})
    return FolderChanges(
        source=source,
        kept_rows=np.array([row for row, _ in kept], np.int64),
        kept_positions=[position for _, position in kept],
        kept_states=FileStates.of([known[row] for row, _ in kept]),
        added=[position for position in range(len(source)) if position not in taken and position not in left_out],
        changed=changed,
        removed=[row for row, name in enumerate(names) if name is not None and name not in positions],
        elsewhere=np.array([row for row, name in enumerate(names) if name is None], np.int64),
        left_out=[left_out[position] for position in sorted(left_out)],
        left_out_elsewhere=[each for each, name in named if name is None],
    )


def _naming(index: IndexContents, folder: Path, present: Set[str]) -> Callable[[str, str], str | None]:
    """Return how images are called in a folder: as they are now or, if that finds more, as after a move of all.

    The name of an image from elsewhere is None: one that is neither in the folder that the index is of, nor in this.
    """
    root, known = Path(index.manifest.root), index.manifest.folder
    before = Path(known or root)
    if root == before == folder:
        return lambda source, member: None if source else member

    def found_below(start: Path) -> int:
        return sum(os.path.relpath(root / member, start) in present for member in index.ids.members)

    start = max((folder, before), key=found_below)

    def name_of(source: str, member: str) -> str | None:
        path = root / member
        is_elsewhere = known is not None and not _is_below(path, before) and not _is_below(path, folder)
        return None if source or is_elsewhere else os.path.relpath(path, start)

    return name_of


def _is_below(path: Path, folder: Path) -> bool:
    return os.path.relpath(path, folder).partition(os.sep)[0] != os.pardir


def _unchanged(source: FileSource, left_out: Mapping[int, LeftOut]) -> dict[int, LeftOut]:
    """Return those, by position, whose files are as they were: of equal size and time, or else of equal bytes.

    One that could not be read is tried again, which costs nothing: it may be a matter of permissions.
    """
    times = {at: file_status(source, at) for at in left_out}
    same = {at for at, each in left_out.items() if each.sha256 and each.state[:2] == times[at]}
    digests = _read(source, sorted(left_out.keys() - same), None)
    same |= {at for at, digest in digests.items() if (digest or b"").hex() == left_out[at].sha256}
    named = {at: replace(left_out[at], source="", member=source.member_of(at)) for at in same}
    return {at: replace(each, size=times[at][0], mtime_ns=times[at][1]) for at, each in named.items()}


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
