"""A figure of robustness: accuracy by dropped patches and by shuffled tiles, below an image as the encoder saw it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sop_faiss.bootstrap import Interval
from sop_faiss.evaluate.robustness import DROPS, Point
from sop_faiss.report.plots import COLORS
from sop_faiss.report.png_figure import png_figure, without_ticks

_WIDTH, _PANELS, _NOTE = 9.6, 3.6, 0.4  # inches
_LETTERS = 125
_LINES = ("o-", "s-", "^-")


def draw_robustness(
    intervals: Mapping[Point, Interval],
    examples: Sequence[tuple[Point, UInt8[np.ndarray, "side side 3"]]],
    chance: float,
    note: str,
) -> bytes:
    """Draw the curves with their 95 % intervals as a PNG.

    Args:
        intervals: accuracy at each point, in percent; the first is of unchanged images.
        examples: an image as some of the points have it, the unchanged one first.
        chance: accuracy of guessing, in percent.
        note: below the curves.
    """
    clean = next(iter(intervals.values()))

    def draw(figure: Figure) -> None:
        parts = figure.subfigures(2, 1, squeeze=False, height_ratios=(strip, _PANELS))
        above, below = parts[:, 0]
        for axes, (point, pixels) in zip(above.subplots(1, len(examples), squeeze=False)[0], examples, strict=True):
            axes.imshow(pixels)
            axes.set_title(_title(point), fontsize=7.5)
            without_ticks(axes)
        dropped, shuffled = below.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        for kind, color, line in zip(DROPS, COLORS, _LINES, strict=False):
            found = {100 * point.value: each for point, each in intervals.items() if point.kind == kind}
            _curve(dropped, {0.0: clean, **found}, color, line, kind.replace("_", "-"))
        dropped.set_xlabel("patches dropped (%)")
        dropped.set_ylabel("top-1 (%)")
        grids = {point.value: each for point, each in intervals.items() if point.kind == "shuffled"}
        grids = {1.0: clean, **grids}
        _curve(
            shuffled, dict(zip(map(float, range(len(grids))), grids.values(), strict=True)), COLORS[3], "D-", "shuffled"
        )
        shuffled.set_xticks(range(len(grids)), [f"{each:g} x {each:g}" for each in grids])
        shuffled.set_xlabel("shuffled tiles")
        for axes in (dropped, shuffled):
            axes.axhline(chance, color="#8a919c", linewidth=1, linestyle=":", label="guessing")
            axes.set_ylim(0, 101)
            axes.grid(color="#e3e6ea")
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False)
        lines = textwrap.fill(note, _LETTERS)
        below.supxlabel(lines, fontsize=8, color="#6d7480", parse_math=False)

    strip = _WIDTH / len(examples) + 0.25
    return png_figure((_WIDTH, strip + _PANELS + _NOTE), draw)


def _curve(axes: Axes, found: Mapping[float, Interval], color: str, line: str, name: str) -> None:
    places = sorted(found)
    axes.plot(places, [found[each].mean for each in places], line, color=color, markersize=4, linewidth=1.5, label=name)
    lows, highs = [found[each].low for each in places], [found[each].high for each in places]
    axes.fill_between(places, lows, highs, color=color, alpha=0.15, linewidth=0)


def _title(point: Point) -> str:
    if point.kind == "shuffled":
        return f"{point.value:g} x {point.value:g} tiles"
    return f"{point.kind.replace('_', '-')}\n{point.value:.0%} dropped" if point.value else "unchanged"
