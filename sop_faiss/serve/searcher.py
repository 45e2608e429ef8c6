"""Search of an opened index by its own images or by one that was sent; safe in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss.data.images.decode import MAX_PIXELS, decode_image
from sop_faiss.errors import DataError, FeatureError
from sop_faiss.index.search import FeatureIndex, Neighbors
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.neighbors.exact import NearestRows, in_fixed_order
from sop_faiss.serve.refused import Refused, refused_image
from sop_faiss.serve.row_sets import FolderRows, LabelRows

_SCORED_ROWS = 20_000
"""Up to this many images of a label or folder, each is compared; for more, the results of wider searches are sifted."""
_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Wanted:
    """What to find."""

    k: int
    """Number of neighbors; fewer are found if the index, the label or the threshold leaves fewer."""
    label: str | None = None
    """Only images of this label."""
    threshold: float | None = None
    """Only those of at least this cosine similarity."""
    folder: str | None = None
    """Only images of this folder."""


@dataclass(frozen=True)
class Hit:
    """One neighbor."""

    row: int
    similarity: float
    """Cosine."""


class Searcher:
    """An index and its encoder, if there is one.

    Args:
        index: the index to search.
        encoder: the one with which the index was built; None: only images of the index can be queries.
        max_pixels: larger images are refused before they are decoded.

    Raises:
        IndexMismatchError: the encoder is not the index's.
    """

    def __init__(self, index: FeatureIndex, encoder: Encoder | None, max_pixels: int = MAX_PIXELS) -> None:
        if encoder is not None:
            index.check_encoder(encoder)
        self.index = index
        self.labels = LabelRows(index)
        self.folders = FolderRows(index)
        self.encoder = encoder
        self._max_pixels = max_pixels
        self._encoding = threading.Lock()
        # What is made at first use is made now, before threads start: the table of keys, an IVF index's map of rows.
        index.has("")
        index.features([0])

    def row_of(self, key: str) -> int:
        """Return the row of an image of the index.

        Raises:
            Refused: there is none (404).
        """
        if not self.index.has(key):
            raise Refused(404, "no image of the index has this key")
        return self.index.row_of(key)

    def rows(self, label: str | None, folder: str | None) -> Int64[np.ndarray, " n"] | None:
        """Return the rows of a label, of a folder, or of both, sorted; None for all rows.

        Raises:
            Refused: no image has the label, or is in the folder (404).
        """
        of_label = None if label is None else self.labels.rows(label)
        of_folder = None if folder is None else self.folders.rows(folder)
        if of_label is None or of_folder is None:
            return of_folder if of_label is None else of_label
        return np.intersect1d(of_label, of_folder, assume_unique=True)

    def near_row(self, row: int, wanted: Wanted) -> list[Hit]:
        """Find the nearest other images of one in the index, nearest first; ties in order of rows.

        Raises:
            Refused: no image has the label, or is in the folder (404).
        """
        return self._find(
            lambda k: self.index.search_rows([row], k), lambda: self.index.features([row])[0], wanted, itself=row
        )

    def near_image(self, encoded: bytes, wanted: Wanted) -> list[Hit]:
        """Find the nearest images of an encoded one, nearest first; ties in order of rows.

        Raises:
            Refused: it cannot be decoded or is too large (400, 413, 415), no image has the label (404), or there is
                no encoder (409).
        """
        self.rows(wanted.label, wanted.folder)  # refused before the image is encoded
        feature = self._embed(encoded)
        return self._find(lambda k: self.index.search(feature, k), lambda: feature, wanted, itself=None)

    def require_encoder(self) -> Encoder:
        """Return the encoder.

        Raises:
            Refused: there is none (409).
        """
        if self.encoder is None:
            raise Refused(409, "served without an encoder: only images of the index can be queries")
        return self.encoder

    def _embed(self, encoded: bytes) -> Float32[np.ndarray, " d"]:
        encoder = self.require_encoder()
        try:
            # images are decoded and resized in parallel; the network runs for one at a time
            decoded = decode_image(encoded, self._max_pixels, encoder.preprocess.top_value)
            image = encoder.preprocess.apply(decoded)
            cropped = replace(encoder.preprocess, resize=encoder.preprocess.crop)  # so that it is not cropped again
            with self._encoding:
                features = encoder.encode(image, preprocess=cropped)
        except DataError as error:
            raise refused_image(error) from None
        except FeatureError:
            raise Refused(400, "the encoder gives no usable feature for this image") from None
        return features[0]

    def _find(
        self,
        nearest: Callable[[int], Neighbors],
        feature: Callable[[], Float32[np.ndarray, " d"]],
        wanted: Wanted,
        itself: int | None,
    ) -> list[Hit]:
        most = len(self.index) - (itself is not None)
        rows = self.rows(wanted.label, wanted.folder)
        if rows is None:
            found = _as_rows(nearest(min(wanted.k, most))) if most else _nothing()
        else:
            rows = rows if itself is None else rows[rows != itself]
            if len(rows) <= _SCORED_ROWS:
                found = self._scored(feature(), rows)
            else:
                found = _filtered(nearest, rows, min(wanted.k, len(rows)), most)
        pairs = zip(found.rows[0].tolist(), found.similarities[0].tolist(), strict=True)
        least = -np.inf if wanted.threshold is None else wanted.threshold
        return [Hit(row, similarity) for row, similarity in pairs if similarity >= least][: wanted.k]

    def _scored(self, feature: Float32[np.ndarray, " d"], rows: Int64[np.ndarray, " n"]) -> NearestRows:
        """Sort these rows by falling similarity, scored as in a search: in float64, rounded to float32."""
        scores = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = self.index.features(rows[start : start + _BLOCK_ROWS].tolist()).astype(np.float64)
            scores[start : start + len(block)] = np.einsum("md,d->m", block, feature.astype(np.float64))
        return in_fixed_order(scores[None], rows[None])


def _filtered(nearest: Callable[[int], Neighbors], rows: Int64[np.ndarray, " n"], k: int, most: int) -> NearestRows:
    """Find the k nearest of these rows, which are at least k, by wider searches until that many are found."""
    asked = min(most, 4 * k)
    while True:
        found = nearest(asked)
        kept = np.isin(found.rows[0], rows)
        if kept.sum() >= k or asked == most:
            return NearestRows(found.similarities[:, kept], found.rows[:, kept])
        asked = min(most, 4 * asked)


def _as_rows(found: Neighbors) -> NearestRows:
    return NearestRows(found.similarities, found.rows)


def _nothing() -> NearestRows:
    return NearestRows(np.empty((1, 0), np.float32), np.empty((1, 0), np.int64))
