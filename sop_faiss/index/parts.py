"""Parts of an index's images, in the folder `parts` beside it: an index of overlapping crops by the same encoder.

Its keys are `LEFT,TOP,RIGHT,BOTTOM KEY`: the box in shares of the image's sides, and the image's key. Its states have
the checksum of the complete image. So parts are known by key and content, and stay when the index around them changes.
"""

from __future__ import annotations

import functools
import io
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt8
from PIL import Image

from sop_faiss.data.images.box import WHOLE, Box, box_text, crop_to_box, parse_box
from sop_faiss.data.images.decode import decode_image
from sop_faiss.errors import ConfigError, IndexMismatchError, SopError
from sop_faiss.features.cache import kept_until_whole
from sop_faiss.features.extract import ExtractionOptions, extract_features
from sop_faiss.features.file_states import FileState, FileStates
from sop_faiss.features.store import FeatureStore
from sop_faiss.files import atomic_directory, locked_directory
from sop_faiss.index.beside import PARTS
from sop_faiss.index.build import IndexOptions, build_index
from sop_faiss.index.contents import IndexContents
from sop_faiss.index.images import IndexImages
from sop_faiss.index.search import FeatureIndex, read_vectors
from sop_faiss.index.store import IdTable, IndexManifest, read_states, read_verified
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.neighbors.disk.approximate_index import ApproximateIndex
from sop_faiss.neighbors.disk.factories import VectorIndex
from sop_faiss.neighbors.disk.with_parts import VectorsWithParts
from sop_faiss.progress import Stage, silent_stage

DEFAULT_GRIDS = (3,)
_MOST_GRID = 10
_DECODED = 4
"""Images kept as pixels: the parts of one follow each other."""


def boxes_of_grids(grids: Sequence[int]) -> list[Box]:
    """Return the parts of an image: n x n boxes of each grid, neighbors of which overlap by half of a side.

    Args:
        grids: numbers n from 2 to 10. Of n = 3 a box has half of the image's sides, of any n 2 / (n + 1).

    Raises:
        ConfigError: a number is out of range, or given twice.
    """
    if not grids or len(set(grids)) < len(grids) or not all(2 <= grid <= _MOST_GRID for grid in grids):
        given = ",".join(str(grid) for grid in grids)
        raise ConfigError(
            f"`part_grid={given}`: wanted one or more different numbers from 2 to {_MOST_GRID}, as 3 or 2,4"
        )
    steps = [(grid, top, left) for grid in grids for top in range(grid) for left in range(grid)]
    corners = [(np.array([left, top, left + 2, top + 2]) / (grid + 1)).tolist() for grid, top, left in steps]
    return [parse_box(box_text(each)) for each in corners]


class _Known(NamedTuple):
    """What the parts of an index are of."""

    boxes: list[Box]
    """Each box once."""
    owners: Int32[np.ndarray, " p"]
    """Row of the index that each part is of; -1 for an image that is gone, or has changed."""
    numbers: Int32[np.ndarray, " p"]
    """Of each part, its box."""

    def missing(self, count: int) -> list[int]:
        """Return the rows of an index of `count` images that have no parts."""
        return np.setdiff1d(np.arange(count), self.owners).tolist()


def open_parts(
    index: FeatureIndex, vectors: VectorIndex, verify: str = "all"
) -> tuple[VectorsWithParts, Float32[np.ndarray, "b 4"]]:
    """Open the parts of an index; arguments and errors as of `FeatureIndex.with_parts`.

    Args:
        vectors: of the index.

    Returns:
        Its vectors with those of the parts, and of each number of a part the box, last that of a complete image.
    """
    directory = index.directory / PARTS
    if not directory.is_dir():
        raise ConfigError(f"{index.directory} has no parts: {_make(index.directory)}")
    manifest, ids = _read(index, vectors=verify == "all")
    known = _known(index, ids, read_states(directory, manifest))
    missing = known.missing(len(index))
    if missing:
        raise IndexMismatchError(
            f"{len(missing):,} of {len(index):,} images of {index.directory} have no parts (first "
            f"{index.ids.keys[missing[0]]!r}): {_make(index.directory)}"
        )
    merged = VectorsWithParts(vectors, read_vectors(directory, manifest), known.owners, known.numbers)
    return merged, np.array([*known.boxes, WHOLE], np.float32)


def _read(index: FeatureIndex, *, vectors: bool = True) -> tuple[IndexManifest, IdTable]:
    directory = index.directory / PARTS
    try:
        manifest, ids = read_verified(directory, vectors=vectors)
    except SopError as error:
        raise IndexMismatchError(f"{error}; or remove {directory}, and {_make(index.directory)}") from None
    if manifest.space != index.manifest.space:
        raise IndexMismatchError(
            f"{directory} has parts of another encoder than the index: remove it, and {_make(index.directory)}"
        )
    return manifest, ids


def _known(index: FeatureIndex, ids: IdTable, states: FileStates) -> _Known:
    """Find the row of each part; an image is known by its key and, where the index has it, its content.

    Raises:
        IndexMismatchError: the keys are not those of parts.
    """
    rows = {key: row for row, key in enumerate(index.ids.keys)}
    contents = read_states(index.directory, index.manifest).digests
    boxes: dict[str, int] = {}
    owners, numbers = np.empty(len(ids.keys), np.int32), np.empty(len(ids.keys), np.int32)
    for place, (name, digest) in enumerate(zip(ids.keys, states.digests, strict=True)):
        box, _, key = name.partition(" ")
        row = rows.get(key, -1)
        owners[place] = row if contents[row] in (b"", digest) else -1
        numbers[place] = boxes.setdefault(box, len(boxes))
    try:
        found = [parse_box(box) for box in boxes]
        if max(map(max, found)) > 1:
            raise ConfigError("a box is in pixels")
    except ConfigError as error:
        directory = index.directory / PARTS
        raise IndexMismatchError(
            f"{directory} does not hold parts ({error}): remove it, and {_make(index.directory)}"
        ) from None
    return _Known(found, owners, numbers)


@dataclass(eq=False)
class PartSource:
    """The parts of images of an index, as a source of images."""

    index: FeatureIndex
    images: IndexImages
    rows: list[int]
    boxes: list[Box]
    known: list[bytes]
    """sha256 of each image of the index; empty if not known."""
    top_value: float
    labels: None = None
    class_names: None = None
    digests: dict[int, bytes] = field(default_factory=dict)
    """sha256 of each image that was read."""

    def __post_init__(self) -> None:
        self.description = f"the parts of {self.index.directory}"
        self.root = self.images.root
        self.keys = [f"{box_text(box)} {self.index.ids.keys[row]}" for row in self.rows for box in self.boxes]
        self._decoded = functools.lru_cache(_DECODED)(self._decode)
        self._decoding = [threading.Lock() for _ in range(_DECODED)]

    def __len__(self) -> int:
        return len(self.keys)

    def row_of(self, position: int) -> int:
        """Return the row of the index that a part is of."""
        return self.rows[position // len(self.boxes)]

    def read(self, position: int) -> bytes:
        """Return a part, encoded without loss, of a pixel or more; errors as of `decode_image`."""
        row = self.row_of(position)
        with self._decoding[row % _DECODED]:  # by one thread, while the others wait for it
            pixels = self._decoded(row)
        sides = np.array(pixels.shape[1::-1])
        start, stop = np.array(self.boxes[position % len(self.boxes)]).reshape(2, 2) * sides
        start = np.minimum(np.round(start), sides - 1)
        stop = np.maximum(np.round(stop), start + 1)
        encoded = io.BytesIO()
        Image.fromarray(crop_to_box(pixels, (*start.tolist(), *stop.tolist()))).save(encoded, "PPM")
        return encoded.getvalue()

    def _decode(self, row: int) -> UInt8[np.ndarray, "h w 3"]:
        encoded, self.digests[row] = self.images.read_unchanged(row, self.known[row])
        return decode_image(encoded, top_value=self.top_value)

    def source_of(self, position: int) -> str:
        """Return the shard of the image, or "" for a file."""
        return self.index.ids.sources[self.row_of(position)]

    def member_of(self, position: int) -> str:
        """Return the file of the image, or its name in the shard."""
        return self.index.ids.members[self.row_of(position)]

    def offset_of(self, position: int) -> int:
        """Return 0: parts are in no shard."""
        return 0


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
        _read(index)
        old = IndexContents.read(directory)
        known = _known(index, old.ids, old.states)
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


def _joined(old: IndexContents, known: _Known, store: FeatureStore) -> IndexContents:
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


def _make(index: Path) -> str:
    return f"make them with `sop-index parts {shlex.quote(str(index))}`"
