"""Images whose pixels have classes, in two layouts: files, classes and masks, checked before anything is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from sop_faiss.config.config_files import read_mapping
from sop_faiss.data.images.decode import open_image
from sop_faiss.data.images.keys import IMAGE_SUFFIXES, is_hidden
from sop_faiss.data.images.listing import FileSource, open_files
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.video_set import read_mask
from sop_faiss.evaluate.trained.segment_score import VOID
from sop_faiss.paths import path_state
from sop_faiss.progress import ProgressCallback

_ADE_CLASSES = 150
_UNKNOWN = 254
"""In the table of values: not a class."""
_TRANSPOSED = (5, 6, 7, 8)
"""Orientations of EXIF that swap width and height."""
_ORIENTATION = 0x0112
_WANTED = (
    "wanted ADE20K's layout (images/training, images/validation, annotations/...) or images/train, images/val, "
    "semantic/train, semantic/val and semantic/classes.yaml"
)
COCO_SUPERCATEGORIES: dict[str, tuple[int, ...]] = {
    "person": (1,),
    "vehicle": (*range(2, 10),),
    "outdoor": (10, 11, 13, 14, 15),
    "animal": (*range(16, 26),),
    "accessory": (27, 28, 31, 32, 33),
    "sports": (*range(34, 44),),
    "kitchen": (44, *range(46, 52)),
    "food": (*range(52, 62),),
    "furniture": (62, 63, 64, 65, 67, 70),
    "electronic": (*range(72, 78),),
    "appliance": (*range(78, 83),),
    "indoor": (*range(84, 91),),
    "textile": (92, 93, 109, 141, 168, 200),
    "building": (95, 128, 151, 166, 197),
    "raw-material": (100, 195),
    "furniture-stuff": (107, 112, 130, 133, 156, 161, 188, 189),
    "floor": (118, 190),
    "plant": (119, 184, 193),
    "food-stuff": (122, 196),
    "ground": (125, 144, 145, 147, 149, 154, 159, 191, 194),
    "structural": (138, 185),
    "water": (148, 155, 178),
    "wall": (171, 175, 176, 177, 199),
    "window": (180, 181),
    "ceiling": (186,),
    "sky": (187,),
    "solid": (192, 198),
}
"""Ids of COCO's panoptic categories, as its `panoptic_coco_categories.json` groups them."""


@dataclass(frozen=True)
class Classes:
    """Names, and the number of the class for each value of a mask: `VOID` of 0 and 255."""

    names: tuple[str, ...]
    numbers: UInt8[np.ndarray, 256]

    @classmethod
    def of_values(cls, values: Mapping[str, tuple[int, ...]]) -> Classes:
        """Make the table of the values that classes have in masks; classes are numbered in order."""
        numbers = np.full(256, _UNKNOWN, np.uint8)
        numbers[[0, VOID]] = VOID
        for number, of_class in enumerate(values.values()):
            numbers[list(of_class)] = number
        return cls(tuple(values), numbers)


@dataclass(frozen=True)
class SegmentSet:
    """Images and their masks, in one order.

    Attributes:
        images: where the images are.
        masks: the file of each.
        classes: of both sets.
    """

    images: FileSource
    masks: tuple[Path, ...]
    classes: Classes

    def read_mask(self, row: int) -> UInt8[np.ndarray, "h w"]:
        """Read the class of each pixel.

        Raises:
            DataError: the mask cannot be read, or has a value that is not of a class.
        """
        values = read_mask(self.masks[row])
        found: UInt8[np.ndarray, "h w"] = self.classes.numbers[values]
        if (found == _UNKNOWN).any():
            raise DataError(
                f"mask {self.masks[row]} has the value {values[found == _UNKNOWN].max()}, which is none of the "
                f"{len(self.classes.names)} classes (0 and 255 are void)"
            )
        return found

    def count_pixels(self, progress: ProgressCallback | None = None) -> Int64[np.ndarray, "n c"]:
        """Count each image's pixels of each class, and check every mask, and its size against the image's header.

        Raises:
            DataError: a file cannot be read, sizes differ, a value is unknown, or no pixel at all has a class.
        """
        counts = np.zeros((len(self.masks), len(self.classes.names)), np.int64)
        for row in range(len(self.masks)):
            mask = self.read_mask(row)
            self._check_size(row, mask.shape)
            counts[row] = np.bincount(mask[mask != VOID], minlength=counts.shape[1])
            if progress is not None:
                progress(row + 1, len(self.masks))
        if not counts.any():
            raise DataError(
                f"{self.masks[0].parent}: no pixel of its {len(self.masks)} masks has a class, all are void"
            )
        return counts

    def _check_size(self, row: int, shape: tuple[int, ...]) -> None:
        file = self.images.root / self.images.members[row]
        try:
            image = open_image(self.images.read(row))
        except DataError as error:
            raise DataError(f"image {file} cannot be used ({error}): restore it") from None
        size = image.size
        with contextlib.suppress(Exception):  # damaged EXIF, which the decoder ignores, too
            if image.format != "HEIF" and image.getexif().get(_ORIENTATION) in _TRANSPOSED:
                size = (size[1], size[0])
        if size != (shape[1], shape[0]):
            raise DataError(
                f"mask {self.masks[row]} is {shape[1]} x {shape[0]} pixels, its image {size[0]} x {size[1]}: wanted "
                "one size"
            )


def open_segment_sets(data: Path, *, supercategories: bool = False) -> tuple[SegmentSet, SegmentSet]:
    """List the training and the test images of a folder in one of the layouts.

    Args:
        data: the folder.
        supercategories: classes are COCO's supercategories, where masks hold its category ids.

    Raises:
        ConfigError: the layout has no COCO categories.
        DataError: folders or files are missing, an image has no mask or a mask no image.
    """
    if (data / "annotations" / "training").is_dir():
        if supercategories:
            raise ConfigError("`supercategories` does not apply to ADE20K: leave it out")
        classes = Classes.of_values({str(value): (value,) for value in range(1, _ADE_CLASSES + 1)})
        masks, names = "annotations", ("training", "validation")
    elif (data / "semantic" / "train").is_dir():
        values = COCO_SUPERCATEGORIES if supercategories else _listed_classes(data / "semantic" / "classes.yaml")
        classes, masks, names = Classes.of_values(values), "semantic", ("train", "val")
    else:
        raise DataError(f"{data} {path_state(data)}: {_WANTED}")
    train, test = (_open_set(data / "images" / name, data / masks / name, classes) for name in names)
    return train, test


def _listed_classes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read `classes: {value: name}`; 0 is void whatever its name."""
    listed: Any = read_mapping(file, "config").get("classes")
    try:
        named = {value: str(name) for value, name in listed.items() if value != 0}
    except AttributeError:
        named = {}
    if (
        not named
        or not all(type(value) is int and 1 <= value < _UNKNOWN for value in named)
        or len(set(named.values())) < len(named)
    ):
        raise DataError(f"{file}: wanted classes: with different names of values from 1 to {_UNKNOWN - 1}")
    return {name: (value,) for value, name in sorted(named.items())}


def _open_set(folder: Path, masks: Path, classes: Classes) -> SegmentSet:
    images, found = _files(folder, IMAGE_SUFFIXES), _files(masks, (".png",))
    for one, other, lacks in ((images, found, f"mask in {masks}"), (found, images, f"image in {folder}")):
        if (alone := min(one.keys() - other.keys(), default=None)) is not None:
            raise DataError(f"{one[alone]} has no {lacks}: wanted one of each name")
    stems = sorted(images)
    source = open_files(str(folder), folder, [images[stem].name for stem in stems], None, None)
    return SegmentSet(source, tuple(found[stem] for stem in stems), classes)


def _files(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of a folder by their names without suffix."""
    if not folder.is_dir():
        raise DataError(f"{folder} {path_state(folder)}: {_WANTED}")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in suffixes and not is_hidden(path.name):
            if path.stem in found:
                raise DataError(f"{found[path.stem]} and {path} have one name: remove one")
            found[path.stem] = path
    if not found:
        raise DataError(f"{folder} has no {' or '.join(suffixes)} files")
    return found
