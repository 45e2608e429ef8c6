"""Images that a text or CSV file lists, with or without labels."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.class_numbers import whole_numbers
from sop_faiss.data.images.listing import FileSource, open_files
from sop_faiss.data.shards.shard_source import common_folder
from sop_faiss.errors import DataError
from sop_faiss.paths import path_state

_HEADINGS = ("path", "file", "filename", "image", "img")
_LIST_BYTES_LIMIT = 4 << 30
_NO_LABEL = frozenset(("", "-1"))
_NEGATIVE = re.compile(r"-[0-9]+")


class _Line(NamedTuple):
    """One image of a list."""

    number: int  # of the line in the file, from 1
    path: str
    label: str  # "" for none


def open_list(description: str, file: Path) -> FileSource:
    """Open the images of a list: `path` or `path,label` per line; paths are absolute or relative to the list's folder.

    A heading, as `path,label`, is allowed. `.csv` is read as CSV (quotes allowed). In other lists a label follows a
    tab, or the last comma of a line that is not itself a file. Labels are integers of 0 or more, or else class names;
    an empty one, or -1, means none.

    Raises:
        DataError: the list is unreadable or empty, or a line is wrong: the file is missing, named twice, or its label
            is negative. The line number is in the message.
    """
    lines = _read_lines(description, file)
    if not lines:
        raise DataError(f"list {description} names no image: wanted one `path` or `path,label` per line")
    base = file.absolute().parent
    paths = [os.path.normpath(base / line.path) for line in lines]
    _check_paths(description, base, lines, paths)
    inside = all(path.startswith(f"{base}{os.sep}") for path in paths)
    root = base if inside else common_folder([Path(path).parent for path in paths])
    members = [Path(path).relative_to(root).as_posix() for path in paths]
    labels, names = _parse_labels(description, lines)
    return open_files(description, root, members, labels, names)


def _read_lines(description: str, file: Path) -> list[_Line]:
    try:
        if file.stat().st_size > _LIST_BYTES_LIMIT:
            raise DataError(f"list {description} is larger than 4 GiB: wanted a list of images")
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"list {description} is not UTF-8 text: save it as UTF-8") from None
    if file.suffix.lower() == ".csv":
        return _read_csv(description, text)
    lines: list[_Line] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.rstrip("\r")
        path, _, label = (part.strip() for part in (line.partition("\t") if "\t" in line else _split_comma(line, file)))
        heading = not lines and path.lower() in _HEADINGS and not (file.parent / path).exists()
        if not line.strip() or heading:
            continue
        if "\t" in label:
            columns = line.count("\t") + 1
            raise DataError(f"list {description} line {number}: {columns} columns, wanted path and label")
        lines.append(_Line(number, path, label))
    return lines


def _split_comma(line: str, file: Path) -> tuple[str, str, str]:
    if "," not in line or "\0" in line or (file.parent / line.strip()).exists():
        return line, "", ""
    return line.rpartition(",")


def _read_csv(description: str, text: str) -> list[_Line]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)  # cells may hold line breaks
    lines: list[_Line] = []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if not lines and row[0].strip().lower() in _HEADINGS:
                continue
            if len(row) > 2:
                raise DataError(f"list {description} line {reader.line_num}: {len(row)} columns, wanted path,label")
            lines.append(_Line(reader.line_num, row[0].strip(), row[1].strip() if len(row) > 1 else ""))
    except csv.Error as error:
        raise DataError(f"list {description} line {reader.line_num}: not CSV ({error})") from None
    return lines


def _check_paths(description: str, base: Path, lines: Sequence[_Line], paths: Sequence[str]) -> None:
    first_line: dict[str, int] = {}
    missing: list[_Line] = []
    for line, path in zip(lines, paths, strict=True):
        if "\0" in path or not line.path:
            raise DataError(f"list {description} line {line.number}: {line.path!r} is not a path")
        if first_line.setdefault(path, line.number) != line.number:
            raise DataError(
                f"list {description} line {line.number}: {line.path} is already on line {first_line[path]}; "
                "name each image once"
            )
        if not os.path.exists(path):  # noqa: PTH110  (a third of pathlib's time, for each of millions)
            missing.append(line)
        elif line.path.endswith("/") or os.path.isdir(path):  # noqa: PTH112
            raise DataError(f"list {description} line {line.number}: {line.path} is a folder, wanted an image")
    if missing:
        more = f" ({len(missing)} of {len(lines)} listed files are missing)" if len(missing) > 1 else ""
        number, path, _ = missing[0]
        raise DataError(
            f"list {description} line {number}: {path} {path_state(base / path)}{more}; "
            "paths are relative to the list's folder"
        )


def _parse_labels(description: str, lines: Sequence[_Line]) -> tuple[Int64[np.ndarray, " n"] | None, list[str] | None]:
    """Return the labels and, if they are given as names, the sorted class names."""
    names = sorted({line.label for line in lines} - _NO_LABEL)
    for line in lines:
        if line.label not in _NO_LABEL and _NEGATIVE.fullmatch(line.label):
            raise DataError(f"list {description} line {line.number}: label {line.label}, wanted 0 or more (-1: none)")
    if not names:
        return None, None
    own = whole_numbers(names)
    numbers = (own or {name: number for number, name in enumerate(names)}) | dict.fromkeys(_NO_LABEL, -1)
    return np.array([numbers[line.label] for line in lines], dtype=np.int64), names if own is None else None
