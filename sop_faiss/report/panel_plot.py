"""One panel of a run's curves as an SVG image that is readable on light and on dark pages."""

from __future__ import annotations

import base64
import io
import warnings

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from sop_faiss.errors import one_line
from sop_faiss.report.plots import COLORS, STYLE, draw_curve, finish_axes
from sop_faiss.report.run_panels import Panel, Reference

__all__ = ["plot_panel"]

_INK, _GRID, _MARK = "#1b1f26", "#e3e6ea", "#6d7480"
_THEMED = {_INK: "ink", _GRID: "grid", _MARK: "mark", COLORS[0]: "first"}
_THEMES = (
    "<style>:root{--ink:#3a414c;--grid:#e3e6ea;--mark:#6d7480;--first:#0072b2}"
    "@media(prefers-color-scheme:dark){:root{--ink:#c3cad5;--grid:#343a45;--mark:#98a1ae;--first:#4aa5e0}}</style>"
)
_LEGEND_LETTERS = 40
_SHORT_NAME = 14
"""Letters; three names of this length fit side by side."""
_DASHES = ("-", "--", "-.", ":")
_STYLE = STYLE | {
    "svg.fonttype": "none",  # text stays text: small, and drawn with the reader's fonts
    "svg.hashsalt": "sop_faiss",  # equal curves give equal bytes
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MARK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "axes.formatter.use_mathtext": False,
}


def plot_panel(panel: Panel) -> str:
    """Draw a panel: its curves, its references as dashed lines with a label, units at the axes.

    The value of a score at step 0 is also a reference, which training has to beat.

    Returns:
        A `data:image/svg+xml` URI. As an image it cannot run or fetch anything, whatever the names of the curves.
    """
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(4.4, 2.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        _draw(axes, panel)
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


def _draw(axes: Axes, panel: Panel) -> None:
    references = list(panel.references)
    for number, (name, curve) in enumerate(panel.curves.items()):
        color = COLORS[number % len(COLORS)]
        draw_curve(axes, curve, color, _DASHES[number % len(_DASHES)], "o" if panel.is_score else "")
        if panel.is_score and curve.steps[0] == 0 and len(curve.steps) > 1:
            before = "step 0" if len(panel.curves) == 1 else f"{name} at step 0"
            references.append(Reference(float(curve.values[0]), f"{before}: {curve.values[0]:.4g}"))
    if panel.logarithmic:
        axes.set_yscale("log", nonpositive="mask")
    else:
        axes.ticklabel_format(useOffset=False)
    for reference in references:
        _draw_reference(axes, reference)
    finish_axes(axes)
    axes.set_ylabel(f"{panel.unit}, log" if panel.logarithmic else panel.unit, parse_math=False)
    if len(panel.curves) > 1:
        _add_legend(axes, list(panel.curves))


def _draw_reference(axes: Axes, reference: Reference) -> None:
    axes.axhline(reference.value, color=_MARK, linewidth=1, linestyle="--", zorder=1)
    axes.annotate(
        reference.label,
        (1.0, reference.value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=7.5,
        color=_MARK,
        parse_math=False,
    )


def _add_legend(axes: Axes, names: list[str]) -> None:
    """Add a legend above the curves; names are shown literally, with any characters."""
    shown = [_shortened(one_line(name)) for name in names[: len(COLORS)]]
    handles = list(axes.get_lines())[: len(shown)]
    columns = 3 if max(map(len, shown)) <= _SHORT_NAME else 1
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    legend = figure.legend(handles, [" "] * len(shown), loc="outside upper left", ncols=columns, fontsize=8)
    for text, name in zip(legend.get_texts(), shown, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _shortened(name: str) -> str:
    return name if len(name) <= _LEGEND_LETTERS else f"{name[: _LEGEND_LETTERS - 3]}..."
