"""Files that are whole or absent: atomic writes, checksums, JSON; and whether an output may be written at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sop_faiss.errors import SopError

__all__ = [
    "atomic_directory",
    "atomic_file",
    "read_json",
    "refuse_occupied",
    "require_writable",
    "sha256_file",
    "write_json",
]


def refuse_occupied(out: Path) -> None:
    """Refuse an output directory that holds something, before hours of work instead of after.

    Raises:
        SopError: `out` is a file, or a directory that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SopError(f"output {out} already exists and is not empty: choose another or remove it")


def require_writable(path: Path | None) -> None:
    """Check before long work that its result, a file, can be written there; None is fine.

    Raises:
        SopError: the path is a directory, or the place cannot be written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise SopError(f"output {path} is a directory: name a file in it")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise SopError(f"output {path} cannot be written: {above} is not a directory, or not writable")


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, so that a rename in it survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_sibling(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; flush and rename it there on success, remove it on failure.

    Whatever stood at `path` stays untouched until the rename.
    """
    temporary = _temporary_sibling(path)
    try:
        yield temporary
        _sync_file(temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory; flush every file in it and rename it to `path` on success, remove it on failure.

    Args:
        path: where the directory shall stand.
        overwrite: replace what stands there (moved aside first, removed after the rename).

    Raises:
        SopError: `path` exists, is not empty, and `overwrite` is off.
    """
    if not overwrite:
        refuse_occupied(path)
    temporary = _temporary_sibling(path)
    temporary.mkdir(parents=True)
    aside = temporary.with_suffix(".old")
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                _sync_file(file)
        sync_directory(temporary)
        if path.exists():
            path.rename(aside)
        temporary.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists():
            if not path.exists():
                aside.rename(path)
            else:
                shutil.rmtree(aside, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically. NaN and infinity are refused (they are not JSON)."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        SopError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SopError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise SopError(f"{path} cannot be read as JSON ({reason}); it is damaged or of another kind") from None
