"""Distractors of a retrieval evaluation, a block at a time: from a feature store, or images encoded on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from sop_faiss.data.images.source import open_source
from sop_faiss.data.images.subset import Subset
from sop_faiss.distributed import rank, world_size
from sop_faiss.errors import FeatureError
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.store_blocks import FeatureBlocks
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback

CHUNK_IMAGES = 4096
"""Images encoded and counted before their features are released."""


@dataclass(frozen=True)
class Distractors:
    """A stream of features that can be read again.

    Attributes:
        name: as the user named it.
        count: images, among them those that will prove unusable.
        stored: whether features are read; otherwise every pass encodes all images.
        own_blocks: starts a pass over this rank's part.
        all_blocks: starts a pass over all.
    """

    name: str
    count: int
    stored: bool
    own_blocks: Callable[[], Iterator[Float32[np.ndarray, "_ d"]]]
    all_blocks: Callable[[], Iterator[Float32[np.ndarray, "_ d"]]]


def open_distractors(
    src: str,
    encoder: Encoder,
    preprocess: Preprocess,
    *,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Distractors:
    """Open a feature store, or images.

    Args:
        src: the directory of a feature store, or a SRC of images.
        encoder: of the queries; a store must have been made by it.
        preprocess: of the queries; a store must have been made with it.
        extraction: how features of images are extracted.
        progress: called with this rank's distractors counted.

    Raises:
        FeatureError: the store is damaged, or was made by another encoder, preprocessing or pooling.
        DataError: the source is missing or damaged.
    """
    directory = Path(src)
    if directory.is_dir() and any(directory.glob("features-*.parquet")):
        store = FeatureBlocks(directory)
        own = FeatureSpace.of_manifest(store.manifest, store.manifest["dimension"], src)
        difference = FeatureSpace.of_encoder(encoder, preprocess).difference(own)
        if difference is not None:
            raise FeatureError(
                f"distractors {src} were made by another {difference.what} than the queries ({difference.values}): "
                "embed them with the same options (sop-embed --whole for whole images)"
            )

        def stored(ranks: int, own: int) -> Iterator[Float32[np.ndarray, "_ d"]]:
            done = 0
            for number, block in enumerate(store):
                done += len(block)
                if number % ranks == own:
                    yield block
                if progress is not None:
                    progress(done, len(store))

        return Distractors(src, len(store), True, lambda: stored(world_size(), rank()), lambda: stored(1, 0))
    source = open_source(src)
    starts = range(0, len(source), CHUNK_IMAGES)

    def encoded(ranks: int, own: int) -> Iterator[Float32[np.ndarray, "_ d"]]:
        for start in starts[own::ranks]:
            positions = np.arange(start, min(start + CHUNK_IMAGES, len(source)))
            yield extract_features(encoder, Subset(source, positions), extraction, preprocess=preprocess).features
            if progress is not None:
                progress(int(positions[-1]) + 1, len(source))

    return Distractors(src, len(source), False, lambda: encoded(world_size(), rank()), lambda: encoded(1, 0))
