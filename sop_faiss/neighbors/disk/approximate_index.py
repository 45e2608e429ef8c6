"""Indices on disk that look at a part of the rows (IVF, HNSW), or at shortened ones (SQ, PQ, RaBitQ).

Any FAISS factory makes one. Its *search setting* says how much of the index a search looks at: `nprobe` of an IVF
index, `efSearch` of an HNSW one; an index that goes through all of its codes has none. Similarities are those of the
stored codes: with `Flat` codes the cosines, with shortened ones near them.
"""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from jaxtyping import Bool, Float32, Int64

from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.neighbors.disk.among import search_among
from sop_faiss.neighbors.disk.codes_on_disk import CodesOnDisk
from sop_faiss.neighbors.disk.faiss_files import reason, save
from sop_faiss.neighbors.disk.faiss_layers import innermost, inside, layers_of
from sop_faiss.neighbors.disk.gpu_lists import FilledByGpus, learning_on_gpus
from sop_faiss.neighbors.disk.reranked import reranked
from sop_faiss.neighbors.exact import NearestRows, in_fixed_order, require_dimension, require_k

MOST_ROWS_PER_LIST = 64
"""That k-means learns from; FAISS's own 256 take four times as long."""
_SEED = 1234
_NO_MAP = 0  # FAISS's DirectMap.NoMap
_MOST_TRAINING_ROWS = 65_536  # FAISS's own limit for 256 centroids of a code
_MOST_LINKED = 4096  # candidates that a search of an HNSW index keeps, at most; more costs more than an exact search
_SPARE_ROWS = 8  # fetched beyond those asked for, so that ties at the end of a list come in a fixed order


class ApproximateIndex:
    """A trained FAISS index of unit vectors under the inner product. Row i is the i-th vector that was added.

    Args:
        factory: the FAISS factory string that it was made by.
        index: FAISS's.
        on_disk: the codes in its file that it re-ranks by, if any.
    """

    def __init__(self, factory: str, index: Any, on_disk: CodesOnDisk | None = None) -> None:
        self._on_disk = on_disk
        self.factory = factory
        self._faiss = index
        self._ivf: Any = faiss.try_extract_index_ivf(index)
        self._gpus = FilledByGpus(index, self._ivf)
        self._changing = threading.Lock()
        self._search_setting: int | None = None
        if self.setting_name is not None:
            self.search_setting = self.search_settings()[0]

    @property
    def dimension(self) -> int:
        """Length of each vector."""
        return int(self._faiss.d)

    @property
    def count(self) -> int:
        """Number of vectors."""
        return int(self._faiss.ntotal)

    @property
    def setting_name(self) -> str | None:
        """FAISS's name of the search setting: `nprobe`, `efSearch`, or None where there is nothing to choose."""
        if self._ivf is not None:
            return "nprobe"
        return "efSearch" if isinstance(innermost(self._faiss), faiss.IndexHNSW) else None

    @property
    def is_graph(self) -> bool:
        """Whether the rows that are added first shape the search for later ones."""
        return self.setting_name == "efSearch"

    @property
    def made_in_parts(self) -> bool:
        """Whether lists of indices that were trained alike can be concatenated."""
        return self._ivf is not None and not isinstance(self._faiss, faiss.IndexRefine)

    @property
    def loses_rows(self) -> bool:
        """Whether rows can be removed, as of a graph they cannot."""
        return self._ivf is not None or isinstance(self._faiss, faiss.IndexFlatCodes)

    @property
    def rerank(self) -> int | None:
        """How many times k candidates are compared by finer codes, as of `...,Refine(SQfp16)`; None: there are none."""
        return int(self._faiss.k_factor) if isinstance(self._faiss, faiss.IndexRefine) else None

    @rerank.setter
    def rerank(self, times: int) -> None:
        self._faiss.k_factor = float(times)  # which is written with the index

    @property
    def search_setting(self) -> int | None:
        """How much a search looks at: lists (`nprobe`) or candidates (`efSearch`)."""
        return self._search_setting

    @search_setting.setter
    def search_setting(self, value: int) -> None:
        name = self.setting_name
        if name is None:
            raise ConfigError(f"search setting {value} of an index {self.factory}: this kind of index has none")
        if not 1 <= value <= self.search_settings()[-1]:
            raise ConfigError(f"{name} = {value} of an index {self.factory}: wanted 1 to {self.search_settings()[-1]}")
        faiss.ParameterSpace().set_index_parameter(self._faiss, name, value)
        self._search_setting = value

    def search_settings(self) -> list[int]:
        """Return the settings worth trying, rising to the largest that is possible, in steps of about a quarter."""
        most = 1 if self.setting_name is None else _MOST_LINKED if self._ivf is None else int(self._ivf.nlist)
        values = {most} | {round(2 ** (step / 3)) for step in range(64)}
        return sorted(value for value in values if value <= most)

    def training_rows(self) -> int:
        """Return how many rows to train on; more do not improve the index."""
        return (
            _MOST_TRAINING_ROWS if self._ivf is None else max(_MOST_TRAINING_ROWS, self._ivf.nlist * MOST_ROWS_PER_LIST)
        )

    def train(self, rows: Float32[np.ndarray, "m d"]) -> None:
        """Learn lists and codes; before the first row is added.

        Raises:
            ConfigError: the rows are too few for this factory.
        """
        if len(rows) < self.dimension and any(isinstance(each, faiss.OPQMatrix) for each in self._transforms()):
            raise ConfigError(
                f"index factory {self.factory!r} learns a rotation from {self.dimension} vectors or more, not from "
                f"{len(rows)}: take one without OPQ, or auto"
            )
        try:
            with learning_on_gpus(self._ivf, len(rows)):
                self._faiss.train(np.ascontiguousarray(rows))
        except RuntimeError as error:
            raise ConfigError(
                f"index factory {self.factory!r} cannot be trained on {len(rows)} vectors ({reason(error)}): "
                "take a smaller one, or auto"
            ) from None

    def _transforms(self) -> list[Any]:
        layers = [self._faiss, inside(self._faiss)]
        chains: list[Any] = [each.chain for each in layers if isinstance(each, faiss.IndexPreTransform)]
        return [faiss.downcast_VectorTransform(chain.at(place)) for chain in chains for place in range(chain.size())]

    def add(self, rows: Float32[np.ndarray, "m d"]) -> None:
        """Append finite unit vectors."""
        rows = np.ascontiguousarray(rows)
        if not self._gpus.add(rows):
            self._faiss.add(rows)

    def features(self, rows: Int64[np.ndarray, " m"]) -> Float32[np.ndarray, "m d"]:
        """Return some rows, as reconstructed from the stored codes.

        Raises:
            ConfigError: FAISS has no way back from the codes of this factory.
        """
        if not len(rows):
            return np.empty((0, self.dimension), np.float32)
        if self._on_disk is not None:
            return self._on_disk.vectors(rows)
        self._map_rows()
        try:
            return np.stack([self._faiss.reconstruct(int(row)) for row in rows])
        except RuntimeError:
            raise ConfigError(
                f"an index {self.factory} cannot return its vectors: search by images or features, without `where`, "
                "`unique` or `rerank`, or build it by another factory"
            ) from None

    def _map_rows(self) -> None:
        """Note the list of each row, once, for reconstruction; searches in other threads wait for it."""
        with self._changing:
            if self._ivf is not None and self._ivf.direct_map.type == _NO_MAP:
                self._ivf.make_direct_map()

    def search(
        self, queries: Float32[np.ndarray, "q d"], k: int, among: Int64[np.ndarray, " m"] | None = None
    ) -> NearestRows:
        """Find k rows of large inner product with each query, ties by rising row; never fewer, and never -1.

        Where the search setting does not lead to k rows, it is doubled for these queries until it does.

        Args:
            queries: finite unit vectors, one per row.
            k: how many rows; 1 <= k <= count, or the number of rows in `among`.
            among: rows to search among, sorted and without repeats, as of `search_among`; None: all.

        Raises:
            ConfigError: k is outside 1..count.
            FeatureError: the dimension differs.
            IndexMismatchError: not all rows of the index can be reached.
        """
        require_k(k, self.count if among is None else len(among))
        require_dimension(queries, self.dimension, "index")
        queries = np.ascontiguousarray(queries)
        if among is not None:
            settings = [value for value in self.search_settings() if value >= (self._search_setting or value)]
            settings = settings if self.setting_name else []
            return search_among(self._faiss, queries, k, among, settings, self._map_rows, self._on_disk)
        asked = min(self.count, k + _SPARE_ROWS)
        similarities, rows = reranked(self._faiss, queries, asked, self._on_disk)
        short = np.flatnonzero((rows[:, :k] < 0).any(1))
        if short.size:
            similarities[short], rows[short] = self._search_wider(queries[short], asked, k)
        found = in_fixed_order(np.where(rows < 0, -np.inf, similarities).astype(np.float32), rows.astype(np.int64))
        return NearestRows(
            np.clip(np.ascontiguousarray(found.similarities[:, :k]), -1, 1), np.ascontiguousarray(found.rows[:, :k])
        )

    def _search_wider(
        self, queries: Float32[np.ndarray, "q d"], asked: int, k: int
    ) -> tuple[Float32[np.ndarray, "q a"], Int64[np.ndarray, "q a"]]:
        before = self._search_setting
        wider = [value for value in self.search_settings() if before is not None and value > before]
        with self._changing:
            try:
                for value in [*wider[::3], *wider[-1:]]:
                    self.search_setting = value
                    similarities, rows = reranked(self._faiss, queries, asked, self._on_disk)
                    if not (rows[:, :k] < 0).any():
                        return similarities, rows
            finally:
                if before is not None:
                    self.search_setting = before
        raise IndexMismatchError(
            f"k = {k} neighbors were asked, and an index {self.factory} of {self.count} rows leads to fewer: ask for "
            "fewer, or build it again"
        )

    def search_above(self, queries: Float32[np.ndarray, "q d"], similarity: float) -> list[NearestRows]:
        """Find the rows whose inner product with a query reaches `similarity`, for each query; ties by rising row.

        Raises:
            ConfigError: FAISS has no such search for this factory.
            FeatureError: the dimension differs.
        """
        require_dimension(queries, self.dimension, "index")
        try:  # FAISS wants more than the radius, not as much
            limits, similarities, rows = self._faiss.range_search(
                np.ascontiguousarray(queries), float(np.nextafter(np.float32(similarity), np.float32(-2)))
            )
        except RuntimeError:
            raise ConfigError(
                f"an index {self.factory} finds only the k nearest, not all above a similarity: give a k"
            ) from None
        found = []
        for start, stop in itertools.pairwise(limits):
            part = slice(int(start), int(stop))
            found.append(in_fixed_order(similarities[None, part], rows[None, part].astype(np.int64)))
        return [NearestRows(np.clip(each.similarities, -1, 1), each.rows) for each in found]

    def write(self, path: Path) -> None:
        """Write the index as a FAISS file. Not atomic: write into a directory that is renamed when complete.

        Raises:
            OSError: the disk is full or the place cannot be written.
        """
        if self._ivf is not None:
            self._ivf.set_direct_map_type(_NO_MAP)  # the map is made when it is needed
        save(self._faiss, path)

    def keep(self, rows: Bool[np.ndarray, " n"]) -> None:
        """Remove all rows but these; those that stay keep their order and their codes.

        Raises:
            ConfigError: the index cannot lose rows, as a graph cannot.
        """
        if self._ivf is not None:
            self._keep_in_lists(rows)
            if isinstance(self._faiss, faiss.IndexRefine):
                faiss.downcast_index(self._faiss.refine_index).remove_ids(faiss.IDSelectorBatch(np.flatnonzero(~rows)))
            self._count_rows()
        elif isinstance(self._faiss, faiss.IndexFlatCodes):
            self._faiss.remove_ids(faiss.IDSelectorBatch(np.flatnonzero(~rows)))
        else:
            raise ConfigError(f"an index {self.factory} cannot lose rows: build it again without them")

    def takes_codes_of(self, other: ApproximateIndex) -> bool:
        """Return whether both indices have lists, and make the same lists and codes of the same vectors."""
        if self._ivf is None or layers_of(self._faiss) != layers_of(other._faiss):
            return False
        probes = np.random.default_rng(_SEED).standard_normal((256, self.dimension)).astype(np.float32)
        probes /= np.linalg.norm(probes, axis=1, keepdims=True)
        return bool(np.array_equal(self._faiss.sa_encode(probes), other._faiss.sa_encode(probes)))

    def take_codes_of(self, other: ApproximateIndex) -> None:
        """Append the rows of an index for which `takes_codes_of` is true, and empty that index."""
        for each in (self, other):
            each._ivf.set_direct_map_type(_NO_MAP)
        if isinstance(self._faiss, faiss.IndexRefine):
            base, finer = (faiss.downcast_index(each) for each in (self._faiss.base_index, self._faiss.refine_index))
            base.merge_from(faiss.downcast_index(other._faiss.base_index), self.count)
            finer.merge_from(faiss.downcast_index(other._faiss.refine_index), 0)
            self._count_rows()
        else:
            self._faiss.merge_from(other._faiss, self.count)

    def _count_rows(self) -> None:
        """Write the number of rows in the lists into the layers around them."""
        layer = self._faiss
        while layer is not None:
            layer.ntotal = self._ivf.ntotal
            layer = inside(layer)

    def _keep_in_lists(self, rows: Bool[np.ndarray, " n"]) -> None:
        """Remove the other rows from the lists, and number the rest from 0."""
        self._ivf.set_direct_map_type(_NO_MAP)
        new_row = np.cumsum(rows) - 1
        self._ivf.remove_ids(faiss.IDSelectorBatch(np.flatnonzero(~rows)))
        lists = self._ivf.invlists
        for number in range(lists.nlist):
            size = lists.list_size(number)
            if size:
                ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
                ids[:] = new_row[ids]
