"""Curves of a run's `metrics.jsonl`, and how curves look in every figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from sop_faiss.errors import DataError
from sop_faiss.paths import path_state

METRICS_FILE = "metrics.jsonl"

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b7b7b")
"""Okabe and Ito's palette, which is distinguishable with any color vision."""
_POINTS_PER_CURVE = 400
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a919c",
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "axes.axisbelow": True,
    "xtick.color": "#4a515c",
    "ytick.color": "#4a515c",
    "legend.frameon": False,
}


class Curve(NamedTuple):
    """One metric over a run; steps increase, values are finite."""

    steps: Float64[np.ndarray, " n"]
    values: Float64[np.ndarray, " n"]


def read_curves(run: str | Path, left_out: list[int] | None = None) -> dict[str, Curve]:
    """Read every number of a run's metrics.

    A run that was killed and resumed writes some steps again: the later line counts. A last line that was cut by a kill
    is left out; nulls and missing keys (of a loss with weight 0) give no point.

    Args:
        run: a run directory, or a metrics file.
        left_out: the numbers of damaged lines, from 1, are added to this list; if None, a damaged line is an error.

    Raises:
        DataError: there is no metrics file, or it has a damaged line and `left_out` is None.
    """
    path = Path(run)
    if path.is_dir():
        path = path / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{path} {path_state(path)}: wanted a run directory or a metrics file")
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    points: dict[str, dict[float, float]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = dict(json.loads(line))
            step = float(record["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            if number == len(lines):
                break
            if left_out is not None:
                left_out.append(number)
                continue
            raise DataError(f"{path} line {number} is damaged: wanted a JSON object with a step") from None
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
                points.setdefault(key, {})[step] = float(value)
    return {key: _curve(values) for key, values in points.items()}


def _curve(values: Mapping[float, float]) -> Curve:
    steps = sorted(values)
    return Curve(np.array(steps, np.float64), np.array([values[step] for step in steps], np.float64))


def draw_curve(axes: Axes, curve: Curve, color: str, dashes: str = "-", marker: str = "") -> None:
    """Draw one curve, a long one as means of equal parts, a single point as a dot."""
    shown = _thinned(curve)
    axes.plot(
        shown.steps,
        shown.values,
        color=color,
        linestyle=dashes,
        linewidth=1.5,
        marker=marker or ("o" if len(shown.steps) == 1 else ""),
        markersize=3.5,
    )


def finish_axes(axes: Axes) -> None:
    """Set what all axes over the steps of a run have."""
    axes.set_xlabel("step")
    axes.margins(x=0.02)


def colors_of(count: int) -> list[str]:
    """Return one color per run; for more runs than the palette has, equally spaced along one color map."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    return [to_hex(color) for color in colormaps["viridis"](np.linspace(0, 0.95, count))]


def _thinned(curve: Curve) -> Curve:
    """Average consecutive points, so that at most `_POINTS_PER_CURVE` remain."""
    count = len(curve.steps)
    if count <= _POINTS_PER_CURVE:
        return curve
    starts = np.linspace(0, count, _POINTS_PER_CURVE, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(starts, count))
    return Curve(np.add.reduceat(curve.steps, starts) / sizes, np.add.reduceat(curve.values, starts) / sizes)
