"""Images as files: a folder (class sub-folders optional), or single images."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.class_numbers import whole_numbers
from sop_faiss.data.images.heif import HEIF_REMEDY, HEIF_SUFFIXES
from sop_faiss.data.images.keys import IMAGE_SUFFIXES, UNREAD_SUFFIXES, is_hidden, split_name, unique_keys, utf8_names
from sop_faiss.errors import DataError
from sop_faiss.paths import path_state, plain_path

_log = logging.getLogger(__name__)
_SHOWN_KINDS, _LONGEST_SUFFIX = 12, 12


@dataclass(eq=False)
class FileSource:
    """Images that are single files; `members` are their paths relative to `root`, as the file system has them.

    A name that is not UTF-8, or a folder without read permission, is among them as an image that cannot be read.
    """

    description: str
    keys: list[str]
    labels: Int64[np.ndarray, " n"] | None
    class_names: list[str] | None
    root: Path
    members: Sequence[str]

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, position: int) -> bytes:
        """Read one image file.

        Raises:
            DataError: the file is missing, empty, not a regular file or not readable, or its name is not UTF-8; the
                first word says which.
        """
        if self.member_of(position) != self.members[position]:
            raise DataError(f"not-utf8: the name {self.member_of(position)} is not UTF-8: rename it")
        return read_image_file(self.root / self.members[position])

    def source_of(self, position: int) -> str:
        """Return "": the image is not in a shard."""
        return ""

    def member_of(self, position: int) -> str:
        """Return the file, relative to `root`, as valid text."""
        return utf8_names([self.members[position]])[0]

    def offset_of(self, position: int) -> int:
        """Return 0: the image is the whole file."""
        return 0


def read_image_file(path: Path) -> bytes:
    """Read one image file.

    Raises:
        DataError: the file is missing, empty, not a regular file or not readable; the first word says which.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe must not block
    except (FileNotFoundError, ValueError):  # ValueError: a NUL in it
        raise DataError(f"missing: {path} {path_state(path)}") from None
    except OSError as error:
        raise DataError(f"unreadable: {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # before `fdopen`, which rejects folders
        os.close(descriptor)
        raise DataError(f"not-a-file: {path} {path_state(path)}")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            encoded = file.readall()
        except OSError as error:
            raise DataError(f"unreadable: {path}: {error.strerror}") from None
    if not encoded:
        raise DataError(f"empty: {path} has no bytes")
    return encoded


def open_files(
    description: str,
    root: Path,
    members: list[str],
    labels: Int64[np.ndarray, " n"] | None,
    class_names: list[str] | None,
) -> FileSource:
    """Make a source of these files below `root`, with keys from their names, or folder and name where names collide."""
    names = utf8_names(members)
    keys = unique_keys(
        [split_name(name)[0].rpartition("/")[2] for name in names],
        lambda position: split_name(names[position])[0],
        lambda position: names[position],
    )
    return FileSource(description, keys, labels, class_names, root, members)


def open_folder(description: str, folder: Path) -> FileSource:
    """Open all images below a folder, sorted by path; each first-level sub-folder is a class, numbered by sorted name.

    If all names are integers, they are the labels themselves.

    Links are followed. Hidden files and folders (names that start with a dot) and `__MACOSX` are skipped; so are
    other files, with a warning that counts them by kind. A sub-folder without read permission, and a link that leads
    back to itself, count as an image that cannot be read.

    Raises:
        DataError: the folder itself cannot be read, has no image, or has shards in a sub-folder.
    """
    root = plain_path(folder)
    members, shards, unread = _walk_folder(root)
    if unread:
        count, kinds = unread.total(), _kinds_of(unread)
        _log.warning("folder %s: %d files of other kinds skipped (%s)%s", description, count, kinds, _remedy_of(unread))
    if shards:
        what = "both images and shards" if members else "shards only"
        raise DataError(f"folder {description} has {what} in its sub-folders: name one, such as {min(shards)}")
    if not members:
        wanted = f"wanted {', '.join(IMAGE_SUFFIXES)}, or .tar shards"
        what = "holds no image" if any(root.iterdir()) else "is empty"
        raise DataError(f"folder {description} {what}{_remedy_of(unread)}: {wanted}")
    members.sort()
    tops = [name.partition("/")[0] if "/" in name else None for name in utf8_names(members)]
    members = [member.removesuffix("/") for member in members]  # of folders without read permission
    names = sorted({top for top in tops if top is not None})
    if not names:
        return open_files(description, root, members, None, None)
    own = whole_numbers(names)
    numbers = own or {name: number for number, name in enumerate(names)}
    labels = np.array([-1 if top is None else numbers[top] for top in tops], dtype=np.int64)
    return open_files(description, root, members, labels, names if own is None else None)


def _walk_folder(root: Path) -> tuple[list[str], list[str], Counter[str]]:
    """List the images below a folder, relative to it, the folders that have shards, and what is not read, by suffix.

    Folders without read permission are among the images, with a slash at the end.
    """
    members: list[str] = []
    shards: list[str] = []
    unread: Counter[str] = Counter()
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]
    while waiting:
        prefix, above = waiting.pop()  # `above`: (device, inode) of the folders on the way down, against link loops
        folder = root / prefix
        try:
            status = folder.stat()
            entries = list(os.scandir(folder))
        except OSError as error:
            if not prefix:
                raise DataError(f"folder {folder} cannot be read: {error.strerror}") from None
            members.append(prefix)
            continue
        identity = (status.st_dev, status.st_ino)
        if identity in above:
            continue
        for entry in entries:
            suffix = split_name(entry.name)[1].lower()
            if is_hidden(entry.name):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link that leads back to itself, or through a folder without permission
                members.append(prefix + entry.name)
                continue
            if is_folder:
                waiting.append((f"{prefix}{entry.name}/", (*above, identity)))
            elif suffix in IMAGE_SUFFIXES:  # broken links and pipes too: they are dropped, and counted, when read
                members.append(prefix + entry.name)
            elif suffix == ".tar":
                shards.append(str(folder))
            else:
                unread[suffix] += 1
    return members, shards, unread


def _kinds_of(unread: Counter[str]) -> str:
    """Return how many files there are of each suffix, the most frequent first."""
    shown = sorted(unread.items(), key=lambda kind: (-kind[1], kind[0]))[:_SHOWN_KINDS]
    kinds = [f"{count:,} {suffix[:_LONGEST_SUFFIX] or 'without a suffix'}" for suffix, count in shown]
    rest = unread.total() - sum(count for _, count in shown)
    return ", ".join(kinds + ([f"{rest:,} others"] if rest else []))


def _remedy_of(unread: Counter[str]) -> str:
    """Return what makes the images among these readable."""
    heic = f": to read HEIC, {HEIF_REMEDY}" if unread.keys() & set(HEIF_SUFFIXES) else ""
    return heic + (": save images among them as JPEG" if unread.keys() & set(UNREAD_SUFFIXES) else "")
