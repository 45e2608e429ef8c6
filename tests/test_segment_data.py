"""Crops: pixels and classes stay together, whatever is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sop_faiss.evaluate.trained.segment_choices import SegmentChoices
from sop_faiss.evaluate.trained.segment_data import resized, training_crop, whole_input
from sop_faiss.evaluate.trained.segment_score import VOID
from sop_faiss.model.encoders.preprocess import Preprocess

PLAIN = Preprocess.square(32, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def scene(height: int = 60, width: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of 10 pixels; each pixel's red is its class, times 20."""
    rows, columns = np.mgrid[0:height, 0:width] // 10
    mask = ((rows + 2 * columns) % 9).astype(np.uint8)
    return np.repeat(mask[..., None], 3, 2) * np.uint8(20), mask


def test_sizes_are_those_of_mmsegmentation() -> None:
    assert resized(480, 640, 512.0) == (512, 683) and resized(640, 480, 512.0) == (683, 512)
    assert resized(100, 1000, 512.0) == (205, 2048)  # at most four times as long
    assert resized(1, 1, 512.0) == (512, 512) and resized(1, 200, 32.0) == (1, 128)
    assert whole_input(scene()[0], PLAIN, 30).shape == (3, 30, 45)


@pytest.mark.parametrize("size", [32, 64])
def test_pixels_keep_their_class(size: int) -> None:
    pixels, mask = scene()
    choices = SegmentChoices(size=size, distort=0.0)
    seen = set()
    for number in range(20):
        crop = training_crop(pixels, mask, PLAIN, choices, "crop", number)
        assert torch.equal(crop, training_crop(pixels, mask, PLAIN, choices, "crop", number))
        assert crop.shape == (4, size, size)
        image, classes = crop[0] * 255 / 20, crop[3]
        inside = classes != VOID
        assert (image[~inside] == 0).all()
        # Borders of blocks are blurred in the image alone.
        assert ((image - classes)[inside].abs() < 0.6).float().mean() > (0.75 if size == 64 else 0.6)
        seen.add((int(inside.sum()), float(crop.sum())))
    assert len(seen) > 15
    assert (training_crop(pixels, mask, PLAIN, SegmentChoices(size=size, distort=1.0), 1) != crop).any()


def test_crops_of_one_class_are_drawn_again() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[:, 56:] = 1
    pixels = np.zeros((64, 64, 3), np.uint8)
    choices = SegmentChoices(size=16, min_scale=4.0, max_scale=4.0, distort=0.0)
    crops = [training_crop(pixels, mask, PLAIN, choices, number) for number in range(30)]
    mixed = [float((crop[3] == 1).float().mean()) > 0.2 for crop in crops]
    assert np.mean(mixed) > 0.35  # of one draw alone 0.1
    void = np.full_like(mask, VOID)
    assert (training_crop(pixels, void, PLAIN, choices, 0)[3] == VOID).all()
