"""Labels of earlier frames propagated to the next one by the similarity of patch tokens; nothing is trained.

Source: Jabri et al., "Space-Time Correspondence as a Contrastive Random Walk", NeurIPS 2020, in the form in which DINO
and iBOT evaluate on DAVIS: each token takes the labels of its `top` most similar tokens nearby, in the first frame and
in the last ones, weighted by a softmax at temperature 0.1.

The tokens are compared in square tiles with their neighborhoods only, so that no matrix of all pairs is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

TEMPERATURE = 0.1
_TILE = 16
"""Largest side of a tile, in tokens: with wider neighborhoods a tile's similarities would outgrow the caches."""


class LabelPropagation:
    """The frames whose labels are propagated: the first one, and the last `frames` before the next.

    Args:
        tokens: of the first frame, in row-major order; of any norm.
        labels: how much each token is of each class; one-hot, as of an annotation.
        grid: rows and columns of the tokens.
        frames: earlier frames that are kept beside the first one.
        radius: a token is compared with those at most this many rows and columns away; 0: with all.
        top: most similar tokens whose labels count.
    """

    def __init__(
        self,
        tokens: Float[Tensor, "n d"],
        labels: Float[Tensor, "n c"],
        grid: tuple[int, int],
        *,
        frames: int,
        radius: int,
        top: int,
    ) -> None:
        self.grid, self.top = grid, top
        self.radius = radius or max(grid)
        size = (1 + frames, len(tokens))
        self._tokens = tokens.new_empty((*size, tokens.shape[1]))
        self._labels = labels.new_empty((*size, labels.shape[1]))
        self._frames, self._seen = frames, 0
        """How many frames are kept beside the first, each in place of the oldest; and how many there were."""
        self._tokens[0], self._labels[0] = functional.normalize(tokens, dim=1), labels

    def next_frame(self, tokens: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
        """Return the labels of the next frame's tokens, and keep both for the frames after it."""
        tokens = functional.normalize(tokens, dim=1)
        kept = self._tokens[: 1 + min(self._seen, self._frames)].unflatten(1, self.grid)
        queries = tokens.unflatten(0, self.grid)
        found = self._labels.new_empty((*self.grid, self._labels.shape[2]))
        flat_labels = self._labels.flatten(0, 1)
        for rows, columns in _tiles(self.grid, min(self.radius + 1, _TILE)):
            window = self._around(rows, 0), self._around(columns, 1)
            similarities, places = self._nearest(queries[rows, columns], kept[:, window[0], window[1]], rows, columns)
            weights = (similarities / TEMPERATURE).softmax(dim=1)
            mixed = (flat_labels[places] * weights[:, :, None]).sum(1)
            found[rows, columns] = mixed.view(rows.stop - rows.start, columns.stop - columns.start, -1)
        labels = found.flatten(0, 1)
        if self._frames:
            place = 1 + self._seen % self._frames
            self._tokens[place], self._labels[place] = tokens, labels
        self._seen += 1
        return labels

    def _around(self, tile: slice, axis: int) -> slice:
        """Return the rows or columns that a tile's tokens are compared with."""
        return slice(max(0, tile.start - self.radius), min(self.grid[axis], tile.stop + self.radius))

    def _nearest(
        self, queries: Float[Tensor, "r c d"], kept: Float[Tensor, "f wr wc d"], rows: slice, columns: slice
    ) -> tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]]:
        """Find the most similar tokens nearby of a tile's tokens: similarities, and places among all kept tokens."""
        _, window_rows, window_columns, _ = kept.shape
        flat = queries.flatten(0, 1)
        similarities = flat @ kept.flatten(0, 2).T
        similarities.unflatten(1, (len(kept), -1)).masked_fill_(
            self._too_far(rows, columns, flat.device)[:, None], -torch.inf
        )
        best, inside = similarities.topk(min(self.top, similarities.shape[1]), dim=1)
        row, column = inside // window_columns, inside % window_columns
        frame, row = row // window_rows, row % window_rows
        row, column = row + self._around(rows, 0).start, column + self._around(columns, 1).start
        return best, (frame * self.grid[0] + row) * self.grid[1] + column

    def _too_far(self, rows: slice, columns: slice, device: torch.device) -> Bool[Tensor, "q w"]:
        apart = []
        for axis, tile in enumerate((rows, columns)):
            window = self._around(tile, axis)
            own, other = (torch.arange(each.start, each.stop, device=device) for each in (tile, window))
            apart.append((own[:, None] - other).abs() > self.radius)
        both = apart[0][:, None, :, None] | apart[1][None, :, None, :]
        return both.flatten(2).flatten(0, 1)


def _tiles(grid: tuple[int, int], side: int) -> Iterator[tuple[slice, slice]]:
    rows, columns = grid
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            yield slice(top, min(top + side, rows)), slice(left, min(left + side, columns))
