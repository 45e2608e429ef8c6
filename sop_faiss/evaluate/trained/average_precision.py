"""Average precision of boxes and masks as COCO defines it, by faster-coco-eval."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from sop_faiss.evaluate.sets.coco_masks import coco_library, read_mask
from sop_faiss.evaluate.sets.coco_set import CocoSet

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""The first of COCO's twelve numbers, in its order."""
_KINDS = {"box": ("bbox", "segmentation"), "mask": ("segm", "bbox")}
"""COCO's name of what is compared, and what its entries must not have: an area is of what is compared."""

_LARGEST_AREA = 1e12
"""Square pixels: more is damaged, as NaN is."""


def ground_truth(data: CocoSet) -> dict[str, Any]:
    """Return the annotations as the evaluator reads them: ids from 1, since it takes 0 for none, and areas."""
    annotations: list[dict[str, Any]] = []
    for image in data.images:
        for row in image.annotations:
            area: Any = row.get("area")
            if type(area) not in (int, float) or not 0 <= area < _LARGEST_AREA:
                area = int(read_mask(row["segmentation"], image.height, image.width).sum())
            names = ("image_id", "category_id", "bbox", "segmentation")
            own = {name: row[name] for name in names} | {"iscrowd": row.get("iscrowd", 0), "area": area}
            annotations.append({**own, "id": len(annotations) + 1})
    return {
        "images": [{"id": each.id, "height": each.height, "width": each.width} for each in data.images],
        "categories": [{"id": number, "name": name} for number, name in data.categories.items()],
        "annotations": annotations,
    }


def average_precision(
    data: CocoSet, found: list[dict[str, Any]]
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return box and mask AP in percent, and the AP of each category that has instances.

    Args:
        data: the annotated images; at least one instance is not of a crowd.
        found: entries of a result file, with `bbox` and `segmentation`.
    """
    library = coco_library()
    metrics: dict[str, float] = {}
    by_category: dict[str, dict[str, float]] = {}
    for kind, (name, other) in _KINDS.items():
        with contextlib.redirect_stdout(io.StringIO()):
            truth = library.COCO(ground_truth(data))
            results = truth.loadRes([{key: value for key, value in row.items() if key != other} for row in found])
            scorer = library.COCOeval_faster(truth, results, name)
            scorer.evaluate()
            scorer.accumulate()
            scorer.summarize()
        values = {key: 100 * float(value) for key, value in zip(NAMES, scorer.stats, strict=False) if value >= 0}
        metrics |= {f"{kind}_{key}": value for key, value in values.items()}
        precision = scorer.eval["precision"][:, :, :, 0, -1]  # IoU, recall, category; all areas, 100 detections
        for place, category in enumerate(data.categories.values()):
            if (precision[:, :, place] >= 0).any():
                by_category.setdefault(category, {})[f"{kind}_ap"] = 100 * float(precision[:, :, place].mean())
    return metrics, by_category
