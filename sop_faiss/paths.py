"""What a path that a user has named leads to, without reading it: nothing, a file, a pipe, a loop of links."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISREG, "is a file"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
)


def path_state(path: str | Path) -> str:
    """Return what a path leads to instead of what was wanted, as the end of a sentence that begins with the path."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a symbolic link that leads back to itself"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return "does not exist" + (" (a link to nowhere)" if os.path.islink(path) else "")  # noqa: PTH114
        return f"cannot be reached ({(error.strerror or 'unknown error').lower()})"
    except ValueError:  # a NUL in it
        return "is not a path"
    return next((text for is_kind, text in _KINDS if is_kind(mode)), "is a device")


def real_path(path: str | Path) -> Path:
    """Return the absolute path with links followed; keep a link that leads to itself, at which `Path.resolve` fails."""
    return Path(os.path.realpath(path))


def led_to(path: Path) -> Path:
    """Return where a link leads to, and any other path as it is."""
    return real_path(path) if path.is_symlink() else path


def plain_path(path: str | Path) -> Path:
    """Return the absolute path without `.` and `..`, as far as that leads to the same place despite links."""
    absolute = Path(path).absolute()
    plain = Path(os.path.normpath(absolute))
    try:
        return plain if plain == absolute or plain.samefile(absolute) else absolute
    except (OSError, ValueError):
        return absolute
