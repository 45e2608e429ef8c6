"""A figure of the confusion matrix: predicted classes by true class."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from sop_faiss.evaluate.confusion import Confusion
from sop_faiss.report.png_figure import png_figure, shortened

SHOWN_CLASSES = 40
"""Of more classes, those with the most confused images are shown."""
_NUMBERED_CLASSES = 16
_NAME_LENGTH = 24


def draw_confusion(confusion: Confusion, title: str) -> bytes:
    """Draw the percentage of each true class (a row) that was predicted as each class (a column), as a PNG.

    Classes that were not tested have an empty row. Of many classes the most confused ones are shown, and the figure
    says so; percentages are of all images of the row's class, whether or not their columns are shown.
    """
    shown = _most_confused(confusion)
    images = confusion.images()[shown]
    percent = 100.0 * confusion.counts[np.ix_(shown, shown)] / np.maximum(images, 1)[:, None]
    names = [shortened(confusion.names[place], _NAME_LENGTH) for place in shown]
    side = 2.6 + max(2.4, 0.24 * len(shown)) * (1.6 if len(shown) <= _NUMBERED_CLASSES else 1.0)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100)
        ticks = range(len(shown))
        axes.set_xticks(ticks, names, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(ticks, names, fontsize=8, parse_math=False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        if len(shown) <= _NUMBERED_CLASSES:
            for row, column in np.argwhere(percent >= 0.5):
                color = "white" if percent[row, column] > 60 else "#1b1f26"
                number = f"{percent[row, column]:.0f}"
                axes.text(column, row, number, ha="center", va="center", fontsize=8, color=color)
        figure.colorbar(image, ax=axes, label="% of the true class", shrink=0.8)
        left_out = len(confusion.names) - len(shown)
        subtitle = f"\nthe {len(shown)} most confused of {len(confusion.names)} classes" if left_out else ""
        figure.suptitle(title + subtitle, fontsize=10.5, parse_math=False)

    return png_figure((side + 0.8, side), draw)


def _most_confused(confusion: Confusion) -> list[int]:
    """Return the positions of the shown classes, in the order of their numbers."""
    if len(confusion.names) <= SHOWN_CLASSES:
        return list(range(len(confusion.names)))
    right = confusion.counts.diagonal()
    wrong = confusion.counts.sum(axis=1) + confusion.counts.sum(axis=0) - 2 * right
    return sorted(np.argsort(-wrong, kind="stable")[:SHOWN_CLASSES].tolist())
