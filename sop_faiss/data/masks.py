"""Which patches of a global view the student does not see (design 2.1)."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool

from sop_faiss.config import MasksConfig

__all__ = ["draw_mask"]

_TRIES = 10


def draw_mask(rows: int, cols: int, config: MasksConfig, generator: np.random.Generator) -> Bool[np.ndarray, " n"]:
    """A mask over rows x cols patches, flattened in row-major order; True is hidden.

    Args:
        rows: patches from top to bottom.
        cols: patches from left to right.
        config: kind, probability and ratio.
        generator: the view's own.
    """
    mask = np.zeros((rows, cols), dtype=bool)
    if config.kind == "none":
        return mask.ravel()
    if config.kind == "random":
        hidden = generator.permutation(rows * cols)[: round(config.random_ratio * rows * cols)]
        mask.flat[hidden] = True
        return mask.ravel()
    if generator.random() < config.probability:
        ratio = generator.uniform(*config.ratio)
        _hide_blocks(mask, int(ratio * rows * cols), config, generator)
    return mask.ravel()


def _hide_blocks(
    mask: Bool[np.ndarray, "rows cols"], wanted: int, config: MasksConfig, generator: np.random.Generator
) -> None:
    """Blockwise masking (BEiT, algorithm 1): rectangles of random area and aspect until `wanted` patches are hidden."""
    rows, cols = mask.shape
    hidden = 0
    log_aspect = np.log(config.aspect)
    smallest = (min(rows, cols) // 3) ** 2  # area of a block in patches, as in iBOT: 16 on a grid of 14 x 14
    while hidden < wanted:
        most = wanted - hidden
        for _ in range(_TRIES):
            area = generator.uniform(min(smallest, most), most)
            aspect = math.exp(generator.uniform(*log_aspect))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if not (0 < height < rows and 0 < width < cols):
                continue
            top, left = generator.integers(rows - height + 1), generator.integers(cols - width + 1)
            block = mask[top : top + height, left : left + width]
            added = block.size - int(block.sum())
            if 0 < added <= most:
                block[:] = True
                hidden += added
                break
        else:
            return  # no further block fits: a little under the ratio, as in BEiT
