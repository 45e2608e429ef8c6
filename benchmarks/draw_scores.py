"""Draw the scores of finished runs against the images that they have seen: docs/from_scratch.png.

    python benchmarks/draw_scores.py "residual network=runs/a" "residual network=runs/b" "ViT=runs/c" \
        --line "raw pixels" 34.3 --title "k-NN top-1 (%)" --out docs/from_scratch.png

Runs with the same name are seeds of one thing and have the same color. A line is a score that needs no training.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from sop_faiss.cli.common import run_command
from sop_faiss.report.plots import STYLE, Curve, colors_of, draw_curve, read_curves
from sop_faiss.report.png_figure import png_figure


@click.command(help=__doc__)
@click.argument("runs", nargs=-1, required=True, metavar="NAME=RUN...")
@click.option("--metric", default="knn_top1_k20", show_default=True)
@click.option("--line", "levels", type=(str, float), multiple=True, metavar="NAME SCORE")
@click.option("--title", default="")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@run_command
def main(runs: tuple[str, ...], metric: str, levels: tuple[tuple[str, float], ...], title: str, out: Path) -> None:
    """Read all runs, then draw."""
    named = [(name, scores_by_images(Path(run), metric)) for name, run in map(parts_of, runs)]
    colors = dict(zip(dict(named), colors_of(len(dict(named))), strict=True))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, curve in named:
            draw_curve(axes, curve, colors[name], marker="o")
        for name, color in colors.items():
            axes.plot([], [], color=color, marker="o", markersize=3.5, label=name)
        for (name, score), dashes in zip(levels, ("--", ":", "-.") * len(levels), strict=False):
            axes.axhline(score, color="#4a515c", linestyle=dashes, linewidth=1.2, label=f"{name} ({score:g})")
        axes.set_xlabel("images seen, in thousands")
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))

    with rc_context(STYLE):
        out.write_bytes(png_figure((8.2, 3.6), draw))


def parts_of(pair: str) -> tuple[str, str]:
    """Split NAME=VALUE at its first sign of equality."""
    name, sign, value = pair.partition("=")
    if not (name and sign and value):
        raise click.BadParameter(f"{pair!r}: wanted NAME=VALUE")
    return name, value


def scores_by_images(run: Path, metric: str) -> Curve:
    """Read the scores of a run, each at the thousands of images that had been trained on."""
    curves = read_curves(run)
    if metric not in curves:
        raise click.BadParameter(f"{run} has no {metric}: wanted one of its scores, as its metrics.jsonl names them")
    images = dict(zip(curves["images"].steps, curves["images"].values, strict=True))
    return Curve(np.array([images[step] / 1000 for step in curves[metric].steps]), curves[metric].values)


if __name__ == "__main__":
    main()
