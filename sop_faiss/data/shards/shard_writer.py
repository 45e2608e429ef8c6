"""Write samples to webdataset shards and their manifest. Equal samples give equal bytes: no times, no user names.

The tar is written by webdataset's `TarWriter`. Its `ShardWriter` is not used: it opens a shard before there is a sample
for it, and cannot compute the checksum, which is made here from the bytes as they are written.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sop_faiss.data.shards.shard_source import MANIFEST_NAME
from sop_faiss.errors import ConfigError
from sop_faiss.files import write_json

SHARD_BYTES = 1 << 30
"""A shard is closed when its images reach this many bytes, with any number of samples."""


@dataclass(frozen=True)
class Sample:
    """One image as it is written to a shard; `key` has no dot in its basename, since webdataset would cut it there."""

    key: str
    suffix: str  # "jpg", "png" or "webp"
    encoded: bytes
    label: int  # -1 for none


@dataclass(frozen=True)
class ShardEntry:
    """The manifest's entry of one shard."""

    name: str
    samples: int
    bytes: int
    sha256: str


class _HashingFile:
    """A file to write that computes its length and sha256."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb")
        self.digest = hashlib.sha256()
        self.length_bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.length_bytes += len(data)
        return self.file.write(data)

    def close(self) -> None:
        self.file.close()


class ShardWriter:
    """A context manager that writes `FOLDER/NAME-000000.tar` and so on with webdataset's `TarWriter`.

    Args:
        folder: must exist.
        name: first part of the names of the shards.
        samples_per_shard: a new shard begins after this many samples.
        shard_bytes: or after this many bytes of images.
    """

    def __init__(self, folder: Path, name: str, samples_per_shard: int, shard_bytes: int = SHARD_BYTES) -> None:
        if samples_per_shard < 1 or shard_bytes < 1:
            raise ConfigError(f"samples per shard is {samples_per_shard}, wanted 1 or more")
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"shard name is {name!r}, wanted letters and digits, without / and not hidden")
        self.folder, self.name = folder, name
        self.samples_per_shard, self.shard_bytes = samples_per_shard, shard_bytes
        self.entries: list[ShardEntry] = []
        self._file: _HashingFile | None = None
        self._tar: Any = None
        self._samples = 0
        self._sample_bytes = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            with contextlib.suppress(Exception):  # the error is already being raised; a full disk fails here again
                self._tar.close()
            with contextlib.suppress(OSError):
                self._file.close()

    def write(self, sample: Sample) -> None:
        """Append one sample, to a new shard if the current one is full."""
        if self._tar is None:
            self._start()
        members: dict[str, Any] = {"__key__": sample.key, sample.suffix: sample.encoded}
        if sample.label >= 0:
            members["cls"] = str(sample.label).encode()
        self._tar.write(members)
        self._samples += 1
        self._sample_bytes += len(sample.encoded)
        if self._samples >= self.samples_per_shard or self._sample_bytes >= self.shard_bytes:
            self._finish()

    def _start(self) -> None:
        import webdataset  # here, because it is slow to import and reading does not need it

        self._file = _HashingFile(self.folder / self._shard_name())
        options = {"mtime": 0, "user": "", "group": "", "mode": 0o644, "format": "PAX_FORMAT"}
        self._tar = webdataset.TarWriter(self._file, encoder=False, compress=False, **options)

    def _finish(self) -> None:
        if self._file is None:
            return
        self._tar.close()
        self._file.close()
        entry = ShardEntry(self._shard_name(), self._samples, self._file.length_bytes, self._file.digest.hexdigest())
        self.entries.append(entry)
        self._file = self._tar = None
        self._samples = self._sample_bytes = 0

    def _shard_name(self) -> str:
        return f"{self.name}-{len(self.entries):06d}.tar"


def write_manifest(folder: Path, shards: list[ShardEntry], classes: list[str] | None, **more: Any) -> dict[str, Any]:
    """Write and return `manifest.json` of shards: each shard, the class names, totals, and `more` facts."""
    manifest = {
        "format": 1,
        "samples": sum(shard.samples for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "classes": classes,
        **more,
        "shards": [asdict(shard) for shard in shards],
    }
    write_json(folder / MANIFEST_NAME, manifest)
    return manifest
