"""Curves of a run's `metrics.jsonl`: loss and teacher entropy over ln K, and k-NN; several runs in one figure."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sop_faiss.errors import DataError
from sop_faiss.files import GENERATOR, write_file
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


class _Line(NamedTuple):
    key: str  # of metrics.jsonl
    name: str  # in the legend, where a panel has several
    dashes: str  # matplotlib's line style


class _Panel(NamedTuple):
    title: str
    lines: tuple[_Line, ...]
    uniform_at: float | None  # the value of the uniform distribution
    marker: str


_PANELS = (
    _Panel(
        "loss / ln K",
        (_Line("loss_cls_over_lnK", "[CLS]", "-"), _Line("loss_patch_over_lnK", "patches", "--")),
        1.0,
        "",
    ),
    _Panel(
        "teacher entropy / ln K",
        (_Line("teacher_entropy_cls_over_lnK", "[CLS]", "-"), _Line("teacher_entropy_patch_over_lnK", "patches", "--")),
        1.0,
        "",
    ),
    _Panel("k-NN top-1, k = 20 (%)", (_Line("knn_top1_k20", "", "-"),), None, "o"),
)


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


def plot_training(
    runs: Mapping[str, str | Path] | Mapping[str, Sequence[str | Path]], path: Path | None = None, title: str = ""
) -> bytes:
    """Draw loss over ln K, teacher entropy over ln K and k-NN over the steps of one or several runs.

    A value of 1 in the first two panels is the uniform distribution over the K prototypes. Panels without data are left
    out. Long curves are drawn as means of equal parts.

    Args:
        runs: name in the legend -> run directory or metrics file, or several (seeds), drawn in the name's color.
        path: where to write the PNG, atomically; if None, it is only returned.

    Returns:
        The PNG.

    Raises:
        DataError: a run has no metrics, or no run has data for a panel.
    """
    curves = {
        name: [read_curves(place) for place in ([places] if isinstance(places, str | Path) else places)]
        for name, places in runs.items()
    }
    known = {key for seeds in curves.values() for seed in seeds for key in seed}
    panels = [panel for panel in _PANELS if any(line.key in known for line in panel.lines)]
    if not panels:
        raise DataError(f"{', '.join(map(repr, runs)) or 'no run'}: no metrics to draw yet, train some steps first")
    colors = colors_of(len(curves))
    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(4.2 * len(panels), 3.4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel, list(curves.values()), colors)
        if title:
            figure.suptitle(title, fontsize=11, fontweight="bold", parse_math=False)
        _add_legend(figure, list(curves), colors)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", metadata={"Software": GENERATOR})
    if path is not None:
        write_file(path, stream.getvalue())
    return stream.getvalue()


def _draw_panel(axes: Axes, panel: _Panel, runs: Sequence[Sequence[dict[str, Curve]]], colors: Sequence[str]) -> None:
    if panel.uniform_at is not None:
        axes.axhline(panel.uniform_at, color="#8a919c", linewidth=1, linestyle=":", zorder=1)
    drawn: set[str] = set()
    for seeds, color in zip(runs, colors, strict=True):
        for seed in seeds:
            for line in panel.lines:
                if line.key not in seed:
                    continue
                draw_curve(axes, seed[line.key], color, line.dashes, panel.marker)
                drawn.add(line.key)
    axes.set_title(panel.title, fontsize=10.5, loc="left")
    finish_axes(axes)
    named = [line for line in panel.lines if line.key in drawn and line.name]
    if len(named) > 1:
        for line in named:
            axes.plot([], [], color="#4a515c", linestyle=line.dashes, linewidth=1.5, label=line.name)
        axes.legend(fontsize=8.5)


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


def _add_legend(figure: Figure, names: list[str], colors: Sequence[str]) -> None:
    """Add the names of the runs below the panels; none for a single run without a name."""
    if names == [""]:
        return
    handles = [Line2D([], [], color=color, linewidth=2.5) for color in colors]
    legend = figure.legend(handles, [" "] * len(names), loc="outside lower left", ncols=4, handlelength=1.4)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)  # a name is shown literally, with any characters
        text.set_text(name)


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
