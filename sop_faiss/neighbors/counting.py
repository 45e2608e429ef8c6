"""How many rows of a stream are more similar to a query than a threshold: exact ranks without a sort.

A row counts for a threshold t if its similarity, as `similarity.py` defines it (float64, rounded to float32), is above
t. In float64 that is a product above the boundary b between t and the next float32. A product so near to b that another
order of summation could put it on the other side is taken again in the fixed order. So the counts depend neither on the
blocks a stream comes in, nor on the order of the rows, nor on the device.

Memory: the thresholds, and one block of products, whatever the length of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from sop_faiss.errors import FeatureError
from sop_faiss.neighbors.similarity import fixed_order_products, product_slack

__all__ = ["CountAbove"]

_PRODUCTS = 2**20
"""Products held at a time (8 MiB in float64): what fits into the caches next to the rows."""


class CountAbove:
    """Counts streamed rows above each query's thresholds.

    Args:
        queries: unit rows.
        thresholds: of each query, similarities in any order, ties allowed; none is fine.
        device: where products are taken and counted, as in `cpu` or `cuda`.
    """

    def __init__(
        self,
        queries: Float32[np.ndarray, "q d"],
        thresholds: Sequence[Float32[np.ndarray, " _"]],
        device: str | torch.device = "cpu",
    ) -> None:
        self._queries = queries
        self._device = torch.device(device)
        self._exact = torch.from_numpy(queries.astype(np.float64, order="C")).to(self._device)
        distinct = [np.unique(each, return_inverse=True) for each in thresholds]
        self._levels = [values for values, _ in distinct]
        self._level_of = [level for _, level in distinct]
        slack = product_slack(queries.shape[1])
        intervals = [_merged(_boundaries(values), slack) for values in self._levels]
        longest = max((len(edges) for edges, _ in intervals), default=0)
        padded = np.full((len(queries), longest), np.inf)
        self._passed = np.zeros((len(queries), longest + 1), np.int64)  # levels that lie below each bin
        for query, (edges, levels) in enumerate(intervals):
            padded[query, : len(edges)] = edges
            self._passed[query, : len(levels)] = levels
        self._edges = torch.from_numpy(padded).to(self._device)
        self._bins = longest + 1
        most = max((len(values) for values in self._levels), default=0)
        self._histogram = np.zeros((len(queries), most + 1), np.int64)  # rows by how many levels lie below them
        self.row_count = 0

    def add(self, rows: Float32[np.ndarray, "n d"]) -> None:
        """Count some rows, of unit norm (`require_unit_rows`).

        Raises:
            FeatureError: they have another dimension than the queries.
        """
        if rows.shape[1] != self._queries.shape[1]:
            raise FeatureError(
                f"rows of dimension {rows.shape[1]} for queries of {self._queries.shape[1]}: use one encoder for both"
            )
        step = max(256, _PRODUCTS // max(1, len(self._queries)))
        for start in range(0, len(rows), step):
            self._add_block(rows[start : start + step])
        self.row_count += len(rows)

    def _add_block(self, rows: Float32[np.ndarray, "n d"]) -> None:
        block = torch.from_numpy(rows.astype(np.float64, order="C")).to(self._device)
        products = self._exact @ block.T
        bins = torch.searchsorted(self._edges, products, right=True, out_int32=True)
        line = torch.arange(len(self._queries), device=self._device, dtype=torch.int32).unsqueeze(1) * self._bins
        found = torch.bincount((bins + line).flatten(), minlength=len(self._queries) * self._bins)
        counts = found.view(len(self._queries), self._bins).cpu().numpy()
        self._take(counts[:, ::2], self._passed[:, ::2])  # odd bins are the intervals of doubt
        if counts[:, 1::2].any():
            self._resolve(bins, rows)

    def _take(self, counts: Int64[np.ndarray, "q b"], levels: Int64[np.ndarray, "q b"]) -> None:
        query = np.arange(len(counts))[:, None]
        np.add.at(self._histogram, (np.broadcast_to(query, counts.shape), levels), counts)

    def _resolve(self, bins: Tensor, rows: Float32[np.ndarray, "n d"]) -> None:
        """Count the rows whose products lie in an interval of doubt by their similarities in the fixed order."""
        query, row = (places.cpu().numpy() for places in torch.nonzero(bins % 2, as_tuple=True))
        similarities = fixed_order_products(self._queries, rows, query, row)
        for each in np.unique(query):
            own = similarities[query == each]
            np.add.at(self._histogram[each], np.searchsorted(self._levels[each], own, side="left"), 1)

    @property
    def histogram(self) -> Int64[np.ndarray, "q levels"]:
        """Rows by the number of distinct thresholds of the query below them; of several streams these add up."""
        return self._histogram

    def counts(self, histogram: Int64[np.ndarray, "q levels"] | None = None) -> list[Int64[np.ndarray, " _"]]:
        """For each query and threshold, in the order given, how many rows were above it.

        Args:
            histogram: the sum over several streams; this one's own if None.
        """
        total = self._histogram if histogram is None else histogram
        above = total[:, ::-1].cumsum(axis=1)[:, ::-1]  # rows with at least that many levels below them
        return [above[query, level + 1] for query, level in enumerate(self._level_of)]


def _boundaries(values: Float32[np.ndarray, " l"]) -> Float64[np.ndarray, " l"]:
    """The middle between each float32 and the next one; exact in float64."""
    following = np.nextafter(values, np.float32(np.inf), dtype=np.float32)
    return (values.astype(np.float64) + following.astype(np.float64)) / 2


def _merged(
    boundaries: Float64[np.ndarray, " l"], slack: float
) -> tuple[Float64[np.ndarray, " e"], Int64[np.ndarray, " b"]]:
    """Intervals of doubt around rising boundaries, those that touch made one.

    Returns:
        The ends of the intervals, rising, and for each of the bins that they cut the line into how many boundaries lie
        below it (even bins; odd ones are the intervals).
    """
    if not len(boundaries):
        return np.empty(0), np.zeros(1, np.int64)
    low, high = boundaries - slack, boundaries + slack
    starts = np.flatnonzero(np.append(True, low[1:] > high[:-1]))
    ends = np.append(starts[1:], len(boundaries)) - 1
    edges = np.stack([low[starts], high[ends]], axis=1).ravel()
    return edges, np.repeat(np.append(0, ends + 1), 2)[:-1]
