"""Many short texts in little memory: blocks of them, compressed, as the names of an index's images.

A Python list takes 60 bytes and more for each text; names that follow each other are alike, and take a few.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from sop_faiss.errors import ConfigError

_BLOCK_ROWS = 512
"""More compress better, and take longer to read one of."""
_CACHED_BLOCKS = 64
_CODEC = pa.Codec("lz4_raw", 9)  # reads a block in a tenth of zstd's time, and takes about 5 bytes more for each text


class PackedTexts(Sequence[str]):
    """A sequence of texts that cannot be changed; slices are lists.

    Args:
        column: of Arrow, without empty values.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._count = len(column)
        texts = column.combine_chunks().cast(pa.large_binary())
        texts = texts if isinstance(texts, pa.Array) else pa.concat_arrays(texts.chunks)
        self._blocks = [_packed(texts.slice(start, _BLOCK_ROWS)) for start in range(0, self._count, _BLOCK_ROWS)]
        self._block = functools.lru_cache(_CACHED_BLOCKS)(self._unpacked)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: Any) -> Any:
        """Return a text, or a list of several."""
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._count))]
        place = range(self._count)[place]
        raw, bounds = self._block(place // _BLOCK_ROWS)
        within = place % _BLOCK_ROWS
        return raw[bounds[within] : bounds[within + 1]].decode()

    def __iter__(self) -> Iterator[str]:
        for raw, bounds in map(self._unpacked, range(len(self._blocks))):
            yield from (raw[start:end].decode() for start, end in itertools.pairwise(bounds.tolist()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | PackedTexts):
            return NotImplemented
        return len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self[:3]!r} and {max(0, self._count - 3):,} more)"

    def _unpacked(self, number: int) -> tuple[bytes, Int64[np.ndarray, " bounds"]]:
        """Return the bytes of a block, and where each of its texts begins and the last one ends."""
        count = min(_BLOCK_ROWS, self._count - number * _BLOCK_ROWS)
        size, block = self._blocks[number]
        raw = _CODEC.decompress(block, size, asbytes=True)
        bounds = np.full(count + 1, 4 * count)
        bounds[1:] += np.cumsum(np.frombuffer(raw, "<u4", count), dtype=np.int64)
        return raw, bounds


def _packed(texts: pa.Array) -> tuple[int, bytes]:
    """Return the lengths of some texts and the texts, compressed, and how many bytes these were."""
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = memoryview(texts.buffers()[2] or b"")[offsets[0] : offsets[-1]]
    raw = np.diff(offsets).astype("<u4").tobytes() + bytes(content)
    return len(raw), _CODEC.compress(raw, asbytes=True)


class RowsOfTexts:
    """Finds the row of a text: 12 bytes for each.

    Args:
        texts: unique.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if len(texts) >= 2**31:
            raise ConfigError(f"{len(texts):,} keys: wanted fewer than {2**31:,}")
        hashes: Int64[np.ndarray, " n"] = np.fromiter(map(hash, texts), np.int64, len(texts))
        self._texts = texts
        self._order = np.argsort(hashes, kind="stable").astype(np.int32)
        self._hashes = hashes[self._order]

    def get(self, text: str) -> int | None:
        """Return the row of a text; None if there is none."""
        first, last = (
            np.searchsorted(self._hashes, hash(text), "left"),
            np.searchsorted(self._hashes, hash(text), "right"),
        )
        return next((row for row in self._order[first:last].tolist() if self._texts[row] == text), None)
