"""Blockwise masks laid patch by patch: the slow version that the masks of integers are held against."""

from __future__ import annotations

import math

import numpy as np

from sop_faiss.config import MasksConfig


def draw_block_mask(rows: int, cols: int, config: MasksConfig, generator: np.random.Generator) -> np.ndarray:
    """BEiT's algorithm 1 as iBOT uses it, but for a last block's area, with `draw_mask`'s draws in the same order."""
    mask = np.zeros((rows, cols), dtype=bool)
    if generator.random() >= config.probability:
        return mask.ravel()
    wanted = int(generator.uniform(*config.ratio) * rows * cols)
    smallest = (min(rows, cols) // 3) ** 2
    while mask.sum() < wanted:
        most = wanted - int(mask.sum())
        for _ in range(10):
            area = generator.uniform(min(smallest, most), most)
            aspect = math.exp(generator.uniform(*np.log(config.aspect)))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if not (0 < height < rows and 0 < width < cols):
                continue
            top, left = generator.integers(rows - height + 1), generator.integers(cols - width + 1)
            fresh = [
                (row, column)
                for row in range(top, top + height)
                for column in range(left, left + width)
                if not mask[row, column]
            ]
            if 0 < len(fresh) <= most:
                for place in fresh:
                    mask[place] = True
                break
        else:
            break
    return mask.ravel()
