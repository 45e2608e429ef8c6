"""Which rows of a feature store train an index, which are held out, and in which order all are added."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import VectorIndex

RECALL_K = 10
"""Neighbors that recall is measured of."""

_SEED = 0
_MOST_QUERIES = 1000  # that recall is measured on


@dataclass(frozen=True)
class RowPlan:
    """Rows of a feature store, as an index takes them."""

    training: Int64[np.ndarray, " t"]
    """Lists and codes are learned from these, in the order drawn."""
    present: Int64[np.ndarray, " p"]
    """Added first; recall is measured then."""
    held_out: Int64[np.ndarray, " h"]
    """A random sample that recall is measured with, added last."""

    @property
    def order(self) -> Int64[np.ndarray, " n"]:
        """For each row of the index, its row of the store."""
        return np.concatenate([self.present, self.held_out])


def plan_rows(count: int, index: VectorIndex) -> RowPlan:
    """Plan the rows of a store of `count` rows; the same every time.

    A `Flat` index takes all rows in order. Others also take the rows that are not held out in order, so that parts of a
    store can be indexed separately, except that a graph takes them in random order: the first rows shape it.

    Args:
        count: rows of the store.
        index: empty.
    """
    if not isinstance(index, ApproximateIndex):
        nothing = np.arange(0)
        return RowPlan(nothing, np.arange(count), nothing)
    drawn = np.random.default_rng(_SEED).permutation(count)
    held_out = min(_MOST_QUERIES, count // 10)
    present = drawn[: count - held_out]
    training = drawn[: index.training_rows()]  # all rows of a small store, so that codes cover their range
    return RowPlan(training, present if index.is_graph else np.sort(present), drawn[count - held_out :])
