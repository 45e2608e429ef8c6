"""FAISS's brute-force search of a tensor on a CUDA device, in place."""

from __future__ import annotations

import faiss
import torch
from jaxtyping import Float
from torch import Tensor

from sop_faiss.neighbors.blocks import NearestRows, in_fixed_order

MAX_NEIGHBORS = 2048
"""The most that FAISS finds on a GPU; more abort the process."""
_TEMPORARY_BYTES = 256 * 2**20  # FAISS would reserve 1.5 GiB


class FaissGpu:
    """FAISS's resources on one device, for one thread at a time.

    Args:
        device: a CUDA device.
        dtype: of the rows: float32 or bfloat16.

    Raises:
        Exception: FAISS cannot search there. What it raises depends on its build and on the driver.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cuda":
            raise RuntimeError("FAISS searches on CPUs and CUDA devices only")
        # Makes faiss.knn_gpu read torch tensors and work on torch's current stream: FAISS's own stream waits for what
        # was queued there before, and what is queued there next waits for FAISS.
        import faiss.contrib.torch_utils

        self._resources = faiss.StandardGpuResources()
        self._resources.setTempMemory(_TEMPORARY_BYTES)
        self._resources.setPinnedMemory(0)  # by default 256 MiB of host memory, which this search does not use
        probe = torch.zeros(1, 8, dtype=dtype, device=device)
        self.search(probe, probe, 1)

    def search(self, queries: Float[Tensor, "q d"], rows: Float[Tensor, "n d"], k: int) -> NearestRows:
        """Return the k rows of largest inner product with each query; bfloat16 products are added up in float32.

        Args:
            queries: contiguous, on the device.
            rows: contiguous, on the device, of the same type; read in place.
            k: at most `MAX_NEIGHBORS` and n.
        """
        with torch.cuda.device(rows.device):
            found = faiss.knn_gpu(self._resources, queries, rows, k, metric=faiss.METRIC_INNER_PRODUCT)
        return in_fixed_order(*found)
