"""Fixed anchors against random ones: runs that differ only in `sop.anchors`, two seeds each, and a plot of the curves.

The paper reports that fixed anchors collapse. A collapse shows as teacher entropy over ln K going to 1 (uniform) or
to 0 (one prototype takes all), and as k-NN falling to chance.

    python benchmarks/fixed_anchors.py cifar10_vit_micro data.train=cifar10_train/ --out runs/anchors
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from sop_faiss.config import load_config
from sop_faiss.report.plots import plot_training
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.verbs.training.train import run_training

ANCHORS = ("random", "fixed_rows", "fixed_vectors")


def summary(run: Path) -> dict[str, float]:
    """Return the last value of each number, or its mean over the last tenth of the run if it is noisy."""
    lines = read_metrics(run)
    trained = [line for line in lines if "loss" in line]
    tail = trained[-max(1, len(trained) // 10) :]
    result = {"step": trained[-1]["step"]}
    for key in ("loss_cls_over_lnK", "teacher_entropy_cls_over_lnK", "support_similarity_cls"):
        result[key] = round(sum(line[key] for line in tail) / len(tail), 4)
    for key in ("knn_top1_k20",):
        scores = [line[key] for line in lines if key in line]
        if scores:
            result.update({f"{key}_first": round(scores[0], 2), f"{key}_last": round(scores[-1], 2)})
    return result


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run directories and anchors.png go here.")
@click.option("--only", multiple=True, type=click.Choice(ANCHORS), help="Run only these; the plot needs all.")
@click.option("--seeds", default=2, show_default=True)
def main(config: str, overrides: tuple[str, ...], out: Path, only: tuple[str, ...], seeds: int) -> None:
    """Train with each kind of anchors and seed (finished runs are kept), print a line per run, plot the curves."""
    for anchors in only or ANCHORS:
        for seed in range(seeds):
            run = out / f"{anchors}-{seed}"
            settings = load_config(config, [*overrides, f"sop.anchors={anchors}", f"train.seed={seed}"])
            if not run_training(settings, run, resume=True).finished:
                return
            print(json.dumps({"anchors": anchors, "seed": seed, **summary(run)}), flush=True)
    if not only:
        plot_training({a: [out / f"{a}-{s}" for s in range(seeds)] for a in ANCHORS}, out / "anchors.png")


if __name__ == "__main__":
    main()
