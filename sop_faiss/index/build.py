"""Features to a searchable index directory, which appears complete or not at all."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from sop_faiss import distributed
from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import ConfigError, FeatureError
from sop_faiss.features.cache import kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory
from sop_faiss.index.encoder_doubts import facts_of_encoder, log_encoder_doubts
from sop_faiss.index.left_out import dropped_images
from sop_faiss.index.resume_build import forget_training, trained_once
from sop_faiss.index.row_plan import RECALL_K, RowPlan, plan_rows
from sop_faiss.index.store import IdTable, IndexManifest, write_index
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.auto_factory import (
    IsNear,
    choices,
    exact_similarities,
    near_by_vectors,
    query_milliseconds,
    tune_search,
)
from sop_faiss.neighbors.disk.factories import METRIC, VectorIndex, check_factory, empty_index
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.progress import ProgressCallback

_log = logging.getLogger(__name__)
_BLOCK_ROWS = 65_536
_TIMED = 50
"""Queries whose time is measured."""


@dataclass(frozen=True)
class IndexOptions:
    """What kind of index to build."""

    factory: str = "auto"
    """FAISS factory string, or `auto`: `Flat` for 100,000 vectors or fewer, else IVF with codes that fit."""
    max_bytes: int | None = None
    """Of the index in memory, for `auto`; None: no limit."""
    recall: float = 0.95
    """Share of the 10 nearest rows that a search must find; the search setting (nprobe or efSearch) is tuned to it."""
    max_query_ms: float | None = None
    """Of one query on one core. `auto` takes coarser codes, which are faster, until a query takes no longer; another
    factory is only measured. None: not measured."""

    def check(self, dimension: int) -> None:
        """Refuse impossible options before any work.

        Raises:
            ConfigError: FAISS knows no such factory, or a number is out of range.
        """
        if not 0 < self.recall <= 1:
            raise ConfigError(f"`recall` {self.recall}: wanted more than 0, and at most 1")
        if self.max_query_ms is not None and not 0 < self.max_query_ms < float("inf"):
            raise ConfigError(f"`max_query_ms` {self.max_query_ms}: wanted more than 0 milliseconds")
        if self.factory != "auto":
            check_factory(self.factory, dimension)
            if self.max_bytes is not None:
                raise ConfigError("`max_memory` is for `factory` auto, which chooses by it: leave one of them out")
        elif self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"`max_memory` {self.max_bytes}: wanted 1 byte or more")

    def choose(self, count: int, dimension: int) -> tuple[str, str]:
        """Choose the factory for this many vectors, and say why."""
        return self.choices(count, dimension)[0]

    def choices(self, count: int, dimension: int) -> list[tuple[str, str]]:
        """List the factories to try for this many vectors, and why."""
        if self.factory != "auto":
            return [(self.factory, "asked for")]
        return [(each.factory, each.why) for each in choices(count, dimension, self.max_bytes)]


_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """Parse a size as people write it: 800000000, 800MB, 1.5 GB, 2GiB.

    Raises:
        ConfigError: the text is not a size.
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"size {text!r}: wanted a number with B, KB, MB, GB or TB, as 500MB")
    return round(float(found[1]) * _UNITS[found[2]])


def build_index(
    store: FeatureStore,
    out: Path,
    options: IndexOptions | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> IndexManifest:
    """Write the index directory of a feature store: `index.faiss`, `ids.parquet`, `manifest.json`.

    The rows are in the store's order, except that those which recall is measured with come last; see `plan_rows`.

    Args:
        store: unit-norm features of one encoder.
        out: the index directory; it appears complete or not at all. What was trained is kept next to it until then:
            after a kill, the same call does not train again.
        options: which kind of index; None for the defaults.
        overwrite: replace the directory that is there.
        progress: called with vectors added and their total.

    Returns:
        The manifest that was written.

    Raises:
        SopError: `out` is not empty, and `overwrite` is off; it stays as it was.
        ConfigError: the options are impossible.
        FeatureError: the store is empty, its columns disagree, a key occurs twice, or a row is not of unit norm.
    """
    options = options or IndexOptions()
    if not overwrite:
        refuse_occupied(out)
    store.check()
    options.check(store.features.shape[1])
    with atomic_directory(out, overwrite=overwrite) as directory:
        index, plan, measured = _chosen_index(store, out, options, progress)
        factory = index.factory
        ids = IdTable(store.keys, store.sources, store.members, store.labels).take(plan.order)
        of_encoder = facts_of_encoder(store, lambda rows: store.features[rows])
        search = {"effort": index.search_setting, **measured, **of_encoder}
        described = replace(store_as_index(store, factory), search=search)
        states = None if store.states is None else store.states.take(plan.order)
        manifest = write_index(
            directory, described, index.write, ids, states, dropped_images(store.manifest.get("dropped"))
        )
    forget_training(out)
    log_encoder_doubts(manifest)
    return manifest


def _chosen_index(
    store: FeatureStore, out: Path, options: IndexOptions, progress: ProgressCallback | None
) -> tuple[VectorIndex, RowPlan, dict[str, Any]]:
    """Fill the first index of those to try; with a target for a query's time others until one meets it, or the fastest.

    Returns:
        The index, its rows, and what the manifest says of its search.
    """
    choices, fastest = options.choices(*store.features.shape), None
    for left, (factory, why) in zip(range(len(choices) - 1, -1, -1), choices, strict=True):
        if options.factory == "auto":
            _log.info("index factory %s: %s", factory, why)
        index, plan, measured = _filled(store, out, factory, options.recall, progress)
        measured["why"] = why
        if options.max_query_ms is None:
            return index, plan, measured
        taken = query_milliseconds(index, store.features[plan.order[-_TIMED:]], min(RECALL_K, index.count))
        measured["milliseconds"] = round(taken, 3)
        if fastest is None or taken < fastest[2]["milliseconds"]:
            fastest = index, plan, measured
        if taken <= options.max_query_ms:
            break
        remedy = "trying coarser codes" if left else "the fastest is taken; allow more, or ask for a smaller recall"
        _log.warning("a query of index %s takes %.3g ms, wanted %.3g: %s", factory, taken, options.max_query_ms, remedy)
    assert fastest is not None
    return fastest


def _filled(
    store: FeatureStore, out: Path, factory: str, target: float, progress: ProgressCallback | None
) -> tuple[VectorIndex, RowPlan, dict[str, Any]]:
    """Train and fill an index, and tune its search to a recall before the last rows are added."""
    count = len(store)
    index = empty_index(factory, store.features.shape[1])
    plan = plan_rows(count, index)
    if isinstance(index, ApproximateIndex):
        _log.info("learning %s from %d of %d vectors", factory, len(plan.training), count)
        index = trained_once(index, store.features[plan.training], out)
    _add(index, store.features, plan.present, progress)
    measured = not_measured(target)
    if isinstance(index, ApproximateIndex) and len(plan.held_out):
        queries, k = store.features[plan.held_out], min(RECALL_K, len(plan.present))
        blocks = (store.features[plan.present[start:stop]] for start, stop in _blocks(len(plan.present)))
        nearest = exact_similarities(queries, blocks, k)
        is_near = near_by_vectors(queries, nearest, store.features, plan.present)
        measured = measure(index, queries, k, is_near, target)
    _add(index, store.features, plan.held_out, progress)
    return index, plan, measured


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK_ROWS, count)) for start in range(0, count, _BLOCK_ROWS)]


def _add(
    index: VectorIndex, features: Float32[np.ndarray, "n d"], rows: Int64[np.ndarray, " m"], progress: Any
) -> None:
    """Add these rows, block by block."""
    for start, stop in _blocks(len(rows)):
        index.add(features[rows[start:stop]])
        if progress is not None:
            progress(index.count, len(features))


def not_measured(target: float) -> dict[str, Any]:
    """Return what the manifest says where recall was not measured."""
    return {"recall": None, "k": None, "queries": 0, "target": target}


def measure(
    index: ApproximateIndex, queries: Float32[np.ndarray, "q d"], k: int, is_near: IsNear, target: float
) -> dict[str, Any]:
    """Tune the search setting, warn where the target is out of reach, and return what the manifest says of it."""
    recall = tune_search(index, queries, k, is_near, target)
    if recall.share < target:
        _log.warning(
            "recall@%d of index %s is %.3f at most, wanted %.3g: its codes are too coarse, or its lists too many; "
            "take a finer factory, or allow more memory",
            *(k, index.factory, recall.share, target),
        )
    return {"recall": round(recall.share, 4), "k": k, "queries": recall.queries, "target": target}


def build_index_of_images(
    encoder: Encoder,
    source: ImageSource,
    out: Path,
    options: IndexOptions | None = None,
    *,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
) -> IndexManifest:
    """Build an index of images. After a kill the same call encodes only what is missing (`kept_until_whole`).

    Ranks share the encoding, and the main one builds.

    Args:
        encoder: on the device that it runs on.
        out: the index directory.
        options: which kind of index; None for the defaults.
        extraction: batch size and the like; images that are left out are counted in the manifest.

    Raises:
        SopError: as `build_index` and `extract_features`; faults of `out` or `options` are found before any work.
    """
    options = options or IndexOptions()
    refuse_occupied(out)
    options.check(encoder.feature_dim)
    with kept_until_whole(encoder, out):
        store = extract_features(
            encoder, source, replace(extraction or ExtractionOptions(), across_ranks=True), progress=progress
        )
        return distributed.decide(lambda: build_index(store, out, options))


def store_as_index(store: FeatureStore, factory: str) -> IndexManifest:
    """Make the manifest of an index from that of a feature store.

    Raises:
        FeatureError: the store's manifest lacks something.
    """
    made_by, space = store.manifest, store.space()
    try:
        return IndexManifest(
            factory=factory,
            metric=METRIC,
            dimension=space.dimension,
            count=len(store.features),
            encoder={"name": str(made_by["encoder"]["name"]), "fingerprint": space.fingerprint},
            preprocess=space.preprocess,
            pooling=space.pooling,
            class_names=made_by.get("class_names"),
            root=str(made_by["root"]),
            dropped=dict(made_by.get("dropped", {}).get("reasons", {})),
            search={},
            files={},
            encoder_spec=made_by.get("encoder_spec"),
            folder=made_by.get("folder"),
        )
    except KeyError as error:
        raise FeatureError(f"the feature store's manifest has no {error}: extract the features again") from None
