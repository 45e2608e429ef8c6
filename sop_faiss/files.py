"""Files that are complete or absent: atomic writes, checksums, JSON; and whether an output may be written at all."""

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
from sop_faiss.paths import path_state, real_path

GENERATOR = "sop-faiss"
"""The generator that figures and pages name, by which a later command recognizes them."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a full quota."""
NO_ROOM = (*DISK_FULL, errno.EFBIG, errno.EROFS)
"""Errors that only writing raises, so that one without a file name is about the file being written."""


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
    directory = _led_to(directory)
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
    path = _led_to(path)
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
        SopError: `path` exists, is not empty, and `overwrite` is off; or it is `.`, `..` or a mount point.
        OSError: the folder cannot be written, or the disk is full; the error names `path`, or the file in it.
    """
    if not overwrite:
        refuse_occupied(path)
    path = _led_to(path)
    if overwrite:
        require_replaceable(path)
    temporary, descriptor = _make_temporary(path, Path.mkdir)
    with _errors_name(path, temporary):
        try:
            yield temporary
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    _open_to_others(file, temporary.stat().st_mode)
                    _sync_file(file)
            sync_directory(temporary)
            _put_in_place(temporary, path)
            sync_directory(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)


def _led_to(path: Path) -> Path:
    """Return where a link leads to, and any other path as it is."""
    return real_path(path) if path.is_symlink() else path


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename a directory to `path`; an existing one is moved aside, and back if renaming fails."""
    if not path.exists():
        temporary.rename(path)
        return
    aside = temporary.with_suffix(".old")
    with _locked(path):
        path.rename(aside)
        try:
            temporary.rename(path)
        except OSError:
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
