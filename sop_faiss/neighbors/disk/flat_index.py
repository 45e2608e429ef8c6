"""The `Flat` index on disk: full vectors, exact search. Make, write, read, search."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from sop_faiss.errors import IndexMismatchError
from sop_faiss.neighbors.disk.among import only
from sop_faiss.neighbors.disk.faiss_files import load, save
from sop_faiss.neighbors.exact import NearestRows, in_fixed_order, require_dimension, require_k

# FAISS's float32 inner products of unit vectors move in the last bits with the shape of the block they are computed
# in, so that equal rows may come back with unequal similarities. No row moves by more than this.
_ROUNDING = 1e-5
# How many more rows than asked are fetched, so that rows which tie at the end of a list rarely need a second search.
_SPARE_ROWS = 8
# Queries of one range search: many at once are quicker, and each may find every row.
_RANGE_QUERIES = 256
# Rows are scored again in float64 in blocks of at most this many bytes.
_BLOCK_BYTES = 64 << 20

# A flat inner-product file of FAISS: b"IxFI", dimension, rows, two unused words, trained, metric (0 is the inner
# product), number of floats; then the floats. Little-endian, not aligned.
_FLAT_HEADER = struct.Struct("<4siqqqBiQ")


class FlatIndex:
    """Unit vectors under the inner product, searched exactly.

    Row i is the i-th vector that was added; similarities are cosines, larger is closer.
    """

    factory = "Flat"
    search_setting: int | None = None
    """A search always looks at all rows."""

    def __init__(self, index: Any) -> None:
        self._faiss = index

    @property
    def dimension(self) -> int:
        """Length of each vector."""
        return int(self._faiss.d)

    @property
    def count(self) -> int:
        """Number of vectors."""
        return int(self._faiss.ntotal)

    @property
    def vectors(self) -> Float32[np.ndarray, "n d"]:
        """All vectors: FAISS's own memory, not a copy. Valid as long as this index lives; never write to it."""
        size = self.count * self.dimension
        vectors = faiss.rev_swig_ptr(self._faiss.get_xb(), size).reshape(self.count, self.dimension)
        vectors.flags.writeable = False
        return vectors

    def features(self, rows: Int64[np.ndarray, " m"]) -> Float32[np.ndarray, "m d"]:
        """Copy some rows."""
        return self.vectors[rows]

    def add(self, rows: Float32[np.ndarray, "m d"]) -> None:
        """Append finite unit vectors."""
        self._faiss.add(np.ascontiguousarray(rows))

    def keep(self, rows: Bool[np.ndarray, " n"]) -> None:
        """Remove all rows but these; those that stay keep their order."""
        self._faiss.remove_ids(faiss.IDSelectorBatch(np.flatnonzero(~rows)))

    def write(self, path: Path) -> None:
        """Write the index as a FAISS file. Not atomic: write into a directory that is renamed when complete.

        Raises:
            OSError: the disk is full or the place cannot be written.
        """
        save(self._faiss, path)

    def search(
        self, queries: Float32[np.ndarray, "q d"], k: int, among: Int64[np.ndarray, " m"] | None = None
    ) -> NearestRows:
        """Find the k rows of largest inner product with each query; exact, ties by rising row.

        FAISS finds the candidates in float32; they are scored again in float64, which makes a similarity independent
        of the other queries, makes equal rows equal, and lets the *lowest* of equal rows in when k cuts through them.

        Args:
            queries: finite unit vectors, one per row.
            k: how many rows; 1 <= k <= count, or the number of rows in `among`.
            among: rows to search among, sorted and without repeats; None: all.

        Raises:
            ConfigError: k is out of range.
            FeatureError: the dimension differs.
            IndexMismatchError: a stored vector is not finite.
        """
        count = self.count if among is None else len(among)
        require_k(k, count)
        require_dimension(queries, self.dimension, "index")
        queries = np.ascontiguousarray(queries)
        candidates = min(count, k + _SPARE_ROWS)
        params = None if among is None else only(among, self.count)
        rough, rows = self._faiss.search(queries, candidates, params=params)
        if rows.size and int(rows.min()) < 0:
            raise IndexMismatchError("the index holds vectors that are not finite: build it again")
        found = in_fixed_order(self._score(queries, rows), rows.astype(np.int64))
        similarities = np.ascontiguousarray(found.similarities[:, :k])
        chosen = np.ascontiguousarray(found.rows[:, :k])
        if candidates < count:
            # A row left out has a rough similarity of at most the last candidate's.
            uncertain = similarities[:, -1] <= rough.min(axis=1) + _ROUNDING
            for query in np.flatnonzero(uncertain):
                nearest = self._search_wide(queries[query : query + 1], float(similarities[query, -1]), k, params)
                similarities[query], chosen[query] = nearest.similarities[0], nearest.rows[0]
        return NearestRows(similarities, chosen)

    def search_above(self, queries: Float32[np.ndarray, "q d"], similarity: float) -> list[NearestRows]:
        """Find all rows whose inner product with a query reaches `similarity`, for each query; ties by rising row.

        Raises:
            FeatureError: the dimension differs.
        """
        require_dimension(queries, self.dimension, "index")
        queries = np.ascontiguousarray(queries)
        blocks = (queries[start : start + _RANGE_QUERIES] for start in range(0, len(queries), _RANGE_QUERIES))
        return [found for block in blocks for found in self._search_block_above(block, similarity)]

    def _search_block_above(self, queries: Float32[np.ndarray, "q d"], similarity: float) -> list[NearestRows]:
        limits, _, candidates = self._faiss.range_search(queries, similarity - _ROUNDING)
        nearest = []
        for query, (start, stop) in enumerate(itertools.pairwise(limits.tolist())):
            rows = np.sort(candidates[start:stop].astype(np.int64))[None]
            found = in_fixed_order(self._score(queries[query : query + 1], rows), rows)
            reached = int((found.similarities >= np.float32(similarity)).sum())
            nearest.append(NearestRows(found.similarities[:, :reached], found.rows[:, :reached]))
        return nearest

    def _search_wide(self, query: Float32[np.ndarray, "1 d"], at_least: float, k: int, params: Any) -> NearestRows:
        """Find the k best of *every* row that may reach the similarity `at_least`, which k rows are known to reach."""
        _, _, rows = self._faiss.range_search(query, at_least - _ROUNDING, params=params)
        rows = np.sort(rows.astype(np.int64))[None]
        found = in_fixed_order(self._score(query, rows), rows)
        return NearestRows(found.similarities[:, :k], found.rows[:, :k])

    def _score(self, queries: Float32[np.ndarray, "q d"], rows: Int64[np.ndarray, "q c"]) -> Float32[np.ndarray, "q c"]:
        """Inner products of each query with its own rows, in float64, rounded to float32."""
        vectors = self.vectors
        flat_rows = rows.reshape(-1)
        owners = np.repeat(np.arange(len(queries)), rows.shape[1])
        scores: Float64[np.ndarray, " m"] = np.empty(flat_rows.size, np.float64)
        block = max(1, _BLOCK_BYTES // (16 * self.dimension))
        for start in range(0, flat_rows.size, block):
            part = slice(start, start + block)
            left = queries[owners[part]].astype(np.float64)
            right = vectors[flat_rows[part]].astype(np.float64)
            scores[part] = np.einsum("md,md->m", left, right)
        return scores.astype(np.float32).reshape(rows.shape)


def make_flat_index(dimension: int) -> FlatIndex:
    """Make an index without a row."""
    return FlatIndex(faiss.IndexFlatIP(dimension))


def read_flat_index(path: Path, dimension: int, count: int, *, mapped: bool = True) -> FlatIndex:
    """Read a FAISS file whose bytes were compared with their checksum before.

    FAISS's reader trusts what it reads; here its header and its length are checked first, so that even a file that
    nobody has a checksum of cannot make it allocate or read past the end.

    Args:
        path: the file.
        dimension: that it must have.
        count: of vectors, that it must have.
        mapped: leave the vectors in the file until they are looked at; such an index cannot be changed.

    Raises:
        IndexMismatchError: the file is not such an index, or of another dimension or count.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_FLAT_HEADER.size)
    if len(head) < _FLAT_HEADER.size:
        raise IndexMismatchError(f"{path} has {size} bytes and is cut off: build the index again")
    kind, file_dimension, file_count, _, _, trained, metric, floats = _FLAT_HEADER.unpack(head)
    if (kind, trained, metric) != (b"IxFI", 1, 0):
        raise IndexMismatchError(f"{path} is not a flat inner-product index of FAISS: build the index again")
    if (file_dimension, file_count) != (dimension, count):
        raise IndexMismatchError(
            f"{path} holds {file_count} vectors of dimension {file_dimension}, wanted {count} of {dimension}: "
            "files of different indices were mixed"
        )
    if floats != count * dimension or size != _FLAT_HEADER.size + 4 * floats:
        raise IndexMismatchError(f"{path} has {size} bytes, its header says otherwise: build the index again")
    return FlatIndex(load(path, mapped=mapped))
