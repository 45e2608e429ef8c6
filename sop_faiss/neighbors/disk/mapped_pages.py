"""Parts of a file that are read here and there, as vectors for re-ranking, without staying in this process's memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import faiss


class MappedPages:
    """Pages of a file that is mapped into memory.

    Args:
        address: of the first page.
        size: bytes.
    """

    def __init__(self, address: int, size: int) -> None:
        self._place = ctypes.c_void_p(address), ctypes.c_size_t(size)
        self._advise = ctypes.CDLL(None).madvise
        self._advise(*self._place, mmap.MADV_RANDOM)  # what follows a vector is not read ahead

    def release(self) -> None:
        """Let go of the pages that were read. They stay in the system's cache of files, and are mapped again."""
        self._advise(*self._place, mmap.MADV_DONTNEED)


def pages_for_reranking(index: Any, path: Path) -> MappedPages | None:
    """Find the pages of the codes that an index re-ranks by; None where there are none, or they are not in the file.

    Args:
        index: FAISS's.
        path: that it was read from.
    """
    if not isinstance(index, faiss.IndexRefine) or not hasattr(mmap, "MADV_DONTNEED"):
        return None
    finer: Any = faiss.downcast_index(index.refine_index)
    codes = finer.codes
    if not codes.size():
        return None
    first = int(faiss.rev_swig_ptr(codes.data(), 1).ctypes.data)
    start, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, first + codes.size()
    size = (last - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0 or not _is_mapped(start, start + size, path):
        return None
    return MappedPages(start, size)


def _is_mapped(start: int, end: int, path: Path) -> bool:
    """Return whether the addresses show a file and nothing that this process has written: that would be lost."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        node = path.stat().st_ino
    except OSError:
        return False
    for line in lines:
        span, mode, _, _, inode, *_ = line.split()
        low, high = (int(each, 16) for each in span.split("-"))
        if low <= start and end <= high:
            return int(inode) == node and mode[1] == "-"
    return False
