"""Keep freed memory in the process while a CPU trains or encodes."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_THRESHOLD_BYTES = 32 * 2**20  # the largest that glibc takes
_TRIM_THRESHOLD_BYTES = 2**30  # more than a step frees


def keep_freed_memory() -> bool:
    """Make glibc reuse freed blocks instead of returning them to the system and faulting them in again.

    A pass on a CPU allocates and frees tensors of the same few megabytes again and again; by default each costs a
    system call and a page fault for every 4 KiB. Results do not change.

    Returns:
        Whether it was done: only on Linux with glibc.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))
