"""Where a query and what it found match: `sop-index search --explain`."""

from __future__ import annotations

from sop_faiss.errors import ConfigError
from sop_faiss.index.images import IndexImages
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.token_store import TokenStore
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.report.heat_figure import draw_heats, matched
from sop_faiss.verbs.finding.search_result import SearchResult

_SHOWN = 5


def draw_explanation(
    index: FeatureIndex, tokens: TokenStore, encoder: EncoderSpec | None, result: SearchResult, images: IndexImages
) -> bytes:
    """Draw a query and its first five neighbors, each with what its parts add to their local score, as a PNG.

    Args:
        index: the one that was searched.
        tokens: of the index; their whitening is used.
        encoder: another way to open the index's encoder; None: as the index remembers.
        result: of a search by one query.
        images: of the index.

    Raises:
        ConfigError: there are several queries, or nothing was found.
        DataError: an image cannot be read.
        SopError: as `encoder_of_index`.
    """
    if len(result.queries) != 1 or not result.queries[0].found:
        answered = sum(bool(query.found) for query in result.queries)
        raise ConfigError(
            f"`explain` draws one query and its neighbors; {answered} of {len(result.queries)} queries have any"
        )
    if result.combined > 1:
        raise ConfigError(f"`explain` draws one image, and this query is of {result.combined}: search by each alone")
    query = result.queries[0]
    tokenizer = tokens.tokenizer(encoder_of_index(index, encoder))
    first = tokenizer.seen(query.read(), query.key)
    rows = []
    for found in query.found[:_SHOWN]:
        second = tokenizer.seen(images.read(found.row), found.key)
        rows.append(matched(f"{found.rank}  {found.key}  ({found.similarity:.3f})", first, second))
    return draw_heats(rows, f"{query.key}: where it matches")
