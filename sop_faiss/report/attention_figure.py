"""A figure of what an encoder looks at: a row for each image, with its patch tokens as colors and [CLS] attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sop_faiss.report.png_figure import png_figure, shortened, without_ticks

_INCHES = 1.7
_NAME_LENGTH = 22


@dataclass(frozen=True)
class AttentionRow:
    """One image as the encoder saw it."""

    name: str
    pixels: UInt8[np.ndarray, "h w 3"]
    colors: Float32[np.ndarray, "rows columns 3"]
    heads: Float32[np.ndarray, "heads rows columns"] | None
    """One map for each head, and before them their mean."""


def draw_attention(rows: Sequence[AttentionRow], title: str) -> bytes:
    """Draw the rows as a PNG; each map of attention has its own scale, from 0 to its largest value."""
    heads = max((0 if row.heads is None else len(row.heads)) for row in rows)
    columns = 2 + heads + (heads > 0)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for panels, row in zip(grid, rows, strict=True):
            _show(panels[0], row.pixels)
            panels[0].set_ylabel(shortened(row.name, _NAME_LENGTH, keep_end=True), fontsize=8, parse_math=False)
            extent = (0, row.pixels.shape[1], row.pixels.shape[0], 0)
            _show(panels[1], row.colors, extent=extent)
            for place, panel in enumerate(panels[2:]):
                if row.heads is None:
                    panel.axis("off")
                    continue
                shown = row.heads.mean(0) if place == 0 else row.heads[place - 1]
                _show(panel, shown, cmap="inferno", vmin=0, extent=extent)
        names = ["image", "patches", *(["heads' mean"] if heads else []), *(f"head {n + 1}" for n in range(heads))]
        for panel, name in zip(grid[0], names, strict=True):
            panel.set_title(name, fontsize=8.5)
        figure.suptitle(title, fontsize=10, parse_math=False)

    return png_figure((_INCHES * columns, _INCHES * len(rows) + 0.7), draw)


def _show(axes: Axes, pixels: np.ndarray, **options: object) -> None:
    axes.imshow(pixels, interpolation="nearest", **options)  # type: ignore[arg-type]  # of imshow
    without_ticks(axes)
