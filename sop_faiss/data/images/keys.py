"""Which files are images, and the unique keys of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from sop_faiss.data.images.heif import HEIF_SUFFIXES, READS_HEIF
from sop_faiss.errors import DataError

SHARD_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Image members of a shard, in lower case."""

_OTHER_SUFFIXES = (".jfif", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
IMAGE_SUFFIXES = (*SHARD_SUFFIXES, *_OTHER_SUFFIXES, *(HEIF_SUFFIXES if READS_HEIF else ()))
"""Image files of a folder, in lower case."""

UNREAD_SUFFIXES = (".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2")
"""Image files of phones and cameras that are not read, in lower case."""


def split_name(name: str) -> tuple[str, str]:
    """Split a path at the last dot of its basename: `a.d/b.c.jpg` gives `a.d/b.c` and `.jpg`; no dot, no suffix."""
    dot = name.rfind(".")
    if dot <= name.rfind("/") + 1:
        return name, ""
    return name[:dot], name[dot:]


def first_part(path: str) -> str:
    """Cut a path at the first dot of its basename, as webdataset does for the key: `a.d/b.c.jpg` gives `a.d/b`."""
    folder, slash, base = path.rpartition("/")
    return folder + slash + base.partition(".")[0]


def is_hidden(path: str) -> bool:
    """Return whether a part of a path starts with a dot (except `.` and `..`), or is `__MACOSX`, which macOS makes."""
    if "__MACOSX" not in path and "/." not in path and not path.startswith("."):
        return False
    return any(part == "__MACOSX" or (part[:1] == "." and part not in (".", "..")) for part in path.split("/"))


def unique_keys(stems: Sequence[str], *longer: Callable[[int], str]) -> list[str]:
    """Give every image a unique key: its stem or, where stems collide, the first longer name that is unique.

    Args:
        stems: the shortest name of each image.
        longer: functions of the position that give longer and longer names, as with the folder, then the suffix too.

    Raises:
        DataError: even the longest names are not unique.
    """
    keys = list(stems)
    for name in longer:
        counts = Counter(keys)
        if len(counts) == len(keys):
            return keys
        for position, key in enumerate(keys):
            if counts[key] > 1:
                keys[position] = name(position)
    if len(set(keys)) < len(keys):  # a longer name of one is the short name of another: all get the longest
        keys = [longer[-1](position) for position in range(len(keys))] if longer else keys
        repeated = next((key for key, count in Counter(keys).items() if count > 1), None)
        if repeated is not None:
            raise DataError(f"two images have the key {repeated}: keys must be unique, rename one")
    return keys


def utf8_names(names: list[str]) -> list[str]:
    """Return the names as valid text: bytes that are not UTF-8 are written as \\xe9."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return [name.encode(errors="surrogateescape").decode(errors="backslashreplace") for name in names]
    return names


def require_utf8(names: Sequence[str]) -> None:
    """Refuse names with bytes that are not UTF-8, which a feature store cannot hold.

    Raises:
        DataError: a name is not UTF-8; the first is in the message.
    """
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        bad = next(name for name in names if any("\ud800" <= letter <= "\udfff" for letter in name))
        raise DataError(f"the name {bad!a} is not UTF-8: rename it") from None
