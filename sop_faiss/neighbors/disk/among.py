"""Search of an approximate index among some of its rows.

Few rows are all compared. Of more, FAISS skips the others while it searches, and the search setting is doubled until
the rows that are found stay the same: the nearest of a tenth of the rows are further away than the nearest of all. With
it the candidates that are re-ranked: where the rows that pass are unlike the query, more of them are about as near, and
short codes cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.neighbors.disk.codes_on_disk import CodesOnDisk
from sop_faiss.neighbors.disk.reranked import reranked
from sop_faiss.neighbors.exact import NearestRows, in_fixed_order

_ALL_COMPARED = 20_000
"""Rows of which all are compared, in any index."""
_SHARE_COMPARED = 0.01
"""Of the rows of a large index, the share up to which all that pass are compared."""
_MOST_RERANKED = 64
"""Candidates for each neighbor up to which their number is doubled."""
_BLOCK_ROWS = 4096
_SPARE_ROWS = 8  # as of a search of all rows

_with_keywords: Any = faiss  # its stubs lack the keywords of its Python classes
_Found = tuple[Float32[np.ndarray, "q k"], Int64[np.ndarray, "q k"]]


def _selecting(rows: Int64[np.ndarray, " m"], count: int) -> Any:
    """Make FAISS's selector of these rows; it takes a bit for each of the `count` rows of the index."""
    passes = np.zeros(count, bool)
    passes[rows] = True
    return _with_keywords.IDSelectorBitmap(np.packbits(passes, bitorder="little"))


def only(rows: Int64[np.ndarray, " m"], count: int) -> Any:
    """Return FAISS's parameters of a search among these rows, for an index that compares all of its rows."""
    return _with_keywords.SearchParameters(sel=_selecting(rows, count))


def search_among(
    index: Any,
    queries: Float32[np.ndarray, "q d"],
    k: int,
    rows: Int64[np.ndarray, " m"],
    settings: list[int],
    map_rows: Callable[[], None],
    on_disk: CodesOnDisk | None = None,
) -> NearestRows:
    """Find k of these rows of large inner product with each query, ties by rising row; never another row, never fewer.

    Args:
        index: FAISS's, with its own codes compared.
        queries: finite unit vectors.
        k: 1 <= k <= m.
        rows: sorted, without repeats.
        settings: `nprobe` or `efSearch`, rising from the one of a search of all rows to the largest; empty where the
            index has none.
        map_rows: makes reconstruction by row possible; called where FAISS cannot skip rows.
        on_disk: what an index that re-ranks does so by, if it is not in memory.
    """
    count = int(index.ntotal)
    selector = _selecting(rows, count)
    asked, found = min(len(rows), k + _SPARE_ROWS), None
    if len(rows) > max(_ALL_COMPARED, _SHARE_COMPARED * count):
        found = _until_settled(index, queries, asked, k, selector, settings, on_disk)
    if found is None and on_disk is not None:
        found = _scored(on_disk.vectors, queries, asked, rows)
    elif found is None:
        found = _all_compared(index, queries, asked, rows, selector, map_rows)
    similarities = np.where(found[1] < 0, -np.inf, found[0]).astype(np.float32)
    nearest = in_fixed_order(similarities, found[1].astype(np.int64))
    best, best_rows = (np.ascontiguousarray(each[:, :k]) for each in nearest)
    return NearestRows(np.clip(best, -1, 1), best_rows)


def _until_settled(
    index: Any,
    queries: Float32[np.ndarray, "q d"],
    asked: int,
    k: int,
    selector: Any,
    settings: list[int],
    on_disk: CodesOnDisk | None,
) -> _Found | None:
    """Search with rising settings until the first k rows of a query stay the same; None where FAISS cannot skip rows.

    Also None where even the largest setting does not lead to k rows.
    """
    similarities = np.empty((len(queries), asked), np.float32)
    rows = np.full((len(queries), asked), -1, np.int64)
    open_queries = np.arange(len(queries))
    rising: list[int | None] = [*settings[::3], *settings[-1:]]
    for doubled, setting in enumerate(rising or [None]):  # every third is about the double
        parameters = _parameters(index, selector, setting, 2**doubled)
        try:
            found = reranked(index, queries[open_queries], asked, on_disk, parameters)
        except RuntimeError:
            return None
        first, before = found[1][:, :k], rows[open_queries, :k]
        settled = (first >= 0).all(1) & (np.sort(first, 1) == np.sort(before, 1)).all(1)
        similarities[open_queries], rows[open_queries] = found
        open_queries = open_queries[~settled]
        if not len(open_queries):
            break
    return None if (rows[:, :k] < 0).any() else (similarities, rows)


def _all_compared(
    index: Any,
    queries: Float32[np.ndarray, "q d"],
    k: int,
    rows: Int64[np.ndarray, " m"],
    selector: Any,
    map_rows: Callable[[], None],
) -> _Found:
    """Compare the queries with all of these rows, by the finest codes of the index."""
    while isinstance(index, faiss.IndexPreTransform | faiss.IndexRefine | faiss.IndexHNSW):
        if isinstance(index, faiss.IndexRefine):
            index = faiss.downcast_index(index.refine_index)
        elif isinstance(index, faiss.IndexHNSW):
            index = faiss.downcast_index(index.storage)
        else:
            chain: Any = index.chain
            for number in range(chain.size()):
                queries = faiss.downcast_VectorTransform(chain.at(number)).apply(queries)
            index = faiss.downcast_index(index.index)
    try:
        setting = int(index.nlist) if isinstance(index, faiss.IndexIVF) else None
        found: _Found = index.search(queries, k, params=_parameters(index, selector, setting))
        if not (found[1] < 0).any():
            return found
    except RuntimeError:  # FAISS cannot skip rows in an index of this kind
        pass
    map_rows()
    return _scored(index.reconstruct_batch, queries, k, rows)


def _scored(
    vectors: Callable[[Int64[np.ndarray, " b"]], Float32[np.ndarray, "b d"]],
    queries: Float32[np.ndarray, "q d"],
    k: int,
    rows: Int64[np.ndarray, " m"],
) -> _Found:
    """Compare the queries with the vectors of the rows."""
    best = np.full((len(queries), k), -np.inf, np.float32)
    best_rows = np.full((len(queries), k), -1, np.int64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        part = rows[start : start + _BLOCK_ROWS]
        scores = np.concatenate([best, queries @ vectors(part).T], axis=1)
        names = np.concatenate([best_rows, np.broadcast_to(part, (len(queries), len(part)))], axis=1)
        ordered = in_fixed_order(scores, names)
        best, best_rows = ordered.similarities[:, :k], ordered.rows[:, :k]
    return best, best_rows


def _parameters(index: Any, selector: Any, setting: int | None, more_candidates: int = 1) -> Any:
    """Return the parameters of one search, for each layer of an index."""
    if isinstance(index, faiss.IndexPreTransform):
        inside = _parameters(faiss.downcast_index(index.index), selector, setting, more_candidates)
        return _with_keywords.SearchParametersPreTransform(index_params=inside)
    if isinstance(index, faiss.IndexRefine):
        inside = _parameters(faiss.downcast_index(index.base_index), selector, setting)
        times = max(index.k_factor, min(_MOST_RERANKED, more_candidates * index.k_factor))
        return _with_keywords.IndexRefineSearchParameters(k_factor=times, base_index_params=inside)
    if isinstance(index, faiss.IndexIVF):
        return _with_keywords.SearchParametersIVF(sel=selector, nprobe=setting)
    if isinstance(index, faiss.IndexHNSW):
        return _with_keywords.SearchParametersHNSW(sel=selector, efSearch=setting)
    return _with_keywords.SearchParameters(sel=selector)
