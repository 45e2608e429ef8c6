"""Masks of COCO: polygons, run lengths and packed ones are read as its library does; damaged ones are refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from sop_faiss.errors import ConfigError, DataError
from sop_faiss.evaluate.sets.coco_masks import check_segmentation, coco_library, encode_masks, has_area, read_mask
from tests.cocos import packed, run_lengths
from tests.messages import assert_one_line


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_run_lengths_are_read_as_the_library_does(share: float) -> None:
    rng = np.random.default_rng(0)
    mask = (rng.random((37, 53)) < share).astype(np.uint8)
    mask[5:30, 10:40] = share >= 0.5  # long runs, which differ much from one to the next
    counts = run_lengths(mask)
    (library,) = encode_masks(mask[None])
    assert packed(counts) == library["counts"]
    for given in (counts, library["counts"]):
        assert np.array_equal(read_mask({"size": [37, 53], "counts": given}, 37, 53), mask)
    assert np.array_equal(coco_library().mask.decode([library])[:, :, 0], mask)


def test_polygons_are_united() -> None:
    squares = [[2, 3, 12, 3, 12, 9, 2, 9], [8.0, 5.0, 20.0, 5.0, 20.0, 15.0, 8.0, 15.0]]
    mask = np.zeros((20, 30), np.uint8)
    mask[3:9, 2:12] = mask[5:15, 8:20] = 1
    assert np.array_equal(read_mask(squares, 20, 30), mask)
    assert has_area(squares) and has_area([[1, 2], *squares]) and not has_area([[1, 2, 3, 4]])
    assert np.array_equal(read_mask([[1, 2], *squares], 20, 30), mask) and not read_mask([[1, 2, 3, 4]], 20, 30).any()
    assert encode_masks(np.zeros((0, 20, 30), np.uint8)) == []


@pytest.mark.parametrize(
    ("segmentation", "part"),
    [
        (None, "no segmentation"),
        ([], "no segmentation"),
        ([[1, 2, 3, 4, 5, "6"]], "of its corners"),
        ([[1, 2, 3, 4, 5, 6, 7]], "of its corners"),
        ([5], "of its corners"),
        ([[1, 2, 3, 4, 5, 1e9]], "leaves the image"),
        ([[1, 2, 3, 4, float("nan"), 6]], "leaves the image"),
        ({"size": [5, 4], "counts": [20]}, "of size"),
        ({"counts": [20]}, "of size"),
        ({"size": [4, 5], "counts": [19]}, "add up to 19"),
        ({"size": [4, 5], "counts": [10**30]}, "add up to"),
        ({"size": [4, 5], "counts": [21, -1]}, "damaged"),
        ({"size": [4, 5], "counts": None}, "damaged"),
        ({"size": [4, 5], "counts": "\x00"}, "damaged"),
        ({"size": [4, 5], "counts": "o" * 50}, "damaged"),
        ({"size": [4, 5], "counts": packed([10, 9])}, "add up to 19"),
        ({"size": [4, 5], "counts": "P"}, "damaged"),
    ],
)
def test_damaged_masks(segmentation: Any, part: str) -> None:
    for check in (check_segmentation, read_mask):
        with pytest.raises(DataError) as error:
            check(segmentation, 4, 5)
        assert_one_line(error, part)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ConfigError) as error:
        coco_library()
    assert_one_line(error, "sop-faiss[eval]")
