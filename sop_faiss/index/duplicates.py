"""Groups of images of an index that are nearly the same, by the similarity of their features."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.data.images.near_duplicates import join_groups
from sop_faiss.index.images import index_images
from sop_faiss.index.same_files import ImageFiles
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import read_states
from sop_faiss.neighbors.exact import require_cosine
from sop_faiss.progress import ProgressCallback

_log = logging.getLogger(__name__)
_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class DuplicateGroup:
    """Two or more images, joined by pairs that reach the threshold."""

    rows: Int64[np.ndarray, " m"]
    """Rows of the index, rising."""
    similarities: Float32[np.ndarray, " m"]
    """Cosine of each with the first. An image that is joined through others may be below the threshold."""
    copy_of: list[int]
    """Place in the group of the first image with the same bytes: an image's own if none before it has them."""
    links: list[bool]
    """Whether each is a symbolic link, to a file that the group does not have."""

    @property
    def kind(self) -> str:
        """Return `exact` if all have the same bytes, `partly` if some have, `similar` if none."""
        distinct = len(set(self.copy_of))
        return "exact" if distinct == 1 else "similar" if distinct == len(self.copy_of) else "partly"


def find_duplicates(
    index: FeatureIndex, threshold: float, *, images_root: Path | None = None, progress: ProgressCallback | None = None
) -> list[DuplicateGroup]:
    """Find all groups of images that are joined by pairs of at least this similarity; the largest first, then by row.

    Every image is looked up in the index, block by block. With a `Flat` index all pairs are found; with others those
    that a search finds, at the similarities of the stored codes. A file that the index has under several names, by
    links, is counted once and is not a duplicate of itself; the log says how many names are left out.

    Args:
        threshold: cosine, -1 to 1, from which on a pair is alike.
        images_root: where the index's images are now; where they were when it was built, if None.
        progress: called with images looked up and their total.

    Raises:
        ConfigError: the threshold is out of range, or this kind of index finds only the k nearest.
    """
    require_cosine(threshold, "threshold")
    lowest = np.arange(len(index))
    for start in range(0, len(index), _BLOCK_ROWS):
        rows = range(start, min(start + _BLOCK_ROWS, len(index)))
        found = [answer.rows[0] for answer in index.others_above(rows, threshold)]
        ones = np.repeat(np.asarray(rows), [len(others) for others in found])
        join_groups(lowest, ones, np.concatenate(found))
        if progress is not None:
            progress(rows.stop, len(index))
    files = ImageFiles(index_images(index, images_root), read_states(index.directory, index.manifest))
    groups = _groups(lowest)
    repeated = files.repeated([row for rows in groups for row in rows.tolist()])
    if repeated:
        _log.warning("%d images are links to files that the index has by another name: left out", len(repeated))
        groups = [np.setdiff1d(rows, sorted(repeated)) for rows in groups]
    groups = sorted((rows for rows in groups if len(rows) > 1), key=lambda rows: (-len(rows), int(rows[0])))
    return [_describe(index, rows, files) for rows in groups]


def _groups(lowest: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " m"]]:
    """Return the rows of each group of two or more; `lowest` has for each row the lowest row of its group."""
    order = np.argsort(lowest, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(lowest[order]) != 0))
    return [rows for rows in np.split(order, starts[1:]) if len(rows) > 1]


def _describe(index: FeatureIndex, rows: Int64[np.ndarray, " m"], files: ImageFiles) -> DuplicateGroup:
    features = index.features(rows.tolist()).astype(np.float64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)  # codes do not keep norms
    similarities = np.clip(features @ features[0], -1, 1).astype(np.float32)
    places: dict[bytes, int] = {}
    digests = [files.digest(row) for row in rows.tolist()]
    copy_of = [places.setdefault(digest, place) if digest else place for place, digest in enumerate(digests)]
    return DuplicateGroup(rows, similarities, copy_of, [files.is_link(row) for row in rows.tolist()])
