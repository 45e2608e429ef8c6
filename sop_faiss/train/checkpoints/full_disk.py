"""A disk that fills up while a run is written: told with the file and with what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sop_faiss.files import DISK_FULL

__all__ = ["full_disk_told"]


@contextlib.contextmanager
def full_disk_told(run: Path) -> Iterator[None]:
    """Give errors of a full disk the name of the run, where they name no file, and a note with the remedy.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        told = OSError(error.errno, os.strerror(error.errno), str(error.filename or run))
        told.add_note("free space, then `resume`")
        raise told from error
