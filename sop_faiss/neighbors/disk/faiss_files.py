"""Reading and writing FAISS's own files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import faiss

from sop_faiss.errors import IndexMismatchError
from sop_faiss.files import require_readable


def save(index: Any, path: Path) -> None:
    """Write a FAISS index.

    Raises:
        OSError: the disk is full or the place cannot be written.
    """
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise OSError(f"cannot write {path}: {reason(error)}") from None


def load(path: Path, *, mapped: bool) -> Any:
    """Read a FAISS index; `mapped` leaves its large arrays in the file until they are looked at.

    Raises:
        IndexMismatchError: FAISS cannot read it.
        SopError: the file may not be read.
    """
    require_readable(path)
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mapped else 0)
    except RuntimeError as error:
        raise IndexMismatchError(f"{path} cannot be read by FAISS ({reason(error)}): build the index again") from None
    ivf: Any = faiss.try_extract_index_ivf(index)
    lists: Any = None if ivf is None else faiss.downcast_index(ivf)
    is_fast: bool = isinstance(lists, faiss.IndexIVFFastScan)
    if is_fast and lists.fine_quantizer is None:
        # FAISS (1.15.1) reads it, but not this pointer to it, without which a reconstruction ends the process
        lists.fine_quantizer = lists.pq if hasattr(lists, "pq") else lists.aq
    return index


def reason(error: RuntimeError) -> str:
    """Return the last sentence of FAISS's message, which starts with its own function and source line."""
    last = str(error).strip().splitlines()[-1]
    return re.split(r"Error: |\.(?:cpp|h):\d+: ", last)[-1]
