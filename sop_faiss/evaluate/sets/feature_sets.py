"""Sets of features that are to be compared: each a feature store, or images to be extracted by one encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.errors import ConfigError, FeatureError
from sop_faiss.features.extract import ExtractionOptions, extract_each
from sop_faiss.features.feature_space import FeatureSpace
from sop_faiss.features.store import FeatureStore
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback


@dataclass(frozen=True)
class FeatureSet:
    """A set under the name a user gave it. `source` is None for a set that was opened as a store.

    `store` is None until `fill_stores`, for a set of images.
    """

    name: str
    source: ImageSource | None
    store: FeatureStore | None

    @property
    def labels(self) -> Int64[np.ndarray, " n"] | None:
        """A class number for each row, -1 for one without; None when none has one."""
        if self.store is not None:
            return self.store.labels
        return None if self.source is None else self.source.labels

    @property
    def class_names(self) -> list[str] | None:
        """The name of each class number, where known."""
        if self.source is not None:
            return self.source.class_names
        names = None if self.store is None else self.store.manifest.get("class_names")
        return None if names is None else [str(name) for name in names]


def open_feature_set(src: str) -> FeatureSet:
    """Open a feature store's directory as a store, anything else as SRC.

    Raises:
        FeatureError: the store is damaged.
        DataError: the source is missing or damaged.
    """
    directory = Path(src)
    if directory.is_dir() and any(directory.glob("features-*.parquet")):
        return FeatureSet(src, None, FeatureStore.read(directory))
    return FeatureSet(src, open_source(src), None)


def require_encoder_or_stores(sets: Sequence[FeatureSet], encoder: EncoderSpec | None) -> None:
    """Check that an encoder is given exactly if there are images to extract, and that all stores have one origin.

    Raises:
        ConfigError: the encoder is missing or idle.
        FeatureError: two stores cannot be compared.
    """
    images = [feature_set.name for feature_set in sets if feature_set.store is None]
    if images and encoder is None:
        raise ConfigError(f"{images[0]} is not a feature store, so its features must be extracted: give `model`")
    if not images and encoder is not None:
        raise ConfigError("all sources are feature stores: leave the encoder's options out")
    _require_same_space(sets)


def fill_stores(
    sets: Sequence[FeatureSet],
    encoder: Encoder,
    *,
    extraction: ExtractionOptions,
    progress: ProgressCallback | None,
) -> list[FeatureSet]:
    """Return the same sets with features extracted where there is no store.

    Raises:
        FeatureError: a store was made by another encoder, preprocessing or pooling; found before the long work.
        SopError: as of `extract_features`.
    """
    _require_same_space(sets, encoder.name, FeatureSpace.of_encoder(encoder))
    sources = [feature_set.source for feature_set in sets if feature_set.store is None and feature_set.source]
    extracted = iter(extract_each(encoder, sources, extraction, progress=progress))
    return [replace(each, store=next(extracted)) if each.store is None else each for each in sets]


def _require_same_space(sets: Sequence[FeatureSet], name: str | None = None, space: FeatureSpace | None = None) -> None:
    """Refuse stores that cannot be compared with this space, or else with the first of them."""
    for each in sets:
        if each.store is None:
            continue
        own = each.store.space(each.name)
        if space is None or name is None:
            name, space = each.name, own
        difference = space.difference(own)
        if difference is not None:
            raise FeatureError(
                f"features of {each.name} and {name} cannot be compared, their {difference.what} differs "
                f"({difference.values}): use one encoder, preprocessing and pooling for both"
            )
