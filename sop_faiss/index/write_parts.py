"""Make the parts of an index's images, all or those that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sop_faiss.features.cache import kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.file_states import FileState, FileStates
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory, locked_directory
from sop_faiss.index.beside import PARTS
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.contents import IndexContents
from sop_faiss.index.images import IndexImages
from sop_faiss.index.part_source import DEFAULT_GRIDS, PartSource, boxes_of_grids
from sop_faiss.index.parts import KnownParts, known_parts, read_own_parts
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IdTable, read_states
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.progress import Stage, silent_stage


def write_parts(
    index: FeatureIndex,
    encoder: Encoder,
    images: IndexImages,
    grids: Sequence[int] | None = None,
    options: IndexOptions | None = None,
    *,
    extraction: ExtractionOptions | None = None,
    stage: Stage = silent_stage,
) -> int:
    """Make the parts of all images of an index that have none, and write them beside it.

    After a kill the same call encodes only what is missing (`kept_until_whole`).

    Args:
        index: whose images.
        encoder: the index's.
        images: where they are now.
        grids: as of `boxes_of_grids`; other ones than before make all again. None: as before, or `DEFAULT_GRIDS`.
        options: which kind of index the parts get, which makes all again. None: what is there stays; else the default.
        extraction: batch size and the like; every image must be usable.
        stage: announces the work.

    Returns:
        The number of images that were encoded.

    Raises:
        DataError: an image is missing, cannot be read, or has changed since it was indexed.
        IndexMismatchError: the encoder is not the index's, or what is there is damaged.
        ConfigError: `grids` or the options are impossible.
        SopError: another process is changing the index.
    """
    index.check_encoder(encoder)
    boxes = boxes_of_grids(DEFAULT_GRIDS if grids is None else grids)
    if options is not None:
        options.check(index.dimension)
    directory = index.directory / PARTS
    old, known = None, None
    if directory.is_dir():
        old = IndexContents.read_rest(directory, *read_own_parts(index))
        known = known_parts(index, old.ids, old.states)
        boxes = known.boxes if grids is None else boxes
        if options is not None or set(boxes) != set(known.boxes):
            old, known = None, None
    missing = list(range(len(index))) if known is None else known.missing(len(index))
    if not missing:
        return 0
    digests = read_states(index.directory, index.manifest).digests
    source = PartSource(index, images, missing, boxes, digests, encoder.preprocess.top_value)
    extraction = replace(extraction or ExtractionOptions(), max_bad_fraction=0.0)
    with locked_directory(index.directory), kept_until_whole(encoder, directory):
        with stage("parts", "parts") as progress:
            store = extract_features(encoder, source, extraction, progress=progress)
        states = [FileState(-1, -1, source.digests[source.row_of(place)]) for place in range(len(source))]
        store = replace(store, states=FileStates.of(states))
        if old is None or known is None:
            build_index(store, directory, options, overwrite=True)
        else:
            with atomic_directory(directory, overwrite=True) as temporary:
                _joined(old, known, store).write(temporary)
    return len(missing)


def _joined(old: IndexContents, known: KnownParts, store: FeatureStore) -> IndexContents:
    """Return the parts of images that are still there, and those of a store; a graph keeps the others, too."""
    assert old.vectors is not None
    stays = known.owners >= 0
    if isinstance(old.vectors, ApproximateIndex) and not old.vectors.loses_rows:
        stays[:] = True
    else:
        old.vectors.keep(stays)
    old.vectors.add(store.features)
    kept = old.ids.take(np.flatnonzero(stays))
    ids = IdTable([*kept.keys, *store.keys], [*kept.sources, *store.sources], [*kept.members, *store.members], None)
    assert store.states is not None
    return IndexContents(old.manifest, ids, old.vectors, old.states.take(np.flatnonzero(stays)) + store.states)
