"""The index of a shard, made by one walk over its headers: its images and their positions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import intern

from sop_faiss.data.images.keys import SHARD_SUFFIXES, first_part, is_hidden, split_name
from sop_faiss.data.shards.tar import Member, require_regular_file, walk_tar
from sop_faiss.errors import DataError

LINK = -1
"""The size that marks an image that cannot be read, since it or its label is a link or a sparse file."""

STRAY_LABEL = ".cls without an image"
"""The name under which labels without an image are counted."""

_LONGEST_LABEL_BYTES = 20
_LINKED_LABEL = -2


@dataclass
class ShardIndex:
    """The images of one shard, in file order."""

    size: int  # of the shard, bytes
    changed_ns: int  # its modification time
    stems: list[str] = field(default_factory=list)
    suffixes: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each image's first byte
    sizes: list[int] = field(default_factory=list)  # of each image, bytes, or `LINK`
    labels: list[int] = field(default_factory=list)  # -1 for none
    ignored: Counter[str] = field(default_factory=Counter)  # members that are not read, by suffix
    stray_label: str = ""  # the first label without an image, without its suffix


def walk_shard(path: Path, name: str = "") -> ShardIndex:
    """Walk the headers of a shard; hidden members are skipped, as in a folder.

    An image has the label of the same name (`a.b.jpg`, `a.b.cls`). A label without such an image belongs to images
    of the same name up to the first dot, as webdataset reads names: `KEY.cls` to each `KEY.*.jpg` without its own
    label, and `KEY.label.cls` to `KEY.input.jpg` if these are the only two.

    Args:
        name: its name in messages; its path if empty.

    Raises:
        DataError: the shard is missing, cut or damaged, a label is not an integer, or a key is unsafe or occurs twice.
    """
    name = name or str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe must not block
    except OSError as error:
        raise DataError(f"shard {name} cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        require_regular_file(status, name)
        members = walk_tar(partial(os.pread, descriptor), status.st_size, name)
        return _index_members(members, ShardIndex(status.st_size, status.st_mtime_ns), name)
    finally:
        os.close(descriptor)


def _index_members(members: Iterator[Member], index: ShardIndex, name: str) -> ShardIndex:
    seen: set[str] = set()
    labels: dict[str, int] = {}
    for member in members:
        stem, suffix = split_name(member.name)
        suffix = suffix.lower()
        if is_hidden(member.name):
            index.ignored["hidden"] += 1
        elif suffix in SHARD_SUFFIXES:
            check_image(member, stem, seen, name)
            index.stems.append(stem)
            index.suffixes.append(intern(member.name[len(stem) :]))
            index.offsets.append(member.offset)
            index.sizes.append(LINK if member.is_link else member.size)
        elif suffix == ".cls":
            if stem in labels:
                raise DataError(f"shard {name} has two labels {member.name}: keys must be unique, pack it again")
            labels[stem] = _LINKED_LABEL if member.is_link else _read_label(member, name)
        elif suffix != ".json":
            index.ignored[suffix or "no suffix"] += 1
    strays = _join_by_first_part(index.stems, labels)
    if strays:
        index.ignored[STRAY_LABEL] = len(strays)
        index.stray_label = strays[0]
    index.labels = [labels.get(stem, -1) for stem in index.stems]
    for position, label in enumerate(index.labels):
        if label == _LINKED_LABEL:
            index.labels[position], index.sizes[position] = -1, LINK
    return index


def _join_by_first_part(stems: Sequence[str], labels: dict[str, int]) -> list[str]:
    """Assign labels without an image of the same stem to images of the same first part, by adding to `labels`.

    Returns:
        The labels without an image.
    """
    images = set(stems)
    strays: dict[str, list[str]] = {}
    for stem in labels:
        if stem not in images:
            strays.setdefault(first_part(stem), []).append(stem)
    if not strays:
        return []
    counts = Counter(map(first_part, stems))
    joined: set[str] = set()
    for stem in stems:
        part = first_part(stem)
        found = strays.get(part, [])
        label = part if part in found else found[0] if len(found) == counts[part] == 1 else None
        if label is not None and stem not in labels:
            labels[stem] = labels[label]
            joined.add(label)
    return [stem for stems_of_part in strays.values() for stem in stems_of_part if stem not in joined]


def check_image(member: Member, stem: str, seen: set[str], shard: str) -> None:
    """Refuse an image whose name points out of the shard, or whose key is in `seen`; add its key to `seen`.

    Raises:
        DataError: the name points out of the shard, or the key is in `seen`.
    """
    if member.name.startswith("/") or ".." in stem.split("/"):
        raise DataError(f"shard {shard}: member {member.name!r} points out of the shard; pack it again")
    if stem in seen:
        raise DataError(f"shard {shard} has two images with the key {stem}: keys must be unique, pack it again")
    seen.add(stem)


def link_error(image: str) -> DataError:
    """Make the error for an image whose size is `LINK`."""
    return DataError(
        f"link: {image} or its label is a link or sparse: make the tar with --dereference --hard-dereference, "
        "without --sparse"
    )


def _read_label(member: Member, shard: str) -> int:
    text = member.head.strip()
    digits = text.removeprefix(b"-")
    if member.size > _LONGEST_LABEL_BYTES or not digits.isdigit() or (text != digits and text != b"-1"):
        shown = text[:_LONGEST_LABEL_BYTES].decode("ascii", "replace")
        raise DataError(f"shard {shard}: label {member.name} is {shown!r}, wanted an integer of 0 or more (-1: none)")
    if int(text) >= 1 << 31:
        raise DataError(f"shard {shard}: label {member.name} is {int(text)}, wanted less than 2**31")
    return int(text)
