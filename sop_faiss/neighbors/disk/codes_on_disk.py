"""Vectors for re-ranking, read one by one from the file of an index.

FAISS maps the file into memory. There each vector would be a page fault, which takes longer than the rest of the
search, and its page would stay in this process's memory. Vectors that the system has not cached would be read one
after the other; here the system is asked for all of them at once.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.errors import IndexMismatchError


class CodesOnDisk:
    """The finer codes of an index that re-ranks; thread-safe.

    Args:
        path: the file of the index.
        offset: of the first code in it.
        codes: FAISS's index of them, which decodes them.
    """

    def __init__(self, path: Path, offset: int, codes: Any) -> None:
        self._path, self._offset, self._codes = path, offset, codes
        self._file = os.open(path, os.O_RDONLY)  # stays the same file if another is renamed to its path
        weakref.finalize(self, os.close, self._file)

    def vectors(self, rows: Int64[np.ndarray, " m"]) -> Float32[np.ndarray, "m d"]:
        """Return the vectors of some rows.

        Raises:
            IndexMismatchError: the file was cut off.
        """
        file, size = self._file, int(self._codes.code_size)
        offsets = (self._offset + size * rows).tolist()
        for offset in offsets:  # all are asked for before the first is waited for
            os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
        read = np.frombuffer(b"".join([os.pread(file, size, offset) for offset in offsets]), np.uint8)
        if len(read) != size * len(rows):
            raise IndexMismatchError(f"{self._path} was cut off while it was open: build the index again")
        vectors: Float32[np.ndarray, "m d"] = self._codes.sa_decode(read.reshape(len(rows), size))
        return vectors


def codes_for_reranking(index: Any, path: Path) -> CodesOnDisk | None:
    """Find the codes that an index re-ranks by; None where there are none, or they are not in the file.

    Args:
        index: FAISS's.
        path: that it was read from.
    """
    if not isinstance(index, faiss.IndexRefine) or not hasattr(os, "posix_fadvise"):
        return None
    finer: Any = faiss.downcast_index(index.refine_index)
    size = int(finer.codes.size())
    offset = _offset_in(path, int(faiss.rev_swig_ptr(finer.codes.data(), 1).ctypes.data), size) if size else None
    return None if offset is None else CodesOnDisk(path, offset, finer)


def _offset_in(path: Path, address: int, size: int) -> int | None:
    """Return where in the file this memory is; None where it is not of the file as it was read."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        node = path.stat().st_ino
    except OSError:
        return None
    for line in lines:
        span, mode, start, _, inode, *_ = line.split()
        low, high = (int(each, 16) for each in span.split("-"))
        if low <= address and address + size <= high:
            return int(start, 16) + address - low if int(inode) == node and mode[1] == "-" else None
    return None
