"""Lists and folders of published data sets, read and checked: what is missing or malformed is one line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sop_faiss.data.images.keys import require_utf8
from sop_faiss.data.images.listing import open_folder
from sop_faiss.errors import DataError
from sop_faiss.files import not_json
from sop_faiss.paths import path_state

MAX_FILE_BYTES = 2**30
"""A larger list is refused (the largest published one, Met's database, has 0.1 GB)."""


def first_of(root: Path, *names: str) -> Path:
    """Return the first of these files or folders below root that is there.

    Raises:
        DataError: none is.
    """
    found = next((root / name for name in names if (root / name).exists()), None)
    if found is None:
        raise DataError(f"{root} has no {' or '.join(names)}" if root.is_dir() else f"{root} {path_state(root)}")
    return found


def list_images(root: Path, folder: str) -> list[str]:
    """List the images below a folder of root, sorted; names are relative to root.

    Raises:
        DataError: the folder or its images are missing.
    """
    place = first_of(root, folder)
    members = open_folder(str(place), place).members
    require_utf8(members)
    return [f"{folder}/{member}" for member in members]


def read_columns(file: Path, wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Read the wanted columns of a CSV with a heading; case does not matter in the heading, nor the order.

    Raises:
        DataError: the file is missing or not CSV, a column is, or a line has another number of columns.
    """
    try:
        lines = [line for line in csv.reader(io.StringIO(_text(file), newline=""), strict=True) if line]
    except csv.Error as error:
        raise DataError(f"{file} is not CSV ({error})") from None
    heading = [cell.strip().lower() for cell in lines[0]] if lines else []
    if missing := [name for name in wanted if name not in heading]:
        raise DataError(f"{file} has no column {missing[0]} (it has {', '.join(heading)[:100] or 'nothing'})")
    places = [heading.index(name) for name in wanted]
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(heading):
            raise DataError(f"{file} line {number}: {len(line)} columns, the heading has {len(heading)}")
    return [tuple(line[place].strip() for place in places) for line in lines[1:]]


def read_words(file: Path, columns: int, *, skipped: int = 0) -> list[list[str]]:
    """Read lines of columns that are separated by blanks, below `skipped` lines of heading.

    Raises:
        DataError: the file is missing, or a line has fewer columns.
    """
    rows = []
    for number, line in enumerate(_text(file).splitlines()[skipped:], start=skipped + 1):
        words = line.split(None, columns - 1)
        if len(words) == columns:
            rows.append([word.strip() for word in words])
        elif words:
            raise DataError(f"{file} line {number}: {len(words)} columns of {columns}")
    return rows


def read_entries(file: Path, required: Iterable[str]) -> list[dict[str, Any]]:
    """Read a JSON list of tables, each of which has the required keys; `path` is text.

    Raises:
        DataError: the file is missing or not of this form.
    """
    try:
        entries = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON ({not_json(error)})") from None
    if not isinstance(entries, list):
        raise DataError(f"{file} is not a list")
    for number, entry in enumerate(entries):
        missing = next((key for key in required if not isinstance(entry, dict) or key not in entry), None)
        if missing is not None or not isinstance(entry["path"], str):
            raise DataError(f"{file}: entry {number} has no {missing or 'path that is text'}")
    return entries


def whole_number(value: Any, where: str) -> int:
    """Return a label that is a whole number, or text of one.

    Raises:
        DataError: it is something else.
    """
    try:
        if isinstance(value, bool | float):
            raise ValueError
        number = int(value)
    except (TypeError, ValueError):
        raise DataError(f"{where}: {str(value)[:30]!r} is not a whole number") from None
    if abs(number) >= 2**62:
        raise DataError(f"{where}: {str(number)[:30]} is too large")
    return number


def _text(file: Path) -> str:
    if not file.is_file():
        raise DataError(f"{file} {path_state(file)}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{file} is larger than {MAX_FILE_BYTES:,} bytes")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
