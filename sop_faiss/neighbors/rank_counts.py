"""How many rows of a stream are more similar to a query than a threshold: exact ranks without a sort.

A row counts for a threshold t if its similarity, as `similarity.py` defines it (float64, rounded to float32), is above
t. In exact numbers that is a product above the boundary b between t and the next float32. A product so close to b that
rounding errors could have moved it across is computed again in the fixed order. So the counts depend neither on the
blocks of a stream, nor on the order of the rows, nor on the device, nor on the precision of the products:

* float32 takes half the time, but has intervals of doubt of about 5e-5 around each boundary (d = 384). It suits streams
  with few rows near the thresholds, since relevant images are more similar than most distractors. CPUs start with it.
* in float64 the intervals are 1e-13 wide, and a product is hardly ever computed twice. A stream continues with it when
  many rows are in doubt, or above the lowest threshold. GPUs always use it, as their float32 may be a rounded TF32.

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

_PRODUCTS = 2**21
"""Products in memory at a time (8 MiB in float32, 16 in float64)."""
_MANY_REACHED = 0.25
"""Fraction of products above the lowest threshold beyond which it is faster to sort all of them into bins."""
_MANY_DOUBTFUL = 0.002
"""Fraction of products in doubt beyond which float64 is faster."""


class CountAbove:
    """Counts streamed rows above each query's thresholds.

    Args:
        queries: unit rows.
        thresholds: of each query, similarities in any order, ties allowed; none is fine.
        device: where products are computed and counted, `cpu` or `cuda`.
    """

    def __init__(
        self,
        queries: Float32[np.ndarray, "q d"],
        thresholds: Sequence[Float32[np.ndarray, " _"]],
        device: str | torch.device = "cpu",
    ) -> None:
        self._queries = queries
        self._device = torch.device(device)
        distinct = [np.unique(each, return_inverse=True) for each in thresholds]
        self._distinct = [values for values, _ in distinct]
        self._distinct_of = [level for _, level in distinct]
        self.use(torch.float32 if self._device.type == "cpu" else torch.float64)
        most = max((len(values) for values in self._distinct), default=0)
        self._histogram = np.zeros(
            (len(queries), most + 1), np.int64
        )  # rows by the number of distinct thresholds below them
        self.row_count = 0

    def add(self, rows: Float32[np.ndarray, "n d"]) -> None:
        """Count some rows of unit norm (`require_unit_rows`).

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

    def use(self, dtype: torch.dtype) -> None:
        """Compute products in this precision from now on, which determines the width of the intervals of doubt."""
        slack = product_slack(self._queries.shape[1], dtype == torch.float64)
        intervals = [_merged(_boundaries(values), slack) for values in self._distinct]
        longest = max((len(edges) for edges, _ in intervals), default=0)
        edges = np.full((len(self._queries), longest + 1), np.inf)
        self._passed = np.zeros((len(self._queries), longest + 1), np.int64)  # distinct thresholds below each bin
        for query, (own, levels) in enumerate(intervals):
            edges[query, : len(own)] = own
            self._passed[query, : len(levels)] = levels
        self._bins = longest + 1
        self.dtype = dtype
        self._edges = torch.from_numpy(edges).to(self._device, dtype)
        self._asked = torch.from_numpy(self._queries.astype(np.float64)).to(self._device, dtype)

    def _add_block(self, rows: Float32[np.ndarray, "n d"]) -> None:
        own_type = np.float32 if self.dtype == torch.float32 else np.float64
        block = torch.from_numpy(np.array(rows, dtype=own_type, order="C")).to(self._device)
        products = self._asked @ block.T
        if self.dtype == torch.float32:
            self._count_few(products.numpy(), rows)
        else:
            self._count_many(products, rows)

    def _count_few(self, products: Float32[np.ndarray, "q n"], rows: Float32[np.ndarray, "n d"]) -> None:
        """Sort only products that reach the lowest interval of their query into bins."""
        edges = self._edges.numpy()
        reached = products >= edges[:, :1]
        places, each = np.flatnonzero(reached), reached.sum(axis=1)
        found = products.ravel()[places]
        bins = [
            np.searchsorted(own, part, side="right")
            for own, part in zip(edges, np.split(found, each.cumsum()[:-1]), strict=True)
        ]
        counts = np.stack([np.bincount(own, minlength=self._bins) for own in bins])
        counts[:, 0] += len(rows) - each
        self._take(counts[:, ::2], self._passed[:, ::2])  # odd bins are the intervals of doubt
        doubtful = np.flatnonzero(np.concatenate(bins) % 2)
        if len(doubtful):
            self._resolve(*np.divmod(places[doubtful], len(rows)), rows)
        if len(found) > _MANY_REACHED * products.size or len(doubtful) > _MANY_DOUBTFUL * products.size:
            self.use(torch.float64)

    def _count_many(self, products: Float64[Tensor, "q n"], rows: Float32[np.ndarray, "n d"]) -> None:
        """Sort all products into bins."""
        bins = torch.searchsorted(self._edges, products, right=True, out_int32=True)
        line = torch.arange(len(self._queries), device=self._device, dtype=torch.int32).unsqueeze(1) * self._bins
        found = torch.bincount((bins + line).flatten(), minlength=len(self._queries) * self._bins)
        counts = found.view(len(self._queries), self._bins).cpu().numpy()
        self._take(counts[:, ::2], self._passed[:, ::2])
        if counts[:, 1::2].any():
            query, row = (places.cpu().numpy() for places in torch.nonzero(bins % 2, as_tuple=True))
            self._resolve(query, row, rows)

    def _take(self, counts: Int64[np.ndarray, "q b"], levels: Int64[np.ndarray, "q b"]) -> None:
        query = np.arange(len(counts))[:, None]
        np.add.at(self._histogram, (np.broadcast_to(query, counts.shape), levels), counts)

    def _resolve(
        self, query: Int64[np.ndarray, " p"], row: Int64[np.ndarray, " p"], rows: Float32[np.ndarray, "n d"]
    ) -> None:
        """Count rows whose products are in an interval of doubt, by their similarities in the fixed order."""
        similarities = fixed_order_products(self._queries, rows, query, row)
        for each in np.unique(query):
            levels = np.searchsorted(self._distinct[each], similarities[query == each], side="left")
            np.add.at(self._histogram[each], levels, 1)

    @property
    def histogram(self) -> Int64[np.ndarray, "q levels"]:
        """Return rows by the number of the query's distinct thresholds below them; those of several streams add up."""
        return self._histogram

    def counts(self, histogram: Int64[np.ndarray, "q levels"] | None = None) -> list[Int64[np.ndarray, " _"]]:
        """Return how many rows were above each query's thresholds, in the order given.

        Args:
            histogram: the sum over several streams; this one's own if None.
        """
        total = self._histogram if histogram is None else histogram
        above = total[:, ::-1].cumsum(axis=1)[:, ::-1]  # rows with at least that many thresholds below them
        return [above[query, level + 1] for query, level in enumerate(self._distinct_of)]


def _boundaries(values: Float32[np.ndarray, " l"]) -> Float64[np.ndarray, " l"]:
    """Return the middle between each float32 and the next one; exact in float64."""
    following = np.nextafter(values, np.float32(np.inf), dtype=np.float32)
    return (values.astype(np.float64) + following.astype(np.float64)) / 2


def _merged(
    boundaries: Float64[np.ndarray, " l"], slack: float
) -> tuple[Float64[np.ndarray, " e"], Int64[np.ndarray, " b"]]:
    """Return the intervals of doubt around rising boundaries, merged where they touch.

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
