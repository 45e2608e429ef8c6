"""Search an index by images, by keys of its own images, or by features."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sop_faiss.data.images.box import Box
from sop_faiss.data.images.source import ImageSource, Place, open_source, place_of
from sop_faiss.errors import ConfigError
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.store import FeatureStore
from sop_faiss.index.build import store_as_index
from sop_faiss.index.change import require_same_space
from sop_faiss.index.find import Line, find, find_others
from sop_faiss.index.images import IndexImages, index_images
from sop_faiss.index.narrowed import Narrowing, combined_query, without
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.rerank.reranker import open_reranker
from sop_faiss.index.rerank.settings import Rerank
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IdTable
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.neighbors.exact import require_cosine
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.finding.as_one import as_one, name_of_all, refuse_minus
from sop_faiss.verbs.finding.query_box import boxed
from sop_faiss.verbs.finding.query_files import open_images
from sop_faiss.verbs.finding.search_result import Found, SearchedQuery, SearchResult

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
    where: str | None = None
    """Only images that pass this condition, as of `rows_where`."""
    table: Path | None = None
    """More columns for `where`."""
    unique: float | None = None
    """Fold a neighbor into a nearer one from this cosine between the two on."""
    together: bool = False
    """Search by the mean of all queries."""
    minus: tuple[str, ...] = ()
    """Less these image files, or keys if the queries are keys; the queries are one then."""
    rerank: Rerank | None = None
    """How the first images are put into a new order; None: not at all."""
    box: Box | None = None
    """The part of each image file that is the query, as `parse_box` returns it; None: the complete image."""

    def narrowing(self, index: FeatureIndex) -> Narrowing | None:
        """Find the rows that count; None: all do.

        Raises:
            SopError: as `rows_where`; an option is impossible.
        """
        if self.table is not None and self.where is None:
            raise ConfigError(f"`table={self.table}` is for a condition on its columns: add `where`, or leave it out")
        if self.unique is not None:
            require_cosine(self.unique, "`unique`")
        if self.where is None and self.unique is None:
            return None
        from sop_faiss.index.rows_where import rows_where  # whose parser takes a moment to load

        return Narrowing(None if self.where is None else rows_where(index, self.where, self.table), self.unique)


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
    normal: Callable[[str], str] = str if keys else os.path.realpath
    refuse_minus(options.minus, list(keys) if keys else [str(image) for image in images], features, normal)
    k = options.k
    how: dict[str, Any] = {
        "threshold": options.threshold,
        "together": options.together or bool(options.minus),
        "rerank": options.rerank,
    }
    if keys:
        how |= {"narrowing": options.narrowing(index), "images_root": options.images_root, "minus": options.minus}
        return search_by_key(index, keys, k, **how)
    _check_request(k, len(index), options.threshold)
    how["narrowing"] = options.narrowing(index)
    if features is not None:
        return search_by_features(index, FeatureStore.read(features), k, **how)
    source: ImageSource = open_images(images) if data is None else open_source(data)
    loaded = encoder_of_index(index, encoder)
    if options.box is not None:
        source = boxed(open_images(images), options.box, loaded.preprocess.top_value)
    extraction = replace(options.extraction, max_bad_fraction=0.0) if data is None else options.extraction
    minus = open_images([Path(name) for name in options.minus]) if options.minus else None
    return search_by_images(index, loaded, source, k, extraction=extraction, progress=progress, minus=minus, **how)


def search_by_images(
    index: FeatureIndex,
    encoder: Encoder,
    source: ImageSource,
    k: int | None = None,
    *,
    threshold: float | None = None,
    extraction: ExtractionOptions | None = None,
    progress: ProgressCallback | None = None,
    narrowing: Narrowing | None = None,
    together: bool = False,
    minus: ImageSource | None = None,
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
        narrowing: which images of the index count; None: all.
        together: search by the mean of all.
        minus: less these, if together.
        rerank: as `SearchOptions.rerank`.

    Raises:
        IndexMismatchError: the encoder, its preprocessing or its pooling is not the index's.
        ConfigError: k or the threshold is out of range.
        DataError: too many images cannot be read.
    """
    _check_request(k, len(index), threshold)
    index.check_encoder(encoder)
    reranker = open_reranker(
        index, rerank, together=together and len(source) + (0 if minus is None else len(minus)) > 1
    )
    extraction = extraction or ExtractionOptions(max_bad_fraction=0.0)
    store = extract_features(encoder, source, extraction, progress=progress)
    positions = {key: position for position, key in enumerate(source.keys)}
    usable = [positions[key] for key in store.keys]
    tokens = None if reranker is None else reranker.tokens_of_images(encoder, source, usable)
    reads = [(functools.partial(source.read, positions[key]), place_of(source, positions[key])) for key in store.keys]
    dropped = dict(store.manifest["dropped"]["reasons"])
    combined = 1
    if together:
        unwanted = (
            None if minus is None else extract_features(encoder, minus, replace(extraction, max_bad_fraction=0.0))
        )
        combined = len(store) + (0 if unwanted is None else len(unwanted))
        store, reads = as_one(store, unwanted), reads[:1]
    lines = find(index, store.features, _default_k(k, threshold, len(index)), threshold, narrowing, reranker, tokens)
    return SearchResult(_judged(index, store, source.class_names, lines, reads), dropped, combined)


def search_by_features(
    index: FeatureIndex,
    store: FeatureStore,
    k: int | None = None,
    *,
    threshold: float | None = None,
    narrowing: Narrowing | None = None,
    together: bool = False,
    rerank: Rerank | None = None,
) -> SearchResult:
    """Find the k nearest images of the index for each row of a feature store; no encoder is needed.

    Args:
        index: what to search.
        store: features of the index's encoder, prepared and pooled in the same way.
        k: how many, 1 <= k <= len(index); None: as `SearchOptions.k`.
        threshold: leave out neighbors of a smaller similarity.
        narrowing: which images of the index count; None: all.
        together: search by the mean of all.
        rerank: as `SearchOptions.rerank`; not `local`, which compares images.

    Raises:
        IndexMismatchError: the store is of another encoder, preprocessing or pooling.
        ConfigError: k or the threshold is out of range, or `rerank` needs images.
        FeatureError: the store is unusable.
    """
    _check_request(k, len(index), threshold)
    if rerank is not None and rerank.method == "local":
        raise ConfigError("`rerank=local` compares parts of images, and `features` has none: name images or keys")
    reranker = open_reranker(index, rerank)
    described = store_as_index(store, index.manifest.factory)
    require_same_space(index.manifest.space, described.space, "the index", "the store")
    combined = 1
    if together:
        store.check()
        combined, store = len(store), as_one(store)
    lines = find(index, store.features, _default_k(k, threshold, len(index)), threshold, narrowing, reranker)
    images = IndexImages(IdTable(store.keys, store.sources, store.members, store.labels), Path(described.root))
    reads = [(functools.partial(images.read, row), images.place(row)) for row in range(len(store))]
    return SearchResult(_judged(index, store, described.class_names, lines, reads), {}, combined)


def search_by_key(
    index: FeatureIndex,
    keys: Sequence[str],
    k: int | None = None,
    *,
    threshold: float | None = None,
    images_root: Path | None = None,
    narrowing: Narrowing | None = None,
    together: bool = False,
    minus: Sequence[str] = (),
    rerank: Rerank | None = None,
) -> SearchResult:
    """Find the k nearest *other* images for images of the index itself; no encoder is needed.

    Args:
        index: what to search.
        keys: names of images of the index.
        k: how many, 1 <= k < len(index); None: as `SearchOptions.k`.
        threshold: leave out neighbors of a smaller similarity.
        images_root: where the images are now; where they were when the index was built, if None.
        narrowing: which images of the index count; None: all.
        together: search by the mean of all.
        minus: less these keys, if together.
        rerank: as `SearchOptions.rerank`.

    Raises:
        ConfigError: a key is not in the index, or k or the threshold is out of range.
    """
    _check_request(k, len(index) - 1, threshold)
    rows = [index.row_of(key) for key in keys]
    reranker = open_reranker(index, rerank, together=together and len(rows) + len(minus) > 1)
    k = _default_k(k, threshold, len(index) - 1)
    names = [index.label_name(row) for row in rows]
    combined = 1
    if together:
        unwanted = [index.row_of(key) for key in minus]
        combined = len(rows) + len(unwanted)
        query = combined_query(index.unit_features(rows), index.unit_features(unwanted))
        tokens = None if reranker is None else reranker.tokens_of_rows(rows)
        lines = find(index, query, k, threshold, without(narrowing, [*rows, *unwanted]), reranker, tokens)
        keys, names = [name_of_all(keys, minus)], names[:1] if len(set(names)) == 1 else [None]
    else:
        lines = find_others(index, rows, k, threshold, narrowing, reranker)
    images = index_images(index, images_root)
    queries = []
    for key, row, name, line in zip(keys, rows, names, lines, strict=False):  # of queries together, the first one's row
        read = functools.partial(images.read, row)
        queries.append(SearchedQuery(key, name, _found(index, line, name), read, images.place(row), not together))
    return SearchResult(queries, {}, combined)


def _judged(
    index: FeatureIndex,
    store: FeatureStore,
    class_names: Sequence[str] | None,
    lines: Sequence[Line],
    reads: Sequence[tuple[Callable[[], bytes], Place]],
) -> list[SearchedQuery]:
    """Return the queries with their neighbors; right or wrong where both sides name their classes, or neither does."""
    comparable = (class_names is None) == (index.manifest.class_names is None)
    queries = []
    for number, key in enumerate(store.keys):
        label = None if store.labels is None or store.labels[number] < 0 else int(store.labels[number])
        name = None if label is None else str(label)
        if label is not None and class_names is not None and label < len(class_names):
            name = class_names[label]
        found = _found(index, lines[number], name if comparable else None)
        queries.append(SearchedQuery(key, name, found, *reads[number]))
    return queries


def _default_k(k: int | None, threshold: float | None, limit: int) -> int | None:
    return min(_K, limit) if k is None and threshold is None else k


def _check_request(k: int | None, limit: int, threshold: float | None) -> None:
    """Refuse what would fail later, before images are encoded."""
    k = _default_k(k, threshold, max(limit, 1))
    if k is not None and not 1 <= k <= limit:
        raise ConfigError(f"`k={k}` neighbors asked, {limit} can be found: wanted 1 <= k <= {limit}")
    if threshold is not None:
        require_cosine(threshold, "threshold")


def _found(index: FeatureIndex, line: Line, wanted: str | None) -> list[Found]:
    """Return the neighbors of one query; `wanted` is the class that makes one right, None where that is not known."""
    neighbors, folded = line
    found = []
    for place, row in enumerate(neighbors.rows[0].tolist()):
        similarity = float(neighbors.similarities[0, place])
        label = None if neighbors.labels is None else index.class_name(int(neighbors.labels[0, place]))
        right = None if wanted is None or label is None else label == wanted
        names = None if folded is None else [index.ids.keys[each] for each in folded[place]]
        box = None if neighbors.boxes is None else tuple(neighbors.boxes[0, place].tolist())
        found.append(Found(place + 1, row, neighbors.keys[0][place], similarity, label, right, names, box))
    return found
