"""The neighbors of queries in a better order: `sop-index search --rerank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import ConfigError
from sop_faiss.index.rerank.order import order_by_features, order_by_tokens
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.rerank.token_store import TokenStore
from sop_faiss.index.search import FeatureIndex, Neighbors
from sop_faiss.model.encoders.encoder import Encoder


@dataclass(frozen=True)
class Reranker:
    """An index, and how the neighbors that it finds are put into a new order."""

    index: FeatureIndex
    settings: Rerank
    store: TokenStore | None
    """Of `local`."""

    def wanted(self, k: int, limit: int) -> int:
        """Return how many neighbors to find, for k of them to be shown."""
        return min(max(k, self.settings.depth), limit)

    def tokens_of_images(
        self, encoder: Encoder, source: ImageSource, positions: Sequence[int]
    ) -> list[np.ndarray] | None:
        """Return the tokens of query images; None where they are not compared."""
        if self.store is None:
            return None
        names = [source.keys[position] for position in positions]
        made = dict(self.store.tokenizer(encoder).tokens(len(positions), lambda at: source.read(positions[at]), names))
        return [made[place].astype(np.float32) for place in range(len(positions))]

    def tokens_of_rows(self, rows: Sequence[int]) -> list[np.ndarray] | None:
        """Return the tokens of images of the index; None where they are not compared."""
        return None if self.store is None else [each.astype(np.float32) for each in self.store.of(rows)]

    def reordered(
        self,
        found: Neighbors,
        features: Float32[np.ndarray, "q d"],
        tokens: Sequence[np.ndarray] | None,
        k: int,
    ) -> Neighbors:
        """Return the first k neighbors of the new order; similarities stay cosines, and no longer fall.

        Args:
            found: the neighbors of the queries, nearest first, as many as `wanted`.
            features: of the queries.
            tokens: of the queries, where they are compared.
            k: how many are wanted.
        """
        places = np.tile(np.arange(found.rows.shape[1]), (len(found.rows), 1))
        for query, rows in enumerate(found.rows[:, : self.settings.depth].tolist()):
            if tokens is None:
                order = order_by_features(self.settings, features[query], self.index.unit_features(rows))
            else:
                assert self.store is not None
                order = order_by_tokens(self.settings, tokens[query], self.store.of(rows))
            places[query, : len(rows)] = order
        places = places[:, :k]
        similarities, rows_ = (np.take_along_axis(each, places, 1) for each in (found.similarities, found.rows))
        labels = None if found.labels is None else np.take_along_axis(found.labels, places, 1)
        keys = [[self.index.ids.keys[row] for row in line] for line in rows_.tolist()]
        return Neighbors(similarities, rows_, keys, labels)


def open_reranker(
    index: FeatureIndex, settings: Rerank | None, threshold: float | None, *, of_some: bool = False
) -> Reranker | None:
    """Make what re-ranks the neighbors of an index; None where nothing is re-ranked.

    Args:
        index: whose neighbors are put into a new order.
        settings: how.
        threshold: of the search.
        of_some: the search is among some rows, or by several images as one.

    Raises:
        ConfigError: it is asked for together with one of these, or the index has no tokens.
        IndexMismatchError: tokens are damaged, of another encoder, or not of all images.
    """
    if settings is None:
        return None
    if threshold is not None:
        raise ConfigError("`rerank` orders the first images, and `threshold` cuts by similarity: leave one of them out")
    if of_some:
        raise ConfigError(
            "`rerank` orders the first images of the complete index for each query: leave out `where`, `unique`, "
            "`together` and `minus`"
        )
    store = None
    if settings.method == "local":
        store = TokenStore.open(index)
        store.require_complete(index)
    return Reranker(index, settings, store)
