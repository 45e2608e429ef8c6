"""A figure of matching patches: pairs of images, with a line from each patch to its match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from sop_faiss.report.plots import COLORS, colors_of
from sop_faiss.report.png_figure import png_figure, shortened, without_ticks

_INCHES = 3.4
_GAP = 0.04  # of the pair's width
_NAME_LENGTH = 70
_RIGHT, _WRONG = COLORS[2], COLORS[1]


@dataclass(frozen=True)
class MatchedPair:
    """Two images and the matches that are drawn."""

    name: str
    first: UInt8[np.ndarray, "h w 3"]
    second: UInt8[np.ndarray, "h2 w2 3"]
    grids: tuple[tuple[int, int], tuple[int, int]]
    """Rows and columns of the tokens of both."""
    matches: Int64[np.ndarray, "m 2"]
    """Row-major numbers of the matching tokens."""
    right: Bool[np.ndarray, " m"] | None
    """Whether each is right; None: unknown."""


def draw_matches(pairs: Sequence[MatchedPair], title: str) -> bytes:
    """Draw a row for each pair as a PNG; right matches are green, wrong ones red, and of unknown ones each has a color.

    Args:
        pairs: one or more.
    """
    heights = [_canvas(pair)[0].shape[0] / _canvas(pair)[0].shape[1] for pair in pairs]
    width = 2 * _INCHES

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(pairs), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, pair in zip(panels, pairs, strict=True):
            _draw_pair(axes, pair)
        figure.suptitle(title, fontsize=9.5, parse_math=False)

    return png_figure((width, width * sum(heights) + 0.25 * len(pairs) + 0.4), draw)


def _canvas(pair: MatchedPair) -> tuple[UInt8[np.ndarray, "h w 3"], int]:
    """Both images side by side on white, and where the second begins."""
    (height, width), (other_height, other_width) = pair.first.shape[:2], pair.second.shape[:2]
    start = width + round(_GAP * (width + other_width))
    canvas = np.full((max(height, other_height), start + other_width, 3), 255, np.uint8)
    canvas[:height, :width] = pair.first
    canvas[:other_height, start:] = pair.second
    return canvas, start


def _draw_pair(axes: Axes, pair: MatchedPair) -> None:
    canvas, start = _canvas(pair)
    axes.imshow(canvas)
    without_ticks(axes)
    axes.spines[:].set_visible(False)
    axes.set_title(shortened(pair.name, _NAME_LENGTH, keep_end=True), fontsize=8, loc="left", parse_math=False)
    colors = colors_of(len(pair.matches))
    if pair.right is not None:
        colors = [_RIGHT if right else _WRONG for right in pair.right]
    for (first, second), color in zip(pair.matches.tolist(), colors, strict=True):
        down, across = _center(first, pair.grids[0], pair.first)
        other_down, other_across = _center(second, pair.grids[1], pair.second)
        (line,) = axes.plot([across, start + other_across], [down, other_down], "o-", color=color, markersize=3.5)
        line.set(linewidth=1.3, path_effects=[withStroke(linewidth=2.4, foreground="white", alpha=0.7)])


def _center(token: int, grid: tuple[int, int], pixels: UInt8[np.ndarray, "h w 3"]) -> tuple[float, float]:
    """Return the row and the column of the pixel in the middle of a token."""
    row, column = divmod(token, grid[1])
    height, width = pixels.shape[:2]
    return (row + 0.5) * height / grid[0] - 0.5, (column + 0.5) * width / grid[1] - 0.5
