"""AP of boxes and masks against a plain loop, and against pycocotools where it is installed."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
import pytest

from sop_faiss.evaluate.sets.coco_masks import encode_masks, read_mask
from sop_faiss.evaluate.sets.coco_set import CocoSet, open_coco
from sop_faiss.evaluate.trained.average_precision import NAMES, average_precision, ground_truth
from tests.cocos import HEIGHT, WIDTH, write_coco


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CocoSet:
    return open_coco(write_coco(tmp_path_factory.mktemp("coco"), 12), "val")


def detections(data: CocoSet, spread: int) -> list[dict[str, Any]]:
    """Every instance, moved by up to `spread` pixels, and as many again at random; scores have ties."""
    rng = np.random.default_rng(spread)
    found = []
    for image in data.images:
        boxes = [(row["bbox"], row["category_id"]) for row in image.annotations]
        if spread:
            boxes += [([int(left), 8, 20, 20], (3, 7)[int(rng.integers(2))]) for left in rng.integers(0, 40, 4)]
        for (left, top, width, height), category in boxes:
            left, top = np.clip(np.add((left, top), rng.integers(-spread, spread + 1, 2)), 0, 40).tolist()
            mask = np.zeros((1, HEIGHT, WIDTH), np.uint8)
            mask[0, top : top + height, left : left + width] = 1
            own = {"image_id": image.id, "category_id": category, "score": round(float(rng.random()), 1)}
            found.append({**own, "bbox": [left, top, width, height], "segmentation": encode_masks(mask)[0]})
    return found


def overlap(one: np.ndarray, other: np.ndarray, crowd: bool) -> float:
    both = np.logical_and(one, other).sum()
    return float(both / (one.sum() if crowd else np.logical_or(one, other).sum()))


def area_of_box(row: dict[str, Any]) -> np.ndarray:
    """The box as a mask, of whole pixels."""
    left, top, width, height = row["bbox"]
    mask = np.zeros((200, 200), bool)
    mask[top : top + height, left : left + width] = True
    return mask


def plain_ap(data: CocoSet, found: list[dict[str, Any]], kind: str, threshold: float) -> float:
    """AP at one overlap, of all sizes: greedy matches by score, then the envelope of precision at 101 recalls."""
    of_categories = []
    for category in data.categories:
        hits: list[tuple[float, bool]] = []
        instances = 0
        for image in data.images:
            truth = [row for row in image.annotations if row["category_id"] == category]
            truth.sort(key=lambda row: row.get("iscrowd", 0))
            instances += sum(not row.get("iscrowd") for row in truth)
            own = [row for row in found if (row["image_id"], row["category_id"]) == (image.id, category)]
            taken: set[int] = set()
            for row in sorted(own, key=lambda row: -row["score"]):
                best, match = threshold, None
                for place, each in enumerate(truth):
                    crowd = bool(each.get("iscrowd"))
                    if (place in taken and not crowd) or (match is not None and crowd and match in plain_ones(truth)):
                        continue
                    if kind == "box":
                        value = overlap(area_of_box(row), area_of_box(each), crowd)
                    else:
                        masks = (read_mask(one["segmentation"], HEIGHT, WIDTH) for one in (row, each))
                        value = overlap(*masks, crowd)
                    if value >= best:
                        best, match = value, place
                if match is not None:
                    taken.add(match)
                if match is None or not truth[match].get("iscrowd"):
                    hits.append((row["score"], match is not None))
        hits.sort(key=lambda hit: -hit[0])
        right = np.cumsum([hit for _, hit in hits])
        precision = right / np.arange(1, len(hits) + 1)
        recall = right / instances
        at = [max(precision[recall >= level], default=0.0) for level in np.linspace(0, 1, 101)]
        of_categories.append(float(np.mean(at)))
    return 100 * float(np.mean(of_categories))


def plain_ones(truth: list[dict[str, Any]]) -> set[int]:
    return {place for place, row in enumerate(truth) if not row.get("iscrowd")}


@pytest.mark.parametrize("spread", [1, 4])
def test_equal_to_a_plain_loop(spread: int, data: CocoSet) -> None:
    found = detections(data, spread)
    metrics, by_category = average_precision(data, found)
    for kind in ("box", "mask"):
        every = [plain_ap(data, found, kind, threshold) for threshold in np.linspace(0.5, 0.95, 10)]
        assert 5 < metrics[f"{kind}_ap50"] < 99
        assert metrics[f"{kind}_ap50"] == pytest.approx(every[0], abs=1e-9)
        assert metrics[f"{kind}_ap75"] == pytest.approx(every[5], abs=1e-9)
        assert metrics[f"{kind}_ap"] == pytest.approx(np.mean(every), abs=1e-9)
        assert np.mean([each[f"{kind}_ap"] for each in by_category.values()]) == pytest.approx(metrics[f"{kind}_ap"])
    assert set(by_category) == {"red", "green"}


def test_all_found_and_none_found(data: CocoSet) -> None:
    for found, expected in ((detections(data, 0), 100.0), ([], 0.0)):
        metrics, _ = average_precision(data, found)
        assert metrics["box_ap"] == metrics["mask_ap75"] == pytest.approx(expected)
        assert "box_ap_large" not in metrics  # no instance is


def test_a_missing_area_is_that_of_the_mask(data: CocoSet) -> None:
    other = copy.deepcopy(data)
    for image in other.images:
        for row in image.annotations:
            row.pop("area")
    assert ground_truth(other) == ground_truth(data)
    assert min(row["id"] for row in ground_truth(data)["annotations"]) == 1


@pytest.mark.parametrize("spread", [1, 4])
def test_equal_to_pycocotools(spread: int, data: CocoSet) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    found = detections(data, spread)
    metrics, _ = average_precision(data, found)
    for kind, name, other in (("box", "bbox", "segmentation"), ("mask", "segm", "bbox")):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = coco.COCO()
            truth.dataset = ground_truth(data)
            truth.createIndex()
            scorer = cocoeval.COCOeval(
                truth, truth.loadRes([{key: row[key] for key in row if key != other} for row in found]), name
            )
            scorer.evaluate(), scorer.accumulate(), scorer.summarize()
        for key, value in zip(NAMES, scorer.stats, strict=False):
            assert metrics.get(f"{kind}_{key}", -100) == pytest.approx(100 * value, abs=1e-9)
