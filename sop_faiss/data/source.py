"""Any SRC a user can name, behind one interface: shards, a folder of pictures, a list, one picture."""

from __future__ import annotations

import glob
import itertools
import re
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.keys import PICTURE_SUFFIXES
from sop_faiss.data.listing import open_files, open_folder, open_list
from sop_faiss.data.shards import MANIFEST_NAME, open_shards
from sop_faiss.errors import DataError, SopError
from sop_faiss.files import read_json

__all__ = ["ImageSource", "find_shards", "open_source"]

_LIST_SUFFIXES = (".txt", ".csv", ".tsv")
_SHARDS_LIMIT = 1_000_000
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SHELL = re.compile(r"[|;<>`]|\$\(|&&")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@runtime_checkable
class ImageSource(Protocol):
    """Encoded pictures by position, with unique keys. Picklable; safe in forked workers and threads."""

    @property
    def description(self) -> str:
        """The source as the user named it."""
        ...

    @property
    def keys(self) -> list[str]:
        """A unique name of each picture; where names collide, with the shard or relative folder before it."""
        ...

    @property
    def labels(self) -> Int64[np.ndarray, " n"] | None:
        """A class number for each picture, -1 for one without; None when none has one."""
        ...

    @property
    def class_names(self) -> list[str] | None:
        """The name of each class number, where known."""
        ...

    @property
    def root(self) -> Path:
        """The absolute folder that `source_of` and `member_of` are relative to."""
        ...

    def __len__(self) -> int: ...

    def read(self, position: int) -> bytes:
        """The encoded bytes of one picture.

        Raises:
            DataError: it is empty, missing or changed; the first word of the message is the reason.
        """
        ...

    def source_of(self, position: int) -> str:
        """The shard of a picture relative to `root`, or "" for a picture that is a file."""
        ...

    def member_of(self, position: int) -> str:
        """The tar member, or the file relative to `root`."""
        ...

    def offset_of(self, position: int) -> int:
        """Where the picture begins in its shard, in bytes; 0 for a picture that is a file."""
        ...


def open_source(src: str | Path) -> ImageSource:
    """Open the pictures a user names.

    Args:
        src: a .tar shard, a pattern of shards (`photos-{000..012}.tar`, `photos-*.tar`), a folder with .tar shards, a
            folder of pictures (class sub-folders optional; used where the folder itself holds no .tar), a .txt, .tsv
            or .csv list of `path[,label]` lines, or one picture.

    Raises:
        DataError: nothing is there, or it is damaged or of another kind. Addresses and commands are refused, not run.
    """
    shards = find_shards(src)
    if shards:
        return open_shards(str(src), shards)
    path = Path(src)
    return open_folder(str(src), path) if path.is_dir() else _open_file(str(src), path)


def find_shards(src: str | Path) -> list[Path]:
    """The shards that a source means, in order; none for a folder of pictures, a list or a picture.

    Raises:
        DataError: nothing is there, a shard of the pattern or of the folder's manifest is missing, or `src` is an
            address or a command.
    """
    text = str(src)
    _refuse_commands(text)
    path = Path(text)
    if path.is_dir():
        shards = sorted(file for file in path.glob("*.tar") if not file.name.startswith("."))
        _check_complete(path, {shard.name for shard in shards})
        return shards
    if path.exists():
        return [path] if path.suffix.lower() == ".tar" else []
    if _BRACES.search(text) or glob.has_magic(text):
        return _expand_pattern(text)
    raise DataError(f"source {text} does not exist: wanted .tar shards, a folder of pictures or a .txt or .csv list")


def _refuse_commands(text: str) -> None:
    if "\0" in text or not text.strip():
        raise DataError(f"source {text!r} is not a path: wanted shards, a folder of pictures or a list")
    if _REMOTE.match(text.lstrip()):
        raise DataError(f"source {text} is an address: only local files are read, download them first")
    if text.lstrip().startswith("pipe:") or (_SHELL.search(text) and not Path(text).exists()):
        raise DataError(f"source {text} is a command: commands are never run, name files")


def _open_file(text: str, path: Path) -> ImageSource:
    suffix = path.suffix.lower()
    if suffix in _LIST_SUFFIXES:
        return open_list(text, path)
    if suffix in PICTURE_SUFFIXES:
        return open_files(text, path.absolute().parent, [path.name], None, None)
    if path.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise DataError(f"source {text} is a compressed tar, which has no random access: unpack it to a .tar")
    raise DataError(f"source {text} is of an unknown kind: wanted .tar, .txt, .csv, a picture or a folder")


def _check_complete(folder: Path, shards: set[str]) -> None:
    """Refuse a folder whose manifest names a shard that is not there; a manifest of another kind says nothing."""
    if not (folder / MANIFEST_NAME).is_file():
        return
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except SopError as error:
        raise DataError(f"{error}: remove it or pack again") from None
    entries = manifest.get("shards") if isinstance(manifest, dict) else None
    if not isinstance(entries, list):
        return
    named = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    missing = [name for name in named if name not in shards]
    if missing:
        raise DataError(
            f"{len(missing)} of the {len(named)} shards of {folder} are missing, first {missing[0]}: "
            "copy again, or name those you want by a pattern"
        )


def _expand_pattern(text: str) -> list[Path]:
    """The shards that a pattern means, braces first, then * ? [ ]; sorted within each glob."""
    paths: list[Path] = []
    for pattern in _expand_braces(text):
        if glob.has_magic(pattern):
            matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
            if not matches:
                raise DataError(f"no shard matches {pattern}")
            paths.extend(matches)
        elif Path(pattern).exists():
            paths.append(Path(pattern))
        else:
            raise DataError(f"shard {pattern} of the pattern {text} does not exist")
    for path in paths:
        if path.suffix.lower() != ".tar":
            raise DataError(f"pattern {text} matches {path}, wanted only .tar shards (name a folder for pictures)")
    return paths


def _expand_braces(text: str) -> list[str]:
    """Expand `{000..012}` (zero-padded as its left end) and `{a,b}`; several multiply, leftmost slowest."""
    parts: list[list[str]] = []
    count, position = 1, 0
    for match in _BRACES.finditer(text):
        ends = _RANGE.fullmatch(match[1])
        if ends:
            first, last = int(ends[1]), int(ends[2])
            size = last - first + 1
        else:
            size = match[1].count(",") + 1
        count *= size
        if size < 1 or count > _SHARDS_LIMIT:
            raise DataError(f"pattern {text} means {max(count, 0)} shards, wanted 1 to {_SHARDS_LIMIT}")
        values = [str(n).zfill(len(ends[1])) for n in range(first, last + 1)] if ends else match[1].split(",")
        parts += [[text[position : match.start()]], values]
        position = match.end()
    return ["".join(choice) for choice in itertools.product(*parts, [text[position:]])]
