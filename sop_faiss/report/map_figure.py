"""A figure of features in a plane, one panel for each encoder: points by class, or the images themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patheffects import withStroke
from PIL import Image

from sop_faiss.report.plots import colors_of
from sop_faiss.report.png_figure import png_figure, shortened, without_ticks

_NAME_LENGTH = 28
_NAMED_CLASSES = 20
_INCHES = 6.0
_ROOM = (0.2, 0.035)
"""Width and height that a name takes, as shares of a panel."""
_GRAY = "#7b7b7b"


@dataclass(frozen=True)
class MapPanel:
    """The images of one encoder."""

    title: str
    points: Float32[np.ndarray, "n 2"]
    labels: Int64[np.ndarray, " n"] | None
    """Class of each; -1 for one without. None: no image has one."""
    thumbnails: Sequence[Image.Image | None] | None = None
    """Drawn in place of points; None for one that cannot be read."""


def draw_maps(panels: Sequence[MapPanel], class_names: Sequence[str] | None, note: str) -> bytes:
    """Draw the panels side by side, as a PNG.

    Up to 20 classes are in a legend, and have a name in the middle of their images where names do not cover each other;
    more have colors alone.

    Args:
        panels: one for each encoder.
        class_names: name of each class number, if known.
        note: below the panels.
    """
    classes = sorted({int(label) for each in panels if each.labels is not None for label in each.labels if label >= 0})
    colors = dict(zip(classes, colors_of(len(classes)), strict=True))
    names = {each: shortened(class_names[each] if class_names else str(each), _NAME_LENGTH) for each in classes}
    side = _INCHES * (2 if panels[0].thumbnails is not None else 1)

    def draw(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel, colors)
            if panel.labels is not None and len(classes) <= _NAMED_CLASSES:
                _write_names(axes, panel.points, panel.labels, names)
        if 0 < len(classes) <= _NAMED_CLASSES:
            _draw_legend(figure, [(names[each], colors[each]) for each in classes])
        figure.supxlabel(note, fontsize=8.5, color="#6d7480", parse_math=False)

    return png_figure((side * len(panels), side + 0.4), draw)


def _draw_panel(axes: Axes, panel: MapPanel, colors: dict[int, str]) -> None:
    labels = np.full(len(panel.points), -1) if panel.labels is None else panel.labels
    of_points = [colors.get(int(label), _GRAY) for label in labels]
    hidden = panel.thumbnails is not None
    axes.scatter(panel.points[:, 0], panel.points[:, 1], s=0 if hidden else 9, c=of_points, linewidths=0, alpha=0.8)
    for point, color, thumbnail in zip(panel.points, of_points, panel.thumbnails or [], strict=False):
        if thumbnail is not None:
            frame = {"edgecolor": color, "linewidth": 1.2}
            axes.add_artist(AnnotationBbox(OffsetImage(np.asarray(thumbnail)), point, pad=0.05, bboxprops=frame))
    axes.set_title(panel.title, loc="left", fontsize=9.5, parse_math=False)
    without_ticks(axes)
    axes.margins(0.06)


def _write_names(
    axes: Axes, points: Float32[np.ndarray, "n 2"], labels: Int64[np.ndarray, " n"], names: dict[int, str]
) -> None:
    """Write each name in the middle of its class, the largest first; one that would cover another is left out."""
    room = np.array(_ROOM) * np.maximum(np.ptp(points, axis=0), np.finfo(np.float32).tiny)
    taken: list[Float32[np.ndarray, " 2"]] = []
    for each in sorted(names, key=lambda each: -int((labels == each).sum())):
        if not (labels == each).any():
            continue
        place = np.median(points[labels == each], axis=0)
        if any((np.abs(place - other) < room).all() for other in taken):
            continue
        taken.append(place)
        written = axes.text(place[0], place[1], names[each], fontsize=8.5, ha="center", va="center", parse_math=False)
        written.set_path_effects([withStroke(linewidth=2.5, foreground="white")])


def _draw_legend(figure: Figure, entries: Sequence[tuple[str, str]]) -> None:
    """Draw a legend on the right; matplotlib leaves out names that begin with `_`, so a space is put before."""
    handles = [Line2D([], [], marker="o", linestyle="", color=color, label=f" {name}") for name, color in entries]
    legend = figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False, handletextpad=0.1)
    for text in legend.get_texts():
        text.set_parse_math(False)
