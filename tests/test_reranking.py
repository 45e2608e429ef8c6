"""Rankings with a new order of their first images: what moves, and what does not by a bit."""

from __future__ import annotations

import numpy as np

from sop_faiss.evaluate.metrics import top_positions
from sop_faiss.evaluate.reranking import Reordering, reorder_by_features
from sop_faiss.index.rerank.refine import refined_scores
from sop_faiss.index.rerank.settings import Rerank
from tests.test_expansion import features

NOTHING = np.empty(0, np.int64)


def ranking(similarities: np.ndarray) -> list[int]:
    return top_positions(similarities, NOTHING, len(similarities)).tolist()


def test_only_the_first_move_also_among_equal_ones() -> None:
    similarities = np.array([0.5, 0.9, 0.5, 0.5, 0.2, -1.0], np.float32)
    assert ranking(similarities) == [1, 0, 2, 3, 4, 5]
    turned = Reordering(3, lambda query, first: np.arange(len(first))[::-1])
    assert ranking(turned.moved(0, similarities)) == [2, 0, 1, 3, 4, 5]
    assert ranking(Reordering(99, turned.order).moved(0, similarities)) == [5, 4, 3, 2, 0, 1]
    same = Reordering(4, lambda query, first: np.arange(len(first)))
    assert ranking(same.moved(0, similarities)) == ranking(similarities)


def test_a_query_of_the_gallery_is_not_its_own_candidate() -> None:
    seen: list[list[int]] = []

    def order(query: int, first: np.ndarray) -> np.ndarray:
        seen.append(first.tolist())
        return np.arange(len(first))

    Reordering(2, order, np.array([3, 0])).moved(1, np.array([1.0, 0.1, 0.3, 0.2], np.float32))
    assert seen == [[2, 3]]


def test_by_features_equals_scores_of_the_first() -> None:
    queries, gallery = features()
    similarities = (queries @ gallery.T).astype(np.float32)
    moved = reorder_by_features(Rerank("global", depth=20), queries, gallery, None).moved(2, similarities[2])
    old = ranking(similarities[2])
    scores = refined_scores(queries[2], gallery[old[:20]], 4, 1.0)
    assert ranking(moved) == [old[place] for place in np.argsort(-scores, kind="stable")] + old[20:]
