"""A fixed number of rows that FAISS searches in place: its view of a memory (docs/method.md, 2).

On the CPU the rows *are* the storage of a FAISS flat inner-product index: what is written into `rows` is what the
next search sees, without a copy. On CUDA the rows are a tensor that FAISS's brute-force kernel reads in place. If FAISS
cannot search on the device, an exact search by blocks in torch takes over, with one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import faiss
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.bf16 import RoundedRows, count_candidates, rescore
from sop_faiss.neighbors.blocks import NearestRows, in_fixed_order, search_by_blocks
from sop_faiss.neighbors.engine_trial import ENGINES, EngineTrial
from sop_faiss.neighbors.faiss_gpu import MAX_NEIGHBORS, FaissGpu

__all__ = ["NearestRows", "RingMirror", "has_bf16", "in_fixed_order", "ring_segments"]

_log = logging.getLogger(__name__)


def ring_segments(start: int, count: int, capacity: int) -> list[tuple[slice, slice]]:
    """Return where `count` rows from `start` on are in a ring: at most two spans, each with its part of the rows."""
    first = min(count, capacity - start)
    segments = [(slice(start, start + first), slice(0, first)), (slice(0, count - first), slice(first, count))]
    return [segment for segment in segments if segment[1].stop > segment[1].start]


class RingMirror:
    """`capacity` rows of dimension `dim`, writable in place through `rows` and searchable at any moment.

    Args:
        capacity: number of rows, n.
        dim: dimension of a row, d.
        device: where the rows are stored.
        engine: `faiss`, `torch`, or `auto`. On a CPU `auto` is FAISS (torch in bf16), so that equal runs are equal to
            the bit; on CUDA the first search takes the faster one, or torch if FAISS cannot search there.
        precision: `float32`, or `bf16`: see `bf16.py`. On a CPU bf16 saves nothing.

    Raises:
        ConfigError: engine or precision are unknown, or not possible on the device.
    """

    rows: Float32[Tensor, "n d"]

    def __init__(
        self, capacity: int, dim: int, device: torch.device, engine: str = "auto", precision: str = "float32"
    ) -> None:
        if engine not in ("auto", "faiss", "torch"):
            raise ConfigError(f"neighbors.engine = {engine!r}: wanted faiss, torch or auto")
        if precision not in ("float32", "bf16"):
            raise ConfigError(f"neighbors.precision = {precision!r}: wanted float32 or bf16")
        self._index: Any = None
        self._gpu: FaissGpu | None = None
        self._trial: EngineTrial | None = None
        self._limit_was_logged = False
        if device.type == "cpu":
            self._engine = self._start_cpu(capacity, dim, engine, precision)
        else:
            self.rows = torch.zeros(capacity, dim, device=device)
            self._engine = self._start_gpu(engine, precision)
        self._rounded = RoundedRows(self.rows) if precision == "bf16" else None

    @property
    def engine(self) -> str:
        """Return the search engine, `faiss` or `torch`; `auto` before a trial."""
        return self._engine if self._trial is None else self._trial.engine

    def _start_cpu(self, capacity: int, dim: int, engine: str, precision: str) -> str:
        """Make the rows the storage of a FAISS index, and return the engine."""
        if engine == "faiss" and precision == "bf16":
            raise ConfigError(
                "neighbors.precision = bf16 with neighbors.engine = faiss on a CPU: FAISS searches bfloat16 on CUDA "
                "only; set neighbors.precision=float32, or neighbors.engine=torch"
            )
        self._index = faiss.IndexFlatIP(dim)
        self._index.add(torch.zeros(capacity, dim).numpy())
        storage = faiss.rev_swig_ptr(self._index.get_xb(), capacity * dim)
        self.rows = torch.from_numpy(storage).view(capacity, dim)
        if engine == "auto":
            return "torch" if precision == "bf16" else "faiss"
        return engine

    def _start_gpu(self, engine: str, precision: str) -> str:
        """Start FAISS on the rows' device unless torch is asked for, and return the engine, if it needs no trial.

        If FAISS cannot search there, torch takes over with one line in the log, unless FAISS is required.
        """
        device = self.rows.device
        if precision == "bf16" and not (device.type == "cuda" and has_bf16(device)):
            raise ConfigError(
                f"neighbors.precision = bf16, but {device} has no bfloat16 arithmetic: set neighbors.precision=float32"
            )
        if engine == "torch":
            return "torch"
        try:
            self._gpu = FaissGpu(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if engine == "faiss":
                raise ConfigError(
                    f"neighbors.engine = faiss, but FAISS cannot search on {device} ({reason}): "
                    "install a faiss-gpu built for this card, or set neighbors.engine=torch"
                ) from None
            _log.warning("FAISS cannot search on %s (%s): using exact torch search", device, reason)
        if engine == "auto" and device.type == "cuda":
            self._trial = EngineTrial(self._gpu is not None, lambda: torch.cuda.synchronize(device))
        return "torch" if self._gpu is None else "faiss"

    @torch.no_grad()
    def write(self, start: int, values: Float[Tensor, "b d"]) -> None:
        """Overwrite rows from `start` on, around the end of the ring; O(b), in bf16 too.

        Args:
            start: the first row, below n.
            values: at most n rows; of any precision, strides and device.
        """
        for ring, part in ring_segments(start, len(values), len(self.rows)):
            followed = self._rounded is not None and self._rounded.is_current
            self.rows[ring].copy_(values[part])
            if self._rounded is not None and followed:
                self._rounded.follow(ring)

    def require_k(self, k: int) -> None:
        """Refuse a number of neighbors that is larger than the number of rows.

        Raises:
            ConfigError: k is outside 1..capacity.
        """
        if not 1 <= k <= len(self.rows):
            raise ConfigError(f"{k} neighbors wanted from a memory of {len(self.rows)} rows: lower num_supports")

    def search(self, queries: Float32[Tensor, "q d"], k: int) -> NearestRows:
        """Return the k rows of largest inner product with each query; exact, except for rows missed in bf16.

        Raises:
            ConfigError: k is outside 1..capacity.
        """
        self.require_k(k)
        queries = queries.detach().contiguous()
        if self._rounded is None:
            return self._search(queries, self.rows, k)
        candidates = count_candidates(k, len(self.rows))
        found = self._search(queries.to(torch.bfloat16), self._rounded.current(), candidates)
        return rescore(queries, self.rows, found.rows, k)

    def _search(self, queries: Float[Tensor, "q d"], rows: Float[Tensor, "n d"], k: int) -> NearestRows:
        """Search the rows, or their rounded copy."""
        engine = self._engine
        if self._index is None and k > MAX_NEIGHBORS:
            self._log_limit(k)
            engine = "torch"
        elif self._trial is not None:
            searches = {name: partial(self._search_by, name, queries, rows, k) for name in ENGINES}
            sizes = f"{len(queries)} queries in {len(rows)} x {rows.shape[1]} {rows.dtype}, top {k}"
            engine = self._trial.choose(searches, sizes)
        return self._search_by(engine, queries, rows, k)

    def _search_by(self, engine: str, queries: Float[Tensor, "q d"], rows: Float[Tensor, "n d"], k: int) -> NearestRows:
        if engine == "torch":
            return search_by_blocks(queries, rows, k)
        if self._gpu is not None:
            return self._gpu.search(queries, rows, k)
        similarities, found = self._index.search(queries.numpy(), k)
        return in_fixed_order(torch.from_numpy(similarities), torch.from_numpy(found))

    def _log_limit(self, k: int) -> None:
        """Log once that FAISS cannot find this many neighbors."""
        if self._gpu is not None and not self._limit_was_logged:
            _log.warning(
                "FAISS on a GPU finds at most %d neighbors, %d are needed: using exact torch search for these",
                MAX_NEIGHBORS,
                k,
            )
            self._limit_was_logged = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the engine that a trial has chosen; the rows belong to the owner's state."""
        return {} if self._trial is None else self._trial.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the choice of an earlier trial, if this device needs one."""
        if self._trial is not None:
            self._trial.load_state_dict(state)


def has_bf16(device: torch.device) -> bool:
    """Return whether a CUDA device has bfloat16 arithmetic of its own."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)
