"""Labels propagated in tiles against the dense matrix of all pairs, and against what must be kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sop_faiss.evaluate.propagation import LabelPropagation

TOLERANCE = 1e-5


def slow_labels(
    tokens: Tensor, earlier: list[tuple[Tensor, Tensor]], grid: tuple[int, int], radius: int, top: int
) -> Tensor:
    """One token at a time, in float64: the most similar tokens nearby, their labels weighted by exp(similarity/0.1)."""
    rows, columns = grid
    result = []
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        found = []
        for frame_tokens, frame_labels in earlier:
            for other in range(rows * columns):
                apart = max(abs(other // columns - row), abs(other % columns - column))
                if radius == 0 or apart <= radius:
                    pair = tokens[place].double(), frame_tokens[other].double()
                    similarity = float(functional.cosine_similarity(*pair, dim=0))
                    found.append((similarity, frame_labels[other].double()))
        found.sort(key=lambda each: -each[0])
        weights = [math.exp(similarity / 0.1) for similarity, _ in found[:top]]
        mixed = [weight * label for weight, (_, label) in zip(weights, found, strict=False)]
        result.append(torch.stack(mixed).sum(0) / sum(weights))
    return torch.stack(result)


def made_up(grid: tuple[int, int], frames: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = grid[0] * grid[1]
    base = torch.randn(count, 6, generator=generator)
    tokens = [base + 0.5 * torch.randn(count, 6, generator=generator) for _ in range(frames)]
    classes = torch.randint(3, (count,), generator=generator)
    return tokens, functional.one_hot(classes, 3).float()


@pytest.mark.parametrize(
    ("grid", "frames", "radius", "top"),
    [((5, 7), 2, 2, 5), ((4, 4), 0, 1, 3), ((3, 9), 3, 0, 5), ((1, 6), 1, 1, 50), ((1, 1), 2, 3, 5), ((4, 5), 9, 9, 1)],
)
def test_tiles_are_as_the_dense_matrix(grid: tuple[int, int], frames: int, radius: int, top: int) -> None:
    tokens, first = made_up(grid, 6)
    propagation = LabelPropagation(tokens[0], first, grid, frames=frames, radius=radius, top=top)
    earlier: list[tuple[Tensor, Tensor]] = []
    for frame in tokens[1:]:
        found = propagation.next_frame(frame)
        expected = slow_labels(frame, [(tokens[0], first), *earlier], grid, radius, top)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=0)
        earlier = [*earlier, (frame, found)][-frames:] if frames else []


def test_more_tokens_than_a_tile() -> None:
    grid = (20, 37)
    tokens, first = made_up(grid, 3)
    narrow, wide = (LabelPropagation(tokens[0], first, grid, frames=1, radius=radius, top=4) for radius in (40, 0))
    for frame in tokens[1:]:  # a radius above the grid is no limit
        torch.testing.assert_close(narrow.next_frame(frame), wide.next_frame(frame), atol=TOLERANCE, rtol=0)
    found = LabelPropagation(tokens[0], first, grid, frames=1, radius=3, top=4).next_frame(tokens[1])
    for place in (0, 36, 370, 400, 739):  # as from frames of one token each
        row, column = divmod(place, 37)
        near = [other for other in range(740) if max(abs(other // 37 - row), abs(other % 37 - column)) <= 3]
        earlier = [(tokens[0][other][None], first[other][None]) for other in near]
        expected = slow_labels(tokens[1][place][None], earlier, (1, 1), 0, 4)
        torch.testing.assert_close(found[place].double(), expected[0], atol=TOLERANCE, rtol=0)


def test_one_hot_labels_of_the_same_frame_stay() -> None:
    tokens, first = made_up((6, 6), 1)
    propagation = LabelPropagation(tokens[0], first, (6, 6), frames=2, radius=2, top=1)
    for _ in range(5):
        assert torch.equal(propagation.next_frame(tokens[0] * 3), first)
