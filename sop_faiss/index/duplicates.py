"""Groups of images of an index that are nearly the same, by the similarity of their features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.data.images.near_duplicates import join_groups
from sop_faiss.index.search import FeatureIndex, require_cosine
from sop_faiss.progress import ProgressCallback

__all__ = ["DuplicateGroup", "find_duplicates"]

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class DuplicateGroup:
    """Two or more images, joined by pairs that reach the threshold."""

    rows: Int64[np.ndarray, " m"]
    """Rows of the index, rising."""
    similarities: Float32[np.ndarray, " m"]
    """Cosine of each with the first. An image that is joined through others may be below the threshold."""


def find_duplicates(
    index: FeatureIndex, threshold: float, *, progress: ProgressCallback | None = None
) -> list[DuplicateGroup]:
    """Find all groups of images that are joined by pairs of at least this similarity; the largest first, then by row.

    Every image is looked up in the index, block by block. With a `Flat` index all pairs are found; with others those
    that a search finds, at the similarities of the stored codes.

    Args:
        index: what to look through.
        threshold: cosine, -1 to 1, from which on a pair is alike.
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
    return [_describe(index, rows) for rows in _groups(lowest)]


def _groups(lowest: Int64[np.ndarray, " n"]) -> list[Int64[np.ndarray, " m"]]:
    """Return the rows of each group of two or more; `lowest` has for each row the lowest row of its group."""
    order = np.argsort(lowest, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(lowest[order]) != 0))
    groups = [rows for rows in np.split(order, starts[1:]) if len(rows) > 1]
    return sorted(groups, key=lambda rows: (-len(rows), int(rows[0])))


def _describe(index: FeatureIndex, rows: Int64[np.ndarray, " m"]) -> DuplicateGroup:
    features = index.features(rows.tolist()).astype(np.float64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)  # codes do not keep norms
    return DuplicateGroup(rows, np.clip(features @ features[0], -1, 1).astype(np.float32))
