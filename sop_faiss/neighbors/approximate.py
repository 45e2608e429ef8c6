"""Approximate nearest rows, for memories of millions of rows: an IVF or HNSW index that is rebuilt every n steps.

FAISS cannot overwrite the rows of such an index. So between two builds the index answers only for the rows that have
not been overwritten since, and the rows stored since are searched exactly. No old row is returned and no new row is
missed, and similarities are computed from the current rows. What the index misses is measured at every build, as
recall.

A resumed run builds the index again from the same rows. For that a checkpoint has the former contents of the rows that
were overwritten since, and the build is reproducible: k-means has a fixed seed, and since FAISS 1.15.1 HNSW's graph
does not depend on the order in which threads work.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import faiss
import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.config import NeighborsConfig
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.neighbors.mirror import NearestRows, RingMirror, in_fixed_order

_log = logging.getLogger(__name__)
_SEED = 1234  # FAISS's own default for k-means
_RECALL_SAMPLE = 256  # rows; enough for two digits of recall
_TIE = 1e-6  # more than the rounding error of a float32 product of unit rows
_SPARE_ROWS = 8  # fetched beyond those asked for, so that rounding at the end of a list decides nothing
_LINKS = 32  # of a row in HNSW's upper layers (M); the lowest has twice as many
_FEWEST_ROWS_PER_LIST = 39  # with fewer FAISS warns that k-means has too little to learn from
_MOST_ROWS_PER_LIST = 64  # that k-means learns from; FAISS's own 256 take four times as long
_BLOCK_ELEMENTS = 2**24  # numbers gathered at a time: 64 MiB


def count_lists(rows: int) -> int:
    """Return the IVF lists for this many rows: the square root, so that choosing lists costs as much as reading one."""
    return max(1, min(round(math.sqrt(rows)), rows // _FEWEST_ROWS_PER_LIST))


def index_pays(settings: NeighborsConfig, rows: int) -> bool:
    """Return whether an index compares so few of this many rows that it can be faster than an exact search.

    An exact search is one matrix product; an index goes row by row, at about four times the cost per row.
    """
    if settings.index == "ivf":
        lists = count_lists(rows)
        compared = lists + min(settings.probes, lists) * rows / lists
    else:
        compared = 2.0 * _LINKS * settings.ef_search
    return 4 * compared < rows


def index_bytes(kind: str, rows: int, dim: int) -> int:
    """Return the bytes that an index takes in addition to the rows: a copy, and ids (IVF) or links (HNSW)."""
    return rows * (4 * dim + (8 if kind == "ivf" else 8 * _LINKS))


def _build(rows: Float32[Tensor, "n d"], kind: str) -> Any:
    """Build a FAISS index of the rows, by inner product; reproducible with the same number of threads."""
    count, dim = rows.shape
    vectors = rows.numpy()
    index: Any
    if kind == "ivf":
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, count_lists(count), faiss.METRIC_INNER_PRODUCT)
        index.cp.spherical = True  # centroids of unit norm, as the rows
        index.cp.seed = _SEED
        index.cp.max_points_per_centroid = _MOST_ROWS_PER_LIST
        index.train(vectors)
        index.add(vectors)
        return index
    index = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    return index


class ApproximateSearch:
    """Searches the rows of a mirror by an index of them that is up to `rebuild_every_steps` stores old.

    Args:
        mirror: the rows, and what searches them exactly.
        settings: kind of index, when it is rebuilt, and its search setting (probes or ef_search).
        k: number of neighbors whose recall is measured.

    Raises:
        ConfigError: the rows are not in main memory.
    """

    def __init__(self, mirror: RingMirror, settings: NeighborsConfig, k: int) -> None:
        device = mirror.rows.device
        if device.type != "cpu":
            raise ConfigError(
                f"neighbors.index = {settings.index} searches in main memory only, and this run is on {device}: set "
                "neighbors.index=exact or train.device=cpu"
            )
        self._mirror = mirror
        self._settings = settings
        self.k = min(k, len(mirror.rows) - 1)
        self.recall: float | None = None
        """recall@k of the last build: the fraction of the k nearest other rows that it finds, over a sample of rows."""
        self._index: Any = None
        self._start = 0
        """First row that was overwritten since the build; the others follow it around the ring."""
        self._fresh = 0
        """Number of rows overwritten since the build."""
        self._stores = 0
        """Stores since the build."""
        self._short_was_logged = False

    @torch.no_grad()
    def search(self, queries: Float32[Tensor, "q d"], k: int) -> NearestRows:
        """Return k rows of large inner product with each query, ties by rising row; rebuild the index if it is due.

        Raises:
            ConfigError: k is outside 1..capacity.
        """
        self._mirror.require_k(k)
        if self._index is None or self._is_due():
            self._rebuild()
        return self._search(queries.detach().contiguous(), k)

    def renew(self, rows: Int64[Tensor, " b"]) -> None:
        """Record that these rows, which are consecutive in the ring, have new embeddings."""
        self._stores += 1
        if len(rows) and self._fresh == 0:
            self._start = int(rows[0])
        self._fresh = min(len(self._mirror.rows), self._fresh + len(rows))

    def _is_due(self) -> bool:
        """Return whether to rebuild; at the latest when half of the rows are new and so are searched exactly."""
        return self._stores >= self._settings.rebuild_every_steps or 2 * self._fresh >= len(self._mirror.rows)

    def _rebuild(self) -> None:
        is_first = self.recall is None
        started = time.monotonic()
        self._index = _build(self._mirror.rows, self._settings.index)
        seconds = time.monotonic() - started
        self._start = self._fresh = self._stores = 0
        self.recall = self._measure_recall()
        if is_first and distributed.is_main():
            _log.info(
                "neighbors.index = %s of %d rows built in %.1f s; recall@%d %.4f (further ones: neighbor_recall)",
                self._settings.index,
                len(self._mirror.rows),
                seconds,
                self.k,
                self.recall,
            )

    def _measure_recall(self) -> float:
        """Return recall@k over a sample of rows. A row that ties with the k-th nearest counts as found."""
        capacity = len(self._mirror.rows)
        generator = torch.Generator().manual_seed(_SEED)
        sample = torch.randperm(capacity, generator=generator)[:_RECALL_SAMPLE]
        queries = self._mirror.rows[sample]

        def others(found: NearestRows) -> Float32[Tensor, "q k"]:
            own = found.rows == sample.unsqueeze(1)
            return found.similarities.masked_fill(own, -math.inf).topk(self.k, dim=1).values

        exact = others(self._mirror.search(queries, self.k + 1))
        approximate = others(self._search(queries, self.k + 1))
        return float((approximate >= exact[:, -1:] - _TIE).double().mean())

    def _search(self, queries: Float32[Tensor, "q d"], k: int) -> NearestRows:
        """Merge the index's answer for the older rows with an exact answer for the fresh rows."""
        wanted = min(k + _SPARE_ROWS, len(self._mirror.rows))
        asked = queries.numpy()
        found = [self._index.search(asked, wanted, params=self._search_parameters())]
        for first, last in self._fresh_spans():
            part = self._mirror.rows[first:last].numpy()
            near, places = faiss.knn(asked, part, min(wanted, last - first), metric=faiss.METRIC_INNER_PRODUCT)
            found.append((near, places + first))
        rough = torch.from_numpy(np.concatenate([near for near, _ in found], axis=1))
        rows = torch.from_numpy(np.concatenate([places for _, places in found], axis=1))
        best = rough.masked_fill(rows < 0, -math.inf).topk(wanted, dim=1).indices  # FAISS pads with row -1
        candidates = rows.gather(1, best)
        result = in_fixed_order(self._similarities(queries, candidates), candidates)
        return self._complete(queries, NearestRows(result.similarities[:, :k], result.rows[:, :k]))

    def _complete(self, queries: Float32[Tensor, "q d"], found: NearestRows) -> NearestRows:
        """Search exactly for queries with fewer rows than were asked for."""
        short = (found.rows < 0).any(dim=1)
        if not bool(short.any()):
            return found
        if not self._short_was_logged and distributed.is_main():
            _log.info(
                "%d of %d searches by neighbors.index = %s found fewer than %d rows and are repeated exactly; if that "
                "takes long, raise neighbors.probes or neighbors.ef_search",
                int(short.sum()),
                len(short),
                self._settings.index,
                found.rows.shape[1],
            )
            self._short_was_logged = True
        exact = self._mirror.search(queries[short], found.rows.shape[1])
        similarities, rows = found.similarities.clone(), found.rows.clone()
        similarities[short], rows[short] = exact
        return NearestRows(similarities, rows)

    def _similarities(self, queries: Float32[Tensor, "q d"], rows: Int64[Tensor, "q c"]) -> Float32[Tensor, "q c"]:
        """Return inner products with the current rows; -infinity for row -1. Equal rows have equal products."""
        block = max(1, _BLOCK_ELEMENTS // (rows.shape[1] * queries.shape[1]))
        parts = [
            (self._mirror.rows[part.clamp(min=0)] * asked.unsqueeze(1)).sum(-1)
            for asked, part in zip(queries.split(block), rows.split(block), strict=True)
        ]
        return torch.cat(parts).masked_fill(rows < 0, -math.inf)

    def _search_parameters(self) -> Any:
        """Return the search setting, and a selector that leaves out the fresh rows."""
        capacity, end = len(self._mirror.rows), self._start + self._fresh
        untyped: Any = faiss  # its type stubs lack these classes or their arguments
        older = None
        if end > capacity:
            older = untyped.IDSelectorRange(end - capacity, self._start)
        elif self._fresh:
            older = untyped.IDSelectorNot(untyped.IDSelectorRange(self._start, end))
        if self._settings.index == "ivf":
            return untyped.SearchParametersIVF(nprobe=self._settings.probes, sel=older)
        # HNSW also walks over the rows that it leaves out: a longer list makes up for them.
        ef_search = self._settings.ef_search * capacity // (capacity - self._fresh)
        return untyped.SearchParametersHNSW(efSearch=ef_search, sel=older)

    def _fresh_spans(self) -> list[tuple[int, int]]:
        """Return the rows overwritten since the build, as one or two spans [first, last)."""
        capacity, end = len(self._mirror.rows), self._start + self._fresh
        spans = ((self._start, min(end, capacity)), (0, end - capacity))
        return [(first, last) for first, last in spans if first < last]

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next search needs in addition to the memory; nothing if it will rebuild the index."""
        if self._index is None or self._is_due():
            return {}
        former = [self._index.reconstruct_n(first, last - first) for first, last in self._fresh_spans()]
        empty = np.empty((0, self._mirror.rows.shape[1]), np.float32)
        return {
            "index_former_rows": torch.from_numpy(np.concatenate([empty, *former])),
            "index_position": torch.tensor([self._start, self._fresh, self._stores], dtype=torch.int64),
            "index_recall": torch.tensor(self.recall, dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Build the saved index again, after the rows were loaded; without a saved one, the next search builds it.

        Raises:
            CheckpointError: the state is not of such an index.
        """
        self._index, self.recall = None, None
        if "index_position" not in state:
            return
        start, fresh, stores = (int(value) for value in state["index_position"])
        capacity, dim = self._mirror.rows.shape
        former = state["index_former_rows"]
        if not (0 <= start < capacity and 0 <= fresh <= capacity and former.shape == (fresh, dim)):
            raise CheckpointError(
                f"the checkpoint's index has {tuple(former.shape)} former rows from row {start} on, wanted "
                f"{(fresh, dim)} within {capacity}: use another checkpoint"
            )
        self._start, self._fresh, self._stores = start, fresh, stores
        rows = self._mirror.rows.clone()
        rows[(start + torch.arange(fresh)) % capacity] = former
        self._index = _build(rows, self._settings.index)
        self.recall = float(state["index_recall"])
