"""Images with annotated instances in the layout of COCO, checked as they are read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64, UInt8

from sop_faiss.data.images.decode import MAX_PIXELS, size_problem
from sop_faiss.data.images.listing import FileSource, open_files
from sop_faiss.errors import DataError, SopError
from sop_faiss.evaluate.sets.coco_masks import check_segmentation, has_area, read_mask
from sop_faiss.files import read_json
from sop_faiss.paths import path_state

_FILES = ("annotations/instances_{}2017.json", "annotations/instances_{}.json")
_FOLDERS = ("{}2017", "images/{}2017", "images/{}", "{}")
_SMALLEST = 1.0
"""Pixels: instances with a smaller side in the image are not trained on, as in iBOT's library."""

_LONGEST = 1000
"""Letters in the name of an image."""
_LARGEST = 1e9
"""Pixels in a box's numbers, so that all can be calculated with."""


@dataclass(frozen=True)
class Instances:
    """What a detector learns of one image.

    Attributes:
        boxes: left, top, right and bottom, in pixels.
        labels: of each, from 1, in the order of the ids of the categories.
        masks: of each, 1 where it is.
    """

    boxes: Float32[np.ndarray, "n 4"]
    labels: Int64[np.ndarray, " n"]
    masks: UInt8[np.ndarray, "n h w"]


@dataclass(frozen=True)
class CocoImage:
    """An image's number, size in pixels, and annotations as the file has them."""

    id: int
    height: int
    width: int
    annotations: list[dict[str, Any]]

    @property
    def usable(self) -> list[dict[str, Any]]:
        """Return the annotations that are trained on: not of a crowd, with a mask, and large enough in the image."""
        ones = [each for each in self.annotations if not each.get("iscrowd") and has_area(each["segmentation"])]
        return [each for each in ones if self._sides(each) >= _SMALLEST]

    def box(self, annotation: dict[str, Any]) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of an annotation's box within the image."""
        left, top, width, height = map(float, annotation["bbox"])
        right, bottom = min(float(self.width), left + width), min(float(self.height), top + height)
        return max(0.0, left), max(0.0, top), right, bottom

    def _sides(self, annotation: dict[str, Any]) -> float:
        left, top, right, bottom = self.box(annotation)
        return min(right - left, bottom - top)


@dataclass(frozen=True)
class CocoSet:
    """A part of COCO.

    Attributes:
        file: of the annotations.
        images: in the order of the file.
        source: the same images as files.
        categories: name of each category by its id, in the order of ids.
    """

    file: Path
    images: list[CocoImage]
    source: FileSource
    categories: dict[int, str]

    def __len__(self) -> int:
        return len(self.images)

    def instances(self, row: int) -> Instances:
        """Return what is learned of an image, in the size that the file states."""
        image = self.images[row]
        labels = {number: place for place, number in enumerate(self.categories, start=1)}
        masks = np.zeros((len(image.usable), image.height, image.width), np.uint8)
        for mask, annotation in zip(masks, image.usable, strict=True):
            mask[:] = read_mask(annotation["segmentation"], image.height, image.width)
        boxes = np.array([image.box(each) for each in image.usable], np.float32).reshape(-1, 4)
        return Instances(boxes, np.array([labels[each["category_id"]] for each in image.usable], np.int64), masks)

    def check_size(self, pixels: UInt8[np.ndarray, "h w 3"], row: int) -> None:
        """Raise DataError unless an image is as large as the file says."""
        image = self.images[row]
        if pixels.shape[:2] != (image.height, image.width):
            raise DataError(
                f"it is {pixels.shape[1]} x {pixels.shape[0]} pixels, and {image.width} x {image.height} in {self.file}"
            )


def open_coco(root: Path, split: str, most: int | None = None) -> CocoSet:
    """Read a part of a data set laid out as COCO.

    Args:
        root: has `annotations/instances_SPLIT2017.json` or `instances_SPLIT.json`, and the images in `SPLIT2017/`,
            `images/SPLIT/` or `SPLIT/`.
        split: `train` or `val`.
        most: only this many images, the first; None: all.

    Raises:
        DataError: files are missing, or annotations are damaged; the first is named.
    """
    if not root.is_dir():
        raise DataError(f"{root} {path_state(root)}: wanted a folder laid out as COCO")
    file = _first(root, [name.format(split) for name in _FILES], "annotations")
    folder = _first(root, [f"{name.format(split)}/" for name in _FOLDERS], "images")
    try:
        content = read_json(file)
    except DataError:
        raise
    except SopError as error:
        raise DataError(str(error)) from None
    parts = [
        content.get(name) if isinstance(content, dict) else None for name in ("categories", "images", "annotations")
    ]
    for name, rows in zip(("categories", "images", "annotations"), parts, strict=True):
        if not isinstance(rows, list) or not all(isinstance(row, dict) and _is_id(row.get("id")) for row in rows):
            raise DataError(
                f"{file} has no list {name!r} of objects with an id: wanted COCO's annotations of instances"
            )
        numbers = [row["id"] for row in rows]
        if len(set(numbers)) < len(numbers):
            twice = next(one for one, other in itertools.pairwise(sorted(numbers)) if one == other)
            raise DataError(f"{file} has two {name} with id {twice}: wanted one")
    named, listed, annotated = parts
    assert named is not None and listed is not None and annotated is not None
    categories = {row["id"]: str(row.get("name", row["id"])) for row in sorted(named, key=lambda row: row["id"])}
    if not listed or not categories:
        raise DataError(f"{file} has {len(listed)} images and {len(categories)} categories: wanted one or more of each")
    images = {row["id"]: _image(row, file) for row in listed}
    for row in annotated:
        try:
            _check_annotation(row, images, categories)
        except DataError as error:
            raise DataError(f"annotation {row['id']} of {file}: {error}") from None
        images[row["image_id"]].annotations.append(row)
    names = [row["file_name"] for row in listed[:most]]
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"image {folder / name} of {file} {path_state(folder / name)}")
    source = open_files(str(folder), folder.absolute(), names, None, None)
    return CocoSet(file, list(images.values())[:most], source, categories)


def _first(root: Path, names: list[str], what: str) -> Path:
    """Return the first of several files or, with a slash behind, folders that is there."""
    for name in names:
        path = root / name
        if path.is_dir() if name.endswith("/") else path.is_file():
            return path
    raise DataError(f"{root} has no {what}: wanted {' or '.join(names)}")


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _image(row: dict[str, Any], file: Path) -> CocoImage:
    name, height, width = row.get("file_name"), row.get("height"), row.get("width")
    path = PurePosixPath(name) if isinstance(name, str) and 0 < len(name) < _LONGEST and "\0" not in name else None
    if path is None or path.is_absolute() or ".." in path.parts:
        raise DataError(
            f"image {row['id']} of {file} has file_name {str(name)[:100]!r}: wanted a path below the folder"
        )
    if type(height) is not int or type(width) is not int or size_problem(width, height, MAX_PIXELS):
        problem = size_problem(width, height, MAX_PIXELS) if type(height) is type(width) is int else "not numbers"
        raise DataError(
            f"image {row['id']} of {file} has height {str(height)[:20]} and width {str(width)[:20]}: {problem[:100]}"
        )
    return CocoImage(row["id"], height, width, [])


def _check_annotation(row: dict[str, Any], images: dict[int, CocoImage], categories: dict[int, str]) -> None:
    for name, known in (("image_id", images), ("category_id", categories)):
        if not _is_id(row.get(name)) or row[name] not in known:
            raise DataError(f"its {name} {row.get(name)!r} is not in the file")
    box = row.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(type(value) in (int, float) for value in box):
        raise DataError(f"its bbox is {str(box)[:100]}: wanted left, top, width and height")
    image = images[row["image_id"]]
    if not all(abs(value) < _LARGEST for value in box) or min(box[2:]) < 0:  # NaN, too
        raise DataError(f"its bbox is {str(box)[:100]}: wanted finite numbers, width and height 0 or more")
    if box[0] > image.width or box[1] > image.height or box[0] + box[2] < 0 or box[1] + box[3] < 0:
        raise DataError(f"its bbox {box} is outside of the image of {image.width} x {image.height} pixels")
    if row.get("iscrowd", 0) not in (0, 1):
        raise DataError(f"its iscrowd is {row['iscrowd']!r}: wanted 0 or 1")
    check_segmentation(row.get("segmentation"), image.height, image.width)
