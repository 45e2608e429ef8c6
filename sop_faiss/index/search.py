"""Open an index directory and search it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32, Int64

from sop_faiss.errors import ConfigError, FeatureError, IndexMismatchError
from sop_faiss.features.feature_space import EncoderLike, FeatureSpace
from sop_faiss.index.closest_key import closest_key
from sop_faiss.index.encoder_doubts import log_if_alike, random_pairs_cosine
from sop_faiss.index.found import Neighbors
from sop_faiss.index.packed_texts import RowsOfTexts
from sop_faiss.index.store import IdTable, IndexManifest, read_verified
from sop_faiss.index.vectors import read_vectors
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import VectorIndex
from sop_faiss.neighbors.disk.with_parts import NearestParts, VectorsWithParts
from sop_faiss.neighbors.exact import NearestRows, require_cosine, require_k
from sop_faiss.unit_rows import require_unit_rows

if TYPE_CHECKING:
    from sop_faiss.model.encoders.encoder import Encoder
    from sop_faiss.model.encoders.image_input import ImageInput

_log = logging.getLogger(__name__)


class FeatureIndex:
    """A searchable index of unit-norm features. Make one with `open`; thread-safe."""

    def __init__(
        self,
        directory: Path,
        manifest: IndexManifest,
        ids: IdTable,
        vectors: VectorIndex | VectorsWithParts,
        part_boxes: Float32[np.ndarray, "b 4"] | None = None,
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.ids = ids
        self._vectors = vectors
        self.part_boxes = part_boxes
        """Of each number of a part, and last of complete images, as `Neighbors.boxes`; None: parts are not searched."""

    @classmethod
    def open(cls, directory: str | Path, *, verify: str = "all") -> FeatureIndex:
        """Open an index directory; the vectors stay in their file until a search looks at them.

        An encoder that hardly distinguishes the images, as measured at the build, is named in the log.

        Args:
            directory: made by `build_index`; it may have been moved or copied since.
            verify: `all` compares every byte with its checksum. `sizes` compares that of the manifest and of the ids,
                and only the length of the vectors' file: it opens at once, and is for files that were verified before
                and that nobody has changed since.

        Raises:
            ConfigError: `verify` is neither.
            IndexMismatchError: a file is missing, damaged, of a foreign version, or belongs to another index.
        """
        directory = Path(directory)
        if verify not in ("all", "sizes"):
            raise ConfigError(f"`verify={verify}`: wanted all or sizes")
        manifest, ids = read_verified(directory, vectors=verify == "all")
        if verify == "sizes":
            _log.info("index %s was checked by file sizes: the vectors' bytes were not verified", directory)
        log_if_alike(manifest)
        return cls(directory, manifest, ids, read_vectors(directory, manifest))

    def with_parts(self, *, verify: str = "all") -> FeatureIndex:
        """Return this index with parts of its images: a search finds an image by the most similar of its parts, too.

        Args:
            verify: as of `open`, for the files of the parts.

        Raises:
            ConfigError: there are no parts; `write_parts` makes them.
            IndexMismatchError: they are damaged, of another encoder, or not of all images.
        """
        from sop_faiss.index.parts import open_parts

        if isinstance(self._vectors, VectorsWithParts):
            return self
        vectors, boxes = open_parts(self, self._vectors, verify)
        return FeatureIndex(self.directory, self.manifest, self.ids, vectors, boxes)

    def __len__(self) -> int:
        return self.manifest.count

    @property
    def dimension(self) -> int:
        """Length of a feature."""
        return self.manifest.dimension

    @property
    def loses_rows(self) -> bool:
        """Whether images can be removed; an index that is a graph must be built again without them."""
        return not isinstance(self._vectors, ApproximateIndex) or self._vectors.loses_rows

    @property
    def mean_cosine(self) -> float | None:
        """The mean cosine of random pairs of images, measured now if the manifest lacks it; None for fewer than 20."""
        if "mean_cosine" in self.manifest.search:
            return self.manifest.search["mean_cosine"]
        return random_pairs_cosine(len(self), self._vectors.features)

    def class_name(self, label: int) -> str | None:
        """Return the name of a label, the number itself if names are not known, None for -1 (no label)."""
        names = self.manifest.class_names
        if label == -1:
            return None
        return names[label] if names is not None and 0 <= label < len(names) else str(label)

    def label_name(self, row: int) -> str | None:
        """Return the name of an image's class; None where it has none."""
        return None if self.ids.labels is None else self.class_name(int(self.ids.labels[row]))

    def row_of(self, key: str) -> int:
        """Find the row of an image.

        Raises:
            ConfigError: no image of the index has this key.
        """
        row = self._rows.get(key)
        if row is None:
            raise ConfigError(f"key {key!r} is not in the index{closest_key(key, self.ids.keys)}")
        return row

    def has(self, key: str) -> bool:
        """Return whether an image of the index has this key."""
        return self._rows.get(key) is not None

    @functools.cached_property
    def _own_encoder(self) -> Encoder:
        from sop_faiss.index.own_encoder import encoder_of_index

        return encoder_of_index(self)

    @functools.cached_property
    def _rows(self) -> RowsOfTexts:
        return RowsOfTexts(self.ids.keys)

    def check_encoder(self, encoder: EncoderLike) -> None:
        """Refuse a query encoder whose features cannot be compared with the index's.

        Raises:
            IndexMismatchError: fingerprint, preprocessing, pooling or dimension differs.
        """
        difference = self.manifest.space.difference(FeatureSpace.of_encoder(encoder))
        if difference is not None:
            remedy = (
                "search with the same weights (of a run that was continued, `model` RUN/checkpoints/step_N)"
                if difference.what == "encoder"
                else f"use the index's {difference.what}"
            )
            raise IndexMismatchError(
                f"the query encoder {encoder.name} has another {difference.what} than the index, which was built with "
                f"encoder {self.manifest.encoder['name']} ({difference.values}): {remedy}, or build the index again"
            )

    def search(
        self,
        x: ImageInput | Iterable[ImageInput],
        k: int,
        *,
        encoder: Encoder | None = None,
        among: Int64[np.ndarray, " m"] | None = None,
    ) -> Neighbors:
        """Find the k nearest images of each query; exact for a `Flat` index, else see `manifest.search` for its recall.

        Args:
            x: features: one of unit norm (d,) or one per row (q, d), of this index's encoder; any float dtype, any
                strides, any device. Norms are checked, not repaired (`require_unit_rows`). Or images, as
                `Encoder.encode` takes them: paths, bytes of files, PIL images, arrays or tensors of three or more axes.
            k: how many neighbors; 1 <= k <= len(self), or the number of rows in `among`.
            encoder: the one that the index was built with, for images; None: as the index remembers it, opened once.
            among: search among these rows only, rising and without repeats (`rows_where`). Few rows are all compared.

        Raises:
            ConfigError: k or `among` is out of range, or there is no encoder for images.
            FeatureError: x has another shape or dtype, is not finite, or not of unit norm.
            IndexMismatchError: the encoder is not the index's.
            DataError: an image cannot be read.
        """
        rows = None if among is None else self._as_rows(among)
        if rows is not None and (np.diff(rows) <= 0).any():
            raise ConfigError("`among` is not in rising order, or repeats a row: wanted the rows of `rows_where`")
        require_k(k, len(self) if rows is None else len(rows))  # before images are encoded
        return self._named(self._vectors.search(self._as_queries(x, encoder), k, rows))

    def search_above(
        self, x: ImageInput | Iterable[ImageInput], similarity: float, *, encoder: Encoder | None = None
    ) -> list[Neighbors]:
        """Find all images whose similarity to a query reaches a threshold; one answer of one line for each query.

        Args:
            x: as of `search`.
            similarity: cosine, -1 to 1.
            encoder: as of `search`.

        Raises:
            ConfigError: the threshold is out of range, or this kind of index has no such search.
            SopError: as `search`.
        """
        require_cosine(similarity, "similarity")
        return [self._named(found) for found in self._vectors.search_above(self._as_queries(x, encoder), similarity)]

    def search_rows(self, rows: Sequence[int], k: int) -> Neighbors:
        """Find the k nearest *other* images of images of the index itself; no encoder is needed.

        Args:
            rows: which images; a row is not its own neighbor, but an identical image of another row is.
            k: how many neighbors; 1 <= k < len(self).

        Raises:
            ConfigError: a row or k is out of range.
        """
        wanted = self._as_rows(rows)
        if not 1 <= k < len(self):
            limit = len(self) - 1
            raise ConfigError(f"`k={k}` other images asked of an index of {len(self)}: wanted 1 <= k <= {limit}")
        found = self._vectors.search(self._vectors.features(wanted), k + 1)
        keep = found.rows != wanted[:, None]
        keep[keep.all(axis=1), -1] = False  # more than k copies came before the row itself
        return self._named(type(found)(*(each[keep].reshape(-1, k) for each in found)))

    def search_rows_above(self, rows: Sequence[int], similarity: float) -> list[Neighbors]:
        """Find all *other* images whose similarity to an image of the index reaches a threshold; one answer per row.

        Args:
            rows: which images; a row is not its own neighbor, but an identical image of another row is.
            similarity: cosine, -1 to 1.

        Raises:
            ConfigError: a row or the threshold is out of range, or this kind of index has no such search.
        """
        return [self._named(found) for found in self.others_above(rows, similarity)]

    def others_above(self, rows: Sequence[int], similarity: float) -> list[NearestRows | NearestParts]:
        """Search as `search_rows_above` does, but return rows without names: for work on a complete index."""
        wanted = self._as_rows(rows)
        require_cosine(similarity, "similarity")
        queries = self._vectors.features(wanted)
        nearby: Sequence[NearestRows | NearestParts] = self._vectors.search_above(queries, similarity)
        answers: list[NearestRows | NearestParts] = []
        for row, found in zip(wanted, nearby, strict=True):
            others = found.rows[0] != row
            answers.append(type(found)(*(each[:, others] for each in found)))
        return answers

    def _as_rows(self, rows: Sequence[int] | Int64[np.ndarray, " m"]) -> Int64[np.ndarray, " m"]:
        wanted = np.asarray(rows, np.int64).reshape(-1)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise ConfigError(f"rows {wanted.min()} to {wanted.max()}: wanted 0 to {len(self) - 1}")
        return wanted

    def features(self, rows: Sequence[int]) -> Float32[np.ndarray, "n d"]:
        """Copy the features of some rows; those of an index with shortened codes are reconstructed from the codes."""
        return self._vectors.features(np.asarray(rows, np.int64))

    def unit_features(self, rows: Sequence[int]) -> Float32[np.ndarray, "n d"]:
        """Return the same, of unit norm: what is reconstructed from shortened codes has another one."""
        features = self.features(rows)
        return features / np.linalg.norm(features, axis=1, keepdims=True)

    def _as_queries(self, x: ImageInput | Iterable[ImageInput], encoder: Encoder | None) -> Float32[np.ndarray, "q d"]:
        if not isinstance(x, np.ndarray | torch.Tensor) or x.ndim > 2:
            if encoder is not None:
                self.check_encoder(encoder)
                return encoder.encode(x)
            if self.manifest.encoder_spec is not None:
                return self._own_encoder.encode(x)
        if not isinstance(x, np.ndarray | torch.Tensor):
            raise ConfigError(f"images need `encoder`, the one of the index: {self.manifest.encoder['name']}")
        if isinstance(x, torch.Tensor):
            if not x.is_floating_point():
                raise FeatureError(f"queries are {x.dtype}, wanted floating-point features")
            x = x.detach().to("cpu", torch.float32).numpy()
        x = np.asarray(x)
        if x.dtype.kind != "f":
            raise FeatureError(f"queries are {x.dtype}, wanted floating-point features")
        queries = np.ascontiguousarray(np.atleast_2d(x), np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimension:
            raise FeatureError(
                f"queries have shape {x.shape}, wanted (number, {self.dimension}): "
                "use the encoder the index was built with"
            )
        require_unit_rows(queries, "queries")
        return queries

    def _named(self, found: NearestRows | NearestParts) -> Neighbors:
        labels = self.ids.labels
        return Neighbors(
            similarities=found.similarities,
            rows=found.rows,
            keys=[[self.ids.keys[row] for row in line] for line in found.rows.tolist()],
            labels=None if labels is None else labels[found.rows],
            boxes=self.part_boxes[found.parts]
            if isinstance(found, NearestParts) and self.part_boxes is not None
            else None,
        )
