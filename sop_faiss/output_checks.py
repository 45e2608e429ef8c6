"""Whether an output may be written at a place, checked before hours of work instead of after."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from sop_faiss.errors import SopError
from sop_faiss.paths import led_to, path_state, real_path


def refuse_occupied(out: Path) -> None:
    """Refuse an output directory that is not empty, before hours of work instead of after.

    Raises:
        SopError: `out` is a file, is not empty, has no name of its own, or cannot be created there.
    """
    require_name(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise SopError(f"output {out} already exists and is not empty: choose another or remove it")
    require_replaceable(out)


def require_replaceable(directory: Path) -> None:
    """Check before long work that a directory can be made, or replaced by renaming a complete one.

    Raises:
        SopError: it is something else (a link to nowhere, a file), has no name of its own, is a mount point, or it or
            the folder that it is in cannot be written to.
    """
    require_name(directory)
    if os.path.lexists(directory) and not directory.is_dir():
        raise SopError(f"output {directory} {path_state(directory)}, wanted a folder: choose another or remove it")
    directory = led_to(directory)
    if directory.is_mount():
        raise SopError(
            f"output {directory} is a mount point, and is written by renaming: name a folder in it, such as "
            f"{directory / 'out'}"
        )
    _require_place(directory)
    if directory.is_dir():
        _require_access(directory, directory)


def require_name(path: Path) -> None:
    """Check that a directory can be replaced by renaming: `.` and `..` cannot.

    Raises:
        SopError: the path ends in one of them.
    """
    if path.name in ("", ".."):
        outside = f"../{real_path(path).name}"
        raise SopError(
            f"{path} has no name of its own, and is written by renaming: name it from outside, such as {outside}"
        )


def refuse_foreign(directory: Path, ours: re.Pattern[str], purpose: str) -> None:
    """Refuse a directory with other files than ours, which would later be removed.

    Raises:
        SopError: the directory has a file whose name does not match `ours`, or is a file itself.
    """
    foreign = directory.name if os.path.lexists(directory) and not directory.is_dir() else None
    if foreign is None and directory.is_dir():
        foreign = next((path.name for path in sorted(directory.iterdir()) if not ours.fullmatch(path.name)), None)
    if foreign is not None:
        raise SopError(f"{directory} is needed for {purpose}, but contains something else ({foreign}): move it away")


def require_writable(path: Path | None) -> None:
    """Check before long work that a result file can be written there; None is fine.

    Raises:
        SopError: the path is a directory, a device, a pipe or a link to itself, or the folder cannot be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise SopError(f"output {path} is a directory: name a file in it")
    try:  # one call, since other processes may remove it
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        is_file = error.errno != errno.ELOOP
    if not is_file:  # a rename would replace the device by a file
        raise SopError(f"output {path} {path_state(path)}: name a file")
    _require_place(path)


def _require_place(path: Path) -> None:
    """Refuse a path below a file, or below a directory that may not be written to."""
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        what = path_state(above)
        raise SopError(f"output {path} cannot be written: {above} {what}, wanted a directory; name another place")
    _require_access(path, above)


def _require_access(path: Path, directory: Path) -> None:
    if not os.access(directory, os.W_OK):
        raise SopError(
            f"output {path} cannot be written: {directory} is not writable; name another place, or ask its owner"
        )
