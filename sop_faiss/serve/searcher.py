"""Search of an opened index by its own images or by some that were sent; safe in threads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.data.images.box import Box, encoded_part
from sop_faiss.data.images.decode import MAX_PIXELS, decode_image, drop_reason, open_image, quiet
from sop_faiss.errors import ConfigError, DataError, FeatureError, IndexMismatchError
from sop_faiss.index.beside import PARTS
from sop_faiss.index.find import Line, find, find_others
from sop_faiss.index.images import IndexImages, index_images
from sop_faiss.index.narrowed import Narrowing, combined_query, without
from sop_faiss.index.rerank.reranker import Reranker, refuse_complete, refuse_local_together
from sop_faiss.index.rerank.settings import METHODS, Rerank
from sop_faiss.index.rerank.token_files import has_tokens
from sop_faiss.index.rerank.token_store import TokenStore
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.report.heat_figure import draw_heats, matched
from sop_faiss.serve.refused import Refused, refused_image, refused_request
from sop_faiss.serve.row_sets import ConditionRows, FolderRows, LabelRows

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What to find."""

    k: int
    """Number of neighbors; fewer are found if the index, a filter or the threshold leaves fewer."""
    label: str | None = None
    """Only images of this label."""
    threshold: float | None = None
    """Only those of at least this cosine similarity."""
    folder: str | None = None
    """Only images of this folder."""
    where: str | None = None
    """Only images that pass this condition, as of `rows_where`."""
    unique: float | None = None
    """Fold a neighbor into a nearer one from this cosine between the two on."""
    rerank: str | None = None
    """Put the first neighbors into a new order by this method."""
    parts: bool = False
    """Find images by parts of them, too."""


@dataclass(frozen=True)
class QueryImage:
    """One image of a query: a row of the index, or the bytes of an image that was sent."""

    row: int | None = None
    encoded: bytes = b""
    box: Box | None = None
    """Only this part of it."""


@dataclass(frozen=True)
class Hit:
    """One neighbor."""

    row: int
    similarity: float
    """Cosine."""
    folded: tuple[int, ...] = ()
    """Rows that are folded into it."""
    box: Box | None = None
    """The part that is as similar, in shares of its sides; None where parts were not searched."""


class Searcher:
    """An index and its encoder, if there is one.

    Args:
        index: the index to search.
        encoder: the one with which the index was built; None: only images of the index can be queries.
        max_pixels: larger images are refused before they are decoded.
        table: more columns for conditions.
        images_root: where the index's images are now; None: where they were when it was built.

    Raises:
        IndexMismatchError: the encoder is not the index's.
        DataError: the table cannot be used.
    """

    def __init__(
        self,
        index: FeatureIndex,
        encoder: Encoder | None,
        max_pixels: int = MAX_PIXELS,
        table: Path | None = None,
        images_root: Path | None = None,
    ) -> None:
        if encoder is not None:
            index.check_encoder(encoder)
        self.index = index
        self.labels = LabelRows(index)
        self.folders = FolderRows(index)
        self.conditions = ConditionRows(index, table)
        self.images: IndexImages = index_images(index, images_root)
        self.tokens = _tokens_of(index)
        self.parts = _with_parts(index)
        self.encoder = encoder
        self._max_pixels = max_pixels
        self._encoding = threading.Lock()
        # What is made at first use is made now, before threads start: the table of keys, an IVF index's map of rows.
        index.has("")
        index.features([0])

    @property
    def methods(self) -> list[str]:
        """Return the methods of re-ranking that the index allows."""
        return [method for method in METHODS if method != "local" or self.tokens is not None]

    def row_of(self, key: str) -> int:
        """Return the row of an image of the index.

        Raises:
            Refused: there is none (404).
        """
        if not self.index.has(key):
            raise Refused(404, f"no image of the index has this key: {key[:100]!r}")
        return self.index.row_of(key)

    def rows(self, label: str | None, folder: str | None, where: str | None = None) -> Int64[np.ndarray, " n"] | None:
        """Return the rows of a label, of a folder, and that pass a condition, sorted; None for all rows.

        Raises:
            Refused: no image has the label, or is in the folder (404); `where` as of `ConditionRows`.
        """
        sets = [] if label is None else [self.labels.rows(label)]
        sets += [] if folder is None else [self.folders.rows(folder)]
        sets += [] if where is None else [self.conditions.rows(where)]
        return reduce(lambda left, right: np.intersect1d(left, right, assume_unique=True), sets) if sets else None

    def find(self, wanted: Wanted, plus: Sequence[QueryImage], minus: Sequence[QueryImage] = ()) -> list[Hit]:
        """Find the images nearest to one, or to the mean of several less that of others; never one of these.

        Returns:
            The nearest first, unless they are re-ranked; ties in order of rows.

        Raises:
            Refused: an image cannot be decoded or is too large (400, 413, 415), no image has the label (404), there is
                no encoder (409) or are no tokens (409), or the box or another wish is impossible (422).
        """
        among = self.rows(wanted.label, wanted.folder, wanted.where)  # refused before images are encoded
        own = [image.row for image in (*plus, *minus) if image.row is not None]
        k = min(wanted.k, len(self.index) - len(set(own)))
        if k < 1 or (among is not None and not len(among)):
            return []
        narrowing = None if among is None and wanted.unique is None else Narrowing(among, wanted.unique)
        index = self._require_parts() if wanted.parts else self.index
        with self._refusing():
            reranker = self._reranker(index, wanted.rerank, together=len(plus) + len(minus) > 1)
            first = plus[0]
            lines: list[Line]
            if len(plus) + len(minus) == 1 and first.row is not None and first.box is None:
                lines = find_others(index, [first.row], k, wanted.threshold, narrowing, reranker)
            else:
                features = [self._feature(image) for image in (*plus, *minus)]
                query = features[0]
                if len(features) > 1:
                    query = combined_query(np.concatenate(features[: len(plus)]), np.concatenate(features)[len(plus) :])
                tokens = self._query_tokens(reranker, first)
                others = without(narrowing, own)
                lines = find(index, query, k, wanted.threshold, others, reranker, tokens)
        neighbors, folded = lines[0]
        pairs = zip(neighbors.rows[0].tolist(), neighbors.similarities[0].tolist(), strict=True)
        boxes = None if neighbors.boxes is None else [tuple(box) for box in neighbors.boxes[0].tolist()]
        return [
            Hit(
                row, similarity, () if folded is None else tuple(folded[place]), None if boxes is None else boxes[place]
            )
            for place, (row, similarity) in enumerate(pairs)
        ]

    def draw_match(self, query: QueryImage, row: int) -> bytes:
        """Draw where a query and an image of the index match, as a PNG.

        Raises:
            Refused: as `find`, or an image of the index cannot be read (404).
        """
        tokens, encoder = self._require_tokens(), self.require_encoder()
        with self._refusing():
            encoded = [self._encoded(query), self._encoded(QueryImage(row))]
            for each in encoded:
                open_image(each, self._max_pixels)
            tokenizer = tokens.tokenizer(encoder)
            with self._encoding:
                seen = [tokenizer.seen(each, "the image") for each in encoded]
        with quiet():  # the figure changes the process's warnings, as opening an image does: one at a time
            return draw_heats([matched(self.index.ids.keys[row], seen[0], seen[1])], "where they match")

    def require_encoder(self) -> Encoder:
        """Return the encoder.

        Raises:
            Refused: there is none (409).
        """
        if self.encoder is None:
            raise Refused(409, "served without an encoder: only images of the index can be queries")
        return self.encoder

    def _require_tokens(self) -> TokenStore:
        if self.tokens is None:
            raise Refused(409, "the index has no tokens, which this needs: make them with sop-index tokens")
        return self.tokens

    def _require_parts(self) -> FeatureIndex:
        if self.parts is None:
            raise Refused(409, "the index has no parts, which this needs: make them with sop-index parts")
        return self.parts

    def _reranker(self, index: FeatureIndex, method: str | None, *, together: bool) -> Reranker | None:
        if method is None:
            return None
        settings = Rerank(method)
        refuse_complete(index, settings)
        refuse_local_together(settings, together)
        return Reranker(index, settings, self._require_tokens() if method == "local" else None)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise refused_image(error) from None
        except FeatureError:
            raise Refused(400, "the encoder gives no usable feature for this image") from None
        except ConfigError as error:
            raise refused_request(error) from None
        except IndexMismatchError as error:
            _log.warning("%s", error)
            raise Refused(409, "the index or its tokens cannot be used: see the server's log") from None

    def _encoded(self, image: QueryImage) -> bytes:
        """Return the bytes of a query image, or of its part inside the box."""
        encoded, encoder = image.encoded, self.require_encoder()
        if image.row is not None:
            try:
                encoded = self.images.read(image.row)
            except DataError as error:  # whose path is not for the client
                raise Refused(404, f"the image cannot be read: {drop_reason(error)}") from None
        if image.box is None:
            return encoded
        return encoded_part(encoded, image.box, "the image", self._max_pixels, encoder.preprocess.top_value)

    def _feature(self, image: QueryImage) -> Float32[np.ndarray, "1 d"]:
        if image.row is not None and image.box is None:
            return self.index.unit_features([image.row])
        encoder = self.require_encoder()
        # images are decoded and resized in parallel; the network runs for one at a time
        decoded = decode_image(self._encoded(image), self._max_pixels, encoder.preprocess.top_value)
        prepared = encoder.preprocess.apply(decoded)
        cropped = replace(encoder.preprocess, resize=encoder.preprocess.crop)  # so that it is not cropped again
        with self._encoding:
            return encoder.encode(prepared, preprocess=cropped)

    def _query_tokens(self, reranker: Reranker | None, image: QueryImage) -> list[np.ndarray] | None:
        if reranker is None or reranker.store is None:
            return None
        tokenizer, encoded = reranker.store.tokenizer(self.require_encoder()), self._encoded(image)
        with self._encoding:
            return [made.astype(np.float32) for _, made in tokenizer.tokens(1, lambda _: encoded, ["the image"])]


def _with_parts(index: FeatureIndex) -> FeatureIndex | None:
    """Open the index with its parts; None where there are none, or where they cannot be used."""
    if not (index.directory / PARTS).is_dir():
        return None
    try:
        return index.with_parts()
    except IndexMismatchError as error:
        _log.warning("served without parts: %s", error)
        return None


def _tokens_of(index: FeatureIndex) -> TokenStore | None:
    """Open the tokens of an index; None where there are none, or where they cannot be used."""
    if not has_tokens(index.directory):
        return None
    try:
        store = TokenStore.open(index)
        store.require_complete(index)
    except IndexMismatchError as error:
        _log.warning("served without tokens: %s", error)
        return None
    return store
