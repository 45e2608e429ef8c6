"""What a search of an index finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64


@dataclass(frozen=True)
class Neighbors:
    """The k nearest rows of each query, nearest first; equal similarities by rising row."""

    similarities: Float32[np.ndarray, "q k"]
    """Cosines."""
    rows: Int64[np.ndarray, "q k"]
    """Rows of the index; never -1."""
    keys: list[list[str]]
    """Names of those images."""
    labels: Int64[np.ndarray, "q k"] | None
    """Their classes, -1 for an image without; None if the index has no labels."""
    boxes: Float32[np.ndarray, "q k 4"] | None = None
    """The part of each image that is as similar: left, top, right, bottom in shares of its sides, 0, 0, 1, 1 for all of
    it; None where parts were not searched."""

    def lines(self) -> list[Neighbors]:
        """Return the neighbors of each query alone."""
        return [
            Neighbors(
                self.similarities[number : number + 1],
                self.rows[number : number + 1],
                [keys],
                None if self.labels is None else self.labels[number : number + 1],
                None if self.boxes is None else self.boxes[number : number + 1],
            )
            for number, keys in enumerate(self.keys)
        ]

    def of(self, places: Sequence[int] | slice) -> Neighbors:
        """Return some neighbors of one query, by their places in its line, in the order given."""
        chosen = np.arange(self.rows.shape[1])[places if isinstance(places, slice) else np.asarray(places, np.int64)]
        return Neighbors(
            self.similarities[:, chosen],
            self.rows[:, chosen],
            [[self.keys[0][place] for place in chosen.tolist()]],
            None if self.labels is None else self.labels[:, chosen],
            None if self.boxes is None else self.boxes[:, chosen],
        )
