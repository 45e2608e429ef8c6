"""Instance masks as COCO writes them: polygons, run lengths, and run lengths packed into text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import UInt8

from sop_faiss.errors import ConfigError, DataError

_FIRST_LETTER = 48
"""Of the 64 that run lengths are packed into."""
_MARGIN = 1.0
"""How far polygons may leave the image, in image sides: COCO's own are within half a pixel."""


def coco_library() -> Any:
    """Return faster-coco-eval.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import faster_coco_eval
        from faster_coco_eval.core import mask  # noqa: F401
    except ImportError:
        raise ConfigError(
            "detection is scored by faster-coco-eval, which is not installed: pip install 'sop-faiss[eval]'"
        ) from None
    return faster_coco_eval


def check_segmentation(segmentation: Any, height: int, width: int) -> None:
    """Check the mask of an annotation without making it.

    Args:
        segmentation: a list of polygons, or run lengths with `size` and `counts`, a list or packed text.
        height: of the image, in pixels.
        width: of the image.

    Raises:
        DataError: it is missing or damaged, of another image size, or leaves the image.
    """
    if isinstance(segmentation, dict):
        _run_lengths(segmentation, height, width)
        return
    if not isinstance(segmentation, list) or not segmentation:
        raise DataError("it has no segmentation: wanted polygons or run lengths")
    for polygon in segmentation:
        _check_polygon(polygon, height, width)


def read_mask(segmentation: Any, height: int, width: int) -> UInt8[np.ndarray, "h w"]:
    """Return the mask of an annotation, 1 where the object is; arguments and errors as of `check_segmentation`."""
    check_segmentation(segmentation, height, width)
    if isinstance(segmentation, dict):
        counts = _run_lengths(segmentation, height, width)
        columns = np.repeat(np.arange(len(counts)) % 2, counts)  # runs of 0 and 1 alternate
        return columns.astype(np.uint8).reshape(width, height).T
    polygons = _areas(segmentation)
    if not polygons:
        return np.zeros((height, width), np.uint8)
    masks = coco_library().mask
    found: UInt8[np.ndarray, "h w"] = masks.decode(masks.merge(masks.frPyObjects(polygons, height, width)))
    return found


def has_area(segmentation: Any) -> bool:
    """Return whether a checked mask can have a pixel: run lengths, or a polygon of three corners."""
    return isinstance(segmentation, dict) or bool(_areas(segmentation))


def _areas(polygons: list[list[Any]]) -> list[list[Any]]:
    return [each for each in polygons if len(each) >= 6]  # x and y of three corners


def _check_polygon(polygon: Any, height: int, width: int) -> None:
    numbers = isinstance(polygon, list) and all(type(value) in (int, float) for value in polygon)
    if not numbers or len(polygon) % 2:
        raise DataError("a polygon is not a list of x and y of its corners")
    for values, side in ((polygon[::2], width), (polygon[1::2], height)):
        if not all(-_MARGIN * side <= value <= (1 + _MARGIN) * side for value in values):  # NaN, too
            raise DataError(f"a polygon leaves the image of {width} x {height} pixels")


def _run_lengths(runs: dict[str, Any], height: int, width: int) -> list[int]:
    size, counts = runs.get("size"), runs.get("counts")
    if size != [height, width]:
        raise DataError(f"its run lengths are of size {str(size)[:100]}: wanted that of the image, [{height}, {width}]")
    if isinstance(counts, str):
        counts = _unpacked(counts)
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        raise DataError("its run lengths are damaged: wanted numbers of 0 and more, or these as packed text")
    if sum(counts) != height * width:
        raise DataError(f"its run lengths add up to {sum(counts)}: wanted the {height * width} pixels of the image")
    return counts


def _unpacked(text: str) -> list[int] | None:
    """Return the run lengths in a text, None if it is damaged.

    Each letter holds five bits of a number, lowest first, and whether more follow; the highest bit of the last one is
    the sign. From the fourth run on the number is the difference from the run two before.
    """
    counts: list[int] = []
    value = shift = 0
    for letter in text.encode("utf-8", "replace"):
        digit = letter - _FIRST_LETTER
        if not 0 <= digit < 64 or shift > 60:
            return None
        value |= (digit & 31) << shift
        shift += 5
        if digit & 32:
            continue
        if digit & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    return None if shift else counts


def encode_masks(masks: UInt8[np.ndarray, "n h w"]) -> list[dict[str, Any]]:
    """Return masks as packed run lengths."""
    if not math.prod(masks.shape):
        return []
    packed = coco_library().mask.encode(np.asfortranarray(masks.transpose(1, 2, 0)))
    return [{**each, "counts": each["counts"].decode()} for each in packed]
