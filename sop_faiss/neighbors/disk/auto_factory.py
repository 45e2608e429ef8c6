"""Choose an index by number of vectors and memory (`auto`), and tune how far its search looks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import faiss
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from sop_faiss.errors import ConfigError
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import FLAT, VectorIndex
from sop_faiss.neighbors.exact import NearestRows

_EXACT_ROWS = 100_000
"""An exact search of this many rows takes milliseconds."""
_LISTS_PER_ROOT = 4.0
"""Lists of an IVF index for each root of the number of rows, about (FAISS's guideline is 4 to 16)."""
_FEWEST_ROWS_PER_LIST = 39
_ID_BYTES = 8
_SLACK = 1.02
"""Lists are not packed without gaps."""
_CODES = (("Flat", 4.0), ("SQfp16", 2.0), ("SQ8", 1.0), ("SQ4", 0.5))
"""Codes from full vectors to coarse ones, and their bytes per dimension."""
_ON_DISK = "RaBitQ,Refine(SQfp16)"
"""One bit per dimension in memory, and float16 on disk for the candidates: where no finer codes fit."""
_FACTOR_BYTES = 8  # that RaBitQ keeps of each vector
_RERANKED = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Candidates for each neighbor that are compared by the codes on disk."""
_LEFT_TO_RERANK = 0.2
"""Share of what recall may miss that is left to candidates, where lists are chosen first."""
_TIME_ROUNDS = 3
_TIE = 1e-6
"""More than a float32 product of unit rows can be off by."""


@dataclass(frozen=True)
class Choice:
    """An index for a number of vectors."""

    factory: str
    """FAISS factory string."""
    why: str
    """For the user, in a line."""
    index_bytes: int
    """Of memory, about."""


@dataclass(frozen=True)
class Recall:
    """How much of an exact search an index finds."""

    share: float
    """Of the k nearest rows, the share that is found, mean over queries; a row as near as the k-th counts as one."""
    k: int
    queries: int
    """That were not in the index when it was measured."""


def choices(count: int, dimension: int, max_bytes: int | None = None) -> list[Choice]:
    """List the indices that fit into `max_bytes`: exact where that is quick, else IVF, the finest codes first.

    Args:
        count: vectors.
        dimension: of each.
        max_bytes: of the index in memory; None: no limit.

    Raises:
        ConfigError: not even the coarsest codes fit.
    """
    flat_bytes = 4 * count * dimension
    found = []
    if count <= _EXACT_ROWS and (max_bytes is None or flat_bytes <= max_bytes):
        found = [Choice(FLAT, f"an exact search of {count:,} vectors takes milliseconds", flat_bytes)]
    lists = _lists(count)
    reason = f"an exact search would look at all of {count:,} vectors" if count > _EXACT_ROWS else "to save memory"
    limit = "" if max_bytes is None else f", the finest that fit into {max_bytes / 1e9:.3g} GB"
    codes = [(code, f"{code} codes", math.ceil(size * dimension)) for code, size in _CODES]
    on_disk = f"RaBitQ codes and, on disk, float16 vectors for re-ranking ({2e-9 * count * dimension:.2g} GB)"
    codes.append((_ON_DISK, on_disk, math.ceil(dimension / 8) + _FACTOR_BYTES))
    for code, named, row_bytes in codes:
        size = round(count * (row_bytes + _ID_BYTES) * _SLACK) + 4 * lists * dimension
        if max_bytes is None or size <= max_bytes:
            why = f"{reason}, so {lists:,} lists; {named} ({size / 1e9:.2g} GB{limit})"
            found.append(Choice(f"IVF{lists},{code}", why, size))
    if not found:
        raise ConfigError(
            f"{count:,} vectors of dimension {dimension} do not fit into {max_bytes:,} bytes, their coarsest codes "
            f"take {size:,}: allow more memory, or name a factory with smaller codes, such as "
            f"IVF{lists},PQ{_pq_bytes(dimension)}"
        )
    return found


def _lists(count: int) -> int:
    """Return a power of two near 4 roots of the count that leaves k-means enough rows to learn from."""
    wanted = 2 ** round(math.log2(_LISTS_PER_ROOT * math.sqrt(count)))
    return max(1, min(wanted, count // _FEWEST_ROWS_PER_LIST))


def _pq_bytes(dimension: int) -> int:
    """Return a divisor of the dimension near an eighth of it."""
    return max(size for size in range(1, max(1, dimension // 8) + 1) if dimension % size == 0)


def exact_similarities(
    queries: Float32[np.ndarray, "q d"], blocks: Iterator[Float32[np.ndarray, "b d"]], k: int
) -> Float32[np.ndarray, "q k"]:
    """Find the k largest inner products of each query with all rows of all blocks, falling."""
    best = np.full((len(queries), k), -np.inf, np.float32)
    for rows in blocks:
        found, _ = faiss.knn(queries, rows, min(k, len(rows)), metric=faiss.METRIC_INNER_PRODUCT)
        best = -np.sort(-np.concatenate([best, found], axis=1), axis=1)[:, :k]
    return best


IsNear = Callable[[Int64[np.ndarray, "q k"]], Bool[np.ndarray, "q k"]]
"""Of rows found for each query: is each as near as the k-th nearest?"""


def near_by_vectors(
    queries: Float32[np.ndarray, "q d"],
    nearest: Float32[np.ndarray, "q k"],
    features: Float32[np.ndarray, "m d"],
    rows: Int64[np.ndarray, " n"],
) -> IsNear:
    """Judge rows that were found by their vectors.

    Args:
        queries: unit vectors.
        nearest: similarities of the k nearest rows, falling: `exact_similarities`.
        features: vectors as they are.
        rows: of each vector of the index, its row in `features`.
    """

    def is_near(found: Int64[np.ndarray, "q k"]) -> Bool[np.ndarray, "q k"]:
        scores: Float64[np.ndarray, "q k"] = np.einsum("qd,qkd->qk", queries, features[rows[found]], dtype=np.float64)
        near: Bool[np.ndarray, "q k"] = scores >= nearest[:, -1:] - _TIE
        return near

    return is_near


def near_by_table(nearest: NearestRows, k: int) -> IsNear:
    """Judge rows that were found by a table of the nearest, where the vectors are elsewhere.

    Rows that tie with the k-th, but are not in the table, count as far.

    Args:
        nearest: more than k exact neighbors of each query, by row of the index.
        k: how many are looked for.
    """
    near = nearest.similarities >= nearest.similarities[:, k - 1 : k] - _TIE
    accepted = [frozenset(rows[keep].tolist()) for rows, keep in zip(nearest.rows, near, strict=True)]

    def is_near(found: Int64[np.ndarray, "q k"]) -> Bool[np.ndarray, "q k"]:
        return np.array([[row in rows for row in line] for line, rows in zip(found.tolist(), accepted, strict=True)])

    return is_near


def tune_search(
    index: ApproximateIndex, queries: Float32[np.ndarray, "q d"], k: int, is_near: IsNear, target: float
) -> Recall:
    """Set the smallest search setting of an index whose recall reaches the target; the largest where none does.

    Then, of an index that re-ranks, the smallest number of candidates.

    Args:
        index: holds n vectors.
        queries: unit vectors that are not in it.
        k: neighbors that are looked for.
        is_near: which of those found count: `near_by_vectors`, `near_by_table`.
        target: recall, 0 to 1.

    Returns:
        The recall that was reached.
    """

    def share() -> float:
        return float(is_near(index.search(queries, k).rows).mean())

    def set_smallest(values: Sequence[int], name: str, wanted: float) -> None:
        low, high = 0, len(values) - 1
        while low < high:  # recall rises with nprobe, efSearch and the number of candidates
            middle = (low + high) // 2
            setattr(index, name, values[middle])
            if share() >= wanted:
                high = middle
            else:
                low = middle + 1
        setattr(index, name, values[low])

    if index.rerank is not None:
        index.rerank = _RERANKED[-1]
    if index.setting_name is not None:
        more = 0 if index.rerank is None else _LEFT_TO_RERANK
        set_smallest(index.search_settings(), "search_setting", target + more * (1 - target))
    if index.rerank is not None:
        set_smallest(_RERANKED, "rerank", target)
    return Recall(share(), k, len(queries))


def query_milliseconds(index: VectorIndex, queries: Float32[np.ndarray, "q d"], k: int) -> float:
    """Measure the median time of one query at a time, on one core."""
    threads, spent = faiss.omp_get_max_threads(), []
    faiss.omp_set_num_threads(1)
    try:
        for _ in range(_TIME_ROUNDS):
            for query in queries:
                started = time.perf_counter()
                index.search(query[None], k)
                spent.append(time.perf_counter() - started)
    finally:
        faiss.omp_set_num_threads(threads)
    return 1000 * float(np.median(spent[len(queries) :]))
