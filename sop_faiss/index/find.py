"""The neighbors of queries: all rows or some, in order of similarity or re-ranked, near-duplicates folded or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from sop_faiss.index.found import Neighbors
from sop_faiss.index.narrowed import Narrowing, reaching, search_narrowed, without
from sop_faiss.index.rerank.reranker import Reranker
from sop_faiss.index.search import FeatureIndex

Line = tuple[Neighbors, list[list[int]] | None]
"""One line of neighbors, and the rows that are folded into each; None where none were looked for."""


def find(
    index: FeatureIndex,
    queries: Float32[np.ndarray, "q d"],
    k: int | None,
    threshold: float | None = None,
    narrowing: Narrowing | None = None,
    reranker: Reranker | None = None,
    tokens: Sequence[np.ndarray] | None = None,
) -> list[Line]:
    """Find the neighbors of each query.

    Args:
        index: what to search.
        queries: unit features.
        k: how many, 1 <= k <= len(index); fewer are found where fewer count. None: all that reach the threshold.
        threshold: leave out neighbors of a smaller similarity.
        narrowing: which rows count; None: all.
        reranker: puts the first of those that count into a new order, before near-duplicates are folded.
        tokens: of the queries, where it compares them.

    Raises:
        ConfigError: neither k nor a threshold is given, or one is out of range.
        IndexMismatchError: tokens of the index are damaged.
    """
    if narrowing is None:
        if k is None:
            narrowing = Narrowing()
        else:
            return _among_all(index, queries, k, threshold, reranker, tokens)
    if reranker is None:
        found = search_narrowed(index, queries, k, threshold, narrowing)
    else:
        found = []
        for number in range(len(queries)):
            own = None if tokens is None else tokens[number]
            reorder = functools.partial(reranker.reordered, feature=queries[number], tokens=own)
            query = queries[number : number + 1]
            found += search_narrowed(index, query, k, threshold, narrowing, reorder, reranker.settings.depth)
    return [(line, None if narrowing.unique is None else folded) for line, folded in found]


def _among_all(
    index: FeatureIndex,
    queries: Float32[np.ndarray, "q d"],
    k: int,
    threshold: float | None,
    reranker: Reranker | None,
    tokens: Sequence[np.ndarray] | None,
) -> list[Line]:
    """Search for all queries at once."""
    wanted = k if reranker is None else min(max(k, reranker.settings.depth), len(index))
    found = [reaching(line, threshold) for line in index.search(queries, wanted).lines()]
    if reranker is not None:
        found = [
            reranker.reordered(line, queries[number], None if tokens is None else tokens[number]).of(slice(k))
            for number, line in enumerate(found)
        ]
    return [(line, None) for line in found]


def find_others(
    index: FeatureIndex,
    rows: Sequence[int],
    k: int | None,
    threshold: float | None = None,
    narrowing: Narrowing | None = None,
    reranker: Reranker | None = None,
) -> list[Line]:
    """Find the neighbors of each of these rows, without the row itself; arguments and errors as of `find`."""
    if narrowing is None and reranker is None:
        if k is not None:
            return [(reaching(line, threshold), None) for line in index.search_rows(rows, k).lines()]
        if threshold is not None:
            return [(line, None) for line in index.search_rows_above(rows, threshold)]
    found: list[Line] = []
    for row in rows:
        tokens = None if reranker is None else reranker.tokens_of_rows([row])
        others = without(narrowing, [row])
        found += find(index, index.unit_features([row]), k, threshold, others, reranker, tokens)
    return found
