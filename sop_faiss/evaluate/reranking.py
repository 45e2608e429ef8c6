"""Rankings whose first images are put into a new order, before they are scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.data.images.source import ImageSource
from sop_faiss.evaluate.metrics import top_positions
from sop_faiss.index.rerank.order import order_by_features, order_by_tokens
from sop_faiss.index.rerank.settings import Rerank, TokenSettings
from sop_faiss.index.rerank.tokens import learn_tokenizer
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.progress import ProgressCallback

_ABOVE_COSINES = 2.0


@dataclass(frozen=True)
class Reordering:
    """A new order of the first images of each ranking."""

    depth: int
    """How many are re-ranked; the others keep their order."""
    order: Callable[[int, Int64[np.ndarray, " m"]], Int64[np.ndarray, " m"]]
    """Of the number of a query and gallery positions, nearest first: the places of these in their new order."""
    own_rows: Int64[np.ndarray, " q"] | None = None
    """The position of each query in the gallery, which is not re-ranked and nobody's neighbor; None: it has none."""

    def moved(self, query: int, similarities: Float32[np.ndarray, " n"]) -> Float32[np.ndarray, " n"]:
        """Return values that rank the gallery in the new order: the cosines, and above all of them those moved."""
        own = np.empty(0, np.int64) if self.own_rows is None else self.own_rows[query : query + 1]
        first = top_positions(similarities, own, self.depth)
        moved = similarities.copy()
        moved[first[self.order(query, first)]] = _ABOVE_COSINES + np.arange(len(first), dtype=np.float32)[::-1]
        return moved


def reorder_by_features(
    settings: Rerank,
    queries: Float32[np.ndarray, "q d"],
    gallery: Float32[np.ndarray, "n d"],
    own_rows: Int64[np.ndarray, " q"] | None,
) -> Reordering:
    """Re-rank by the features that ranked, `global` or `diffusion`."""

    def order(query: int, first: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        return order_by_features(settings, queries[query], gallery[first])

    return Reordering(settings.depth, order, own_rows)


def reorder_by_tokens(
    settings: Rerank,
    tokens: TokenSettings,
    encoder: Encoder,
    sources: tuple[ImageSource, ImageSource],
    own_rows: Int64[np.ndarray, " q"] | None,
    progress: ProgressCallback | None = None,
) -> Reordering:
    """Re-rank by tokens (`local`), which are made of all images of the gallery and of the queries, and kept in memory.

    Args:
        settings: how many are re-ranked.
        tokens: how tokens are made; their whitening is learned from the gallery, whose tokens are stored and read as
            those of an index.
        encoder: whose tokens.
        sources: the queries, and the gallery.
        own_rows: as of `Reordering`.
        progress: called with the images done.

    Raises:
        ConfigError: the encoder has no tokens, or does not take this size.
        DataError: an image cannot be read.
    """
    queries, gallery = sources
    tokenizer = learn_tokenizer(encoder, tokens, len(gallery), gallery.read, gallery.keys)
    codes = tokenizer.codes
    found = tokenizer.tokens(len(gallery), gallery.read, gallery.keys, progress)
    made = {position: codes.tokens(codes.packed(tokens)) for position, tokens in found}
    if own_rows is None:
        asked = dict(tokenizer.tokens(len(queries), queries.read, queries.keys, progress))
    else:
        asked = {query: made[row] for query, row in enumerate(own_rows.tolist())}

    def order(query: int, first: Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        return order_by_tokens(settings, asked[query].astype(np.float32), [made[row] for row in first.tolist()])

    return Reordering(settings.depth, order, own_rows)
