"""AP of boxes and masks against pycocotools, on the same detections in a set laid out as COCO."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import click
import numpy as np
from report import Row, finish, interleaved_medians, meets

from sop_faiss.evaluate.sets.coco_masks import encode_masks, read_mask
from sop_faiss.evaluate.sets.coco_set import CocoSet, open_coco
from sop_faiss.evaluate.trained.average_precision import NAMES, average_precision, ground_truth

EQUAL = "<= 1e-9"
MOVED = 0.2
"""Shares of its sides by which an instance is moved at most to become a detection."""
PER_IMAGE = 200
"""Detections, more than the 100 that count."""


def detections(data: CocoSet, seed: int = 0) -> list[dict[str, Any]]:
    """Return instances moved at random, some with another category, and their repetitions; scores have ties."""
    rng = np.random.default_rng(seed)
    ids, found = list(data.categories), []
    for image in data.images:
        masks = [read_mask(row["segmentation"], image.height, image.width) for row in image.annotations]
        for number in range(PER_IMAGE if masks else 0):
            row, mask = image.annotations[number % len(masks)], masks[number % len(masks)]
            left, top, width, height = row["bbox"]
            right, down = (round(side * rng.uniform(-MOVED, MOVED)) for side in (width, height))
            category = row["category_id"] if rng.random() < 0.8 else ids[rng.integers(len(ids))]
            own = {"image_id": image.id, "category_id": category, "score": round(float(rng.random()), 2)}
            moved = encode_masks(np.roll(mask, (down, right), axis=(0, 1))[None])[0]
            found.append({**own, "bbox": [left + right, top + down, width, height], "segmentation": moved})
    return found


def official(data: CocoSet, found: list[dict[str, Any]]) -> dict[str, float]:
    """Return pycocotools' numbers in percent, under our names; those without an instance are left out."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    numbers: dict[str, float] = {}
    for kind, name, other in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO()
            truth.dataset = ground_truth(data)
            truth.createIndex()
            results = [{key: value for key, value in row.items() if key != other} for row in found]
            scorer = COCOeval(truth, truth.loadRes(results), name)
            scorer.evaluate()
            scorer.accumulate()
            scorer.summarize()
        numbers |= {f"{kind}_{key}": 100 * value for key, value in zip(NAMES, scorer.stats, strict=False) if value >= 0}
    return numbers


@click.command()
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Laid out as COCO.")
@click.option("--json", "json_file", type=click.Path(path_type=Path))
@click.option("--record", is_flag=True, help="Append to RESULTS.md.")
def main(data: Path, json_file: Path | None, record: bool) -> None:
    """Compare AP with pycocotools, where it is installed."""
    what, against = (
        "AP, AP50, AP75, small, medium, large of boxes and masks: largest difference, percent",
        "pycocotools",
    )
    if importlib.util.find_spec("pycocotools") is None:
        rows = [Row(what, against, None, EQUAL, None, {"not measured": "pycocotools is not installed"})]
    else:
        split = open_coco(data, "val")
        found = detections(split)
        ours, theirs = average_precision(split, found)[0], official(split, found)
        assert ours.keys() == theirs.keys()
        away = max(abs(ours[name] - theirs[name]) for name in ours)
        detail = {"detections": len(found), "images": len(split), "box_ap": ours["box_ap"], "mask_ap": ours["mask_ap"]}
        rows = [Row(what, against, away, EQUAL, meets(away, EQUAL), detail)]
        scorers = {"ours": lambda: average_precision(split, found), "theirs": lambda: official(split, found)}
        seconds = interleaved_medians(scorers, 3)
        detail = {f"{name}_seconds": value for name, value in seconds.items()}
        rows.append(Row("time to score them", against, seconds["ours"] / seconds["theirs"], "", None, detail))
    finish("detection", rows, json_file=json_file, record=record)


if __name__ == "__main__":
    main()
