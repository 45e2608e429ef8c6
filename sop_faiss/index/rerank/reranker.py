"""The neighbors of a query in a better order: `sop-index search --rerank`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import ConfigError
from sop_faiss.index.found import Neighbors
from sop_faiss.index.rerank.order import order_by_features, order_by_tokens
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.rerank.token_store import TokenStore
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import Encoder


@dataclass(frozen=True)
class Reranker:
    """An index, and how the neighbors that it finds are put into a new order."""

    index: FeatureIndex
    settings: Rerank
    store: TokenStore | None
    """Of `local`."""

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
        self, found: Neighbors, feature: Float32[np.ndarray, " d"], tokens: Float32[np.ndarray, "t e"] | None
    ) -> Neighbors:
        """Return all neighbors of one query in the new order; similarities stay cosines, and no longer fall.

        Args:
            found: one line of neighbors, nearest first.
            feature: of the query.
            tokens: of the query, where they are compared.
        """
        rows = found.rows[0, : self.settings.depth].tolist()
        if not rows:
            return found
        if tokens is None:
            order = order_by_features(self.settings, feature, self.index.unit_features(rows))
        else:
            assert self.store is not None
            order = order_by_tokens(self.settings, tokens, self.store.of(rows))
        return found.of([*order.tolist(), *range(len(rows), found.rows.shape[1])])


def open_reranker(index: FeatureIndex, settings: Rerank | None, *, together: bool = False) -> Reranker | None:
    """Make what re-ranks the neighbors of an index; None where nothing is re-ranked.

    Args:
        index: whose neighbors are put into a new order.
        settings: how.
        together: the query is of several images.

    Raises:
        ConfigError: parts of several images are to be compared as one, the index has no tokens, or images found by
            their parts are to be compared as complete ones.
        IndexMismatchError: tokens are damaged, of another encoder, or not of all images.
    """
    if settings is None:
        return None
    if settings.method != "local":
        refuse_complete(index, settings)
        return Reranker(index, settings, None)
    refuse_local_together(settings, together)
    store = TokenStore.open(index)
    store.require_complete(index)
    return Reranker(index, settings, store)


def refuse_complete(index: FeatureIndex, settings: Rerank) -> None:
    """Refuse to put images that are found by their parts into an order by their complete features.

    Raises:
        ConfigError: it is asked for.
    """
    if index.part_boxes is not None and settings.method != "local":
        raise ConfigError(
            f"`rerank={settings.method}` compares complete images, and `parts` finds parts of them: leave one of them "
            "out, or take `rerank=local`"
        )


def refuse_local_together(settings: Rerank, together: bool) -> None:
    """Refuse to compare the parts of several images as those of one.

    Raises:
        ConfigError: it is asked for.
    """
    if together and settings.method == "local":
        raise ConfigError(
            "`rerank=local` compares the parts of one image, and this query is of several: wanted `rerank=global`, "
            "`rerank=diffusion`, or one image"
        )
