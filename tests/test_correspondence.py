"""Matches, and where patches of one view are in another, against loops and against pixels that say where they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

from sop_faiss.data.views.color import UNCHANGED
from sop_faiss.data.views.crops import CropBox, View, write_view
from sop_faiss.evaluate.correspondence import (
    Matches,
    TokenMap,
    crop_views,
    match_tokens,
    places_in_other,
    score_matches,
)
from tests.images import make_image


def token_map(seed: int, grid: tuple[int, int], width: int = 6) -> TokenMap:
    tokens = torch.randn(grid[0] * grid[1], width, generator=torch.Generator().manual_seed(seed)).double()
    return TokenMap(functional.normalize(tokens, dim=1), grid)


def test_matches_are_mutual_nearest_tokens_by_falling_similarity() -> None:
    first, second = token_map(0, (5, 6)), token_map(1, (4, 7))
    similarity = [[float(a @ b) for b in second.tokens] for a in first.tokens]
    nearest = [max(range(28), key=lambda j, row=row: row[j]) for row in similarity]
    expected = {
        (i, j)
        for i, j in itertools.product(range(30), range(28))
        if nearest[i] == j and max(range(30), key=lambda k, j=j: similarity[k][j]) == i
    }
    found = match_tokens(first, second)
    assert set(zip(found.first.tolist(), found.second.tolist(), strict=True)) == expected
    assert found.nearest.tolist() == nearest and len(expected) > 3
    assert (np.diff(found.similarities) <= 0).all()
    np.testing.assert_allclose(found.similarities[0], similarity[found.first[0]][found.second[0]])


@pytest.mark.parametrize("flips", list(itertools.product([False, True], repeat=2)))
def test_places_are_where_the_pixels_are(flips: tuple[bool, bool]) -> None:
    """The image's red is its row, its green its column: views of it say where each of their pixels was."""
    rows, columns = np.mgrid[:240, :240]
    image = np.stack([rows, columns, np.zeros_like(rows)], axis=2).astype(np.uint8)
    boxes = CropBox(10, 40, 160, 120), CropBox(60, 20, 140, 180)
    views = [View(0.0, 0.0, box, flip, UNCHANGED) for box, flip in zip(boxes, flips, strict=True)]
    side, grids = 96, ((6, 8), (8, 4))
    made = np.empty((2, side, side, 3), np.uint8)
    for out, view in zip(made, views, strict=True):
        write_view(image, view, out)
    found = places_in_other(*views, *grids)
    other = made[1].astype(int)
    checked = 0
    for place, (row, column) in zip(found, itertools.product(range(6), range(8)), strict=True):
        y, x = round((row + 0.5) * side / 6), round((column + 0.5) * side / 8)
        wanted = made[0][y - 1 : y + 1, x - 1 : x + 1, :2].astype(float).mean((0, 1))  # on the corner of four pixels
        apart = np.abs(other[..., :2] - wanted).sum(2)
        seen = np.unravel_index(apart.argmin(), apart.shape)
        inside = -0.5 < place[0] < 7.5 and -0.5 < place[1] < 3.5
        if apart.min() <= 2:
            pixels = (place + 0.5) * side / np.array(grids[1]) - 0.5
            assert np.abs(pixels - seen).max() <= 1.6
            checked += 1
        else:
            assert (
                not inside
                or min(abs(place[0] + 0.5), abs(place[0] - 7.5), abs(place[1] + 0.5), abs(place[1] - 3.5)) < 0.2
            )
    assert checked > 8


def test_right_matches_are_counted_as_a_loop_does() -> None:
    generator = np.random.default_rng(0)
    grid = (5, 4)
    places = generator.uniform(-2, 6, (20, 2))
    nearest = generator.integers(20, size=20)
    first = generator.permutation(20)[:12]
    matches = Matches(first, nearest[first], np.zeros(12), nearest)
    scored = score_matches(matches, places, grid)

    def is_right(i: int, j: int) -> bool:
        row, column = divmod(j, 4)
        return abs(places[i][0] - row) <= 1 and abs(places[i][1] - column) <= 1

    inside = [i for i in range(20) if -0.5 < places[i][0] < 4.5 and -0.5 < places[i][1] < 3.5]
    assert scored.known.tolist() == [i in inside for i in first]
    assert scored.right.tolist() == [is_right(i, nearest[i]) for i in first]
    assert scored.right_nearest.tolist() == [is_right(i, nearest[i]) for i in inside] and len(inside) > 2
    expected = np.mean([np.mean([is_right(i, j) for j in range(20)]) for i in inside])
    assert scored.chance == pytest.approx(expected)


def test_tokens_that_know_their_place_match_rightly_and_random_ones_by_chance() -> None:
    pixels = make_image(np.random.default_rng(0), (200, 300))
    grid, shares, chances = (12, 12), [], []
    for number in range(30):
        views, made = crop_views(pixels, 48, 0, number)
        assert made.shape == (2, 48, 48, 3)
        places = places_in_other(*views, grid, grid)
        own = np.stack(np.unravel_index(np.arange(144), grid), axis=1).astype(float)
        known = [functional.normalize(torch.from_numpy(_located(each)), dim=1) for each in (places, own)]
        scored = score_matches(match_tokens(*(TokenMap(tokens, grid) for tokens in known)), places, grid)
        assert scored.right[scored.known].all() and scored.right_nearest.all() and scored.known.sum() > 4
        guessed = score_matches(match_tokens(token_map(number, grid), token_map(99, grid)), places, grid)
        shares.append(guessed.right_nearest.mean())
        chances.append(guessed.chance)
    assert np.mean(shares) == pytest.approx(np.mean(chances), abs=0.02)
    first, second = (crop_views(pixels, 48, 0, 3)[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def _located(places: np.ndarray) -> np.ndarray:
    """Tokens whose cosine falls with the distance of their places."""
    waves = [np.cos(places / 20), np.sin(places / 20)]
    return np.concatenate(waves, axis=1)
