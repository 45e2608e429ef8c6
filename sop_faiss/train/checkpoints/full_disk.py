"""A disk that fills up while a run is written: the error names a file and says what to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sop_faiss.files import DISK_FULL


@contextlib.contextmanager
def explain_full_disk(run: Path) -> Iterator[None]:
    """Name the run in errors of a full disk that name no file, and add a note with the remedy.

    Raises:
        OSError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        named = OSError(error.errno, os.strerror(error.errno), str(error.filename or run))
        named.add_note("free space, then `resume`")
        raise named from error
