"""What is beside an index's vectors, and known by key and content: tokens and parts. A changed index takes it over."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from sop_faiss.errors import IndexMismatchError, SopError
from sop_faiss.index.rerank import token_files
from sop_faiss.index.store import MANIFEST_FILE, IdTable, IndexManifest, read_verified
from sop_faiss.paths import real_path

PARTS = "parts"
"""The folder of the parts of images, which is an index of them: see `parts`."""
_FOLDERS = (token_files.FOLDER, PARTS)


def verify_beside(directory: Path) -> dict[str, int]:
    """Compare every byte of what is beside an index's vectors with its checksum; needs neither torch nor FAISS.

    Returns:
        The folders that are there, and how many bytes the files of each have.

    Raises:
        IndexMismatchError: one of them is damaged.
    """
    if token_files.has_tokens(directory):
        token_files.read_manifest(directory, every_byte=True)
    if (directory / PARTS).is_dir():
        read_parts(directory)
    return {
        name: sum(file.stat().st_size for file in (directory / name).iterdir() if file.is_file())
        for name in _FOLDERS
        if (directory / name).is_dir()
    }


def read_parts(directory: Path, *, vectors: bool = True) -> tuple[IndexManifest, IdTable]:
    """Read the parts of an index as `read_verified` does.

    Raises:
        IndexMismatchError: they are damaged.
    """
    try:
        return read_verified(directory / PARTS, vectors=vectors)
    except SopError as error:
        remedy = f"or remove {directory / PARTS}, and {how_to_make_parts(directory)}"
        raise IndexMismatchError(f"{error}; {remedy}") from None


def how_to_make_parts(directory: Path) -> str:
    """Return the remedy where parts are missing."""
    return f"make them with `sop-index parts {shlex.quote(str(directory))}`"


def beside_state(directory: Path) -> tuple[tuple[int, ...] | None, ...]:
    """Return what changes when one of the folders beside an index's vectors is made or made again."""
    return tuple(file_state(directory / name / MANIFEST_FILE) for name in _FOLDERS)


def file_state(path: Path) -> tuple[int, ...] | None:
    """Return what changes with a file that is only ever replaced; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def carry_beside(old: Path, new: Path) -> None:
    """Take what is beside an index over into the directory that replaces it, as links to the same bytes if possible.

    What is damaged stays so, until it is asked for. A link to a place outside stays a link.
    """
    for folder in _FOLDERS:
        if (old / folder).is_symlink() and not real_path(old / folder).is_relative_to(real_path(old)):
            (new / folder).symlink_to((old / folder).readlink())
            continue
        if not (old / folder).is_dir():
            continue
        (new / folder).mkdir()
        for file in (old / folder).iterdir():
            if not file.is_file():
                continue
            try:
                os.link(file, new / folder / file.name)
            except OSError:
                shutil.copyfile(file, new / folder / file.name)
