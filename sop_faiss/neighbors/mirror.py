"""A fixed number of rows that are searched where they lie: FAISS's view of a memory (design 6.1).

On the CPU the rows *are* the storage of a FAISS flat inner-product index: what is written into `rows` is what the
next search sees, without a copy. On CUDA the rows are a tensor that FAISS's brute-force kernel reads in place. Where
FAISS has no code for the device, an exact search by blocks in torch takes over, and says so once.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import faiss
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from sop_faiss.errors import ConfigError

__all__ = ["Neighbors", "RingMirror", "in_fixed_order", "search_by_blocks"]

_log = logging.getLogger(__name__)
_TEMPORARY_BYTES = 256 * 2**20
_GPU_MAX_NEIGHBORS = 2048  # more aborts the process
_BLOCK_ELEMENTS = 2**24


class Neighbors(NamedTuple):
    """Inner products in falling order, and the rows they belong to; ties by rising row."""

    similarities: Float32[Tensor, "q k"]
    rows: Int64[Tensor, "q k"]


def in_fixed_order(similarities: Float32[Tensor, "q k"], rows: Int64[Tensor, "q k"]) -> Neighbors:
    """Equal similarities by rising row: two stable sorts, the main key last."""
    rows, order = rows.sort(dim=1)
    similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
    return Neighbors(similarities, rows.gather(1, order))


def search_by_blocks(queries: Float32[Tensor, "q d"], rows: Float32[Tensor, "n d"], k: int) -> Neighbors:
    """Exact search in torch, a block of queries at a time; also the oracle of the FAISS engines."""
    block = max(1, _BLOCK_ELEMENTS // len(rows))
    parts = [torch.topk(part @ rows.T, k, dim=1) for part in queries.split(block)]
    similarities = torch.cat([part.values for part in parts])
    return in_fixed_order(similarities, torch.cat([part.indices for part in parts]))


class RingMirror:
    """`capacity` rows of dimension `dim`, writable in place through `rows` and searchable at any moment.

    Args:
        capacity: number of rows, n.
        dim: dimension of a row, d.
        device: where the rows lie.
        engine: `faiss`, `torch`, or `auto` (FAISS where it has code for the device).

    Raises:
        ConfigError: the engine is unknown, or FAISS was asked for on a device it has no code for.
    """

    rows: Float32[Tensor, "n d"]

    def __init__(self, capacity: int, dim: int, device: torch.device, engine: str = "auto") -> None:
        if engine not in ("auto", "faiss", "torch"):
            raise ConfigError(f"neighbors.engine = {engine!r}: wanted faiss, torch or auto")
        self._index: Any = None
        self._gpu_resources: Any = None
        self.engine = engine
        if device.type == "cpu":
            self.engine = "torch" if engine == "torch" else "faiss"
            self._index = faiss.IndexFlatIP(dim)
            self._index.add(torch.zeros(capacity, dim).numpy())
            storage = faiss.rev_swig_ptr(self._index.get_xb(), capacity * dim)
            self.rows = torch.from_numpy(storage).view(capacity, dim)
        else:
            self.rows = torch.zeros(capacity, dim, device=device)
            if engine != "torch":
                self._start_gpu(required=engine == "faiss")

    def _start_gpu(self, required: bool) -> None:
        """Try FAISS's GPU kernel once; fall back to torch with one line in the log unless FAISS is required."""
        try:
            import faiss.contrib.torch_utils  # teaches faiss.knn_gpu to read torch tensors in place

            self._gpu_resources = faiss.StandardGpuResources()
            self._gpu_resources.setTempMemory(_TEMPORARY_BYTES)
            self.engine = "faiss"
            self.search(self.rows[:1], 1)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if required:
                raise ConfigError(
                    f"neighbors.engine = faiss, but FAISS cannot search on {self.rows.device} ({reason}): "
                    "install a faiss-gpu built for this card, or set neighbors.engine=torch"
                ) from None
            self._gpu_resources = None
            self.engine = "torch"
            _log.warning("FAISS cannot search on %s (%s): using exact torch search", self.rows.device, reason)

    def require_k(self, k: int) -> None:
        """Refuse a number of neighbours that the rows cannot give.

        Raises:
            ConfigError: k is outside 1..capacity.
        """
        if not 1 <= k <= len(self.rows):
            raise ConfigError(f"{k} neighbours asked of a memory of {len(self.rows)} rows: lower the supports")

    def search(self, queries: Float32[Tensor, "q d"], k: int) -> Neighbors:
        """The k rows of largest inner product with each query; exact.

        Raises:
            ConfigError: k is outside 1..capacity.
        """
        self.require_k(k)
        queries = queries.detach().contiguous()
        if self._index is not None and self.engine == "faiss":
            similarities, rows = self._index.search(queries.numpy(), k)
            return in_fixed_order(torch.from_numpy(similarities), torch.from_numpy(rows))
        if self._gpu_resources is not None and self.engine == "faiss" and k > _GPU_MAX_NEIGHBORS:
            _log.warning(
                "FAISS on a GPU finds at most %d neighbours, %d are needed: using exact torch search",
                _GPU_MAX_NEIGHBORS,
                k,
            )
            self.engine = "torch"
        if self._gpu_resources is not None and self.engine == "faiss":
            with torch.cuda.device(self.rows.device):
                similarities, rows = faiss.knn_gpu(
                    self._gpu_resources, queries, self.rows, k, metric=faiss.METRIC_INNER_PRODUCT
                )
            return in_fixed_order(similarities, rows)
        return search_by_blocks(queries, self.rows, k)
