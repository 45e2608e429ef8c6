"""Any source of images (SRC) behind one interface: shards, a folder of images, a list, one image."""

from __future__ import annotations

import glob
import logging
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from sop_faiss.config import DataConfig
from sop_faiss.data.images.heif import HEIF_REMEDY, HEIF_SUFFIXES
from sop_faiss.data.images.image_list import open_list
from sop_faiss.data.images.keys import IMAGE_SUFFIXES
from sop_faiss.data.images.listing import open_files, open_folder
from sop_faiss.data.shards.address import hide_secrets, is_address, path_of_file_address, refuse_commands
from sop_faiss.data.shards.patterns import expand_braces, has_braces
from sop_faiss.data.shards.remote_shards import find_addresses, open_remote_shards
from sop_faiss.data.shards.shard_source import MANIFEST_NAME, open_shards
from sop_faiss.errors import DataError, SopError
from sop_faiss.files import read_json
from sop_faiss.paths import path_state

_log = logging.getLogger(__name__)
_LIST_SUFFIXES = (".txt", ".csv", ".tsv")


@runtime_checkable
class ImageSource(Protocol):
    """Encoded images by position, with unique keys. Picklable; safe in forked workers and threads."""

    @property
    def description(self) -> str:
        """The source as the user named it."""
        ...

    @property
    def keys(self) -> list[str]:
        """A unique name of each image; where names collide, prefixed with the shard or relative folder."""
        ...

    @property
    def labels(self) -> Int64[np.ndarray, " n"] | None:
        """A class number for each image, -1 for one without; None if no image has one."""
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
        """Read the encoded bytes of one image.

        Raises:
            DataError: the image is empty, missing or changed; the first word of the message is the reason.
        """
        ...

    def source_of(self, position: int) -> str:
        """Return the shard of an image relative to `root`, or "" for an image that is a file."""
        ...

    def member_of(self, position: int) -> str:
        """Return the tar member, or the file relative to `root`."""
        ...

    def offset_of(self, position: int) -> int:
        """Return where the image begins in its shard, in bytes; 0 for an image that is a file."""
        ...


class Place(NamedTuple):
    """Where an image is."""

    path: str = ""
    """The file, or the shard."""
    member: str = ""
    """Of the shard; empty for an image that is a file."""


def place_of(source: ImageSource, position: int) -> Place:
    """Return where an image of a source is."""
    return place_below(source.root, source.source_of(position), source.member_of(position))


def place_below(root: Path, shard: str, member: str) -> Place:
    """Return where an image is by its shard, "" for an image that is a file, and its member, relative to `root`."""
    return Place(str(root / shard), member) if shard else Place(str(root / member))


def open_source(src: str | Path, settings: DataConfig | None = None) -> ImageSource:
    """Open the images a user names.

    Args:
        src: a .tar shard, a pattern of shards (`photos-{000..012}.tar`, `photos-*.tar`), a folder with .tar shards, the
            address of any of these (`https://...`, `s3://...` or another protocol of fsspec), a folder of images (class
            sub-folders optional; used if the folder itself has no .tar), a .txt, .tsv or .csv list of
            `path[,label]` lines, or one image.
        settings: where fetched shards are kept; None for the defaults.

    Raises:
        DataError: the source is missing, damaged or of another kind. Commands are refused, not run.
        UnreachableError: a server does not answer.
    """
    settings = settings or DataConfig()
    text = _checked(src)
    shards = [] if is_address(text) else find_shards(text)
    if is_address(text):
        source = open_remote_shards(hide_secrets(text), find_addresses(text), settings)
    elif shards and settings.access == "cached":
        source = open_remote_shards(text, [str(shard.absolute()) for shard in shards], settings)
    elif shards:
        source = open_shards(text, shards)
    else:
        path = Path(text)
        return open_folder(text, path) if path.is_dir() else _open_file(text, path)
    if source.stray_labels:
        _log.warning("%s", source.stray_labels)
    return source


def find_streams(src: str | Path) -> list[str]:
    """Find the shards of a source, as addresses or paths, for reading each from front to back.

    Raises:
        DataError: as `find_shards`, or the source has none.
    """
    text = _checked(src)
    addresses = find_addresses(text) if is_address(text) else [str(path.absolute()) for path in find_shards(text)]
    if not addresses:
        raise DataError(f"source {text} has no shards, and only shards are read in sequence: pack it first")
    return addresses


def _checked(src: str | Path) -> str:
    text = str(src)
    refuse_commands(text)
    return path_of_file_address(text.strip() if is_address(text.strip()) else text)


def find_shards(src: str | Path) -> list[Path]:
    """Find the local shards of a source, in order; none for a folder of images, a list or an image.

    Raises:
        DataError: the source is missing, a shard of the pattern or of the folder's manifest is missing, or `src` is an
            address or a command.
    """
    text = _checked(src)
    if is_address(text):
        raise DataError(f"source {hide_secrets(text)} is an address: wanted shards on this machine, fetch them first")
    path = Path(text)
    if path.is_dir():
        shards = sorted(file for file in path.glob("*.tar") if not file.name.startswith("."))
        _check_complete(path, {shard.name for shard in shards})
        return shards
    if path.is_file():
        return [path] if path.suffix.lower() == ".tar" else []
    if has_braces(text) or glob.has_magic(text):
        return _expand_pattern(text)
    wanted = "wanted .tar shards, a folder of images or a .txt or .csv list"
    raise DataError(f"source {text} {path_state(path)}: {wanted}")


def _open_file(text: str, path: Path) -> ImageSource:
    suffix = path.suffix.lower()
    if suffix in _LIST_SUFFIXES:
        return open_list(text, path)
    if suffix in IMAGE_SUFFIXES:
        return open_files(text, path.absolute().parent, [path.name], None, None)
    if suffix in HEIF_SUFFIXES:
        raise DataError(f"source {text} is a HEIC image, which needs pillow-heif: {HEIF_REMEDY}")
    if path.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")):
        raise DataError(f"source {text} is a compressed tar, which has no random access: unpack it to a .tar")
    raise DataError(f"source {text} is of an unknown kind: wanted .tar, .txt, .csv, an image or a folder")


def _check_complete(folder: Path, shards: set[str]) -> None:
    """Refuse a folder whose manifest names a shard that is missing; a manifest of another kind is ignored."""
    if not (folder / MANIFEST_NAME).is_file():
        return
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except SopError as error:
        raise DataError(f"{error}; or remove it, or pack again") from None
    entries = manifest.get("shards") if isinstance(manifest, dict) else None
    if not isinstance(entries, list):
        return
    named = [entry.get("name") for entry in entries if isinstance(entry, dict)]
    missing = [name for name in named if name not in shards]
    if missing:
        raise DataError(
            f"{len(missing)} of the {len(named)} shards of {folder} are missing, first {missing[0]}: "
            "copy them again, or name the shards you want by a pattern"
        )


def _expand_pattern(text: str) -> list[Path]:
    """Expand a pattern to shards, braces first, then * ? [ ]; sorted within each glob."""
    paths: list[Path] = []
    for pattern in expand_braces(text):
        if glob.has_magic(pattern):
            matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207
            if not matches:
                raise DataError(f"no shard matches {pattern}")
            paths.extend(matches)
        else:
            paths.append(Path(pattern))
    for path in paths:
        if path.suffix.lower() != ".tar":
            raise DataError(f"pattern {text} matches {path}, wanted only .tar shards (name a folder for images)")
        if not path.is_file():
            raise DataError(f"shard {path} of the pattern {text} {path_state(path)}: wanted a .tar file")
    return paths
