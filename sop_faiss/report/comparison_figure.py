"""A figure of several retrieval results: mAP with its interval, and the differences to the first."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sop_faiss.bootstrap import Interval
from sop_faiss.evaluate.compare import Comparison
from sop_faiss.report.png_figure import png_figure, shortened

_NAME_LENGTH = 32


def draw_comparison(comparison: Comparison) -> bytes:
    """Draw two panels per metric as a PNG: mAP of each result above, its difference to the first below."""
    names = [shortened(name, _NAME_LENGTH, keep_end=True) for name in comparison.names]
    count = len(comparison.setups)

    def draw(figure: Figure) -> None:
        ratios = [len(names) + 0.6, len(names) - 0.4]
        panels = figure.subplots(2, count, sharey="row", squeeze=False, height_ratios=ratios)
        for (above, below), setup in zip(panels.T, comparison.setups, strict=True):
            _draw(above, setup.scores, "#0072b2")
            above.set_title(f"{setup.metric} (%), {setup.queries} queries", loc="left", fontsize=9.5)
            _draw(below, [each.difference for each in setup.differences], "#d55e00")
            below.axvline(0, color="#1b1f26", linewidth=1)
            below.set_title("difference to the first", loc="left", fontsize=9.5)
        for axes, shown in ((panels[0, 0], names), (panels[1, 0], names[1:])):
            axes.set_yticks(range(len(shown)), shown, fontsize=8.5, parse_math=False)
            axes.set_ylim(len(shown) - 0.4, -0.6)

    return png_figure((2.4 + 3.2 * count, 1.6 + 0.32 * (2 * len(names) - 1)), draw)


def _draw(axes: Axes, values: list[Interval], color: str) -> None:
    for place, each in enumerate(values):
        axes.plot([each.low, each.high], [place, place], color=color, linewidth=2.2, solid_capstyle="butt")
        axes.plot([each.mean], [place], "o", color=color, markersize=5.5)
    axes.grid(axis="x", color="#e3e6ea")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
