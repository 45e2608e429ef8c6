"""The verbs of `sop-index build` and `add`: a feature store, or an encoder and images, to an index."""

from __future__ import annotations

from pathlib import Path

from sop_faiss import distributed
from sop_faiss.data.images.source import open_source
from sop_faiss.errors import ConfigError
from sop_faiss.features.cache import kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import refuse_occupied
from sop_faiss.index.build import IndexOptions, build_index, build_index_of_images
from sop_faiss.index.change import add_to_index
from sop_faiss.index.cluster import build_on_cluster
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IndexManifest
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback

__all__ = ["add", "build"]


def build(
    out: Path,
    *,
    features: Path | None = None,
    encoder: EncoderSpec | None = None,
    data: str | None = None,
    options: IndexOptions | None = None,
    cluster: str | None = None,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
) -> IndexManifest:
    """Build an index of a feature store, or of images.

    Args:
        out: the index directory, new or empty; checked before anything is read.
        features: a feature store.
        encoder: which encoder; with `data`, instead of `features`.
        data: SRC: shards, a folder of images, or a list.
        options: which kind of index; None for the defaults.
        cluster: with `features`: by tasks on this Ray cluster (`build_on_cluster`); None: in this process.
        extraction: how features of images are extracted.
        progress: called with images encoded, or vectors added, and their total.

    Raises:
        ConfigError: neither or both of features and images are given, or the options are impossible.
        SopError: as `build_index`, `encoder_of_spec` and `open_source`.
    """
    if features is not None and (encoder is not None or data is not None):
        raise ConfigError("`features` holds all that an index needs: leave `model` and `data` out")
    refuse_occupied(out)
    if cluster is not None:
        if features is None:
            raise ConfigError("`cluster` builds of `features=STORE`, which sop-embed writes: name it")
        return distributed.decide(lambda: build_on_cluster(features, out, options, address=cluster, progress=progress))
    if features is not None:
        return distributed.decide(lambda: build_index(FeatureStore.read(features), out, options, progress=progress))
    if encoder is None or data is None:
        raise ConfigError("name what to index: `features=STORE`, or `model=M` with `data` SRC")
    source = open_source(data)
    return build_index_of_images(
        encoder_of_spec(encoder),
        source,
        out,
        options,
        extraction=extraction,
        progress=progress,
    )


def add(
    index: Path,
    *,
    features: Path | None = None,
    encoder: EncoderSpec | None = None,
    data: str | None = None,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
) -> IndexManifest:
    """Add a feature store, or images, to an index.

    Args:
        index: the index directory.
        features: a feature store.
        encoder: which encoder, the index's; with `data`, instead of `features`.
        data: SRC: shards, a folder of images, or a list.
        extraction: how features of images are extracted.
        progress: called with images encoded and their total.

    Raises:
        ConfigError: neither or both of features and images are given, or a key is there already.
        SopError: as `add_to_index`, `encoder_of_spec` and `open_source`.
    """
    if features is not None and (encoder is not None or data is not None):
        raise ConfigError("`features` holds all that an index needs: leave `model` and `data` out")
    if features is not None:
        return add_to_index(index, FeatureStore.read(features))
    if encoder is None or data is None:
        raise ConfigError("name what to add: `features=STORE`, or `model=M` with `data` SRC")
    opened = FeatureIndex.open(index)
    source, loaded = open_source(data), encoder_of_spec(encoder)
    opened.check_encoder(loaded)
    there = [key for key in source.keys if opened.has(key)]
    if there:
        raise ConfigError(
            f"{len(there)} keys are in {index} already (first {there[0]!r}): remove them first, or rename"
        )
    with kept_until_whole(loaded, index):
        store = extract_features(loaded, source, extraction, progress=progress)
        return add_to_index(index, store)
