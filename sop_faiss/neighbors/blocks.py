"""Exact k nearest rows in torch, a block of queries at a time, and the fixed order of all engines' answers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

_BLOCK_ELEMENTS = 2**24  # 64 MiB of similarities; with smaller blocks the product itself is slower
_SMALLEST_GROUP = 8  # smaller groups save less than the second topk costs


class NearestRows(NamedTuple):
    """Inner products in falling order, and the rows they belong to; ties by rising row."""

    similarities: Float32[Tensor, "q k"]
    rows: Int64[Tensor, "q k"]


def in_fixed_order(similarities: Float32[Tensor, "q k"], rows: Int64[Tensor, "q k"]) -> NearestRows:
    """Sort by falling similarity, equal ones by rising row: two stable sorts, the main key last."""
    rows, order = rows.sort(dim=1)
    similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
    return NearestRows(similarities, rows.gather(1, order))


@torch.no_grad()
def search_by_blocks(queries: Float[Tensor, "q d"], rows: Float[Tensor, "n d"], k: int) -> NearestRows:
    """Return the k rows of largest inner product with each query; exact.

    topk is slow on long lines. So the rows are divided into groups: the first topk is over the maxima of the groups,
    the second over all rows of the k groups with the largest maxima. These contain the k best rows: let t be the
    smallest of the k maxima. A row of another group has a similarity of at most t, or its group would have been chosen.
    The chosen groups contain k rows that reach t, their maxima. So a row that is left out is at best tied with the
    k-th; of rows that tie for the k-th place any may be returned.

    Args:
        queries: float32 or bfloat16.
        rows: of the same type; products of bfloat16 numbers are added up in float32.
        k: how many rows; 1 <= k <= n.
    """
    if rows.dtype == torch.bfloat16 and rows.device.type == "cpu":
        queries, rows = (
            queries.float(),
            rows.float(),
        )  # the same numbers, but CPUs would round sums of bfloat16 products
    group = _group_size(len(rows), k)
    parts = []
    for part in queries.split(max(1, _BLOCK_ELEMENTS // len(rows))):
        similarities = _products(part, rows)
        parts.append(similarities.topk(k, dim=1) if group is None else _best_by_groups(similarities, k, group))
    return in_fixed_order(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


def _products(queries: Float[Tensor, "q d"], rows: Float[Tensor, "n d"]) -> Float32[Tensor, "q n"]:
    if rows.dtype == torch.float32:
        return queries @ rows.T
    return torch.mm(queries, rows.T, out_dtype=torch.float32)


def _group_size(count: int, k: int) -> int | None:
    """Return the rows per group; None if groups do not pay.

    A power of two, for which maxima are fastest, such that the two lines that topk reads are about equally long.
    """
    size = 1 << (math.isqrt(count // k).bit_length() - 1)
    return size if size >= _SMALLEST_GROUP else None


def _best_by_groups(
    similarities: Float32[Tensor, "q n"], k: int, size: int
) -> tuple[Float32[Tensor, "q k"], Int64[Tensor, "q k"]]:
    """Return the k best of each line, in any order, by groups of consecutive rows; see `search_by_blocks`.

    The fewer than `size` rows after the last complete group are always included.
    """
    count, device = similarities.shape[1], similarities.device
    groups = count // size
    grouped, last = similarities[:, : groups * size].unflatten(1, (groups, size)), similarities[:, groups * size :]
    chosen = grouped.amax(dim=2).topk(k, dim=1, sorted=False).indices.unsqueeze(2)  # (q, k, 1)
    candidates = torch.cat([grouped.gather(1, chosen.expand(-1, -1, size)).flatten(1), last], dim=1)
    rows = (chosen * size + torch.arange(size, device=device)).flatten(1)
    last_rows = torch.arange(groups * size, count, device=device).expand(len(rows), -1)
    best = candidates.topk(k, dim=1)
    return best.values, torch.cat([rows, last_rows], dim=1).gather(1, best.indices)
