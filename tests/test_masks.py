"""Block and random masks."""

from __future__ import annotations

import numpy as np
import pytest

from sop_faiss.config import MasksConfig
from sop_faiss.data.views.crops import view_generator
from sop_faiss.data.views.masks import draw_mask
from tests.oracle_masks import draw_block_mask


def draw_many(config: MasksConfig, side: int = 14, count: int = 400) -> np.ndarray:
    return np.stack([draw_mask(side, side, config, view_generator(0, 0, i, 0)) for i in range(count)])


@pytest.mark.parametrize("grid", [(14, 14), (7, 7), (3, 5), (24, 6), (1, 1)])
@pytest.mark.parametrize("ratio", [(0.1, 0.5), (0.7, 1.0)])
def test_block_masks_equal_those_laid_patch_by_patch(grid, ratio):
    config = MasksConfig(probability=0.7, ratio=ratio)
    for number in range(60):
        generators = [view_generator(0, 0, number, 0) for _ in range(2)]
        mask, slow = draw_mask(*grid, config, generators[0]), draw_block_mask(*grid, config, generators[1])
        assert np.array_equal(mask, slow)
        assert generators[0].random() == generators[1].random()  # as many numbers were drawn


def test_block_masks_hide_the_configured_share():
    masks = draw_many(MasksConfig(probability=1.0, ratio=(0.1, 0.5)))
    shares = masks.mean(1)
    assert shares.max() <= 0.5
    assert 0.25 < shares.mean() < 0.31  # uniform in [0.1, 0.5], a little less where no block fits any more
    assert shares.min() >= 0.08


@pytest.mark.parametrize(("drop", "dropped"), [(0.5, 98), (0.3, 58), (0.999, 195), (0.001, 0)])
def test_as_many_patches_of_every_view_are_dropped(drop, dropped):
    masks = draw_many(MasksConfig(kind="none", drop=drop), count=50)
    assert (masks.sum(1) == dropped).all()
    assert len(np.unique(masks, axis=0)) > 30 if dropped else not masks.any()


def test_half_of_the_views_are_not_masked():
    empty = (~draw_many(MasksConfig(probability=0.5)).any(1)).mean()
    assert 0.42 < empty < 0.58


def test_block_masks_are_made_of_rectangles():
    mask = draw_mask(14, 14, MasksConfig(probability=1.0, ratio=(0.3, 0.3)), view_generator(0, 0, 3, 0)).reshape(14, 14)
    touching = mask[:, :-1] & mask[:, 1:]
    assert touching.sum() > mask.sum() * 0.6  # scattered patches at 30 % would touch for 0.3


def test_random_masks_hide_an_exact_share():
    masks = draw_many(MasksConfig(kind="random", random_ratio=0.7))
    assert set(masks.sum(1)) == {137}
    assert len({mask.tobytes() for mask in masks}) == len(masks)


def test_random_masks_may_hide_a_share_drawn_for_each_view():
    masks = draw_many(MasksConfig(kind="random", random_ratio=None, probability=0.5, ratio=(0.1, 0.5)))
    shares = masks.mean(1)
    assert 0.42 < (shares == 0).mean() < 0.58
    masked = shares[shares > 0]
    assert masked.min() > 0.09 and masked.max() <= 0.5 and 0.27 < masked.mean() < 0.33


def test_no_masks():
    assert not draw_many(MasksConfig(kind="none"), count=5).any()


@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_tiny_grids_end(side):
    masks = draw_many(MasksConfig(probability=1.0, ratio=(0.5, 1.0)), side=side, count=50)
    assert masks.shape == (50, side * side)


def test_a_mask_follows_its_generator():
    config = MasksConfig(probability=1.0)
    first, again = (draw_mask(14, 14, config, view_generator(1, 2, 3, 0)) for _ in range(2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, draw_mask(14, 14, config, view_generator(1, 2, 3, 1)))
