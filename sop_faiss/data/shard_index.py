"""What one walk over the headers of a shard finds: which pictures it holds, and where each lies."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import intern

from sop_faiss.data.keys import SHARD_SUFFIXES, split_name
from sop_faiss.data.tar import Member, require_regular_file, walk_tar
from sop_faiss.errors import DataError

__all__ = ["ShardIndex", "check_picture", "walk_shard"]

_LONGEST_LABEL_BYTES = 20


@dataclass
class ShardIndex:
    """The pictures of one shard, in file order."""

    size: int  # of the shard, bytes
    changed_ns: int  # its modification time
    stems: list[str] = field(default_factory=list)
    suffixes: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of each picture's first byte
    sizes: list[int] = field(default_factory=list)  # of each picture, bytes
    labels: list[int] = field(default_factory=list)  # -1 for none
    ignored: Counter[str] = field(default_factory=Counter)  # members that are not read, by suffix


def walk_shard(path: Path, name: str = "") -> ShardIndex:
    """Walk the headers of a shard.

    Args:
        path: of the shard.
        name: what messages call it; its path if empty.

    Raises:
        DataError: the shard is missing, cut or damaged, a label is no integer, or a key is unsafe or occurs twice.
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
        if suffix in SHARD_SUFFIXES:
            check_picture(member, stem, seen, name)
            index.stems.append(stem)
            index.suffixes.append(intern(member.name[len(stem) :]))
            index.offsets.append(member.offset)
            index.sizes.append(member.size)
        elif suffix == ".cls":
            if stem in labels:
                raise DataError(f"shard {name} has two labels {member.name}: keys must be unique, pack it again")
            labels[stem] = _read_label(member, name)
        elif suffix != ".json":
            index.ignored[suffix or "no suffix"] += 1
    index.labels = [labels.get(stem, -1) for stem in index.stems]
    orphans = len(labels.keys() - seen)
    if orphans:
        index.ignored[".cls without a picture"] = orphans
    return index


def check_picture(member: Member, stem: str, seen: set[str], shard: str) -> None:
    """Refuse a picture that is a link, whose name points out of the shard, or whose key is in `seen`; add it there.

    Raises:
        DataError: it is one of these.
    """
    if member.is_link:
        raise DataError(
            f"shard {shard}: {member.name} is a link or sparse: make the tar with --dereference, without --sparse"
        )
    if member.name.startswith("/") or ".." in stem.split("/"):
        raise DataError(f"shard {shard}: member {member.name!r} points out of the shard; pack it again")
    if stem in seen:
        raise DataError(f"shard {shard} has two pictures with the key {stem}: keys must be unique, pack it again")
    seen.add(stem)


def _read_label(member: Member, shard: str) -> int:
    text = member.head.strip()
    digits = text.removeprefix(b"-")
    if member.size > _LONGEST_LABEL_BYTES or not digits.isdigit() or (text != digits and text != b"-1"):
        shown = text[:_LONGEST_LABEL_BYTES].decode("ascii", "replace")
        raise DataError(f"shard {shard}: label {member.name} is {shown!r}, wanted an integer of 0 or more (-1: none)")
    if int(text) >= 1 << 31:
        raise DataError(f"shard {shard}: label {member.name} is {int(text)}, wanted less than 2**31")
    return int(text)
