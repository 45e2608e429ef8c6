"""Files that are complete or absent: atomic writes, checksums, JSON."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sop_faiss.errors import SopError
from sop_faiss.output_checks import refuse_occupied, require_name, require_replaceable, require_writable
from sop_faiss.paths import led_to, path_state

GENERATOR = "sop-faiss"
"""The generator that figures and pages name, by which a later command recognizes them."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a full quota."""
NO_ROOM = (*DISK_FULL, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises, so that one without a file name is about the file being written."""


def require_readable(path: Path) -> None:
    """Check that a file may be read, for libraries that report a missing permission as a missing or damaged file.

    Raises:
        SopError: it may not be read.
    """
    try:
        path.open("rb").close()
    except PermissionError:
        raise _may_not_be_read(path) from None
    except OSError:  # the library that reads it reports this
        return


def _may_not_be_read(path: Path) -> SopError:
    return SopError(f"{path} may not be read (permission denied): ask its owner, or change its mode")


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    sync_directory(path)  # the same call


def _open_to_others(file: Path, like: int) -> None:
    """Give a file the mode that the user's umask asks for: some libraries make files that only their owner can read.

    `like` is the mode of a file or directory that this process has made next to it without such a library.
    """
    if stat.S_IMODE(file.stat().st_mode) != like & 0o666:
        file.chmod(like & 0o666)


def _make_temporary(path: Path, make: Callable[[Path], None]) -> tuple[Path, int]:
    """Make an empty temporary beside `path`, and return it and an open descriptor.

    Until that is closed it holds a lock, so that no other process takes the temporary for a leftover.
    """
    require_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        with _errors_name(path, temporary):
            make(temporary)
        with contextlib.suppress(FileNotFoundError):  # removed as a leftover before it was locked: try again
            descriptor = os.open(temporary, os.O_RDONLY)
            if _lock(descriptor) is not False and os.fstat(descriptor).st_nlink:
                return temporary, descriptor
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file or directory until it is closed or the process ends, in whatever way.

    Returns:
        Whether it is locked now; None where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file or directory; yields False if another process has it, or it cannot be locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor) is True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Keep other processes from changing a directory, if the file system has locks.

    Raises:
        SopError: another process is changing it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)  # so that a pipe does not block
    except OSError:  # reported when it is read
        yield
        return
    try:
        if _lock(descriptor) is False:
            raise SopError(f"{path} is being changed by another process: wait for it and try again")
        yield
    finally:
        os.close(descriptor)


def restore_directory(path: Path) -> None:
    """Put back a directory that a killed process had moved aside but not yet replaced; a link stays a link to it."""
    path = led_to(path)
    if not path.exists() and path.parent.is_dir():
        remove_leftovers(path)


def remove_leftovers(path: Path) -> None:
    """Remove the temporaries that killed processes have left next to `path`; those of running processes stay.

    A directory that a killed process had moved aside but not yet replaced is moved back.
    """
    start, ending = f".{path.name}.", re.compile(r"[0-9a-f]{8}\.(?:tmp|old)")
    names = os.listdir(path.parent)  # noqa: PTH208  # there may be thousands of files: make no Path for each
    found = [name for name in names if name.startswith(start) and ending.fullmatch(name, len(start))]
    for leftover in (path.parent / name for name in sorted(found, reverse=True)):
        with _locked(leftover) as is_left, contextlib.suppress(OSError):  # it may be another user's
            if not is_left:
                continue
            if leftover.suffix == ".old" and not path.exists():
                leftover.rename(path)
            elif leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _errors_name(path: Path, temporary: Path) -> Iterator[None]:
    """Raise errors about the temporary name as errors about `path`, the name that the user knows."""
    try:
        yield
    except OSError as error:
        renamed = _renamed(error, path, temporary)
        if renamed is None:
            raise
        raise renamed from error


def _renamed(error: OSError, path: Path, temporary: Path) -> OSError | None:
    """Return the same error about `path`; None if it is about something else."""
    if error.errno is None:  # raised by a library, which puts names into the text
        text = str(error)
        return OSError(text.replace(str(temporary), str(path))) if str(temporary) in text else None
    if error.filename is None:
        named = path if error.errno in NO_ROOM else None
    else:
        place = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes | os.PathLike) else None
        inside = place is not None and place.is_relative_to(temporary)
        named = path / place.relative_to(temporary) if place is not None and inside else None
    return None if named is None else OSError(error.errno, os.strerror(error.errno), str(named))


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield an empty temporary file beside `path`; flush and rename it there on success, remove it on failure.

    An existing file at `path` stays untouched until the rename.

    Raises:
        SopError: `path` is a directory, a device or a pipe.
        OSError: the folder cannot be written, or the disk is full; the error names `path`.
    """
    require_writable(path)
    temporary, descriptor = _make_temporary(path, lambda file: file.touch(exist_ok=False))
    with _errors_name(path, temporary):
        try:
            mode = temporary.stat().st_mode
            yield temporary
            _open_to_others(temporary, mode)
            _sync_file(temporary)
            temporary.replace(path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)


@contextlib.contextmanager
def atomic_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory; flush every file in it and rename it to `path` on success, remove it on failure.

    With `overwrite` it replaces an existing one, which is moved aside first, and removed after the rename. A link
    stays: the directory that it leads to is replaced, beside which there must be room for the new one.

    Raises:
        SopError: `path` exists, is not empty, and `overwrite` is off; or it is `.`, `..`, a link to nowhere or a mount
            point.
        OSError: the folder cannot be written, or the disk is full; the error names `path`, or the file in it.
    """
    if overwrite:
        require_replaceable(path)
    else:
        refuse_occupied(path)
    path = led_to(path)
    temporary, descriptor = _make_temporary(path, Path.mkdir)
    with _errors_name(path, temporary):
        try:
            yield temporary
            for inner in sorted(temporary.rglob("*")):
                if inner.is_symlink():  # leads to what is not ours
                    continue
                if inner.is_file():
                    _open_to_others(inner, temporary.stat().st_mode)
                    _sync_file(inner)
                elif inner.is_dir():
                    sync_directory(inner)
            sync_directory(temporary)
            if overwrite:
                _put_in_place(temporary, path)
            else:
                _rename_to_free(temporary, path)
            sync_directory(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)


def _rename_to_free(temporary: Path, path: Path) -> None:
    """Rename a directory to `path`, unless another process has filled it since."""
    try:
        temporary.rename(path)
    except OSError:
        refuse_occupied(path)
        raise


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a directory to `path`; an existing one is moved aside, and back if renaming fails."""
    if not path.exists():
        temporary.rename(path)
        return
    aside = temporary.with_suffix(".old")
    with _locked(path):
        try:
            path.rename(aside)
            temporary.rename(path)
        except BaseException:  # Ctrl-C, too
            if path.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(path)
            raise
        sync_directory(path.parent)
        shutil.rmtree(aside, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_file(path: Path, content: bytes | str) -> None:
    """Write bytes, or text as UTF-8, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically; raise ValueError at NaN and infinity, which are not JSON."""
    write_file(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        SopError: the file is missing, may not be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SopError(f"{path} {path_state(path)}") from None
    except PermissionError:
        raise _may_not_be_read(path) from None
    except (OSError, ValueError, RecursionError) as error:  # not JSON or UTF-8, thousands of digits, or deeply nested
        raise SopError(
            f"{path} cannot be read as JSON ({not_json(error)}); it is damaged, or not a JSON file"
        ) from None


def not_json(error: Exception) -> str:
    """Return why a file or a text could not be read as JSON."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    if isinstance(error, UnicodeError):
        return "not UTF-8 text"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "a number has too many digits"
