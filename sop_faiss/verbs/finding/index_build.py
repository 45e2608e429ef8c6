"""The verbs of `sop-index build` and `add`: a feature store, or an encoder and images, to an index."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sop_faiss import distributed
from sop_faiss.data.images.source import ImageSource, open_source
from sop_faiss.data.images.subset import Subset
from sop_faiss.errors import ConfigError
from sop_faiss.features.cache import kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import IndexOptions, build_index, build_index_of_images
from sop_faiss.index.change import add_to_index
from sop_faiss.index.cluster import build_on_cluster
from sop_faiss.index.left_out import LeftOut, dropped_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IndexManifest, read_states
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.progress import ProgressCallback

_log = logging.getLogger(__name__)
DEFAULT_ENCODER = "lite0"
"""The encoder of an index for which none is named."""
_LEAVING_OUT = ExtractionOptions(max_bad_fraction=1.0)
"""A folder as cameras and telephones leave it has broken files; that none can be used is an error."""


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
        encoder: which encoder, with `data`; None, or one without a `model`: `DEFAULT_ENCODER`, which the log names.
        data: SRC: shards, a folder of images, or a list; instead of `features`.
        options: which kind of index; None for the defaults.
        cluster: with `features`: by tasks on this Ray cluster (`build_on_cluster`); None: in this process.
        extraction: how features of images are extracted; None: images that cannot be used are left out.
        progress: called with images encoded, or vectors added, and their total.

    Raises:
        ConfigError: neither or both of features and images are given, or the options are impossible.
        SopError: as `build_index`, `encoder_of_spec` and `open_source`.
    """
    _require_one(features, encoder, data, "name what to index: `data` SRC (images), or `features=STORE`")
    refuse_occupied(out)
    if cluster is not None:
        if features is None:
            raise ConfigError("`cluster` builds of `features=STORE`, which sop-embed writes: name it")
        return distributed.decide(lambda: build_on_cluster(features, out, options, address=cluster, progress=progress))
    if features is not None:
        return distributed.decide(lambda: build_index(FeatureStore.read(features), out, options, progress=progress))
    assert data is not None
    source = open_source(data)
    encoder = encoder or EncoderSpec("")
    if not encoder.model:
        encoder = replace(encoder, model=DEFAULT_ENCODER)
        if distributed.is_main():
            _log.info("no encoder is named: %s is used; name another with `model`", DEFAULT_ENCODER)
    return build_index_of_images(
        encoder_of_spec(encoder), source, out, options, extraction=extraction or _LEAVING_OUT, progress=progress
    )


@dataclass(frozen=True)
class Added:
    """What `add` did."""

    manifest: IndexManifest
    """Of the index."""
    added: int
    skipped: int
    """Images that were there already."""
    left_out: list[LeftOut]
    """Images that cannot be used."""


def add(
    index: Path,
    *,
    features: Path | None = None,
    encoder: EncoderSpec | None = None,
    data: str | None = None,
    skip_existing: bool = False,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Added:
    """Add a feature store, or images, to an index.

    Args:
        features: a feature store.
        encoder: another way to open the index's encoder, which is remembered then; None: as the index remembers.
        data: SRC: shards, a folder of images, or a list; instead of `features`.
        skip_existing: leave out images whose key and content are in the index already; without it they are an error.
        extraction: how features of images are extracted; None: images that cannot be used are left out.
        progress: called with images encoded and their total.

    Raises:
        ConfigError: neither or both of features and images are given, or a key is there already, with
            `skip_existing` of another image.
        SopError: as `add_to_index`, `encoder_of_index` and `open_source`.
    """
    _require_one(features, encoder, data, "name what to add: `data` SRC (images), or `features=STORE`")
    if features is not None:
        if skip_existing:
            raise ConfigError("`skip_existing` compares images, and `features` has none: leave it out, or name `data`")
        store = FeatureStore.read(features)
        return Added(add_to_index(index, store), len(store), 0, [])
    assert data is not None
    opened = FeatureIndex.open(index)
    source = open_source(data)
    there = [position for position, key in enumerate(source.keys) if opened.has(key)]
    if there and not skip_existing:
        raise ConfigError(
            f"{len(there)} keys are in {index} already (first {source.keys[there[0]]!r}): remove them first, rename, "
            "or give `skip_existing`"
        )
    if there:
        _require_equal(opened, source, there)
        source = Subset(source, np.setdiff1d(np.arange(len(source)), there))
    if not len(source):
        return Added(opened.manifest, 0, len(there), [])
    loaded = encoder_of_index(opened, encoder)
    with kept_until_whole(loaded, index):
        store = extract_features(loaded, source, extraction or _LEAVING_OUT, progress=progress)
        manifest = add_to_index(index, store, encoder_spec=loaded.spec)
        return Added(manifest, len(store), len(there), dropped_images(store.manifest["dropped"]))


def _require_one(features: Path | None, encoder: EncoderSpec | None, data: str | None, missing: str) -> None:
    if features is not None and (encoder is not None or data is not None):
        raise ConfigError("`features` holds all that an index needs: leave `model`, its options and `data` out")
    if features is None and data is None:
        raise ConfigError(missing)


def _require_equal(index: FeatureIndex, source: ImageSource, positions: list[int]) -> None:
    """Refuse images whose keys are in the index with another content; of an older index only keys are known."""
    states = read_states(index.directory, index.manifest)
    others = []
    for position in positions:
        known = states[index.row_of(source.keys[position])].digest
        if known and hashlib.sha256(source.read(position)).digest() != known:
            others.append(source.keys[position])
    if others:
        raise ConfigError(
            f"{len(others)} keys are in {index.directory} with another content (first {others[0]!r}): rename them, or "
            "remove them first"
        )
