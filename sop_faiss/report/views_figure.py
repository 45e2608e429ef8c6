"""A figure of training views: source images with their crop boxes, global and local views, and masks."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sop_faiss.data.views.crops import CropBox
from sop_faiss.files import GENERATOR, write_file

# Okabe and Ito's palette, which is distinguishable with any color vision
_GLOBAL_COLORS = ("#0072b2", "#d55e00", "#e69f00", "#56b4e9")
_LOCAL_COLOR = "#009e73"
_HIDDEN = np.array([204, 90, 160], dtype=np.float64)  # pink, which is rare in photos
_HIDDEN_SHARE = 0.85
_INK = "#4a515c"

_CELL, _GAP = 0.95, 0.1  # inches; two local views, with the gap between them, are as high as a global one
_LARGE = 2 * _CELL + _GAP
_HEAD, _ROW_HEAD, _FOOT = 0.7, 0.24, 0.42
_LETTER, _LINE = 0.065, 0.17  # width and height of small text
_KEY_LENGTH = 60


@dataclass(frozen=True)
class ViewedImage:
    """One image as training sees it."""

    key: str
    image: UInt8[np.ndarray, "h w 3"]
    global_views: UInt8[np.ndarray, "G s s 3"]
    local_views: UInt8[np.ndarray, "L t t 3"]
    masks: Bool[np.ndarray, "G n"]
    """True where the student does not see a patch; row-major."""
    boxes: list[CropBox]
    """The crop of each view in the image, global ones first; empty where unknown."""


def overlay_mask(view: UInt8[np.ndarray, "s s 3"], mask: Bool[np.ndarray, " n"]) -> UInt8[np.ndarray, "s s 3"]:
    """Tint the hidden patches of a view pink."""
    side = math.isqrt(len(mask))
    pixels = len(view) // side
    hidden = mask.reshape(side, side).repeat(pixels, 0).repeat(pixels, 1)
    shown = view.copy()
    area = shown[: len(hidden), : len(hidden)]
    area[hidden] = (area[hidden] * (1 - _HIDDEN_SHARE) + _HIDDEN * _HIDDEN_SHARE).round().astype(np.uint8)
    return shown


def plot_views(images: Sequence[ViewedImage], path: Path, title: str) -> None:
    """Draw one row per image: the source with its crops, each global view unmasked and masked, and the local views.

    Args:
        images: with equal numbers of views; one or more.
        path: where to write the PNG, atomically.

    Raises:
        OSError: the place cannot be written.
    """
    first = images[0]
    large, small = 1 + 2 * len(first.global_views), math.ceil(len(first.local_views) / 2)
    width = _GAP + large * (_LARGE + _GAP) + small * (_CELL + _GAP)
    row = _ROW_HEAD + _LARGE + _GAP
    notes = textwrap.wrap(_explain(first), int(width / _LETTER))
    page = _Page(width, _HEAD + len(images) * row + _FOOT + (len(notes) - 1) * _LINE)
    page.text(_GAP, 0.28, textwrap.shorten(title, int(width / _LETTER / 1.6), placeholder=" ..."), 12.0, "bold")
    for number, image in enumerate(images):
        _draw_row(page, image, _HEAD + number * row, with_heads=number == 0)
    for number, note in enumerate(reversed(notes)):
        page.text(_GAP, page.height - 0.16 - number * _LINE, note, size=8.5)
    page.write(path)


class _Page:
    """A figure whose parts are placed in inches from the top left."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=110)
        FigureCanvasAgg(self.figure)

    def text(self, left: float, base: float, text: str, size: float, weight: str = "normal") -> None:
        """Write text literally, with any characters."""
        x, y = left / self.width, 1 - base / self.height
        self.figure.text(x, y, text, fontsize=size, fontweight=weight, color=_INK, parse_math=False)

    def image(
        self, left: float, top: float, side: float, pixels: UInt8[np.ndarray, "h w 3"], color: str, note: str = ""
    ) -> Axes:
        """Show pixels, in a frame of this color, with a few words in the corner."""
        bottom = 1 - (top + side) / self.height
        axes = self.figure.add_axes((left / self.width, bottom, side / self.width, side / self.height), anchor="NW")
        axes.imshow(pixels, interpolation="nearest" if len(pixels) < 64 else "antialiased")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set(color=color, linewidth=1.8)
        if note:
            plate = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5}
            axes.text(0.03, 0.97, note, transform=axes.transAxes, fontsize=7, va="top", color=_INK, bbox=plate)
        return axes

    def write(self, path: Path) -> None:
        """Write the PNG, atomically."""
        stream = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self.figure.savefig(stream, format="png", metadata={"Software": GENERATOR})
        write_file(path, stream.getvalue())


def _draw_row(page: _Page, image: ViewedImage, top: float, with_heads: bool) -> None:
    height, width = image.image.shape[:2]
    key = image.key if len(image.key) <= _KEY_LENGTH else f"...{image.key[3 - _KEY_LENGTH :]}"
    page.text(_GAP, top + _ROW_HEAD - 0.07, f"{key}  ({width} x {height} px)", size=8.5)
    top += _ROW_HEAD
    heads = top - _ROW_HEAD - 0.06
    left = _GAP
    axes = page.image(left, top, _LARGE, image.image, "#8a919c")
    _draw_boxes(axes, image)
    if with_heads:
        page.text(left, heads, "source and crops" if image.boxes else "source", size=9.0, weight="bold")
    left += _LARGE + _GAP
    for number, (view, mask) in enumerate(zip(image.global_views, image.masks, strict=True)):
        color = _global_color(number)
        page.image(left, top, _LARGE, view, color)
        hidden = f"{mask.mean():.0%} hidden" if mask.any() else "no mask"
        page.image(left + _LARGE + _GAP, top, _LARGE, overlay_mask(view, mask), color, hidden)
        if with_heads:
            page.text(left, heads, f"global {number + 1}: teacher", size=9.0, weight="bold")
            page.text(left + _LARGE + _GAP, heads, f"global {number + 1}: student", size=9.0, weight="bold")
        left += 2 * (_LARGE + _GAP)
    if with_heads and len(image.local_views):
        page.text(left, heads, "local", size=9.0, weight="bold")
    per_line = math.ceil(len(image.local_views) / 2)
    for number, view in enumerate(image.local_views):
        line, place = divmod(number, per_line)
        x, y = left + place * (_CELL + _GAP), top + line * (_CELL + _GAP)
        page.image(x, y, _CELL, view, _LOCAL_COLOR, str(number + 1))


def _draw_boxes(axes: Axes, image: ViewedImage) -> None:
    count = len(image.global_views)
    for number, box in enumerate(image.boxes):
        is_global = number < count
        color = _global_color(number) if is_global else _LOCAL_COLOR
        edge = (box.left - 0.5, box.top - 0.5)
        line = 1.8 if is_global else 0.9
        axes.add_patch(Rectangle(edge, box.width, box.height, fill=False, edgecolor=color, linewidth=line))
        if not is_global:
            place = (box.left + 0.02 * image.image.shape[1], box.top)
            axes.text(*place, str(number - count + 1), fontsize=6, va="top", color=color, fontweight="bold")


def _global_color(number: int) -> str:
    return _GLOBAL_COLORS[number % len(_GLOBAL_COLORS)]


def _explain(image: ViewedImage) -> str:
    pixels, patches = image.global_views.shape[1], image.masks.shape[1]
    words = [
        f"{len(image.global_views)} global views of {pixels} px: the teacher sees them whole, the student with the "
        f"patches in pink hidden (of {patches})"
    ]
    if len(image.local_views):
        words.append(f"{len(image.local_views)} local views of {image.local_views.shape[1]} px, for the student alone")
    if not image.boxes:
        words.append("crops are not marked: the source is turned before it is cropped")
    return "; ".join(words)
