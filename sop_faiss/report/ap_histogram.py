"""Histogram of the average precision (AP) of the queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from sop_faiss.report.themed_svg import FIRST, INK, themed_svg

_BINS = 20
_HEAD, _ROW = 0.6, 1.3  # inches


def draw_ap_histogram(values: Mapping[str, Sequence[float]], metric: str = "mAP") -> str:
    """Draw a histogram of AP, or of another score, in steps of 5 %, one row per difficulty; a line marks the mean.

    Args:
        values: AP of each counted query in percent, by the name of the difficulty; one without queries is left out.
        metric: the name of the mean.

    Returns:
        A `data:image/svg+xml` URI.
    """
    shown = {name: np.asarray(each, np.float64) for name, each in values.items() if len(each)}

    def draw(figure: Figure) -> None:
        rows = figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, each) in zip(rows, shown.items(), strict=False):
            axes.hist(each, bins=np.linspace(0, 100, _BINS + 1), color=FIRST, rwidth=0.9)
            axes.axvline(each.mean(), color=INK, linewidth=1.2, linestyle="--")
            title = f"{metric} {each.mean():.1f}" if name == "all" else f"{name}: {metric} {each.mean():.1f}"
            axes.set_title(title, loc="left", fontsize=9.5)
            axes.yaxis.get_major_locator().set_params(integer=True, nbins=4)
            axes.grid(axis="x", visible=False)
            axes.set_ylabel("queries")
        rows[-1].set_xlim(0, 100)
        rows[-1].set_xlabel(f"{'AP' if metric == 'mAP' else metric} of a query (%)")

    return themed_svg(_HEAD + _ROW * max(1, len(shown)), draw)
