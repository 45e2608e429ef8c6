"""Which kind of index a FAISS factory string means: make it, read it; `auto` chooses one (`choice.py`)."""

from __future__ import annotations

from pathlib import Path

from sop_faiss.neighbors.approximate_index import ApproximateIndex, make_approximate_index, read_approximate_index
from sop_faiss.neighbors.flat_index import FlatIndex, make_flat_index, read_flat_index

__all__ = ["FLAT", "METRIC", "VectorIndex", "check_factory", "empty_index", "read_index"]

FLAT = "Flat"
METRIC = "inner_product"


VectorIndex = FlatIndex | ApproximateIndex
"""Unit vectors under the inner product: row i is the i-th that was added; similarities are cosines, or near them."""


def check_factory(factory: str, dimension: int) -> None:
    """Refuse a factory string that FAISS does not know.

    Raises:
        ConfigError: as `make_approximate_index`.
    """
    empty_index(factory, dimension)


def empty_index(factory: str, dimension: int) -> VectorIndex:
    """An index without a row; one that is not `Flat` is to be trained first.

    Raises:
        ConfigError: FAISS knows no such factory, or not for this dimension.
    """
    return make_flat_index(dimension) if factory == FLAT else make_approximate_index(factory, dimension)


def read_index(path: Path, factory: str, dimension: int, count: int, *, mapped: bool = True) -> VectorIndex:
    """Read an index whose bytes were compared with their checksum; see `read_flat_index`.

    Raises:
        IndexMismatchError: the file is not such an index, or of another dimension or count.
    """
    if factory == FLAT:
        return read_flat_index(path, dimension, count, mapped=mapped)
    return read_approximate_index(path, factory, dimension, count, mapped=mapped)
