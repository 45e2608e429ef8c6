"""Published retrieval data sets in the folders they come in: who asks for what, in the terms of a ground truth.

Each reader takes the folder of a data set and returns the content of a gnd.json whose names are files below it. What
the folders hold, and which metrics belong to them, is in docs/evaluation.md; the metrics are in `protocols.py`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float64

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.protocols import ILIAS_LISTS, PROTOCOLS
from sop_faiss.evaluate.sets.ground_truth import NO_CLASS, PLAIN, Classes
from sop_faiss.evaluate.sets.layout_files import (
    first_of,
    list_images,
    read_columns,
    read_entries,
    read_words,
    whole_number,
)
from sop_faiss.evaluate.sets.plain_sets import groups_between

RADIUS_METERS = 25.0
"""Within this distance an image shows the query's place, in nearly all work on place recognition."""

_SCALE_BOUNDS = (0.06880213760855043, 0.13526567164179104, 0.2729876723163842)
_CLUTTER_BOUNDS = (18.0, 33.0, 53.0)
"""Quarters of the positives of ILIAS, from its evaluation; a value on a bound is in the upper quarter."""

_LARGEST = 1e12
"""Of coordinates in meters, whose squares are added."""

_MARKET_NAME = re.compile(r"(-1|\d+)_c(\d+)")


@dataclass(frozen=True)
class Layout:
    """What the folders say.

    Attributes:
        content: as of a `gnd.json`; names are files relative to root.
        root: the folder that everything is in.
        lists: of each query.
        classes: of sets whose queries are classified.
        choices: further ones, for the result file.
    """

    content: dict[str, Any]
    root: Path
    lists: tuple[str, ...] = PLAIN
    classes: Classes | None = None
    choices: dict[str, Any] = field(default_factory=dict)


def read_layout(protocol: str, place: Path, radius: float) -> Layout:
    """Read the data set of a protocol that has a layout.

    Args:
        protocol: a key of LAYOUTS.
        place: the data set's folder; of `place` also a CSV.
        radius: of `place`, in meters.

    Raises:
        ConfigError: the radius is impossible.
        DataError: the folder is not of this layout, or contradicts itself; the message says what is wanted.
    """
    if not 0 < radius < math.inf:
        raise ConfigError(f"`radius={radius}`: wanted meters above 0")
    reader, wanted = LAYOUTS[protocol]
    if protocol == "place":
        reader = partial(_place, radius=radius)
    try:
        layout = reader(place)
        if not layout.content["qimlist"] or not layout.content["imlist"]:
            raise DataError(f"{place} has no query or no image to search")
    except DataError as error:
        raise DataError(f"protocol {protocol}: {error}; wanted {wanted}") from None
    return layout


def _content(gallery: Sequence[str], gnd: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"imlist": list(gallery), "qimlist": list(gnd), "gnd": list(gnd.values())}


def _positions(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Map each key to the positions where it stands."""
    found: dict[Any, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        found[key].append(position)
    return dict(found)


def _cub(root: Path) -> Layout:
    """Metric learning on CUB-200-2011: the second half of the classes."""
    labels_file = root / "image_class_labels.txt"
    paths = dict(read_words(root / "images.txt", 2))
    labels = {number: whole_number(label, str(labels_file)) for number, label in read_words(labels_file, 2)}
    if unknown := labels.keys() - paths.keys():
        raise DataError(f"{labels_file} names image {min(unknown)}, which images.txt does not")
    count = max(labels.values(), default=0)
    tested = {f"images/{paths[number]}": str(label) for number, label in labels.items() if label > count // 2}
    return Layout(
        groups_between(tested, tested, root, one_folder=True), root, choices={"classes": [count // 2 + 1, count]}
    )


def _sop(root: Path) -> Layout:
    rows = read_words(root / "Ebay_test.txt", 4, skipped=1)
    labels = {path: label for _, label, _, path in rows}
    return Layout(groups_between(labels, labels, root, one_folder=True), root)


def _inshop(root: Path) -> Layout:
    file = first_of(root, "Eval/list_eval_partition.txt", "list_eval_partition.txt")
    folder = "Img/" if (root / "Img").is_dir() else ""
    parts: dict[str, dict[str, str]] = {"train": {}, "query": {}, "gallery": {}}
    for name, item, status in read_words(file, 3, skipped=2):
        if status not in parts:
            raise DataError(f"{file}: {status[:30]!r} is none of {', '.join(parts)}")
        parts[status][folder + name] = item
    return Layout(groups_between(parts["query"], parts["gallery"], root, one_folder=False), root)


def _reid(root: Path) -> Layout:
    """Market-1501 and its kin. Images of the same person by the same camera are junk, and so, for all queries, are
    those of -1: these are left out of the gallery."""
    marks = {name: _market_marks(name) for folder in _MARKET_FOLDERS for name in list_images(root, folder)}
    gallery = [name for name, (person, _) in marks.items() if name.startswith(_MARKET_FOLDERS[1]) and person != "-1"]
    of_person = _positions(marks[name][0] for name in gallery)
    gnd = {}
    for name, (person, camera) in marks.items():
        if name.startswith(f"{_MARKET_FOLDERS[0]}/"):
            own = of_person.get(person, [])
            same = [place for place in own if marks[gallery[place]][1] == camera]
            gnd[name] = {"ok": [place for place in own if place not in same], "junk": same}
    return Layout(_content(gallery, gnd), root, choices={"ignored_by_all": len(marks) - len(gallery) - len(gnd)})


_MARKET_FOLDERS = ("query", "bounding_box_test")


def _market_marks(name: str) -> tuple[str, str]:
    found = _MARKET_NAME.match(PurePosixPath(name).name)
    if found is None:
        raise DataError(f"{name} does not begin with a person and a camera")
    return found[1], found[2]


def _place(place: Path, radius: float) -> Layout:
    """Places by position: the images of the database within a radius are relevant."""
    if place.suffix.lower() == ".csv":
        root, parts = place.parent, _places_of_table(place)
    else:
        root, above = place, "images/test/" if (place / "images" / "test").is_dir() else ""
        parts = {
            role: {name: _place_of_name(name) for name in list_images(root, above + role)}
            for role in ("queries", "database")
        }
    gallery = list(parts["database"])
    found = within_radius(list(parts["queries"].values()), list(parts["database"].values()), radius)
    gnd = {name: {"ok": near} for name, near in zip(parts["queries"], found, strict=True)}
    return Layout(_content(gallery, gnd), root, choices={"radius_meters": radius})


def _places_of_table(file: Path) -> dict[str, dict[str, tuple[float, float]]]:
    parts: dict[str, dict[str, tuple[float, float]]] = {"queries": {}, "database": {}}
    roles = {"query": "queries", "database": "database"}
    for name, role, east, north in read_columns(file, ("image", "role", "easting", "northing")):
        if role not in roles:
            raise DataError(f"{file}: role {role[:30]!r} of {name[:100]}, wanted query or database")
        parts[roles[role]][name] = _two_numbers(east, north, f"{file}: {name[:100]}")
    return parts


def _place_of_name(name: str) -> tuple[float, float]:
    parts = PurePosixPath(name).name.split("@")
    if len(parts) < 4:
        raise DataError(f"{name} has no @easting@northing@")
    return _two_numbers(parts[1], parts[2], name)


def _two_numbers(first: str, second: str, where: str) -> tuple[float, float]:
    try:
        numbers = float(first), float(second)
    except ValueError:
        numbers = math.nan, math.nan
    if not all(abs(number) < _LARGEST for number in numbers):  # NaN is not smaller
        raise DataError(f"{where}: {first[:30]!r} and {second[:30]!r} are not two numbers below {_LARGEST:g}")
    return numbers


def within_radius(
    queries: Sequence[Sequence[float]], database: Sequence[Sequence[float]], radius: float
) -> list[list[int]]:
    """Find positions in the database within the radius, rising; only a strip of the map is looked at for each."""
    places: Float64[np.ndarray, "n 2"] = np.array(database, np.float64).reshape(-1, 2)
    order = np.argsort(places[:, 0], kind="stable")
    east = places[order, 0]
    found = []
    for place in np.array(queries, np.float64).reshape(-1, 2):
        strip = order[slice(*np.searchsorted(east, [place[0] - radius, np.nextafter(place[0] + radius, np.inf)]))]
        near = ((places[strip] - place) ** 2).sum(axis=1) <= radius * radius
        found.append(np.sort(strip[near]).tolist())
    return found


def _gldv2(root: Path) -> Layout:
    """Google Landmarks v2, retrieval: index and the test images that are not ignored, by public and private part."""
    places = ("{}", "metadata/{}", "ground_truth/{}")
    solution = first_of(root, *(place.format("retrieval_solution_v2.1.csv") for place in places))
    index = first_of(root, *(place.format("index.csv") for place in places))
    positions = {name: position for position, (name,) in enumerate(read_columns(index, ("id",)))}
    gnd = {}
    for name, images, usage in read_columns(solution, ("id", "images", "usage")):
        if usage == "Ignored" or images in ("", "None"):
            continue
        if usage.lower() not in PROTOCOLS["gldv2"].lists:
            raise DataError(f"{solution}: usage {usage[:30]!r} of {name[:30]}")
        relevant = list(dict.fromkeys(images.split()))
        if unknown := [each for each in relevant if each not in positions]:
            raise DataError(f"{solution}: {unknown[0][:30]} of {name[:30]} is not in {index.name}")
        gnd[_landmark_file("test", name)] = {usage.lower(): [positions[each] for each in relevant]}
    gallery = [_landmark_file("index", name) for name in positions]
    return Layout(_content(gallery, gnd), root, PROTOCOLS["gldv2"].lists, choices={"solution": solution.name})


def _landmark_file(folder: str, name: str) -> str:
    return "/".join((folder, *name[:3], f"{name}.jpg"))


def _ilias(root: Path) -> Layout:
    """ILIAS core; its distractors are streamed. Queries are whole images, as in the published extraction."""
    files = [file.relative_to(root).as_posix() for file in sorted((root / "ilias_core").glob("*/*/*.jpg"))]
    gallery = [file for file in files if PurePosixPath(file).parent.name == "pos"]
    rows = [line[0].split(",") for line in read_words(root / "image_ids" / "positive_ids.txt", 1)]
    if wrong := [row for row in rows if len(row) != 3]:
        raise DataError(f"image_ids/positive_ids.txt: {','.join(wrong[0])[:100]!r} is not id,scale,clutter")
    groups = {f"ilias_core/{name.strip()}": _ilias_list(scale, clutter) for name, scale, clutter in rows}
    if differing := groups.keys() ^ set(gallery):
        raise DataError(f"{min(differing)} is not in both image_ids/positive_ids.txt and the folders")
    of_object = _positions(PurePosixPath(file).parts[1] for file in gallery)
    gnd = {}
    for file in files:
        if PurePosixPath(file).parent.name == "query":
            own: dict[str, list[int]] = defaultdict(list)
            for place in of_object.get(PurePosixPath(file).parts[1], ()):
                own[groups[gallery[place]]].append(place)
            gnd[file] = dict(own)
    return Layout(_content(gallery, gnd), root, ILIAS_LISTS)


def _ilias_list(scale: str, clutter: str) -> str:
    share, around = _two_numbers(scale, clutter, "image_ids/positive_ids.txt")
    quarters = np.searchsorted(_SCALE_BOUNDS, share, "right"), np.searchsorted(_CLUTTER_BOUNDS, around, "right")
    return ILIAS_LISTS[4 * int(quarters[0]) + int(quarters[1])]


def _met(root: Path) -> Layout:
    """Met: queries of a class or of none, those of valset.json for choices only."""
    folder = root / "ground_truth"
    database = first_of(folder, "MET_database.json", "mini_MET_database.json")
    entries = read_entries(database, ("path", "id"))
    labels = [whole_number(entry["id"], str(database)) for entry in entries]
    of_class = _positions(labels)
    gnd, asked = {}, []
    for part in ("val", "test"):
        file = folder / f"{part}set.json"
        for entry in read_entries(file, ("path",)):
            label = whole_number(entry.get("MET_id", NO_CLASS), str(file))
            gnd[f"images/{entry['path']}"] = {part: of_class.get(label, [])}
            asked.append((label, part == "val"))
    if len(asked) != len(gnd):
        raise DataError(f"{folder} names one query twice")
    queries, validation = np.array(asked, np.int64).reshape(-1, 2).T
    classes = Classes(np.array(labels, np.int64), queries, validation.astype(bool))
    gallery = [f"images/{entry['path']}" for entry in entries]
    choices = {"database_list": database.name}
    return Layout(_content(gallery, gnd), root, PROTOCOLS["met"].lists, classes, choices)


def _uned(root: Path) -> Layout:
    """Universal image embeddings: the domains' test queries, among the galleries of all domains."""
    domains = sorted(file.parent.name for file in (root / "info_files").glob("*/test.json"))
    positions: dict[str, int] = {}
    of_class: dict[tuple[str, int], list[int]] = defaultdict(list)
    asked: dict[str, tuple[str, list[int]]] = {}
    for domain in domains:
        tested = _uned_entries(root / "info_files" / domain / "test.json")
        index = root / "info_files" / domain / "index.json"
        for name, labels in (_uned_entries(index) if index.is_file() else tested).items():
            for label in labels:
                of_class[domain, label].append(positions.setdefault(name, len(positions)))
        asked |= {name: (domain, labels) for name, labels in tested.items()}
    gnd = {}
    for name, (domain, labels) in asked.items():
        own = [positions[name]] if name in positions else []
        relevant = {place for label in labels for place in of_class.get((domain, label), ())}
        gnd[name] = {domain: sorted(relevant.difference(own)), "junk": own}
    return Layout(_content(list(positions), gnd), root, (*domains, "junk"))


def _uned_entries(file: Path) -> dict[str, list[int]]:
    """Classes of each image."""
    found = {}
    for entry in read_entries(file, ("path", "class_id")):
        labels = entry["class_id"] if isinstance(entry["class_id"], list) else [entry["class_id"]]
        if not labels:
            raise DataError(f"{file}: {entry['path'][:100]} has no class")
        found[f"images/{entry['path']}"] = [whole_number(label, str(file)) for label in labels]
    return found


def _copydays(root: Path) -> Layout:
    """Copydays: originals are searched; a copy has the first four characters of its original's name."""
    gallery = list_images(root, "original")
    of_scene = _positions(PurePosixPath(name).name[:4] for name in gallery)
    blocks = [place for kind in ("jpegqual", "crops") for place in (root / kind).glob("*") if place.is_dir()]
    blocks.sort(key=lambda place: (place.parent.name, len(place.name), place.name))
    folders = [*(["strong"] if (root / "strong").is_dir() else []), *(f"{b.parent.name}/{b.name}" for b in blocks)]
    gnd = {
        name: {folder: of_scene.get(PurePosixPath(name).name[:4], [])}
        for folder in folders
        for name in list_images(root, folder)
    }
    return Layout(_content(gallery, gnd), root, (*folders, "junk"))


def _amstertime(root: Path) -> Layout:
    """AmsterTime: each old image asks for the new one of its name, and the other way around."""
    names = [*list_images(root, "new"), *list_images(root, "old")]
    sides = _positions(name.partition("/")[0] for name in names)
    pairs = _positions(PurePosixPath(name).stem for name in names)
    gnd = {}
    for name in names:
        side = name.partition("/")[0]
        others = [place for place in pairs[PurePosixPath(name).stem] if names[place].partition("/")[0] != side]
        gnd[name] = {side: others, "junk": sides[side]}
    return Layout(_content(names, gnd), root, PROTOCOLS["amstertime"].lists)


LAYOUTS: dict[str, tuple[Callable[[Path], Layout], str]] = {
    "cub": (_cub, "CUB_200_2011 with images.txt, image_class_labels.txt and images/"),
    "inshop": (_inshop, "In-shop with Eval/list_eval_partition.txt, and img/ alone or in Img/"),
    "sop": (_sop, "Stanford Online Products with Ebay_test.txt and NAME_final/"),
    "reid": (_reid, "query/ and bounding_box_test/ with names that begin as 0001_c1, as in Market-1501"),
    "place": (
        partial(_place, radius=RADIUS_METERS),
        "database/ and queries/, alone or in images/test/, with names @EASTING@NORTHING@...; or a .csv of "
        "image,role,easting,northing",
    ),
    "gldv2": (_gldv2, "Google Landmarks v2 with index.csv, retrieval_solution_v2.1.csv, index/ and test/"),
    "ilias": (_ilias, "ILIAS with ilias_core/NAME/query/ and pos/, and image_ids/positive_ids.txt"),
    "met": (_met, "Met with images/ and ground_truth/: MET_database.json, valset.json, testset.json"),
    "uned": (_uned, "UnED with info_files/DOMAIN/test.json (and index.json) and images/"),
    "copydays": (_copydays, "Copydays with original/, and strong/, jpegqual/QUALITY/ or crops/SHARE/"),
    "amstertime": (_amstertime, "AmsterTime with old/ and new/"),
}
"""Readers by protocol, and what each wants."""
