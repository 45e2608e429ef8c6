"""Patches of two images, or of two views of one image, that match by their tokens.

Source: iBOT's `analysis/correspondence/visualize_correspondence.py`. Two views are crops of 40 to 100 % of the image,
half of them flipped, with iBOT's color jitter; where each patch of one is in the other is known from the crops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from torch import Tensor
from torch.nn import functional

from sop_faiss.config import ViewsConfig
from sop_faiss.data.views.crops import View, draw_view, view_generator, write_view
from sop_faiss.errors import FeatureError
from sop_faiss.model.encoders.dense import DenseEncoder

_VIEWS = ViewsConfig(global_scale=(0.4, 1.0), local_count=0, blur_global1=0.0, blur_global2=0.0, solarize_global2=0.0)
"""iBOT's views for this figure; jitter, gray, flip and aspect are the defaults."""
_RADIUS = 1.0
"""A match is right within one patch, in rows and in columns."""
Grid = tuple[int, int]


class TokenMap(NamedTuple):
    """The tokens of an image."""

    tokens: Float[Tensor, "n d"]
    """Unit rows, row-major."""
    grid: Grid
    """Rows and columns."""


@dataclass(frozen=True)
class Matches:
    """Pairs of tokens of a first and a second image, each the other's nearest; the most similar pair first."""

    first: Int64[np.ndarray, " m"]
    second: Int64[np.ndarray, " m"]
    similarities: Float64[np.ndarray, " m"]
    nearest: Int64[np.ndarray, " n"]
    """The nearest token in the second image of each in the first, whether or not it is mutual."""


@dataclass(frozen=True)
class Scored:
    """How many matches of two views are right.

    Attributes:
        right: of each mutual match, whether it is.
        known: of each mutual match, whether the first patch is in the second view at all; only these count.
        right_nearest: of each patch of the first view that is in the second, whether its nearest token is right.
        chance: share of the second view's tokens that would be right, the mean over the same patches.
    """

    right: Bool[np.ndarray, " m"]
    known: Bool[np.ndarray, " m"]
    right_nearest: Bool[np.ndarray, " k"]
    chance: float


def tokens_of(dense: DenseEncoder, pixels: UInt8[np.ndarray, "h w 3"], name: str) -> TokenMap:
    """Compute the tokens of an image whose sides the encoder can take.

    Raises:
        FeatureError: they are not finite; `name` is in the message.
    """
    device = next(dense.encoder.parameters()).device
    tokens, grid = dense(dense.encoder.preprocess.normalize(torch.from_numpy(pixels)[None].to(device)))
    if not bool(torch.isfinite(tokens).all()):
        raise FeatureError(f"the tokens of {name} are not finite: the encoder's weights or preprocessing are wrong")
    return TokenMap(functional.normalize(tokens[0].double(), dim=1).cpu(), grid)


def match_tokens(first: TokenMap, second: TokenMap) -> Matches:
    """Find the tokens that are each other's nearest by cosine; of equally near ones the first."""
    similarities = (first.tokens @ second.tokens.T).numpy()
    nearest, back = similarities.argmax(1), similarities.argmax(0)
    rows = np.flatnonzero(back[nearest] == np.arange(len(nearest)))
    found = similarities[rows, nearest[rows]]
    order = np.argsort(-found, kind="stable")
    return Matches(rows[order], nearest[rows[order]], found[order], nearest)


def crop_views(
    pixels: UInt8[np.ndarray, "h w 3"], side: int, seed: int, number: int
) -> tuple[tuple[View, View], UInt8[np.ndarray, "2 side side 3"]]:
    """Draw and make two views of an image.

    Args:
        pixels: of the image.
        side: of the views.
        seed: of the draws, with the image's number.
        number: of the image.
    """
    height, width = pixels.shape[:2]
    first, second = (
        draw_view(height, width, index, _VIEWS, view_generator(seed, 0, number, index)) for index in range(2)
    )
    made = np.empty((2, side, side, 3), np.uint8)
    for out, view in zip(made, (first, second), strict=True):
        write_view(pixels, view, out)
    return (first, second), made


def places_in_other(first: View, second: View, grid: Grid, other_grid: Grid) -> Float64[np.ndarray, "n 2"]:
    """Return where the center of each patch of the first view is in the second, in rows and columns of its patches.

    0, 0 is the center of the second view's first patch; a place above -0.5 and below rows - 0.5 is inside.

    Args:
        first: how the first view was cropped and flipped.
        second: how the second was.
        grid: rows and columns of the first.
        other_grid: of the second.
    """
    rows, columns = (axis.ravel() for axis in np.mgrid[: grid[0], : grid[1]])
    down, across = (rows + 0.5) / grid[0], (columns + 0.5) / grid[1]
    across = 1 - across if first.flipped else across
    box, other = first.box, second.box
    down = (box.top + down * box.height - other.top) / other.height
    across = (box.left + across * box.width - other.left) / other.width
    across = 1 - across if second.flipped else across
    return np.stack([down * other_grid[0] - 0.5, across * other_grid[1] - 0.5], axis=1)


def score_matches(matches: Matches, places: Float64[np.ndarray, "n 2"], grid: Grid) -> Scored:
    """Compare matches with the truth.

    Args:
        matches: of the two views.
        places: of `places_in_other`.
        grid: rows and columns of the second view.
    """
    inside: Bool[np.ndarray, " n"] = np.all((places > -0.5) & (places < np.array(grid) - 0.5), axis=1)
    tokens = np.stack(np.unravel_index(np.arange(grid[0] * grid[1]), grid), axis=1)
    near: Bool[np.ndarray, "n tokens"] = np.all(np.abs(places[:, None] - tokens[None]) <= _RADIUS, axis=2)
    return Scored(
        right=near[matches.first, matches.second],
        known=inside[matches.first],
        right_nearest=near[np.arange(len(near)), matches.nearest][inside],
        chance=float(near[inside].mean()) if inside.any() else float("nan"),
    )
