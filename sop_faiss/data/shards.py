"""Pictures in webdataset shards: every header walked once, then any picture by one positioned read."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.keys import SHARD_SUFFIXES, require_utf8, split_name, unique_keys
from sop_faiss.data.tar import Member, walk_tar
from sop_faiss.errors import DataError, SopError
from sop_faiss.files import read_json

__all__ = ["MANIFEST_NAME", "ShardSource", "common_folder", "find_class_names", "open_shards"]

MANIFEST_NAME = "manifest.json"
_LONGEST_LABEL_BYTES = 20
_OPEN_FILES_LIMIT = 256  # per source and process


class _OpenFile:
    """A descriptor that closes when the last thread lets go of it."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)


@dataclass(frozen=True)
class _Shard:
    """What the walk of one shard found; samples in file order of their pictures."""

    path: Path
    size: int  # bytes
    changed_ns: int
    stems: list[str]
    suffixes: list[str]
    offsets: list[int]
    sizes: list[int]
    labels: dict[str, int]  # by stem; a label whose picture is missing included
    ignored: Counter[str]  # members that are not read, by suffix


@dataclass(eq=False)
class ShardSource:
    """The pictures of tar shards, in the order of the shards and of the members in each.

    Reading is by position in the file: safe in forked workers and in threads, and picklable.
    """

    description: str
    keys: list[str]
    labels: Int64[np.ndarray, " n"] | None
    class_names: list[str] | None
    root: Path
    shards: list[Path]
    identities: list[tuple[int, int]]  # size in bytes and modification time in ns of each shard when it was opened
    stems: list[str]
    suffixes: list[str]
    shard_numbers: Int64[np.ndarray, " n"]
    offsets: Int64[np.ndarray, " n"]
    sizes: Int64[np.ndarray, " n"]
    ignored: Counter[str]  # members that are never read, by suffix
    _open: dict[int, _OpenFile] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def read(self, position: int) -> bytes:
        """The encoded bytes of one picture.

        Raises:
            DataError: the member is empty, or the shard is gone or changed since it was opened; the first word tells.
        """
        number, size = int(self.shard_numbers[position]), int(self.sizes[position])
        if size == 0:
            raise DataError(f"empty: {self._name(position)} has no bytes")
        file = self._open.get(number) or self._open_shard(number)
        encoded = os.pread(file.descriptor, size, int(self.offsets[position]))
        while len(encoded) < size:  # a short read is legal, if rare; none at all means that the shard was cut
            more = os.pread(file.descriptor, size - len(encoded), int(self.offsets[position]) + len(encoded))
            if not more:
                raise DataError(f"changed: {self._name(position)} was cut off after the shard was opened")
            encoded += more
        self._check_unchanged(number, file)  # after the read: what was written over before its end shows
        return encoded

    def source_of(self, position: int) -> str:
        """The shard of a picture, relative to `root`."""
        return self.shards[self.shard_numbers[position]].relative_to(self.root).as_posix()

    def member_of(self, position: int) -> str:
        """The tar member of a picture."""
        return self.stems[position] + self.suffixes[position]

    def offset_of(self, position: int) -> int:
        """Where the picture begins in its shard, in bytes."""
        return int(self.offsets[position])

    def _name(self, position: int) -> str:
        return f"{self.member_of(position)} in {self.source_of(position)}"

    def _open_shard(self, number: int) -> _OpenFile:
        path = self.shards[number]
        try:
            file = _OpenFile(path)
        except OSError as error:
            raise DataError(f"missing: shard {path} cannot be opened any more ({error.strerror})") from None
        self._check_unchanged(number, file)
        if len(self._open) >= _OPEN_FILES_LIMIT:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread may be doing the same
                self._open.pop(next(iter(self._open)), None)
        self._open[number] = file
        return file

    def _check_unchanged(self, number: int, file: _OpenFile) -> None:
        """Raise DataError where a shard has another size or modification time than when its headers were walked."""
        status = os.fstat(file.descriptor)
        if (status.st_size, status.st_mtime_ns) != self.identities[number]:
            path = self.shards[number]
            raise DataError(f"changed: shard {path} is not the file it was when it was opened; start again")


def open_shards(description: str, paths: Sequence[Path]) -> ShardSource:
    """Walk the headers of shards, in the order given.

    Raises:
        DataError: a shard is missing, cut, damaged or named twice, none holds a picture, a label is no integer, a name
            is not UTF-8, or a key occurs twice in a shard.
    """
    paths = [path.absolute() for path in paths]
    if len(set(paths)) < len(paths):
        repeated = next(path for number, path in enumerate(paths) if path in paths[:number])
        raise DataError(f"{description} names the shard {repeated} twice: name each once")
    shards = [_walk_shard(path) for path in paths]
    root = common_folder([path.parent for path in paths])
    numbers = np.repeat(np.arange(len(shards), dtype=np.int64), [len(shard.stems) for shard in shards])
    stems = [stem for shard in shards for stem in shard.stems]
    if not stems:
        raise DataError(f"{description} holds no picture: wanted members KEY.jpg, .jpeg, .png or .webp")
    require_utf8(stems)
    labels = _join_labels(shards)
    return ShardSource(
        description=description,
        keys=unique_keys(
            [stem.removeprefix("./") for stem in stems],
            lambda position: f"{paths[numbers[position]].stem}/{stems[position].removeprefix('./')}",
            lambda position: (
                f"{paths[numbers[position]].relative_to(root).with_suffix('').as_posix()}/{stems[position]}"
            ),
        ),
        labels=labels,
        class_names=find_class_names(root, labels),
        root=root,
        shards=paths,
        identities=[(shard.size, shard.changed_ns) for shard in shards],
        stems=stems,
        suffixes=[suffix for shard in shards for suffix in shard.suffixes],
        shard_numbers=numbers,
        offsets=np.array([offset for shard in shards for offset in shard.offsets], dtype=np.int64),
        sizes=np.array([size for shard in shards for size in shard.sizes], dtype=np.int64),
        ignored=sum((shard.ignored for shard in shards), Counter()),
    )


def _walk_shard(path: Path) -> _Shard:
    try:
        file = _OpenFile(path)
    except OSError as error:
        raise DataError(f"shard {path} cannot be opened: {error.strerror}") from None
    status = os.fstat(file.descriptor)
    shard = _Shard(path, status.st_size, status.st_mtime_ns, [], [], [], [], {}, Counter())
    seen: set[str] = set()
    for member in walk_tar(file.descriptor, path):
        stem, suffix = split_name(member.name)
        suffix = suffix.lower()
        if suffix in SHARD_SUFFIXES:
            _check_picture(member, stem, seen, path)
            shard.stems.append(stem)
            shard.suffixes.append(intern(member.name[len(stem) :]))
            shard.offsets.append(member.offset)
            shard.sizes.append(member.size)
        elif suffix == ".cls":
            if stem in shard.labels:
                raise DataError(f"shard {path} has two labels {member.name}: keys must be unique, pack it again")
            shard.labels[stem] = _read_label(member, path)
        elif suffix != ".json":
            shard.ignored[suffix or "no suffix"] += 1
    orphans = len(shard.labels.keys() - seen)
    if orphans:
        shard.ignored[".cls without a picture"] = orphans
    return shard


def _check_picture(member: Member, stem: str, seen: set[str], path: Path) -> None:
    if member.is_link:
        raise DataError(
            f"shard {path}: {member.name} is a link or sparse: make the tar with --dereference, without --sparse"
        )
    if member.name.startswith("/") or ".." in stem.split("/"):
        raise DataError(f"shard {path}: member {member.name!r} points out of the shard; pack it again")
    if stem in seen:
        raise DataError(f"shard {path} has two pictures with the key {stem}: keys must be unique, pack it again")
    seen.add(stem)


def _read_label(member: Member, path: Path) -> int:
    text = member.head.strip()
    digits = text.removeprefix(b"-")
    if member.size > _LONGEST_LABEL_BYTES or not digits.isdigit() or (text != digits and text != b"-1"):
        shown = text[:_LONGEST_LABEL_BYTES].decode("ascii", "replace")
        raise DataError(f"shard {path}: label {member.name} is {shown!r}, wanted an integer of 0 or more (-1: none)")
    if int(text) >= 1 << 31:
        raise DataError(f"shard {path}: label {member.name} is {int(text)}, wanted less than 2**31")
    return int(text)


def _join_labels(shards: Sequence[_Shard]) -> Int64[np.ndarray, " n"] | None:
    labels = np.array([shard.labels.get(stem, -1) for shard in shards for stem in shard.stems], dtype=np.int64)
    return labels if (labels >= 0).any() else None


def common_folder(folders: Sequence[Path]) -> Path:
    """The deepest folder that holds all of these absolute folders."""
    return Path(os.path.commonpath([os.fspath(folder) for folder in folders]))


def find_class_names(folder: Path, labels: Int64[np.ndarray, " n"] | None) -> list[str] | None:
    """The class names of `manifest.json`, or of `classes.txt` (one a line, or last column), beside shards.

    None unless there is one for each label.
    """
    if labels is None:
        return None
    names: list[str] | None = None
    if (folder / MANIFEST_NAME).is_file():
        try:
            manifest = read_json(folder / MANIFEST_NAME)
        except SopError as error:
            raise DataError(f"{error}; make it again with `sop-data pack` or remove it") from None
        listed = manifest.get("classes") if isinstance(manifest, dict) else None
        names = [str(name) for name in listed] if isinstance(listed, list) and listed else None
    elif (folder / "classes.txt").is_file():
        text = (folder / "classes.txt").read_text(encoding="utf-8", errors="replace")
        names = [line.rpartition("\t")[2].strip() for line in text.splitlines() if line.strip()]
    return names if names and len(names) > int(labels.max()) else None
