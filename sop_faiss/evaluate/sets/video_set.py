"""Videos with annotated objects in the layout of DAVIS-2017: lists, frames and masks, checked as they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from sop_faiss.data.images.decode import decode_image, open_image
from sop_faiss.data.images.listing import read_image_file
from sop_faiss.errors import DataError
from sop_faiss.paths import path_state

LIST = Path("ImageSets") / "2017" / "val.txt"
FRAMES = Path("JPEGImages") / "480p"
MASKS = Path("Annotations") / "480p"
VOID = 255
"""In masks of several objects: pixels of none of them."""
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_MODES = ("P", "L", "1")
"""Of masks, as PIL has it: the palette is ignored, the index counts."""
_PALETTE_BITS = 3
"""Bits of an index that each color channel has in the palette of VOC and DAVIS."""


@dataclass(frozen=True)
class Video:
    """A sequence, its masks not yet read but the first.

    Attributes:
        name: of its folders.
        frames: files of the frames, in order.
        masks: files of the annotations, one for each frame.
        objects: how many; their numbers in masks are 1 to this.
        numbers: from the values in the files to the numbers of the objects.
        first: the first mask.
    """

    name: str
    frames: tuple[Path, ...]
    masks: tuple[Path, ...]
    objects: int
    numbers: UInt8[np.ndarray, " values"]
    first: UInt8[np.ndarray, "h w"]

    def read_mask(self, place: int) -> UInt8[np.ndarray, "h w"]:
        """Read an annotation: 0 is the background, and each object has its number.

        Raises:
            DataError: the mask cannot be read, or is not as large as the first.
        """
        mask = read_mask(self.masks[place])
        _same_size(self.masks[place], mask.shape, self.first.shape, "the first mask")
        found: UInt8[np.ndarray, "h w"] = self.numbers[mask]
        return found

    def read_frame(self, place: int) -> UInt8[np.ndarray, "h w 3"]:
        """Read a frame as RGB.

        Raises:
            DataError: the frame cannot be read, or is not as large as the masks.
        """
        frame = read_frame(self.frames[place])
        _same_size(self.frames[place], frame.shape[:2], self.first.shape, "its masks")
        return frame


def list_videos(root: Path) -> list[str]:
    """Read the names of the sequences to evaluate, from `ImageSets/2017/val.txt`.

    Raises:
        DataError: the list is missing, empty, or not one of names.
    """
    file = root / LIST
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        what = "is not text" if isinstance(error, UnicodeDecodeError) else path_state(file)
        what = f"cannot be read ({error})" if isinstance(error, PermissionError) else what
        raise DataError(
            f"{file} {what}: wanted a folder laid out as DAVIS-2017, with {LIST}, {FRAMES}/NAME/00000.jpg and "
            f"{MASKS}/NAME/00000.png"
        ) from None
    if not names:
        raise DataError(f"{file} is empty: wanted the name of a sequence in each line")
    for name in names:
        if not _NAME.fullmatch(name):
            raise DataError(f"{file} lists {name[:100]!r}: wanted names of letters, digits, _, - and dots")
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise DataError(f"{file} lists {twice} twice: remove one")
    return names


def open_video(root: Path, name: str, most_frames: int | None = None) -> Video:
    """List a sequence's files and read its first mask.

    A first mask of 0 and 255 alone is of one object, as in DAVIS-2016; else 255 is of none, and the objects are 1 to
    the largest value of the first mask, as the evaluator of DAVIS counts them.

    Args:
        root: of the data set.
        name: of the sequence.
        most_frames: how many of the first frames; None: all.

    Raises:
        DataError: files are missing, there are fewer than 3 frames, or the first mask is unreadable or empty.
    """
    frames, masks = _files(root / FRAMES / name, ".jpg"), _files(root / MASKS / name, ".png")
    if min(frames) not in masks:
        raise DataError(f"sequence {name}: the first frame {min(frames)} has no annotation in {root / MASKS / name}")
    for one, other, lacks in ((frames, masks, "annotation"), (masks, frames, "frame")):
        if (alone := min(one.keys() - other.keys(), default=None)) is not None:
            raise DataError(f"sequence {name}: {one[alone]} has no {lacks}: wanted one of each name")
    stems = sorted(frames)[:most_frames]
    if len(stems) < 3:
        raise DataError(
            f"sequence {name} has {len(stems)} frames: wanted at least 3, as the first and last do not count"
        )
    values = read_mask(masks[stems[0]])
    present = set(np.unique(values).tolist())
    numbers = np.zeros(256, np.uint8)
    if present <= {0, VOID} and VOID in present:
        objects, numbers[VOID] = 1, 1
    else:
        objects = max(present - {VOID}, default=0)
        numbers[: objects + 1] = range(objects + 1)
    if not objects:
        raise DataError(f"sequence {name}: the first mask {masks[stems[0]]} has no object")
    return Video(
        name,
        tuple(frames[stem] for stem in stems),
        tuple(masks[stem] for stem in stems),
        objects,
        numbers,
        numbers[values],
    )


def _files(folder: Path, suffix: str) -> Mapping[str, Path]:
    """Return the files of a folder by their names without suffix."""
    if not folder.is_dir():
        raise DataError(f"{folder} {path_state(folder)}: wanted the folder of a listed sequence")
    found = {path.stem: path for path in folder.iterdir() if path.suffix == suffix and not path.name.startswith(".")}
    if not found:
        raise DataError(f"{folder} has no {suffix} files")
    return found


def read_frame(file: Path) -> UInt8[np.ndarray, "h w 3"]:
    """Read an image as RGB.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return decode_image(read_image_file(file))
    except DataError as error:
        raise DataError(f"frame {file}: {error}") from None


def read_mask(file: Path) -> UInt8[np.ndarray, "h w"]:
    """Read the values of an indexed, gray or black-and-white image; white is 255.

    Raises:
        DataError: it cannot be read, or is of another kind.
    """
    try:
        image = open_image(read_image_file(file))
        if image.mode not in _MODES:
            raise DataError(f"it is of mode {image.mode}: wanted an indexed or gray image of 8 bits")
        values = np.array(image)  # decodes
    except DataError as error:
        raise DataError(f"mask {file}: {error}") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"mask {file} is damaged ({error}): restore it") from None
    return values if values.dtype == np.uint8 else values.astype(np.uint8) * np.uint8(VOID)


def _same_size(file: Path, found: Iterable[int], wanted: Iterable[int], of: str) -> None:
    if tuple(found) != tuple(wanted):
        (height, width), (rows, columns) = found, wanted
        raise DataError(f"{file} is {width} x {height} pixels, {of} {columns} x {rows}: wanted one size per sequence")


def palette_image(mask: UInt8[np.ndarray, "h w"]) -> Image.Image:
    """Return a mask as an indexed image in the colors of VOC and DAVIS."""
    numbers = np.arange(256)
    colors = np.zeros((256, 3), np.uint8)
    for bit in range(_PALETTE_BITS):  # bits of the index, from the lowest up, go to red, green, blue, red, ...
        for channel in range(3):
            colors[:, channel] |= ((numbers >> (3 * bit + channel) & 1) << (7 - bit)).astype(np.uint8)
    image = Image.fromarray(mask)
    image.putpalette(colors.tobytes())
    return image
