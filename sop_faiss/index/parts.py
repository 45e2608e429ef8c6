"""Parts of an index's images, in the folder `parts` beside it: an index of overlapping crops by the same encoder.

Its keys are `LEFT,TOP,RIGHT,BOTTOM KEY`: the box in shares of the image's sides, and the image's key. Its states have
the checksum of the complete image. So parts are known by key and content, and stay when the index around them changes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from sop_faiss.data.images.box import WHOLE, Box, parse_box
from sop_faiss.errors import ConfigError, IndexMismatchError
from sop_faiss.features.file_states import FileStates
from sop_faiss.index.beside import PARTS, how_to_make_parts, read_parts
from sop_faiss.index.search import FeatureIndex
from sop_faiss.index.store import IdTable, IndexManifest, read_states
from sop_faiss.index.vectors import read_vectors
from sop_faiss.neighbors.disk.factories import VectorIndex
from sop_faiss.neighbors.disk.with_parts import VectorsWithParts


class KnownParts(NamedTuple):
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
        raise ConfigError(f"{index.directory} has no parts: {how_to_make_parts(index.directory)}")
    manifest, ids = read_own_parts(index, vectors=verify == "all")
    known = known_parts(index, ids, read_states(directory, manifest))
    missing = known.missing(len(index))
    if missing:
        raise IndexMismatchError(
            f"{len(missing):,} of {len(index):,} images of {index.directory} have no parts (first "
            f"{index.ids.keys[missing[0]]!r}): {how_to_make_parts(index.directory)}"
        )
    merged = VectorsWithParts(vectors, read_vectors(directory, manifest), known.owners, known.numbers)
    return merged, np.array([*known.boxes, WHOLE], np.float32)


def read_own_parts(index: FeatureIndex, *, vectors: bool = True) -> tuple[IndexManifest, IdTable]:
    """Read the parts of an index as `read_verified` does.

    Raises:
        IndexMismatchError: they are damaged, or of another encoder.
    """
    manifest, ids = read_parts(index.directory, vectors=vectors)
    difference = index.manifest.space.difference(manifest.space)
    if difference is not None:
        raise IndexMismatchError(
            f"{index.directory / PARTS} has parts of another {difference.what} than the index ({difference.values}): "
            f"remove it, and {how_to_make_parts(index.directory)}"
        )
    return manifest, ids


def known_parts(index: FeatureIndex, ids: IdTable, states: FileStates) -> KnownParts:
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
            f"{directory} does not hold parts ({error}): remove it, and {how_to_make_parts(index.directory)}"
        ) from None
    return KnownParts(found, owners, numbers)
