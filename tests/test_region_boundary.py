"""J and F of masks, and their statistics, against loops over pixels and frames written from the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sop_faiss.evaluate.region_boundary import boundary_accuracy, frame_statistics, region_similarity


def slow_boundary(mask: np.ndarray) -> list[tuple[int, int]]:
    """Pixels that differ from the one to the right, below, or diagonally below; each only where there is one."""
    height, width = mask.shape
    found = []
    for row in range(height):
        for column in range(width):
            right, below = min(column + 1, width - 1), min(row + 1, height - 1)
            others = {bool(mask[row, right]), bool(mask[below, column]), bool(mask[below, right])}
            if others != {bool(mask[row, column])}:
                found.append((row, column))
    return found


def slow_accuracy(mask: np.ndarray, truth: np.ndarray) -> float:
    radius = math.ceil(0.008 * math.hypot(*mask.shape))
    found, wanted = slow_boundary(mask), slow_boundary(truth)
    if not found and not wanted:
        return 1.0

    def matched(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
        if not some:
            return 1.0
        near = [any((a - c) ** 2 + (b - d) ** 2 <= radius**2 for c, d in others) for a, b in some]
        return sum(near) / len(some)

    precision, recall = matched(found, wanted), matched(wanted, found)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def hostile_masks() -> dict[str, np.ndarray]:
    height, width = 40, 300  # the tolerance is 3 pixels
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:height, :width]
    masks = {
        "empty": np.zeros((height, width), bool),
        "full": np.ones((height, width), bool),
        "half": columns < 150,
        "disk": (rows - 20) ** 2 + (columns - 150) ** 2 < 200,
        "moved": (rows - 18) ** 2 + (columns - 147) ** 2 < 180,
        "border": (rows < 2) | (columns >= width - 1),
        "noise": generator.random((height, width)) < 0.02,
    }
    for name, place in {"first": (0, 0), "last": (-1, -1), "edge": (-1, 150), "middle": (20, 153)}.items():
        masks[name] = np.zeros((height, width), bool)
        masks[name][place] = True
    return masks


@pytest.mark.parametrize("name", hostile_masks())
def test_j_and_f_are_those_of_loops(name: str) -> None:
    masks = hostile_masks()
    for other in masks.values():
        mask = masks[name]
        assert boundary_accuracy(mask, other) == pytest.approx(slow_accuracy(mask, other), abs=1e-12)
        pixels = [(bool(a), bool(b)) for a, b in zip(mask.flat, other.flat, strict=True)]
        union = sum(a or b for a, b in pixels)
        expected = sum(a and b for a, b in pixels) / union if union else 1.0
        assert region_similarity(mask, other) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (2, 2)])
def test_images_of_few_pixels(shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    for _ in range(10):
        mask, truth = generator.random((2, *shape)) < 0.5
        assert boundary_accuracy(mask, truth) == pytest.approx(slow_accuracy(mask, truth), abs=1e-12)


def test_statistics_of_frames() -> None:
    values = np.array([1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.0, 0.0])
    found = frame_statistics(values)
    assert found.mean == pytest.approx(3.5 / 8) and found.recall == 3 / 8  # 0.5 is not above 0.5
    # bounds of the quarters in 1 to 8 are 1, 2.75, 4.5, 6.25 and 8: rounded, half up, 1, 3, 5, 6 and 8
    assert found.decay == pytest.approx(0.8 - (0.2 + 0.0 + 0.0) / 3)
    assert frame_statistics(np.array([0.7])) == (0.7, 1.0, 0.0)
    long = frame_statistics(np.linspace(1, 0, 1000))
    assert long.decay == pytest.approx(0.75, abs=1e-3)
    with pytest.raises(ValueError, match="no frame"):
        frame_statistics(np.array([]))
