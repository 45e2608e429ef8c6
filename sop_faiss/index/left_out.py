"""The images that an index leaves out, `left_out.json`: those that cannot be used, and those that the user removed.

A sync does not try them again while their files are as they were.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sop_faiss.errors import IndexMismatchError, SopError
from sop_faiss.features.file_states import FileState
from sop_faiss.files import read_json

LEFT_OUT_FILE = "left_out.json"
REMOVED = "removed"
"""The reason of an image that the user removed; all others are of images that cannot be used."""


@dataclass(frozen=True)
class LeftOut:
    """One image file, or member of a shard, that is not in the index."""

    source: str
    """The shard, relative to the manifest's `root`; empty for an image file."""
    member: str
    """The tar member, or the image file relative to `root`."""
    reason: str
    error: str
    """What is wrong, in words."""
    size: int = -1
    """Of the file when it was read, as `time` and `sha256` in hexadecimal; -1 and empty where not known."""
    mtime_ns: int = -1
    sha256: str = ""

    @property
    def state(self) -> FileState:
        """Return what was read."""
        return FileState(self.size, self.mtime_ns, bytes.fromhex(self.sha256))


def dropped_images(dropped: Any) -> list[LeftOut]:
    """Return the images of a feature store's `dropped`; entries that are not what the extraction writes are skipped."""
    entries = dropped.get("images") if isinstance(dropped, dict) else None
    made = [_parse(entry) for entry in entries] if isinstance(entries, list) else []
    return [entry for entry in made if entry is not None]


def count_unusable(left_out: Iterable[LeftOut]) -> dict[str, int]:
    """Count by reason the images that cannot be used."""
    return dict(Counter(each.reason for each in left_out if each.reason != REMOVED))


def write_left_out(path: Path, left_out: Sequence[LeftOut]) -> None:
    """Write the file. Not atomic: write into a directory that is renamed when complete."""
    path.write_text(json.dumps([asdict(each) for each in left_out], indent=1) + "\n", encoding="utf-8")


def parse_left_out(path: Path) -> list[LeftOut]:
    """Read the file.

    Raises:
        IndexMismatchError: it is damaged.
    """
    try:
        content = read_json(path)
    except SopError as error:
        raise IndexMismatchError(f"{error}; restore it or build the index again") from None
    made = [_parse(entry) for entry in content] if isinstance(content, list) else [None]
    if None in made:
        raise IndexMismatchError(f"{path} is not what the index wrote: restore it or build the index again")
    return [entry for entry in made if entry is not None]


def _parse(entry: Any) -> LeftOut | None:
    """Make an entry of JSON; None if something in it is missing or of another type."""
    if not isinstance(entry, dict):
        return None
    try:
        values = {field.name: entry[field.name] for field in fields(LeftOut) if field.name in entry}
        made = LeftOut(**values)
        texts = (made.source, made.member, made.reason, made.error, made.sha256)
        bytes.fromhex(made.sha256)
    except (TypeError, ValueError):
        return None
    is_sound = all(isinstance(text, str) for text in texts) and type(made.size) is type(made.mtime_ns) is int
    return made if is_sound else None
