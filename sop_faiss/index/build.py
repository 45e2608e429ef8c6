"""Features -> a searchable index directory, whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sop_faiss.data.source import ImageSource
from sop_faiss.errors import FeatureError
from sop_faiss.features.extract import extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory, refuse_occupied
from sop_faiss.index.store import IDS_FILE, INDEX_FILE, IdTable, IndexManifest, describe_file
from sop_faiss.model.encoder import Encoder
from sop_faiss.neighbors.factories import METRIC, check_factory, make_index
from sop_faiss.progress import ProgressCallback

__all__ = ["build_index", "build_index_of_pictures"]


def build_index(store: FeatureStore, out: Path, factory: str = "Flat") -> IndexManifest:
    """Write the index directory of a feature store: `index.faiss`, `ids.parquet`, `manifest.json`.

    Args:
        store: unit-norm features of one encoder.
        out: where the directory shall stand; it appears complete or not at all.
        factory: FAISS factory string; only `Flat` so far.

    Returns:
        The manifest that was written.

    Raises:
        SopError: `out` is not empty; it stays as it was.
        ConfigError: the factory is not supported.
        FeatureError: the store is empty, its columns disagree, a key occurs twice, or a row is not of unit norm.
    """
    refuse_occupied(out)
    check_factory(factory)
    store.check()
    with atomic_directory(out) as directory:
        make_index(store.features, factory).write(directory / INDEX_FILE)
        IdTable(store.keys, store.sources, store.members, store.labels).write(directory / IDS_FILE)
        manifest = _manifest(store, factory, {name: describe_file(directory / name) for name in (INDEX_FILE, IDS_FILE)})
        manifest.write(directory)
    return manifest


def build_index_of_pictures(
    encoder: Encoder,
    source: ImageSource,
    out: Path,
    factory: str = "Flat",
    *,
    batch_size: int = 64,
    max_bad_fraction: float = 0.01,
    progress: ProgressCallback | None = None,
) -> IndexManifest:
    """As `build_index`, of pictures; the features are kept in the index only.

    Args:
        encoder: on the device it shall run on.
        source: the pictures.
        out: where the directory shall stand.
        factory: FAISS factory string.
        batch_size: pictures per forward pass.
        max_bad_fraction: share of pictures that may be unreadable; they are left out and counted in the manifest.
        progress: called with pictures done and their total.

    Raises:
        SopError: as `build_index` and `extract_features`; what is wrong with `out` or `factory`, before any work.
    """
    refuse_occupied(out)
    check_factory(factory)
    store = extract_features(
        encoder, source, batch_size=batch_size, max_bad_fraction=max_bad_fraction, progress=progress
    )
    return build_index(store, out, factory)


def _manifest(store: FeatureStore, factory: str, files: dict[str, dict[str, Any]]) -> IndexManifest:
    made_by = store.manifest
    try:
        return IndexManifest(
            factory=factory,
            metric=METRIC,
            dimension=int(store.features.shape[1]),
            count=len(store.features),
            encoder={name: str(made_by["encoder"][name]) for name in ("name", "fingerprint")},
            preprocess=json.loads(json.dumps(made_by["preprocess"])),
            pooling=made_by["pooling"],
            class_names=made_by.get("class_names"),
            root=str(made_by["root"]),
            dropped=dict(made_by.get("dropped", {}).get("reasons", {})),
            files=files,
        )
    except KeyError as error:
        raise FeatureError(f"the feature store's manifest has no {error}: extract the features again") from None
