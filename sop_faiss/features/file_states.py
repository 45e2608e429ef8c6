"""What was read of each image: size, time of the last change, and sha256, by which a later change is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64

from sop_faiss.errors import IndexMismatchError

if TYPE_CHECKING:
    from sop_faiss.data.images.source import ImageSource

_COLUMNS = pa.schema([("size", pa.int64()), ("mtime_ns", pa.int64()), ("sha256", pa.binary())])


class FileState(NamedTuple):
    """Of one image."""

    size: int
    """Bytes; -1 if not known."""
    time: int
    """When the file was changed last, in nanoseconds; -1 if not known, or in a shard."""
    digest: bytes
    """sha256 of the encoded bytes; empty if not known."""


@dataclass(frozen=True, eq=False)
class FileStates:
    """The states of an index's images, in the order of its rows."""

    sizes: Int64[np.ndarray, " n"]
    times: Int64[np.ndarray, " n"]
    digests: list[bytes]

    def __len__(self) -> int:
        return len(self.digests)

    def __getitem__(self, row: int) -> FileState:
        return FileState(int(self.sizes[row]), int(self.times[row]), self.digests[row])

    @classmethod
    def of(cls, states: Sequence[FileState]) -> FileStates:
        """Make the columns of these states."""
        sizes, times = (np.array([state[place] for state in states], np.int64) for place in (0, 1))
        return cls(sizes, times, [state.digest for state in states])

    @classmethod
    def unknown(cls, count: int) -> FileStates:
        """Make the states of images of which nothing is known."""
        return cls(np.full(count, -1, np.int64), np.full(count, -1, np.int64), [b""] * count)

    def take(self, rows: Int64[np.ndarray, " m"]) -> FileStates:
        """Return some rows, in this order."""
        return FileStates(self.sizes[rows], self.times[rows], [self.digests[row] for row in rows])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FileStates)
            and np.array_equal(self.sizes, other.sizes)
            and np.array_equal(self.times, other.times)
            and self.digests == other.digests
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __add__(self, other: FileStates) -> FileStates:
        sizes, times = np.concatenate([self.sizes, other.sizes]), np.concatenate([self.times, other.times])
        return FileStates(sizes, times, self.digests + other.digests)

    def write(self, path: Path) -> None:
        """Write the Parquet file. Not atomic: write into a directory that is renamed when complete."""
        columns = [pa.array(self.sizes), pa.array(self.times), pa.array(self.digests, pa.binary())]
        pq.write_table(pa.table(columns, schema=_COLUMNS), path)

    @classmethod
    def read(cls, path: Path, count: int) -> FileStates:
        """Read the Parquet file of an index of this many rows.

        Raises:
            IndexMismatchError: it is damaged, or of another index.
        """
        try:
            table = pq.read_table(path).select(_COLUMNS.names).cast(_COLUMNS)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise IndexMismatchError(f"{path} is damaged ({str(error).splitlines()[0]}): restore it") from None
        if len(table) != count or any(column.null_count for column in table.columns):
            raise IndexMismatchError(f"{path} has {len(table)} rows or gaps, wanted {count}: restore it")
        return cls(table["size"].to_numpy(), table["mtime_ns"].to_numpy(), table["sha256"].to_pylist())


def file_status(source: ImageSource, position: int) -> tuple[int, int]:
    """Return the size of an image's file, and when it was changed last, in nanoseconds.

    Both are -1 in a shard, or if the file cannot be reached.
    """
    if source.source_of(position):
        return -1, -1
    try:
        status = (source.root / source.member_of(position)).stat()
    except (OSError, ValueError):
        return -1, -1
    return status.st_size, status.st_mtime_ns
