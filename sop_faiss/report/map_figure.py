"""A figure of features in a plane, one panel for each encoder: points by class, or the images themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patheffects import withStroke
from PIL import Image

from sop_faiss.report.plots import colors_of
from sop_faiss.report.png_figure import png_figure, shortened, without_ticks

__all__ = ["MapPanel", "draw_maps"]

_NAME_LENGTH = 28
_NAMED_CLASSES = 20
_INCHES = 6.0
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

    Up to 20 classes have a color and, in the middle of their images, a name; more have colors alone.

    Args:
        panels: one for each encoder.
        class_names: name of each class number, if known.
        note: below the panels.
    """
    classes = sorted({int(label) for each in panels if each.labels is not None for label in each.labels if label >= 0})
    colors = dict(zip(classes, colors_of(len(classes)), strict=True))
    side = _INCHES * (2 if panels[0].thumbnails is not None else 1)

    def draw(figure: Figure) -> None:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel, colors)
            if panel.labels is not None and len(classes) <= _NAMED_CLASSES:
                for each in set(panel.labels.tolist()) & colors.keys():
                    name = shortened(class_names[each] if class_names else str(each), _NAME_LENGTH)
                    _write_name(axes, np.median(panel.points[panel.labels == each], axis=0), name)
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


def _write_name(axes: Axes, place: Float32[np.ndarray, " 2"], name: str) -> None:
    written = axes.text(place[0], place[1], name, fontsize=8.5, ha="center", va="center", parse_math=False)
    written.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
