"""What safetensors says of a disk that is full, as Python says it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


@contextlib.contextmanager
def writing_tensors(file: Path) -> Iterator[None]:
    """Raise the system's errors that the library meets inside, while it writes a file, as Python's.

    Raises:
        OSError: the disk is full or the place cannot be written.
    """
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from None
