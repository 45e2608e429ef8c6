"""Figures as SVG images that are readable on light and on dark pages, and on narrow ones."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from sop_faiss.report.plots import COLORS, STYLE

INK, MARK, FIRST = "#1b1f26", "#6d7480", COLORS[0]
"""Colors of text, of lines that mark a value, and of the first curve; a dark page shows lighter ones."""
WIDTH = 3.6
"""Inches: as wide as a telephone, so that letters keep their size there."""

_GRID = "#e3e6ea"
_THEMED = {INK: "ink", _GRID: "grid", MARK: "mark", FIRST: "first"}
_THEMES = (
    "<style>:root{--ink:#3a414c;--grid:#e3e6ea;--mark:#6d7480;--first:#0072b2}"
    "@media(prefers-color-scheme:dark){:root{--ink:#c3cad5;--grid:#343a45;--mark:#98a1ae;--first:#4aa5e0}}</style>"
)
_STYLE: dict[Any, Any] = STYLE | {
    "svg.fonttype": "none",  # text stays text: small, and drawn with the reader's fonts
    "svg.hashsalt": "sop_faiss",  # equal curves give equal bytes
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MARK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": _GRID,
    "axes.formatter.use_mathtext": False,
}


def themed_svg(height: float, draw: Callable[[Figure], None]) -> str:
    """Draw a figure of `WIDTH` and this height in inches.

    Args:
        height: of the figure.
        draw: draws into it; what it draws in `INK`, `MARK` and `FIRST` follows the page from light to dark.

    Returns:
        A `data:image/svg+xml` URI. As an image it cannot run or fetch anything, whatever texts it has.
    """
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        stream = io.StringIO()
        figure.savefig(
            stream, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    for color, name in _THEMED.items():
        svg = svg.replace(f": {color}", f": var(--{name})")
    svg = svg.replace("<defs>", f"{_THEMES}<defs>", 1)
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8", "replace")).decode("ascii")
