"""What one task of a build on a cluster does: index one part of a feature store against a trained index.

A part's directory appears complete or not at all, and says what it was made of, so that it is made once.

    part.faiss     the part's rows that are not held out, numbered from 0
    nearest.npz    of these rows the nearest of each held-out query, exact, by row of the complete index
    part.json      what it was made of, and the checksum of part.faiss
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory
from sop_faiss.index.resume_build import read_made, write_made
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import VectorIndex, append, empty_index, read_index
from sop_faiss.neighbors.disk.from_factory import read_approximate_index
from sop_faiss.neighbors.disk.joined_lists import joins_on_disk, write_joined
from sop_faiss.neighbors.exact import NearestRows, in_fixed_order, nearest_rows

TABLE_ROWS = 64
"""Exact neighbors of each held-out query that are kept: more than recall is measured of, for ties."""

_VECTORS, _NEAREST, _MADE_OF = "part.faiss", "nearest.npz", "part.json"
_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Part:
    """One task."""

    store: str
    """The feature store's directory."""
    number: int
    """Of the store's file."""
    directory: str
    """Where the result goes; all workers and the driver see it."""
    factory: str
    trained: str | None
    """The trained index without a row; None for `Flat`."""
    made_of: str
    """Checksum of what goes in: the part's file, the trained index, the rows held out."""
    first_row: int
    """Row of the complete index that the part's first row becomes."""
    skipped: list[int]
    """Rows of the part that are held out."""
    held_out: str | None
    """A file of the held-out queries; None where nothing is measured."""


def part_vectors(store: str, number: int, rows: list[int]) -> Float32[np.ndarray, "m d"]:
    """Read some rows of one part of a store, after every byte of it was verified."""
    return FeatureStore.read_part(Path(store), number).features[rows]


def index_part(part: Part) -> int:
    """Index one part, unless that was done before, and return how many rows it has.

    Raises:
        SopError: the store is damaged, or the disk is full.
    """
    directory = Path(part.directory)
    done = _rows_done(directory, part.made_of)
    if done is not None:
        return done
    features = FeatureStore.read_part(Path(part.store), part.number).features
    rows = np.delete(features, part.skipped, axis=0)
    index = _empty(part.factory, features.shape[1], part.trained)
    for start in range(0, len(rows), _BLOCK_ROWS):
        index.add(rows[start : start + _BLOCK_ROWS])
    with atomic_directory(directory, overwrite=True) as temporary:
        index.write(temporary / _VECTORS)
        if part.held_out is not None:
            _write_nearest(temporary / _NEAREST, np.load(part.held_out), rows, part.first_row)
        write_made(temporary, _MADE_OF, _VECTORS, part.made_of, rows=len(rows))
    return len(rows)


def _empty(factory: str, dimension: int, trained: str | None) -> VectorIndex:
    if trained is None:
        return empty_index(factory, dimension)
    return read_index(Path(trained), factory, dimension, 0, mapped=False)


def _write_nearest(path: Path, queries: Any, rows: Float32[np.ndarray, "m d"], first_row: int) -> None:
    if len(rows):
        found = nearest_rows(queries, rows, min(TABLE_ROWS, len(rows)))
    else:
        found = NearestRows(np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64))
    np.savez(path, similarities=found.similarities, rows=found.rows + first_row)


def _rows_done(directory: Path, made_of: str) -> int | None:
    """Return the rows of a part that is complete and made of the same, else None."""
    note = read_made(directory, _MADE_OF, _VECTORS, made_of)
    try:
        return None if note is None else int(note["rows"])
    except (KeyError, TypeError, ValueError):
        return None


def read_nearest(parts: list[Part]) -> NearestRows:
    """Return the nearest rows of each held-out query in all parts together."""
    similarities, rows = [], []
    for part in parts:
        with np.load(Path(part.directory) / _NEAREST) as table:
            similarities.append(table["similarities"])
            rows.append(table["rows"])
    found = in_fixed_order(np.concatenate(similarities, axis=1), np.concatenate(rows, axis=1))
    return NearestRows(found.similarities[:, :TABLE_ROWS].copy(), found.rows[:, :TABLE_ROWS].copy())


def join_parts(
    parts: list[Part],
    counts: list[int],
    dimension: int,
    path: Path,
    *,
    last: Float32[np.ndarray, "q d"] | None = None,
    search_setting: int | None = None,
) -> None:
    """Write one index of all parts: lists as `write_joined` does, other kinds one part after the other in memory.

    Args:
        parts: what the tasks were given.
        counts: rows of each.
        dimension: of the vectors.
        path: the index file.
        last: more rows, which come after those of the parts.
        search_setting: of the index; None: the smallest.

    Raises:
        IndexMismatchError: a part was damaged after it was made.
        OSError: the disk is full or the place cannot be written.
    """
    first = parts[0]
    whole = _empty(first.factory, dimension, first.trained)
    files = [
        (Path(part.directory) / _VECTORS, part.factory, dimension, count)
        for part, count in zip(parts, counts, strict=True)
    ]
    if isinstance(whole, ApproximateIndex):
        if search_setting is not None:
            whole.search_setting = search_setting
        if joins_on_disk(whole):
            opened = [read_approximate_index(*file) for file in files]
            if last is not None:
                opened.append(
                    read_approximate_index(Path(str(first.trained)), first.factory, dimension, 0, mapped=False)
                )
                opened[-1].add(last)
            write_joined(whole, opened, path)
            return
    for file in files:
        append(whole, read_index(*file, mapped=False))
    if last is not None:
        whole.add(last)
    whole.write(path)


def digest(*values: Any) -> str:
    """Return a checksum of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def rows_by_part(sizes: list[int], rows: Int64[np.ndarray, " m"]) -> list[tuple[Int64[np.ndarray, " w"], list[int]]]:
    """Find for each part, by its number of rows, which of `rows` are in it, and their numbers there."""
    starts = np.cumsum([0, *sizes])
    owner = np.searchsorted(starts, rows, side="right") - 1
    places = [np.flatnonzero(owner == number) for number in range(len(sizes))]
    return [(place, (rows[place] - starts[number]).tolist()) for number, place in enumerate(places)]
