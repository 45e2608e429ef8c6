"""One panel of a run's curves as an SVG image that is readable on light and on dark pages."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sop_faiss.errors import one_line
from sop_faiss.report.contact_sheet import Chart
from sop_faiss.report.plots import COLORS, draw_curve, finish_axes
from sop_faiss.report.run_panels import Panel, Reference
from sop_faiss.report.themed_svg import MARK, themed_svg

_HEIGHT = 2.4  # inches
_LEGEND_LETTERS = 40
_SHORT_NAME = 14
"""Letters; three names of this length fit side by side."""
_DASHES = ("-", "--", "-.", ":")


def panel_chart(panel: Panel) -> Chart:
    """Draw a panel as a chart of a page, with its curves in words for screen readers."""
    title = panel.heading(next(iter(panel.curves))) if len(panel.curves) == 1 else panel.title
    return Chart(title, plot_panel(panel), alt=_describe(panel))


def _describe(panel: Panel) -> str:
    ends = [
        f"{name} from {curve.values[0]:.4g} at step {curve.steps[0]:,.0f} to {curve.values[-1]:.4g} at step "
        f"{curve.steps[-1]:,.0f}"
        for name, curve in panel.curves.items()
    ]
    return f"{panel.title} ({panel.unit}): {'; '.join(ends)}" if panel.unit else f"{panel.title}: {'; '.join(ends)}"


def plot_panel(panel: Panel) -> str:
    """Draw a panel: its curves, its references as dashed lines with a label, units at the axes.

    The value of a score at step 0 is also a reference, which training has to beat.

    Returns:
        A `data:image/svg+xml` URI.
    """
    return themed_svg(_HEIGHT, lambda figure: _draw(figure.subplots(), panel))


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
    axes.axhline(reference.value, color=MARK, linewidth=1, linestyle="--", zorder=1)
    axes.annotate(
        reference.label,
        (1.0, reference.value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8.5,
        color=MARK,
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
