"""The kind of index that a FAISS factory string means: make it, read it; `auto` chooses one (`auto_factory.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.flat_index import FlatIndex, make_flat_index, read_flat_index
from sop_faiss.neighbors.disk.from_factory import make_approximate_index, read_approximate_index

FLAT = "Flat"
METRIC = "inner_product"
_BLOCK_ROWS = 65_536
_ROUNDING = 1e-5


VectorIndex = FlatIndex | ApproximateIndex
"""Unit vectors under the inner product: row i is the i-th that was added; similarities are cosines, or near them."""


def check_factory(factory: str, dimension: int) -> None:
    """Refuse a factory string that FAISS does not know.

    Raises:
        ConfigError: as `make_approximate_index`.
    """
    empty_index(factory, dimension)


def empty_index(factory: str, dimension: int) -> VectorIndex:
    """Make an index without a row; one that is not `Flat` must be trained first.

    Raises:
        ConfigError: FAISS knows no such factory, or not for this dimension; or it is CAGRA's.
    """
    if "CAGRA" in factory.upper():
        raise ConfigError(
            f"index factory {factory!r}: CAGRA needs a GPU and faiss-gpu-cuvs in the place of faiss-gpu, never "
            "tried: use HNSW32, a graph that CPUs build"
        )
    return make_flat_index(dimension) if factory == FLAT else make_approximate_index(factory, dimension)


def read_index(path: Path, factory: str, dimension: int, count: int, *, mapped: bool = True) -> VectorIndex:
    """Read an index whose bytes were compared with their checksum; see `read_flat_index`.

    Raises:
        IndexMismatchError: the file is not such an index, or of another dimension or count.
    """
    if factory == FLAT:
        return read_flat_index(path, dimension, count, mapped=mapped)
    return read_approximate_index(path, factory, dimension, count, mapped=mapped)


def append(index: VectorIndex, other: VectorIndex) -> None:
    """Add the rows of another index: its codes where both were trained alike, else its reconstructed vectors.

    Args:
        index: is changed.
        other: of the same dimension; must not be used any more.
    """
    if isinstance(index, ApproximateIndex) and isinstance(other, ApproximateIndex) and index.takes_codes_of(other):
        index.take_codes_of(other)
        return
    for start in range(0, other.count, _BLOCK_ROWS):
        rows = other.features(np.arange(start, min(start + _BLOCK_ROWS, other.count)))
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        index.add(np.where(np.abs(norms - 1) > _ROUNDING, rows / norms, rows))  # full vectors stay as they are
