"""Sets with masks: two layouts, and what is wrong with one is found before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.segment_set import COCO_SUPERCATEGORIES, SegmentSet, open_segment_sets
from sop_faiss.evaluate.trained.segment_score import VOID
from tests.images import encode
from tests.messages import assert_one_line
from tests.segments import write_segments


def opened(root: Path, **options: bool) -> tuple[SegmentSet, SegmentSet]:
    sets = open_segment_sets(root, **options)
    for each in sets:
        each.count_pixels()
    return sets


def test_both_layouts_have_the_same_classes(tmp_path: Path) -> None:
    ade, own = (opened(write_segments(tmp_path / name, ade=name == "ade")) for name in ("ade", "own"))
    assert len(ade[0].classes.names) == 150 and own[0].classes.names == ("person", "car", "tree-merged")
    for one, other in zip(ade, own, strict=True):
        assert len(one.masks) == len(other.masks)
        for row in range(len(one.masks)):
            assert np.array_equal(one.read_mask(row), other.read_mask(row))
    mask = own[0].read_mask(0)
    assert (mask[:4, :6] == VOID).all() and set(np.unique(mask)) == {0, 1, 2, VOID}
    counts = own[1].count_pixels()
    assert counts.sum(0)[2] == 0 and counts[0].sum() == mask.size - 24
    groups, _ = opened(tmp_path / "own", supercategories=True)
    names = [groups.classes.names[number] for number in np.unique(groups.read_mask(0))[:-1]]
    assert names == ["person", "vehicle", "plant"]


def test_every_category_of_coco_is_in_one_group() -> None:
    ids = [each for group in COCO_SUPERCATEGORIES.values() for each in group]
    assert len(ids) == len(set(ids)) and len(COCO_SUPERCATEGORIES) == 27
    assert sum(each <= 90 for each in ids) >= 80 and sum(each > 90 for each in ids) == 53


def test_an_image_turned_by_exif_has_the_size_that_is_seen(tmp_path: Path) -> None:
    root = write_segments(tmp_path / "s")
    file = root / "images" / "train" / "0.jpg"
    with Image.open(file) as image:
        turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    file.write_bytes(encode(turned, exif=exif))
    train, _ = opened(root)
    with Image.open(file) as image:
        assert train.read_mask(0).shape == (image.width, image.height)  # rows and columns as they are seen


def set_value(value: int) -> Callable[[Path, Path], None]:
    def change(image: Path, mask: Path) -> None:
        Image.fromarray(np.full((48, 64), value, np.uint8)).save(mask)

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda image, mask: mask.unlink(), "no mask"),
        (lambda image, mask: image.unlink(), "no image"),
        (lambda image, mask: Image.new("L", (64, 47), 1).save(mask), "64 x 47"),
        (lambda image, mask: Image.new("RGB", (64, 48)).save(mask), "RGB"),
        (lambda image, mask: Image.new("I;16", (64, 48), 1).save(mask), "I;16"),
        (set_value(151), "151"),
        (set_value(254), "254"),
        (lambda image, mask: mask.write_bytes(mask.read_bytes()[:60]), "0.png"),
        (lambda image, mask: image.write_bytes(b"no image"), "0.jpg"),
        (lambda image, mask: image.with_suffix(".png").write_bytes(image.read_bytes()), "one name"),
    ],
)
def test_files_that_cannot_be_used(change: Callable[[Path, Path], None], part: str, tmp_path: Path) -> None:
    root = write_segments(tmp_path / "s", ade=True)
    change(root / "images" / "training" / "0.jpg", root / "annotations" / "training" / "0.png")
    with pytest.raises(DataError) as error:
        opened(root)
    assert_one_line(error, part)


def test_sets_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        opened(tmp_path / "none")
    assert_one_line(error, "ADE20K")
    root = write_segments(tmp_path / "s", ade=True)
    with pytest.raises(ConfigError) as refused:
        opened(root, supercategories=True)
    assert_one_line(refused, "supercategories")
    for mask in (root / "annotations" / "validation").iterdir():
        set_value(0)(mask, mask)
    with pytest.raises(DataError) as error:
        opened(root)
    assert_one_line(error, "void")
    for folder in ("images", "annotations"):
        for file in (root / folder / "validation").iterdir():
            file.unlink()
    with pytest.raises(DataError) as error:
        opened(root)
    assert_one_line(error, "validation")
    own = write_segments(tmp_path / "own")
    texts = ["classes: 3", "classes: {a: b}", "classes: {1: a, 2: a}", "classes: {0: a}", "classes: {300: a}"]
    for text in [*texts, "classes: {.inf: a, 2: b}", "classes: {1.9: a, 2: b}", "classes: {true: a, 2: b}"]:
        (own / "semantic" / "classes.yaml").write_text(text)
        with pytest.raises(DataError) as error:
            opened(own)
        assert_one_line(error, "classes.yaml")
    (own / "semantic" / "classes.yaml").unlink()
    with pytest.raises(ConfigError):
        opened(own)
