"""Steps of a build that are not done again: a file in a directory of its own, which says what it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sop_faiss.errors import SopError
from sop_faiss.files import read_json, sha256_file, write_json

__all__ = ["read_made", "write_made"]


def write_made(directory: Path, note: str, file: str, made_of: str, **more: Any) -> None:
    """Write the note of a file that stands in a directory which is renamed when complete.

    Args:
        directory: of both.
        note: name of the note.
        file: name of what was made.
        made_of: checksum of what went in.
        more: JSON values to be told, too.
    """
    write_json(directory / note, {"made_of": made_of, **more, "sha256": sha256_file(directory / file)})


def read_made(directory: Path, note: str, file: str, made_of: str) -> dict[str, Any] | None:
    """The note of a file that is whole and made of the same, else None."""
    if not (directory / note).is_file():
        return None
    try:
        told: dict[str, Any] = read_json(directory / note)
        return told if told["made_of"] == made_of and told["sha256"] == sha256_file(directory / file) else None
    except (SopError, KeyError, TypeError, OSError):
        return None
