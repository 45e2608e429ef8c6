"""Annotations of COCO: what is learned of an image, and files that are missing or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import DataError
from sop_faiss.evaluate.sets.coco_set import open_coco
from tests.cocos import CATEGORIES, HEIGHT, WIDTH, write_coco
from tests.messages import assert_one_line


@pytest.mark.parametrize("official", [True, False])
def test_boxes_labels_and_masks_are_those_that_were_drawn(official: bool, tmp_path: Path) -> None:
    data = open_coco(write_coco(tmp_path / "c", official=official), "train")
    assert data.categories == CATEGORIES and list(data.categories) == [3, 7] and len(data) == len(data.source) == 6
    assert [image.id for image in data.images] == [5, 15, 25, 35, 45, 55]
    assert len(data.images[1].annotations) == 2 and len(data.images[1].usable) == 1  # one is of a crowd
    assert data.instances(0).boxes.shape == (0, 4) and data.instances(0).masks.shape == (0, HEIGHT, WIDTH)
    seen = 0
    for row in range(len(data)):
        pixels, found = decode_image(data.source.read(row)).astype(int), data.instances(row)
        data.check_size(pixels.astype(np.uint8), row)
        for box, label, mask in zip(found.boxes, found.labels, found.masks, strict=True):
            left, top, right, bottom = box.astype(int)
            expected = np.zeros((HEIGHT, WIDTH), np.uint8)
            expected[top:bottom, left:right] = 1
            assert np.array_equal(mask, expected)
            red, green, _ = pixels[mask == 1].mean(0)
            assert (red > green) == (label == 1)
            seen += 1
    assert seen == 8 - 1
    assert len(open_coco(tmp_path / "c", "train", 2)) == 2


def test_boxes_are_cut_and_small_ones_left_out(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        first, second, third = content["annotations"][2:5]
        third["segmentation"] = [[1, 2, 3, 4]]
        first["bbox"], second["bbox"] = [-4, 10, 20.5, 100], [5, 5, 0.5, 20]

    file = changed(write_coco(tmp_path), change)
    data = open_coco(tmp_path, "train")
    assert file == data.file
    image = next(each for each in data.images if len(each.annotations) != len(each.usable) and each.id != 15)
    assert image.box(data.images[2].annotations[0]) == (0, 10, 16.5, HEIGHT)
    assert [len(each.usable) for each in data.images] == [0, 1, 1, 0, 1, 2]


def changed(root: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    file = root / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda c: c.pop("images"), "'images'"),
        (lambda c: c.update(annotations=5), "'annotations'"),
        (lambda c: c["categories"].append({"id": "x"}), "'categories'"),
        (lambda c: c["categories"].append(c["categories"][0]), "two categories with id"),
        (lambda c: c["annotations"].append(c["annotations"][0]), "two annotations with id 100"),
        (lambda c: c.update(images=[], annotations=[]), "0 images"),
        (lambda c: c["images"][0].update(file_name="../x.jpg"), "'../x.jpg'"),
        (lambda c: c["images"][0].update(file_name="/etc/passwd"), "file_name"),
        (lambda c: c["images"][0].update(file_name="none.jpg"), "does not exist"),
        (lambda c: c["images"][0].update(file_name="a" * 3000), "file_name"),
        (lambda c: c["images"][0].update(width=10**2000), "too-many-pixels"),
        (
            lambda c: c["annotations"].extend(
                {**c["annotations"][0], "id": 9**9 + n} for n in (*range(2 * 10**5), 2 * 10**5 - 1)
            ),
            "two",
        ),
        (lambda c: c["images"][0].update(height=10**6, width=10**6), "too-many-pixels"),
        (lambda c: c["images"][0].update(height="48"), "not numbers"),
        (lambda c: c["images"][0].update(height=0), "height 0"),
        (lambda c: c["annotations"][0].update(image_id=77), "image_id 77"),
        (lambda c: c["annotations"][0].update(category_id=[]), "category_id"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "bbox"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, -3, 4]), "width and height 0 or more"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, float("inf"), 4]), "finite"),
        (lambda c: c["annotations"][0].update(bbox=[1, 10**400, 2, 4]), "finite"),
        (lambda c: c["annotations"][0].update(bbox=[100, 2, 3, 4]), "outside"),
        (lambda c: c["annotations"][0].update(iscrowd="no"), "iscrowd"),
        (lambda c: c["annotations"][0].update(segmentation={"size": [1, 1], "counts": [1]}), "annotation 100"),
        (lambda c: c["annotations"][0].pop("segmentation"), "no segmentation"),
    ],
)
def test_wrong_annotations(change: Callable[[dict[str, Any]], Any], part: str, tmp_path: Path) -> None:
    file = changed(write_coco(tmp_path, 3), change)
    with pytest.raises(DataError) as error:
        open_coco(tmp_path, "train")
    assert_one_line(error, part, file.name)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="laid out as COCO"):
        open_coco(tmp_path / "none", "train")
    root = write_coco(tmp_path / "c", 2)
    file = root / "annotations" / "instances_val.json"
    for content in ("", "{", "[]", "5", '{"images": {}}', "\xff"):
        file.write_text(content, encoding="latin-1")
        with pytest.raises(DataError) as error:
            open_coco(root, "val")
        assert_one_line(error, str(file))
    file.unlink()
    with pytest.raises(DataError, match=r"instances_val2017\.json"):
        open_coco(root, "val")
    (root / "images").rename(root / "elsewhere")
    with pytest.raises(DataError, match="train2017"):
        open_coco(root, "train")


def test_an_image_of_another_size(tmp_path: Path) -> None:
    data = open_coco(write_coco(tmp_path, 2), "train")
    with pytest.raises(DataError) as error:
        data.check_size(np.zeros((WIDTH, HEIGHT, 3), np.uint8), 0)
    assert_one_line(error, f"{HEIGHT} x {WIDTH}")
