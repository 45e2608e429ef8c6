"""Search an index by pictures, or by keys of its own images."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sop_faiss.data.listing import open_files
from sop_faiss.data.shards import common_folder
from sop_faiss.data.source import ImageSource, open_source
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.features.extract import extract_features
from sop_faiss.index.pictures import index_pictures
from sop_faiss.index.search import FeatureIndex, Neighbors
from sop_faiss.model.encoder import Encoder
from sop_faiss.model.spec import EncoderSpec
from sop_faiss.progress import ProgressCallback

__all__ = [
    "Found",
    "SearchOptions",
    "SearchResult",
    "SearchedQuery",
    "open_pictures",
    "search_by_key",
    "search_by_pictures",
    "search_index",
]


@dataclass(frozen=True)
class Found:
    """One neighbour of a query."""

    rank: int
    """1 is the nearest."""
    row: int
    """Row of the index."""
    key: str
    similarity: float
    """Cosine."""
    label: str | None
    """Class name, or its number where names are not known; None for an image without."""
    right: bool | None
    """Whether it is of the query's class; None where one of the two has none, or the two cannot be compared."""


@dataclass(frozen=True)
class SearchedQuery:
    """One query and its neighbours, nearest first."""

    key: str
    label: str | None
    found: list[Found]
    read: Callable[[], bytes]
    """Encoded bytes of the query's picture; raises DataError."""


@dataclass(frozen=True)
class SearchResult:
    """A search."""

    queries: list[SearchedQuery]
    dropped: dict[str, int]
    """How many query pictures could not be used, by reason."""


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    k: int = 10
    """Neighbours of each query."""
    threshold: float | None = None
    """Leave out neighbours of a smaller similarity."""
    images_root: Path | None = None
    """Where the index's pictures are now; where they were when it was built, if None."""
    batch_size: int = 64
    """Pictures per forward pass."""
    max_bad_fraction: float = 0.01
    """Share of the pictures of a source that may be unreadable. Of pictures named one by one, none may."""


def search_index(
    index: FeatureIndex,
    *,
    pictures: Sequence[Path] = (),
    data: str | None = None,
    keys: Sequence[str] = (),
    encoder: EncoderSpec | None = None,
    options: SearchOptions | None = None,
    progress: ProgressCallback | None = None,
) -> SearchResult:
    """Search by exactly one of: picture files, a source, keys of the index's own images.

    Args:
        index: what to search.
        pictures: picture files.
        data: SRC: shards, a folder of pictures, or a list.
        keys: names of images of the index; no encoder is needed.
        encoder: the one that the index was built with.
        options: k and the like.
        progress: called with pictures encoded and their total.

    Raises:
        ConfigError: none or several kinds of query are given, the encoder is missing or idle, or an option is
            impossible.
        SopError: as `search_by_pictures`, `search_by_key`, `EncoderSpec.load` and `open_source`.
    """
    options = options or SearchOptions()
    if sum([bool(pictures), data is not None, bool(keys)]) != 1:
        raise ConfigError("name the queries in one way: picture files, or --data SRC, or --key KEY")
    if keys:
        if encoder is not None:
            raise ConfigError("--key needs no encoder, its features are in the index: leave --model out")
        return search_by_key(index, keys, options.k, threshold=options.threshold, images_root=options.images_root)
    if encoder is None:
        raise ConfigError(f"pictures need --model, the encoder of the index: {index.manifest.encoder['name']}")
    _check_request(options.k, len(index), options.threshold)
    source = open_pictures(pictures) if data is None else open_source(data)
    return search_by_pictures(
        index,
        encoder.load(),
        source,
        options.k,
        threshold=options.threshold,
        batch_size=options.batch_size,
        max_bad_fraction=0.0 if data is None else options.max_bad_fraction,
        progress=progress,
    )


def open_pictures(files: Sequence[Path]) -> ImageSource:
    """Picture files as a source, in the order given; one named twice counts once.

    Raises:
        DataError: a file is missing or is a folder.
    """
    paths = [Path(os.path.normpath(Path(file).absolute())) for file in dict.fromkeys(files)]
    for path in paths:
        if path.is_dir():
            raise DataError(f"{path} is a folder, wanted a picture: name a folder with --data")
        if not path.is_file():
            raise DataError(f"picture {path} does not exist")
    root = common_folder([path.parent for path in paths])
    description = f"{len(paths)} pictures" if len(paths) != 1 else str(paths[0])
    return open_files(description, root, [path.relative_to(root).as_posix() for path in paths], None, None)


def search_by_pictures(
    index: FeatureIndex,
    encoder: Encoder,
    source: ImageSource,
    k: int,
    *,
    threshold: float | None = None,
    batch_size: int = 64,
    max_bad_fraction: float = 0.0,
    progress: ProgressCallback | None = None,
) -> SearchResult:
    """The k nearest images of the index for each picture of a source.

    Args:
        index: what to search.
        encoder: the one that the index was built with.
        source: the query pictures; their classes are compared with the index's by name where both have names.
        k: how many; 1 <= k <= len(index).
        threshold: leave out neighbours of a smaller similarity.
        batch_size: pictures per forward pass.
        max_bad_fraction: share of pictures that may be unreadable; they are left out.
        progress: called with pictures done and their total.

    Raises:
        IndexMismatchError: the encoder, its preprocessing or its pooling is not the index's.
        ConfigError: k or the threshold is out of range.
        DataError: too many pictures cannot be read.
    """
    _check_request(k, len(index), threshold)
    index.check_encoder(encoder)
    store = extract_features(
        encoder, source, batch_size=batch_size, max_bad_fraction=max_bad_fraction, progress=progress
    )
    neighbors = index.search(store.features, k)
    positions = {key: position for position, key in enumerate(source.keys)}
    names = source.class_names
    comparable = (names is None) == (index.manifest.class_names is None)
    queries = []
    for number, key in enumerate(store.keys):
        label = None if store.labels is None or store.labels[number] < 0 else int(store.labels[number])
        name = None if label is None else names[label] if names is not None and label < len(names) else str(label)
        read = functools.partial(source.read, positions[key])
        found = _found(index, neighbors, number, name if comparable else None, threshold)
        queries.append(SearchedQuery(key, name, found, read))
    return SearchResult(queries, dict(store.manifest["dropped"]["reasons"]))


def search_by_key(
    index: FeatureIndex,
    keys: Sequence[str],
    k: int,
    *,
    threshold: float | None = None,
    images_root: Path | None = None,
) -> SearchResult:
    """The k nearest *other* images for images of the index itself; no encoder is needed.

    Args:
        index: what to search.
        keys: names of images of the index.
        k: how many; 1 <= k < len(index).
        threshold: leave out neighbours of a smaller similarity.
        images_root: where the pictures are now; where they were when the index was built, if None.

    Raises:
        ConfigError: a key is not in the index, or k or the threshold is out of range.
    """
    _check_request(k, len(index) - 1, threshold)
    rows = [index.row_of(key) for key in keys]
    neighbors = index.search_rows(rows, k)
    pictures = index_pictures(index, images_root)
    queries = []
    for number, (key, row) in enumerate(zip(keys, rows, strict=True)):
        name = None if index.ids.labels is None else index.class_name(int(index.ids.labels[row]))
        found = _found(index, neighbors, number, name, threshold)
        queries.append(SearchedQuery(key, name, found, functools.partial(pictures.read, row)))
    return SearchResult(queries, {})


def _check_request(k: int, limit: int, threshold: float | None) -> None:
    """Refuse what would fail later, before pictures are encoded."""
    if not 1 <= k <= limit:
        raise ConfigError(f"k = {k} neighbours asked, {limit} can be found: wanted 1 <= k <= {limit}")
    if threshold is not None and not -1 <= threshold <= 1:
        raise ConfigError(f"threshold = {threshold}: wanted a cosine similarity from -1 to 1")


def _found(
    index: FeatureIndex, neighbors: Neighbors, query: int, wanted: str | None, threshold: float | None
) -> list[Found]:
    """The neighbours of one query; `wanted` is the class that makes one right, None where that cannot be said."""
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
