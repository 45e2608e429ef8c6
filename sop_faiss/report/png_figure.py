"""A figure as a PNG: what all of them have in common."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sop_faiss.files import GENERATOR


def png_figure(size: tuple[float, float], draw: Callable[[Figure], None]) -> bytes:
    """Draw a figure of this width and height in inches, and return the PNG; letters that no font has are boxes."""
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        draw(figure)
        figure.savefig(stream, format="png", metadata={"Software": GENERATOR})
    return stream.getvalue()


def without_ticks(axes: Axes) -> None:
    """Leave the ticks of an image or a map out."""
    axes.set_xticks([])
    axes.set_yticks([])


def shortened(name: str, letters: int, *, keep_end: bool = False) -> str:
    """Return a name of at most this many letters; what is cut is its end, or its start with `keep_end`."""
    if len(name) <= letters:
        return name
    return "…" + name[1 - letters :] if keep_end else name[: letters - 1] + "…"
