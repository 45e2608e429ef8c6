"""A figure of where two images match: a row for each pair, with both images and a map over each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8
from matplotlib.figure import Figure

from sop_faiss.index.rerank.local import token_shares
from sop_faiss.index.rerank.tokens import SeenTokens
from sop_faiss.report.png_figure import png_figure, shortened, without_ticks

_INCHES = 2.0
_NAME_LENGTH = 60
_OPACITY = 0.55


@dataclass(frozen=True)
class HeatRow:
    """Two images as the encoder saw them, and a map over each."""

    name: str
    images: tuple[UInt8[np.ndarray, "h w 3"], UInt8[np.ndarray, "h2 w2 3"]]
    heats: tuple[Float32[np.ndarray, "rows columns"], Float32[np.ndarray, "rows2 columns2"]]


def matched(name: str, first: SeenTokens, second: SeenTokens) -> HeatRow:
    """Return two images with what their parts add to their local score."""
    shares = token_shares(first.tokens, second.tokens)
    heats = [np.reshape(share, each.grid) for share, each in zip(shares, (first, second), strict=True)]
    return HeatRow(name, (first.pixels, second.pixels), (heats[0], heats[1]))


def draw_heats(rows: Sequence[HeatRow], title: str) -> bytes:
    """Draw the rows as a PNG: query, its map, map of the other, other; each map from 0 to its largest value."""

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(rows), 4, squeeze=False)
        for panels, row in zip(grid, rows, strict=True):
            for place, side in enumerate((0, 0, 1, 1)):
                pixels, heat = row.images[side], row.heats[side]
                panels[place].imshow(pixels, interpolation="nearest")
                if place in (1, 2):
                    extent = (0, pixels.shape[1], pixels.shape[0], 0)
                    most = float(heat.max()) or 1.0
                    panels[place].imshow(
                        heat, cmap="inferno", vmin=0, vmax=most, alpha=_OPACITY, extent=extent, interpolation="bilinear"
                    )
                without_ticks(panels[place])
            panels[0].set_title(
                shortened(row.name, _NAME_LENGTH, keep_end=True), fontsize=8, loc="left", parse_math=False
            )
        figure.suptitle(title, fontsize=9.5, parse_math=False)

    return png_figure((4 * _INCHES, (_INCHES + 0.25) * len(rows) + 0.4), draw)
