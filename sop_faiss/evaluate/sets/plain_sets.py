"""Ground truth of a user's own images, from class folders or a CSV of groups or pairs.

* Class folders: `DIR/CLASS/*.jpg`. Every image of a class with two or more is a query; the others of its class are
  relevant to it, and it is itself left out of its ranking. With `DIR/query/CLASS/` and `DIR/database/CLASS/` the
  queries are the former and the gallery the latter.
* CSV with the columns `image,group`: as class folders. A third column `role` (`query` or `database`) parts the queries
  from the gallery.
* CSV with the columns `query,image`: each line says that an image is relevant to a query; a third column `relevance`
  may say `ok`, `junk` (neither right nor wrong) or `wrong` (an image of the gallery that nothing asks for).

Paths in a CSV are relative to its folder. The result is a `gnd.json`'s content, which `ground_truth.py` checks.
"""

from __future__ import annotations

import csv
import io
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sop_faiss.data.images.class_numbers import whole_numbers
from sop_faiss.data.images.keys import require_utf8
from sop_faiss.data.images.listing import open_folder
from sop_faiss.errors import DataError
from sop_faiss.paths import path_state

_IMAGE_HEADINGS = ("image", "path", "file", "filename")
_GROUP_HEADINGS = ("group", "label", "class", "instance")
_RELEVANCES = ("ok", "junk", "wrong")
_MAX_RELEVANT = 50_000_000


@dataclass(frozen=True)
class PlainSet:
    """What a folder or a CSV says.

    Attributes:
        content: as of a `gnd.json`.
        root: the folder that everything is in.
        query_folder: below root, what query names are relative to.
        gallery_folder: the folder of the gallery's names.
        alone: images without another of their group, which cannot be queries.
    """

    content: dict[str, Any]
    root: Path
    query_folder: str
    gallery_folder: str
    alone: int


def read_plain_set(path: Path) -> PlainSet:
    """Read class folders, or a CSV.

    Raises:
        DataError: there is neither, or nothing in it is relevant to anything.
    """
    if path.is_dir():
        return _from_folders(path)
    if path.suffix.lower() == ".csv" and path.is_file():
        return _from_csv(path)
    raise DataError(f"{path} {path_state(path)}: wanted a folder or a .csv file")


def _from_folders(root: Path) -> PlainSet:
    if (root / "query").is_dir() and (root / "database").is_dir():
        queries, gallery = _classes_of(root / "query"), _classes_of(root / "database")
        return PlainSet(groups_between(queries, gallery, root, one_folder=False), root, "query", "database", 0)
    images = _classes_of(root)
    content, alone = _among(images, root)
    return PlainSet(content, root, "", "", alone)


def _classes_of(folder: Path) -> dict[str, str]:
    """Map the path of each image to its class below the folder."""
    source = open_folder(str(folder), folder)
    require_utf8(source.members)
    if not all("/" in member for member in source.members):
        raise DataError(
            f"{folder} has images outside class folders: wanted CLASS/image.jpg, where images of one class are "
            "relevant to each other, or a gnd.json"
        )
    return {member: member.partition("/")[0] for member in source.members}


def _among(groups: Mapping[str, str], origin: Path) -> tuple[dict[str, Any], int]:
    """Every image asks for the others of its group; and how many have no other."""
    images = list(groups)
    positions = _positions_by_group(groups)
    _require_reasonable(sum(len(own) ** 2 for own in positions.values()), origin)
    queries = [place for place, image in enumerate(images) if len(positions[groups[image]]) > 1]
    if not queries:
        raise DataError(f"{origin}: no two images share a group, so nothing is relevant to anything")
    gnd = [
        {"ok": [other for other in positions[groups[images[place]]] if other != place], "junk": [place]}
        for place in queries
    ]
    content = {"imlist": images, "qimlist": [images[place] for place in queries], "gnd": gnd}
    return content, len(images) - len(queries)


def groups_between(
    queries: Mapping[str, str], gallery: Mapping[str, str], origin: Path, *, one_folder: bool
) -> dict[str, Any]:
    """Return the content in which every query asks for the gallery's images of its group.

    Groups that are whole numbers are compared as such. Where queries and gallery are in one folder, a query that is in
    the gallery, too, is left out of its own ranking.

    Raises:
        DataError: no query's group has an image in the gallery.
    """
    own, others = whole_numbers(queries.values()), whole_numbers(gallery.values())
    if own is not None and others is not None:
        queries = {image: str(own[group]) for image, group in queries.items()}
        gallery = {image: str(others[group]) for image, group in gallery.items()}
    positions = _positions_by_group(gallery)
    _require_reasonable(sum(len(positions.get(group, ())) for group in queries.values()), origin)
    if not any(group in positions for group in queries.values()):
        raise DataError(f"{origin}: no query's group has an image in the database, so nothing is relevant to anything")
    own_place = {image: place for place, image in enumerate(gallery)} if one_folder else {}
    gnd = [
        {
            "ok": [place for place in positions.get(group, []) if place != own_place.get(image)],
            "junk": [own_place[image]] if image in own_place else [],
        }
        for image, group in queries.items()
    ]
    return {"imlist": list(gallery), "qimlist": list(queries), "gnd": gnd}


def _positions_by_group(groups: Mapping[str, str]) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = defaultdict(list)
    for place, group in enumerate(groups.values()):
        positions[group].append(place)
    return dict(positions)


def _require_reasonable(relevant: int, origin: Path) -> None:
    if relevant > _MAX_RELEVANT:
        raise DataError(
            f"{origin}: {relevant:,} pairs of images would be relevant, at most {_MAX_RELEVANT:,} are taken: put "
            "some images of each class into query/ and the others into database/"
        )


def _from_csv(file: Path) -> PlainSet:
    heading, lines = _read_table(file)
    image = next((name for name in heading if name in _IMAGE_HEADINGS), None)
    group = next((name for name in heading if name in _GROUP_HEADINGS), None)
    root = file.parent
    if image is not None and "query" in heading:
        return PlainSet(_from_pairs(lines, image, file), root, "", "", 0)
    if image is None or group is None:
        raise DataError(
            f"{file}: the first line names {', '.join(heading)}; wanted image,group (and role) or query,image (and "
            "relevance)"
        )
    if "role" not in heading:
        content, alone = _among(_groups(lines, image, group, file), file)
        return PlainSet(content, root, "", "", alone)
    for number, line in lines:
        if line["role"] not in ("query", "database"):
            raise DataError(f"{file} line {number}: role {line['role']!r}, wanted query or database")
    by_role = {
        role: _groups([each for each in lines if each[1]["role"] == role], image, group, file)
        for role in ("query", "database")
    }
    return PlainSet(groups_between(by_role["query"], by_role["database"], file, one_folder=True), root, "", "", 0)


_Lines = Sequence[tuple[int, dict[str, str]]]


def _read_table(file: Path) -> tuple[list[str], _Lines]:
    """Headings in lower case, and each line by heading with its number."""
    try:
        text = io.StringIO(file.read_bytes().decode("utf-8-sig"), newline="")  # cells may hold line breaks
        reader = csv.reader(text, strict=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except UnicodeDecodeError:
        raise DataError(f"{file} is not UTF-8 text: save it as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{file} is not CSV ({error})") from None
    if len(rows) < 2:
        raise DataError(f"{file} has no line below its heading: wanted image,group or query,image and images")
    heading = [cell.lower() for cell in rows[0][1]]
    for number, row in rows[1:]:
        if len(row) != len(heading) or not all(row):
            raise DataError(f"{file} line {number}: wanted {len(heading)} filled columns, {','.join(heading)}")
    return heading, [(number, dict(zip(heading, row, strict=True))) for number, row in rows[1:]]


def _groups(lines: Iterable[tuple[int, dict[str, str]]], image: str, group: str, file: Path) -> dict[str, str]:
    groups: dict[str, str] = {}
    for number, line in lines:
        if groups.setdefault(line[image], line[group]) != line[group]:
            raise DataError(f"{file} line {number}: {line[image]} is in {groups[line[image]]} and {line[group]}")
    return groups


def _from_pairs(lines: _Lines, image: str, file: Path) -> dict[str, Any]:
    positions: dict[str, int] = {}
    lists: dict[str, dict[str, list[int]]] = {}
    for number, line in lines:
        relevance = line.get("relevance", "ok").lower()
        if relevance not in _RELEVANCES:
            raise DataError(f"{file} line {number}: relevance {relevance!r}, wanted {', '.join(_RELEVANCES)}")
        place = positions.setdefault(line[image], len(positions))
        own = lists.setdefault(line["query"], {name: [] for name in _RELEVANCES})
        if any(place in own[name] for name in _RELEVANCES):
            raise DataError(f"{file} line {number}: {line[image]} was already judged for {line['query']}")
        if relevance == "ok" and posixpath.normpath(line[image]) == posixpath.normpath(line["query"]):
            raise DataError(f"{file} line {number}: {line[image]} is relevant to itself: remove the line, or say junk")
        own[relevance].append(place)
    # A query that is in the gallery, too, would find itself: it is left out of its own ranking.
    for query, own in lists.items():
        place = positions.get(query, -1)
        if place >= 0 and not any(place in own[name] for name in _RELEVANCES):
            own["junk"].append(place)
    if not any(own["ok"] for own in lists.values()):
        raise DataError(f"{file}: no line says ok, so nothing is relevant to anything")
    gnd = [{"ok": own["ok"], "junk": own["junk"]} for own in lists.values()]
    return {"imlist": list(positions), "qimlist": list(lists), "gnd": gnd}
