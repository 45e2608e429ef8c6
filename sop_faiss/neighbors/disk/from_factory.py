"""Approximate indices by FAISS's factory string: made without a row, or read from a file that must be of that kind."""

from __future__ import annotations

import re
from pathlib import Path

import faiss

from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.neighbors.disk.approximate_index import MOST_ROWS_PER_LIST, ApproximateIndex
from sop_faiss.neighbors.disk.codes_on_disk import codes_for_reranking
from sop_faiss.neighbors.disk.faiss_files import load, reason
from sop_faiss.neighbors.disk.faiss_layers import innermost, layers_of

_SEED = 1234
_LONGEST_FACTORY = 200
_RANGES = {
    "IVF": (1, 2**22),  # lists
    "HNSW": (2, 512),  # links; FAISS crashes on fewer
    "NSG": (16, 256),  # links; FAISS never ends with very few
    "x": (1, 16),  # bits of a code: 2^bits centroids
    **dict.fromkeys(("RQ", "LSQ", "Nrq", "Nlsq"), (1, 64)),  # codes of a vector, each learned after the other
}
"""Least and most of the number that follows a name in a factory string."""
_OTHER_RANGE = (1, 4096)  # lengths (a rotation has their square), parts of a vector, bits of a component


def _check_numbers(factory: str) -> None:
    """Refuse a number that FAISS does not check: it ends the process, or never ends.

    Raises:
        ConfigError: a number is out of range, or the string is longer than any useful one.
    """
    if len(factory) > _LONGEST_FACTORY:
        raise ConfigError(f"index factory {factory[:20]!r}... has {len(factory):,} letters, wanted a short one or auto")
    for name, digits in re.findall(r"([A-Za-z]*)([0-9]+)", factory):
        least, most = _RANGES.get(name, _OTHER_RANGE)
        if not least <= int(digits) <= most:
            raise ConfigError(f"index factory {factory!r} has {digits} after {name or '_'}: wanted {least} to {most:,}")


def make_approximate_index(factory: str, dimension: int) -> ApproximateIndex:
    """Make an untrained index without a row.

    Raises:
        ConfigError: FAISS knows no such factory, or not for this dimension or under the inner product, or a number is
            out of range.
    """
    _check_numbers(factory)
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, TypeError) as error:
        why = reason(error) if isinstance(error, RuntimeError) else str(error)
        raise ConfigError(
            f"index factory {factory!r} is unknown to FAISS for dimension {dimension} ({why}): use auto, Flat, or one "
            "such as IVF1024,SQ8 or HNSW32"
        ) from None
    has_own_ids = isinstance(innermost(index), faiss.IndexIDMap | faiss.IndexLSH)
    if has_own_ids or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ConfigError(f"index factory {factory!r} has ids or a metric of its own: use one without")
    if isinstance(index, faiss.IndexRefine):
        finer = faiss.downcast_index(index.refine_index)
        if not isinstance(finer, faiss.IndexFlatCodes):  # FAISS would end the process at the first search
            raise ConfigError(f"index factory {factory!r} re-ranks by an index: wanted codes, as Refine(SQfp16)")
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.cp.seed = _SEED
        ivf.cp.max_points_per_centroid = MOST_ROWS_PER_LIST
        ivf.cp.min_points_per_centroid = 1  # FAISS would write to the terminal
    return ApproximateIndex(factory, index)


def read_approximate_index(
    path: Path, factory: str, dimension: int, count: int, *, mapped: bool = True
) -> ApproximateIndex:
    """Read a FAISS file whose bytes were compared with their checksum before: FAISS's reader trusts what it reads.

    Args:
        path: the file.
        factory: that it was made by.
        dimension: that it must have.
        count: of vectors, that it must have.
        mapped: leave the vectors in the file until they are looked at; such an index cannot be changed.

    Raises:
        IndexMismatchError: the file is not a FAISS index, or of another dimension, count or metric.
    """
    index = load(path, mapped=mapped)
    found = (int(index.d), int(index.ntotal), int(index.metric_type), bool(index.is_trained))
    if found != (dimension, count, faiss.METRIC_INNER_PRODUCT, True):
        raise IndexMismatchError(
            f"{path} holds {found[1]} vectors of dimension {found[0]}, wanted {count} of {dimension} under the inner "
            "product: files of different indices were mixed"
        )
    if layers_of(index) != layers_of(make_approximate_index(factory, dimension)._faiss):
        raise IndexMismatchError(f"{path} is not the index {factory} that its manifest names: build the index again")
    return ApproximateIndex(factory, index, codes_for_reranking(index, path) if mapped else None)
