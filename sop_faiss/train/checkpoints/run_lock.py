"""One process at a time trains into a run directory: a lock that the kernel releases when the process ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

from sop_faiss.errors import ConfigError

LOCK_NAME = ".lock"
"""Name of the lock's file in the run directory. The file stays; only a lock that a process holds on it counts."""

_log = logging.getLogger(__name__)
_CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_held: set[int] = set()


def _close_in_child() -> None:
    """Close the lock in a forked worker, which would keep it after its trainer is killed; the trainer keeps its own."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """The lock of a run directory, free until `acquire`.

    Args:
        run: the run directory; it must exist when the lock is acquired.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Return whether this object holds the lock."""
        return self._descriptor is not None

    @property
    def descriptor(self) -> int | None:
        """Return the open file that holds the lock, for processes that keep it held; None if it is not held."""
        return self._descriptor

    def acquire(self) -> None:
        """Take the lock, without waiting; a file system without locks is only a warning in the log.

        Raises:
            ConfigError: another process holds it.
            OSError: the directory is missing or cannot be written.
        """
        descriptor = os.open(self.run / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another process is training into {self.run}: wait for it or stop it, or choose another `output`"
            ) from None
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                os.close(descriptor)
                raise
            _log.warning("%s cannot be locked (%s): do not start a second training into it", self.run, error.strerror)
        _held.add(descriptor)
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if held."""
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
