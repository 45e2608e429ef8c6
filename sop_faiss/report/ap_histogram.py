"""Histogram of the average precision (AP) of the queries."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["draw_ap_histogram"]

_COLORS = ("#009e73", "#0072b2", "#d55e00")
_BINS = 20


def draw_ap_histogram(values: Mapping[str, Sequence[float]]) -> bytes:
    """Draw a histogram of AP in steps of 5 %, one row per difficulty, as a PNG; a line marks the mean.

    Args:
        values: AP of each counted query in percent, by the name of the difficulty; one without queries is left out.
    """
    shown = {name: np.asarray(each, np.float64) for name, each in values.items() if len(each)}
    figure = Figure(figsize=(5.6, 0.7 + 1.25 * max(1, len(shown))), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, each), color in zip(rows, shown.items(), _COLORS, strict=False):
        axes.hist(each, bins=np.linspace(0, 100, _BINS + 1), color=color, edgecolor="white", linewidth=0.6)
        axes.axvline(each.mean(), color="#1b1f26", linewidth=1.2, linestyle="--")
        title = f"mAP {each.mean():.1f}" if name == "all" else f"{name}: mAP {each.mean():.1f}"
        axes.set_title(title, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlim(0, 100)
    rows[-1].set_xlabel("AP of a query (%)", fontsize=9)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
