"""Weighted k-NN against DINO's loop: seconds for four k, and the predictions.

    python benchmarks/bench_knn.py --dino CHECKOUT [--quick] [--json FILE] [--record]

4,000 test and 18,000 training rows, d = 384, ten classes, k = 10, 20, 100 and 200. DINO's loop is its
`knn_classifier`, called once for each k as its script does.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import torch
from evaluators import dino_knn, load_dino
from report import Row, finish, interleaved_medians, meets

from sop_faiss.evaluate.knn import knn_scores
from sop_faiss.evaluate.knn_choices import KS

TEST, TRAIN, DIM, CLASSES = 4_000, 18_000, 384, 10
FASTER, SAME = ">= 3", "<= 0.05"


def clusters(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw unit rows around class centers, so far apart that about two thirds are classified correctly."""
    centers = np.random.default_rng(99).standard_normal((CLASSES, DIM))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    rows = centers[labels] + 5.5 * rng.standard_normal((count, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


@click.command()
@click.option("--dino", type=click.Path(path_type=Path, file_okay=False), help="A checkout of DINO.")
@click.option("--quick", is_flag=True, help="Two timed rounds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures here.")
@click.option("--record", is_flag=True, help="Append the figures to benchmarks/RESULTS.md.")
def main(dino: Path | None, quick: bool, json_file: Path | None, record: bool) -> None:
    """Measure four k at once against DINO's loop."""
    size = f"{TEST:,} x {TRAIN:,} x {DIM}, k = {', '.join(map(str, KS))}"
    what, against = (f"times faster: {size}", "percent of predictions that differ"), "DINO's knn_classifier"
    if dino is None:
        why = {"not measured": "no --dino checkout"}
        rows = [Row(what[0], against, None, FASTER, None, why), Row(what[1], against, None, SAME, None, why)]
        finish("knn", rows, json_file=json_file, record=record)
        return
    module, (train, labels), (test, truth) = load_dino(dino), clusters(TRAIN, 0), clusters(TEST, 1)
    gallery = torch.from_numpy(train), torch.from_numpy(labels)
    queries, classes = torch.from_numpy(test), torch.from_numpy(truth)
    repeats = 2 if quick else 7
    seconds = interleaved_medians(
        {
            "ours": lambda: knn_scores(train, labels, test, truth),
            "dino": lambda: dino_knn(module, *gallery, queries, classes, KS, CLASSES),
        },
        repeats,
    )
    ratio = seconds["dino"] / seconds["ours"]
    own = knn_scores(train, labels, test, truth)
    # Asked for our predictions instead of the truth, DINO's loop tells how many of them are its own.
    predicted = {k: torch.from_numpy(own.predicted[k]) for k in KS}
    agreed = {k: dino_knn(module, *gallery, queries, predicted[k], [k], CLASSES)[k][0] for k in KS}
    differing = 100 - min(agreed.values())
    detail = {f"{name}_seconds": value for name, value in seconds.items()} | {"repeats": repeats}
    top1 = {f"top1_k{k}": own.metrics[f"top1_k{k}"] for k in KS}
    rows = [
        Row(what[0], against, ratio, FASTER, meets(ratio, FASTER), detail),
        Row(what[1], against, differing, SAME, meets(differing, SAME), top1),
    ]
    finish("knn", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
