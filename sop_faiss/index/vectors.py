"""Read the vectors of an index directory."""

from __future__ import annotations

from pathlib import Path

from sop_faiss.errors import IndexMismatchError
from sop_faiss.index.store import INDEX_FILE, IndexManifest
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import METRIC, VectorIndex, read_index


def read_vectors(directory: Path, manifest: IndexManifest, *, mapped: bool = True) -> VectorIndex:
    """Read the vectors of a verified index directory; searches use the setting in its manifest.

    Args:
        directory: of the index.
        manifest: read from it.
        mapped: leave the vectors in the file until they are looked at; such an index cannot be changed.

    Raises:
        IndexMismatchError: the vectors are not what the manifest says.
    """
    if manifest.metric != METRIC:
        raise IndexMismatchError(f"{directory} has metric {manifest.metric!r}, wanted {METRIC!r}")
    file, search_setting = directory / INDEX_FILE, manifest.search.get("effort")
    vectors = read_index(file, manifest.factory, manifest.dimension, manifest.count, mapped=mapped)
    if isinstance(vectors, ApproximateIndex) and search_setting is not None:
        vectors.search_setting = int(search_setting)
    return vectors
