"""One file of several IVF indices that were trained alike, their lists concatenated, without all of them in memory.

FAISS writes the lists last, as `ilar`: number of lists, bytes of a code, the sizes (all of them, or those of the lists
with something in them where these are half or fewer), then of each list its codes and its ids.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import faiss
import numpy as np
from jaxtyping import Int64

from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex


def joins_on_disk(empty: ApproximateIndex) -> bool:
    """Return whether `write_joined` knows how FAISS writes the lists of such an index.

    Args:
        empty: trained, without a row.
    """
    lists = _lists(empty)
    return isinstance(lists, faiss.ArrayInvertedLists) and _written(empty).endswith(_no_lists(lists))


def write_joined(empty: ApproximateIndex, parts: Sequence[ApproximateIndex], path: Path) -> None:
    """Write the file that `empty` would write, had it taken the rows of all parts, one part after the other.

    Not atomic: write into a directory that is renamed when complete.

    Args:
        empty: trained, without a row, of a kind that `joins_on_disk`; its search setting is written, too.
        parts: trained alike; those whose vectors are in files stay there.
        path: the file.

    Raises:
        OSError: the disk is full or the place cannot be written.
    """
    lists, sources = _lists(empty), [_lists(part) for part in parts]
    sizes = np.array([[source.list_size(number) for number in range(lists.nlist)] for source in sources], np.int64)
    sizes = sizes.reshape(-1, lists.nlist)
    totals = sizes.sum(0)
    first_rows = np.cumsum([0, *(part.count for part in parts)])
    with path.open("wb") as stream:
        stream.write(_written(empty, rows=int(first_rows[-1])).removesuffix(_no_lists(lists)))
        stream.write(_opening(lists) + _written_sizes(totals))
        for number in np.flatnonzero(totals).tolist():
            _write_list(stream, number, sources, sizes[:, number], first_rows, int(lists.code_size))


def _write_list(
    stream: IO[bytes],
    number: int,
    sources: list[Any],
    sizes: Int64[np.ndarray, " parts"],
    first_rows: Int64[np.ndarray, " more"],
    code_size: int,
) -> None:
    for source, size in zip(sources, sizes.tolist(), strict=True):
        if size:
            stream.write(faiss.rev_swig_ptr(source.get_codes(number), size * code_size).data)
    for source, size, first_row in zip(sources, sizes.tolist(), first_rows, strict=False):
        if size:
            stream.write((faiss.rev_swig_ptr(source.get_ids(number), size) + first_row).astype(np.int64).data)


def _lists(index: ApproximateIndex) -> Any:
    return None if index._ivf is None else faiss.downcast_InvertedLists(index._ivf.invlists)


def _written(empty: ApproximateIndex, rows: int = 0) -> bytes:
    """Return what FAISS would write of the index, with another number of rows in its headers."""
    layers = (empty._faiss, empty._ivf)
    try:
        for layer in layers:
            layer.ntotal = rows
        return bytes(faiss.serialize_index(empty._faiss).data)
    finally:
        for layer in layers:
            layer.ntotal = 0


def _opening(lists: Any) -> bytes:
    return b"ilar" + struct.pack("<QQ", lists.nlist, lists.code_size)


def _no_lists(lists: Any) -> bytes:
    return _opening(lists) + _written_sizes(np.zeros(lists.nlist, np.int64))


def _written_sizes(sizes: Int64[np.ndarray, " lists"]) -> bytes:
    filled = np.flatnonzero(sizes)
    if len(filled) > len(sizes) // 2:
        kind, written = b"full", sizes
    else:
        kind, written = b"sprs", np.stack([filled, sizes[filled]], 1).ravel()
    return kind + struct.pack("<Q", len(written)) + written.astype("<u8").tobytes()
