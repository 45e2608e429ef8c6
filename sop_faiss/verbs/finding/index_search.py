"""Search an index by images, by keys of its own images, or by features."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from sop_faiss.data.images.listing import FileSource, open_files
from sop_faiss.data.images.source import ImageSource, Place, open_source, place_of
from sop_faiss.data.shards.shard_source import common_folder
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import store_as_index
from sop_faiss.index.change import require_same_space
from sop_faiss.index.images import IndexImages, index_images
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.search import FeatureIndex, Neighbors, require_cosine
from sop_faiss.index.store import IdTable
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.paths import path_state
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.finding.index_rerank import Reranker, open_reranker
from sop_faiss.verbs.finding.query_box import Box, boxed
from sop_faiss.verbs.finding.search_result import Found, SearchedQuery, SearchResult

__all__ = [
    "SearchOptions",
    "open_images",
    "search_by_features",
    "search_by_images",
    "search_by_key",
    "search_index",
]

_K = 10  # neighbors of a query, where neither k nor a threshold is given


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    k: int | None = None
    """Neighbors of each query. None: 10, or all where there are fewer; with a threshold all that reach it."""
    threshold: float | None = None
    """Leave out neighbors of a smaller similarity."""
    images_root: Path | None = None
    """Where the index's images are now; where they were when it was built, if None."""
    extraction: ExtractionOptions = field(default_factory=ExtractionOptions)
    """How features of images are extracted. Of images named one by one, none may be unreadable."""
    rerank: Rerank | None = None
    """How the first images are put into a new order; None: not at all."""
    box: Box | None = None
    """The part of each image file that is the query, as `parse_box` returns it; None: the complete image."""


def search_index(
    index: FeatureIndex,
    *,
    images: Sequence[Path] = (),
    data: str | None = None,
    keys: Sequence[str] = (),
    features: Path | None = None,
    encoder: EncoderSpec | None = None,
    options: SearchOptions | None = None,
    progress: ProgressCallback | None = None,
) -> SearchResult:
    """Search by exactly one of: image files, a source, keys of the index's own images, a feature store.

    Args:
        index: what to search.
        images: image files.
        data: SRC: shards, a folder of images, or a list.
        keys: names of images of the index; no encoder is needed.
        features: a feature store of the index's encoder; none is needed.
        encoder: another way to open the index's encoder; None: as the index remembers.
        options: k and the like.
        progress: called with images encoded and their total.

    Raises:
        ConfigError: none or several kinds of query are given, an encoder is not needed, or an option is impossible.
        SopError: as `search_by_images`, `search_by_key`, `search_by_features`, `encoder_of_index`, `open_source`.
    """
    options = options or SearchOptions()
    if sum([bool(images), data is not None, bool(keys), features is not None]) != 1:
        raise ConfigError("name the queries in one way: image files, or `data` SRC, or `key` KEY, or `features=STORE`")
    if encoder is not None and (keys or features is not None):
        needless = "`key` needs no encoder, its features are in the index" if keys else "`features` needs no encoder"
        raise ConfigError(f"{needless}: leave `model` and its options out")
    if options.box is not None and not images:
        raise ConfigError("`box` is a part of an image file: name one, or leave it out")
    if keys:
        return search_by_key(
            index,
            keys,
            options.k,
            threshold=options.threshold,
            images_root=options.images_root,
            rerank=options.rerank,
        )
    if features is not None:
        _check_request(options.k, len(index), options.threshold)
        return search_by_features(
            index, FeatureStore.read(features), options.k, threshold=options.threshold, rerank=options.rerank
        )
    _check_request(options.k, len(index), options.threshold)
    source: ImageSource = open_images(images) if data is None else open_source(data)
    loaded = encoder_of_index(index, encoder)
    if options.box is not None:
        source = boxed(open_images(images), options.box, loaded.preprocess.top_value)
    return search_by_images(
        index,
        loaded,
        source,
        options.k,
        threshold=options.threshold,
        extraction=replace(options.extraction, max_bad_fraction=0.0) if data is None else options.extraction,
        progress=progress,
        rerank=options.rerank,
    )


def open_images(files: Sequence[Path]) -> FileSource:
    """Open image files as a source, in the order given; a file that is named twice counts once.

    Raises:
        DataError: a file is missing or is a folder.
    """
    paths = [Path(os.path.normpath(Path(file).absolute())) for file in dict.fromkeys(files)]
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a folder, wanted an image: name a folder with `data`")
        if not path.is_file():
            raise DataError(f"image {path} {path_state(path)}")
    root = common_folder([path.parent for path in paths])
    description = f"{len(paths)} images" if len(paths) != 1 else str(paths[0])
    return open_files(description, root, [path.relative_to(root).as_posix() for path in paths], None, None)


def search_by_images(
    index: FeatureIndex,
    encoder: Encoder,
    source: ImageSource,
    k: int | None = None,
    *,
    threshold: float | None = None,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
    rerank: Rerank | None = None,
) -> SearchResult:
    """Find the k nearest images of the index for each image of a source.

    Args:
        index: what to search.
        encoder: the one that the index was built with.
        source: the query images; their classes are compared with the index's by name where both have names.
        k: how many, 1 <= k <= len(index); None: as `SearchOptions.k`.
        threshold: leave out neighbors of a smaller similarity.
        extraction: how features are extracted; images that are left out are counted. None: every image must be usable.
        progress: called with images done and their total.
        rerank: as `SearchOptions.rerank`.

    Raises:
        IndexMismatchError: the encoder, its preprocessing or its pooling is not the index's.
        ConfigError: k or the threshold is out of range.
        DataError: too many images cannot be read.
    """
    _check_request(k, len(index), threshold)
    index.check_encoder(encoder)
    reranker = open_reranker(index, rerank, threshold)
    extraction = extraction or ExtractionOptions(max_bad_fraction=0.0)
    store = extract_features(encoder, source, extraction, progress=progress)
    positions = {key: position for position, key in enumerate(source.keys)}
    usable = [positions[key] for key in store.keys]
    tokens = None if reranker is None else reranker.tokens_of_images(encoder, source, usable)
    lines = _search(index, store.features, k, threshold, reranker, tokens)
    reads = [(functools.partial(source.read, positions[key]), place_of(source, positions[key])) for key in store.keys]
    dropped = dict(store.manifest["dropped"]["reasons"])
    return SearchResult(_judged(index, store, source.class_names, lines, reads, threshold), dropped)


def search_by_features(
    index: FeatureIndex,
    store: FeatureStore,
    k: int | None = None,
    *,
    threshold: float | None = None,
    rerank: Rerank | None = None,
) -> SearchResult:
    """Find the k nearest images of the index for each row of a feature store; no encoder is needed.

    Args:
        index: what to search.
        store: features of the index's encoder, prepared and pooled in the same way.
        k: how many, 1 <= k <= len(index); None: as `SearchOptions.k`.
        threshold: leave out neighbors of a smaller similarity.
        rerank: as `SearchOptions.rerank`; not `local`, which compares images.

    Raises:
        IndexMismatchError: the store is of another encoder, preprocessing or pooling.
        ConfigError: k or the threshold is out of range, or `rerank` needs images.
        FeatureError: the store is unusable.
    """
    _check_request(k, len(index), threshold)
    if rerank is not None and rerank.method == "local":
        raise ConfigError("`rerank=local` compares parts of images, and `features` has none: name images or keys")
    reranker = open_reranker(index, rerank, threshold)
    described = store_as_index(store, index.manifest.factory)
    require_same_space(index.manifest.space, described.space, "the index", "the store")
    lines = _search(index, store.features, k, threshold, reranker)
    images = IndexImages(IdTable(store.keys, store.sources, store.members, store.labels), Path(described.root))
    reads = [(functools.partial(images.read, row), images.place(row)) for row in range(len(store))]
    return SearchResult(_judged(index, store, described.class_names, lines, reads, threshold), {})


def search_by_key(
    index: FeatureIndex,
    keys: Sequence[str],
    k: int | None = None,
    *,
    threshold: float | None = None,
    images_root: Path | None = None,
    rerank: Rerank | None = None,
) -> SearchResult:
    """Find the k nearest *other* images for images of the index itself; no encoder is needed.

    Args:
        index: what to search.
        keys: names of images of the index.
        k: how many, 1 <= k < len(index); None: as `SearchOptions.k`.
        threshold: leave out neighbors of a smaller similarity.
        images_root: where the images are now; where they were when the index was built, if None.
        rerank: as `SearchOptions.rerank`.

    Raises:
        ConfigError: a key is not in the index, or k or the threshold is out of range.
    """
    _check_request(k, len(index) - 1, threshold)
    rows = [index.row_of(key) for key in keys]
    reranker = open_reranker(index, rerank, threshold)
    if k is None and threshold is not None:
        lines = [(found, 0) for found in index.search_rows_above(rows, threshold)]
    else:
        k = k or min(_K, len(index) - 1)
        neighbors = index.search_rows(rows, k if reranker is None else reranker.wanted(k, len(index) - 1))
        if reranker is not None:
            neighbors = reranker.reordered(neighbors, index.features(rows), reranker.tokens_of_rows(rows), k)
        lines = [(neighbors, number) for number in range(len(rows))]
    images = index_images(index, images_root)
    queries = []
    for key, row, line in zip(keys, rows, lines, strict=True):
        name = index.label_name(row)
        found = _found(index, *line, name, threshold)
        queries.append(SearchedQuery(key, name, found, functools.partial(images.read, row), images.place(row), True))
    return SearchResult(queries, {})


def _search(
    index: FeatureIndex,
    features: Float32[np.ndarray, "q d"],
    k: int | None,
    threshold: float | None,
    reranker: Reranker | None = None,
    tokens: Sequence[np.ndarray] | None = None,
) -> list[tuple[Neighbors, int]]:
    """Find the neighbors of each query, and which line of them is the query's."""
    if k is None and threshold is not None:
        return [(found, 0) for found in index.search_above(features, threshold)]
    k = k or min(_K, len(index))
    neighbors = index.search(features, k if reranker is None else reranker.wanted(k, len(index)))
    if reranker is not None:
        neighbors = reranker.reordered(neighbors, features, tokens, k)
    return [(neighbors, number) for number in range(len(features))]


def _judged(
    index: FeatureIndex,
    store: FeatureStore,
    class_names: Sequence[str] | None,
    lines: Sequence[tuple[Neighbors, int]],
    reads: Sequence[tuple[Callable[[], bytes], Place]],
    threshold: float | None,
) -> list[SearchedQuery]:
    """Return the queries with their neighbors; right or wrong where both sides name their classes, or neither does."""
    comparable = (class_names is None) == (index.manifest.class_names is None)
    queries = []
    for number, key in enumerate(store.keys):
        label = None if store.labels is None or store.labels[number] < 0 else int(store.labels[number])
        name = None if label is None else str(label)
        if label is not None and class_names is not None and label < len(class_names):
            name = class_names[label]
        found = _found(index, *lines[number], name if comparable else None, threshold)
        queries.append(SearchedQuery(key, name, found, *reads[number]))
    return queries


def _check_request(k: int | None, limit: int, threshold: float | None) -> None:
    """Refuse what would fail later, before images are encoded."""
    if k is None and threshold is None:
        k = min(_K, max(limit, 1))
    if k is not None and not 1 <= k <= limit:
        raise ConfigError(f"`k={k}` neighbors asked, {limit} can be found: wanted 1 <= k <= {limit}")
    if threshold is not None:
        require_cosine(threshold, "threshold")


def _found(
    index: FeatureIndex, neighbors: Neighbors, query: int, wanted: str | None, threshold: float | None
) -> list[Found]:
    """Return the neighbors of one query; `wanted` is the class that makes one right, None where that is not known."""
    least = -np.inf if threshold is None else threshold
    found = []
    for place, row in enumerate(neighbors.rows[query].tolist()):
        similarity = float(neighbors.similarities[query, place])
        if similarity < least:
            break
        label = None if neighbors.labels is None else index.class_name(int(neighbors.labels[query, place]))
        right = None if wanted is None or label is None else label == wanted
        found.append(Found(place + 1, row, neighbors.keys[query][place], similarity, label, right))
    return found
