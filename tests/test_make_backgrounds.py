"""The eight sets of `benchmarks/make_backgrounds.py`, pixel by pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("faster_coco_eval")

from benchmarks.make_backgrounds import SIDE, Cut, box_of, largest_strip, with_tiled_box, write_sets


def cut(name: str, color: int, top: int) -> Cut:
    """A triangle of 255 - color on rows of color, color + 1, and so on."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    mask = (rows >= top) & (rows < top + 60) & (columns >= 20) & (columns < 20 + rows - top)
    pixels = np.repeat((color + rows[..., None] % 50), 3, axis=2).astype(np.uint8)
    pixels[mask] = 255 - color
    return Cut(name, pixels, mask)


def test_the_box_is_filled_with_the_largest_strip_repeated() -> None:
    each = cut("a", 10, 100)
    rows, columns = box_of(each.mask)
    assert (rows, columns) == (slice(101, 160), slice(20, 79))
    strip = largest_strip(each.pixels, each.mask)
    assert strip.shape == (SIDE, SIDE - 79, 3)  # right of the box
    filled = with_tiled_box(each)
    for row, column in ((101, 20), (159, 78), (130, 50)):
        np.testing.assert_array_equal(filled[row, column], strip[row % strip.shape[0], column % strip.shape[1]])
    outside = np.ones((SIDE, SIDE), bool)
    outside[rows, columns] = False
    np.testing.assert_array_equal(filled[outside], each.pixels[outside])


def test_the_sets_have_their_foregrounds_and_backgrounds(tmp_path: Path) -> None:
    classes = [[cut("a", 10, 100), cut("b", 60, 30)], [cut("c", 110, 60), cut("d", 160, 90)]]
    write_sets(tmp_path, classes, ["cat", "dog"])
    assert len(list(tmp_path.rglob("*.jpg"))) == 8 * 4
    mask = classes[0][0].mask

    def read(kind: str) -> np.ndarray:
        return np.array(Image.open(tmp_path / kind / "val" / "00_cat" / "a.jpg")).astype(int)

    border = np.zeros_like(mask)
    border[2:-2, 2:-2] = True  # JPEG mixes a few pixels at edges
    inner = mask & np.roll(mask, 9, 0) & np.roll(mask, -9, 0) & np.roll(mask, 9, 1) & np.roll(mask, -9, 1)
    assert inner.sum() > 50
    for kind in ("original", "only_fg", "mixed_same", "mixed_rand", "mixed_next"):
        assert np.abs(read(kind)[inner] - 245).max() < 30, kind
    for kind in ("no_fg", "only_bg_b"):
        assert read(kind)[inner].max() < 30, kind
    far = border & ~mask
    far[85:180, :100] = False
    assert read("only_fg")[far].max() < 30
    for kind, color in (("original", 10), ("no_fg", 10), ("only_bg_t", 10), ("mixed_same", 60)):
        values = read(kind)[far]
        assert color - 20 < values.min() and values.max() < color + 70, kind
    assert read("mixed_next")[far].min() > 90  # of the class after
