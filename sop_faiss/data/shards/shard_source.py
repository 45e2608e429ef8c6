"""Images in webdataset shards: an index of every shard, then any image by one positioned read."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.class_numbers import number_classes
from sop_faiss.data.images.keys import require_utf8, unique_keys
from sop_faiss.data.shards.shard_index import STRAY_LABEL, ShardIndex, link_error, walk_shard
from sop_faiss.data.shards.sidecar import load_index
from sop_faiss.errors import DataError, SopError
from sop_faiss.files import read_json

MANIFEST_NAME = "manifest.json"
_OPEN_FILES_LIMIT = 256  # per source and process


class _OpenFile:
    """A descriptor that is closed when no thread uses it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)


@dataclass(eq=False)
class ShardSource:
    """The images of tar shards, in the order of the shards and of the members in each.

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
    stray_labels: str  # a warning about labels without an image; "" if there are none
    fetch: Callable[[int], None] | None = None  # fetches a missing shard; None: all are local
    _open: dict[int, _OpenFile] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}

    def read(self, position: int) -> bytes:
        """Read the encoded bytes of one image.

        Raises:
            DataError: the member is empty or a link, or the shard is missing or changed since it was opened; the first
                word says which.
            UnreachableError: the shard cannot be fetched.
        """
        number, size = int(self.shard_numbers[position]), int(self.sizes[position])
        if size < 0:
            raise link_error(self._name(position))
        if size == 0:
            raise DataError(f"empty: {self._name(position)} has no bytes")
        file = self._open.get(number) or self._open_shard(number)
        encoded = os.pread(file.descriptor, size, int(self.offsets[position]))
        while len(encoded) < size:  # a short read is rare but allowed; an empty one means that the shard was cut
            more = os.pread(file.descriptor, size - len(encoded), int(self.offsets[position]) + len(encoded))
            if not more:
                raise DataError(f"changed: {self._name(position)} was cut off after the shard was opened")
            encoded += more
        self._check_unchanged(number, file)  # after the read, so that any change before its end is found
        return encoded

    def source_of(self, position: int) -> str:
        """Return the shard of an image, relative to `root`."""
        return self.shards[self.shard_numbers[position]].relative_to(self.root).as_posix()

    def member_of(self, position: int) -> str:
        """Return the tar member of an image."""
        return self.stems[position] + self.suffixes[position]

    def offset_of(self, position: int) -> int:
        """Return where the image begins in its shard, in bytes."""
        return int(self.offsets[position])

    def _name(self, position: int) -> str:
        return f"{self.member_of(position)} in {self.source_of(position)}"

    def _open_shard(self, number: int) -> _OpenFile:
        path = self.shards[number]
        if self.fetch is not None:
            self.fetch(number)
        try:
            file = _OpenFile(path)
        except OSError as error:
            raise DataError(f"missing: shard {path} can no longer be opened ({error.strerror})") from None
        self._check_unchanged(number, file)
        if len(self._open) >= _OPEN_FILES_LIMIT:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread may be doing the same
                self._open.pop(next(iter(self._open)), None)
        self._open[number] = file
        return file

    def _check_unchanged(self, number: int, file: _OpenFile) -> None:
        """Raise DataError unless a shard has the size and modification time of when its headers were walked."""
        status = os.fstat(file.descriptor)
        if (status.st_size, status.st_mtime_ns) != self.identities[number]:
            path = self.shards[number]
            raise DataError(f"changed: shard {path} was changed after it was opened; start again")


def open_shards(description: str, paths: Sequence[Path], *, ignore_sidecars: bool = False) -> ShardSource:
    """Open local shards, in the order given.

    Args:
        description: the source as the user named it.
        ignore_sidecars: walk the headers even of shards that have a sidecar.

    Raises:
        DataError: a shard is missing, cut, damaged or named twice, no shard has an image, a label is not an integer, a
            name is not UTF-8, or a key occurs twice in a shard.
    """
    paths = [path.absolute() for path in paths]
    if len(set(paths)) < len(paths):
        repeated = next(path for number, path in enumerate(paths) if path in paths[:number])
        raise DataError(f"{description} names the shard {repeated} twice: name each once")
    source = join_shards(
        description, paths, [walk_shard(path) if ignore_sidecars else load_index(path) for path in paths]
    )
    name_classes(source, _read_class_names(source.root))
    return source


def join_shards(description: str, paths: list[Path], shards: Sequence[ShardIndex]) -> ShardSource:
    """Join the images of shards to one source; `paths` are absolute.

    Raises:
        DataError: there is no image, or a name is not UTF-8.
    """
    root = common_folder([path.parent for path in paths])
    numbers = np.repeat(np.arange(len(shards), dtype=np.int64), [len(shard.stems) for shard in shards])
    stems = [stem for shard in shards for stem in shard.stems]
    if not stems:
        hidden = sum(shard.ignored["hidden"] for shard in shards)
        but = f" but {hidden} hidden members" if hidden else ""
        raise DataError(f"{description} has no image{but}: wanted members KEY.jpg, .jpeg, .png or .webp")
    require_utf8(stems)
    labels = np.array([label for shard in shards for label in shard.labels], dtype=np.int64)
    return ShardSource(
        description=description,
        keys=unique_keys(
            [stem.removeprefix("./") for stem in stems],
            lambda position: f"{paths[numbers[position]].stem}/{stems[position].removeprefix('./')}",
            lambda position: (
                f"{paths[numbers[position]].relative_to(root).with_suffix('').as_posix()}/{stems[position]}"
            ),
        ),
        labels=labels if (labels >= 0).any() else None,
        class_names=None,
        root=root,
        shards=paths,
        identities=[(shard.size, shard.changed_ns) for shard in shards],
        stems=stems,
        suffixes=[suffix for shard in shards for suffix in shard.suffixes],
        shard_numbers=numbers,
        offsets=np.array([offset for shard in shards for offset in shard.offsets], dtype=np.int64),
        sizes=np.array([size for shard in shards for size in shard.sizes], dtype=np.int64),
        ignored=sum((shard.ignored for shard in shards), Counter()),
        stray_labels=_say_stray_labels(description, paths, shards),
    )


def _say_stray_labels(description: str, paths: Sequence[Path], shards: Sequence[ShardIndex]) -> str:
    count = sum(shard.ignored[STRAY_LABEL] for shard in shards)
    if not count:
        return ""
    shard, first = next(
        (path.name, shard.stray_label) for path, shard in zip(paths, shards, strict=True) if shard.stray_label
    )
    return (
        f"{description} has labels without an image ({count:,}, first {first}.cls in {shard}): "
        "name each label as its image, KEY.jpg and KEY.cls"
    )


def common_folder(folders: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all of these absolute folders."""
    return Path(os.path.commonpath([os.fspath(folder) for folder in folders]))


def name_classes(source: ShardSource, names: Sequence[str]) -> None:
    """Name the labels of shards, if there is a name for each; names that are integers become the labels themselves."""
    if source.labels is not None and len(names) > int(source.labels.max()):
        source.labels, source.class_names = number_classes(source.labels, names)


def _read_class_names(folder: Path) -> list[str]:
    """Read the class names of a folder's `manifest.json`, or of `classes.txt` (one per line, or the last column)."""
    names: list[str] = []
    if (folder / MANIFEST_NAME).is_file():
        try:
            manifest = read_json(folder / MANIFEST_NAME)
        except SopError as error:
            raise DataError(f"{error}; or make it again with `sop-data pack`, or remove it") from None
        listed = manifest.get("classes") if isinstance(manifest, dict) else None
        names = [str(name) for name in listed] if isinstance(listed, list) else []
    elif (folder / "classes.txt").is_file():
        text = (folder / "classes.txt").read_text(encoding="utf-8", errors="replace")
        names = [line.rpartition("\t")[2].strip() for line in text.splitlines() if line.strip()]
    return names
