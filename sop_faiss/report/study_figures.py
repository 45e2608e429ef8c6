"""Figures of a study: scores along an axis with intervals over seeds, and curves of its arms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sop_faiss.bootstrap import Interval
from sop_faiss.errors import one_line
from sop_faiss.report.plots import Curve, colors_of
from sop_faiss.report.themed_svg import themed_svg

_HEIGHT, _LEGEND_ROW, _TICK_LETTER = 2.4, 0.2, 0.055  # inches
_LONGEST = 24
_MOST_LINES = 14
"""Lines in one figure; more cannot be told apart."""


@dataclass(frozen=True)
class AxisPoint:
    """A score of one arm at one choice of an axis."""

    choice: int
    """Number of the choice, from the left."""
    mean: Interval
    seeds: Sequence[float]
    """The score of each seed."""


@dataclass(frozen=True)
class ArmCurves:
    """A score of one arm while it trains."""

    mean: Curve
    """Over seeds."""
    seeds: Sequence[Curve]


def draw_axis(
    choices: Sequence[str], lines: Mapping[str, Sequence[AxisPoint]], unit: str, connected: bool = True
) -> str:
    """Draw a score along an axis: the mean with its 95 % interval, and each seed as a small dot.

    Args:
        choices: names along the axis.
        lines: name in the legend (the choices of all other axes) -> its points.
        unit: label of the score's axis.
        connected: whether lines connect the means, as is right for numbers.

    Returns:
        A `data:image/svg+xml` URI.
    """
    shown = dict(list(lines.items())[:_MOST_LINES])
    labels = [_shortened(choice) for choice in choices]
    letters = max(map(len, labels))
    tilted = letters * len(labels) > 40

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (points, color) in enumerate(zip(shown.values(), colors_of(len(shown)), strict=True)):
            shift = 0.12 * (number - (len(shown) - 1) / 2) / max(1, len(shown) - 1)
            for point in points:
                place = point.choice + shift
                axes.plot([place] * len(point.seeds), point.seeds, "o", color=color, markersize=2.6, alpha=0.45)
                if math.isfinite(point.mean.low):
                    axes.plot([place] * 2, [point.mean.low, point.mean.high], color=color, linewidth=2.2, alpha=0.6)
            places = [point.choice + shift for point in points]
            axes.plot(
                places, [point.mean.mean for point in points], "-o" if connected else "o", color=color, lw=1.2, ms=5
            )
        axes.set_xticks(range(len(labels)), labels, parse_math=False, rotation=35 if tilted else 0)
        if tilted:
            for label in axes.get_xticklabels():
                label.set_horizontalalignment("right")
                label.set_rotation_mode("anchor")
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.grid(axis="x", visible=False)
        _finish(figure, axes, unit, list(shown), colors_of(len(shown)))

    return themed_svg(_HEIGHT + _legend_height(shown) + (letters * _TICK_LETTER if tilted else 0), draw)


def draw_curves(arms: Mapping[str, ArmCurves], x_label: str, unit: str) -> str:
    """Draw a score of each arm while it trains: the mean over seeds, and the seeds as thin lines.

    Args:
        arms: name in the legend -> its curves; their steps are in the unit of `x_label`.
        x_label: label of the axis of training.
        unit: label of the score's axis.

    Returns:
        A `data:image/svg+xml` URI.
    """
    shown = dict(list(arms.items())[:_MOST_LINES])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for arm, color in zip(shown.values(), colors_of(len(shown)), strict=True):
            for seed in arm.seeds if len(arm.seeds) > 1 else ():
                axes.plot(*seed, color=color, linewidth=0.6, alpha=0.4)
            axes.plot(*arm.mean, "-o", color=color, linewidth=1.6, markersize=3)
        axes.set_xlabel(x_label)
        axes.margins(x=0.02)
        _finish(figure, axes, unit, list(shown), colors_of(len(shown)))

    return themed_svg(_HEIGHT + _legend_height(shown), draw)


def _legend_height(names: Mapping[str, object]) -> float:
    return _LEGEND_ROW * len(names) if len(names) > 1 else 0.0


def _shortened(name: str) -> str:
    line = one_line(name)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def _finish(figure: Figure, axes: Axes, unit: str, names: Sequence[str], colors: Sequence[str]) -> None:
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_ylabel(unit, parse_math=False)
    if len(names) < 2:
        return
    handles = [axes.plot([], [], color=color, linewidth=2.2)[0] for color in colors]
    legend = figure.legend(handles, [" "] * len(names), loc="outside upper left", fontsize=8, handlelength=1.4)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)  # a name is shown literally, with any characters
        text.set_text(_shortened(name))
