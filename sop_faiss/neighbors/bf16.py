"""Search in bfloat16, answer in float32: a rounded copy of the rows, and candidates scored again (neighbors.precision).

Inner products of rounded unit vectors are off by about 1.5e-4 (at d = 256). So the search in bfloat16 returns spare
candidates, and all are scored again from the float32 rows. Similarities are exact float32 products; a row among the k
nearest is missed only if rounding puts as many others before it as there are spare candidates.
"""

from __future__ import annotations

import torch
from jaxtyping import BFloat16, Float32, Int64
from torch import Tensor

from sop_faiss.neighbors.blocks import NearestRows, in_fixed_order

_BLOCK_ELEMENTS = 2**24  # numbers of candidates' rows at a time: 64 MiB


def count_candidates(k: int, capacity: int) -> int:
    """Return how many candidates to search for in bfloat16, of which the best k are kept."""
    return min(capacity, 2 * k + 32)


class RoundedRows:
    """A bfloat16 copy that follows rows which change in place.

    torch counts the writes to a tensor. After a write that `follow` reports, only the written rows are copied; the
    count reveals any other write, after which the next search copies everything.
    """

    def __init__(self, rows: Float32[Tensor, "n d"]) -> None:
        self._rows = rows
        self._copy: BFloat16[Tensor, "n d"] = rows.to(torch.bfloat16)
        self._writes = rows._version

    @property
    def is_current(self) -> bool:
        """Return whether nothing has been written since the copy was last updated."""
        return self._writes == self._rows._version

    def follow(self, written: slice) -> None:
        """Copy rows that were just written; before, the copy was current."""
        self._copy[written] = self._rows[written]
        self._writes = self._rows._version

    def current(self) -> BFloat16[Tensor, "n d"]:
        """Return the current rows, rounded."""
        if not self.is_current:
            self.follow(slice(None))
        return self._copy


@torch.no_grad()
def rescore(
    queries: Float32[Tensor, "q d"], rows: Float32[Tensor, "n d"], candidates: Int64[Tensor, "q c"], k: int
) -> NearestRows:
    """Return the k best of each query's own candidates, by inner products in float32."""
    block = max(1, _BLOCK_ELEMENTS // (candidates.shape[1] * rows.shape[1]))
    parts = zip(queries.split(block), candidates.split(block), strict=True)
    similarities = torch.cat([torch.bmm(rows[some], part.unsqueeze(2)).squeeze(2) for part, some in parts])
    found = in_fixed_order(similarities, candidates)
    return NearestRows(found.similarities[:, :k], found.rows[:, :k])
