"""The index of a shard, kept next to it as `NAME.tar.index`, so that a shard is walked once and not at every start.

It is JSON, since it may come from an untrusted place. A sidecar is valid for one size and modification time of its
shard; one that is stale, damaged or of another kind is ignored. Its content is checked before use: a forged one can at
worst name wrong bytes inside the shard, which then are not an image.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import starmap
from operator import add
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from sop_faiss.data.images.keys import SHARD_SUFFIXES
from sop_faiss.data.shards.shard_index import LINK, ShardIndex, walk_shard
from sop_faiss.data.shards.tar import BLOCK_BYTES
from sop_faiss.errors import DataError, SopError
from sop_faiss.files import write_file

SIDECAR_SUFFIX = ".index"
"""Appended to the full name of the shard."""

LONGEST_SIDECAR_BYTES = 64 << 20
"""Longer ones (a million images in a shard) are neither written nor read."""

_FORMAT = "sop_faiss shard index 2"
_COLUMNS = {"stems": str, "suffixes": str, "offsets": int, "sizes": int, "labels": int}
_log = logging.getLogger(__name__)


def sidecar_of(shard: Path) -> Path:
    """Return the path of a shard's sidecar."""
    return shard.with_name(shard.name + SIDECAR_SUFFIX)


def load_index(shard: Path) -> ShardIndex:
    """Load the index of a shard from its sidecar, else walk the shard and write the sidecar.

    Where nothing may be written, as on a read-only mount, the index is in memory only.

    Raises:
        DataError: as `walk_shard`.
    """
    try:
        status = shard.stat()
    except OSError as error:
        raise DataError(f"shard {shard} cannot be opened: {error.strerror}") from None
    index = read_sidecar(shard, status.st_size, status.st_mtime_ns)
    if index is None:
        index = walk_shard(shard)
        write_sidecar(shard, index)
    return index


def write_sidecar(shard: Path, index: ShardIndex) -> None:
    """Write the sidecar of a shard, atomically; if that is not allowed, log it once per folder."""
    content = {
        "format": _FORMAT,
        "shard_bytes": index.size,
        "shard_changed_ns": index.changed_ns,
        "ignored": index.ignored,
        "stray_label": index.stray_label,
        **{name: getattr(index, name) for name in _COLUMNS},
    }
    text = json.dumps(content, separators=(",", ":"))
    if len(text) > LONGEST_SIDECAR_BYTES:
        return
    try:
        write_file(sidecar_of(shard), text)
    except (OSError, SopError):
        _log_unwritable(shard.parent)


@functools.cache
def _log_unwritable(folder: Path) -> None:
    _log.info("indices of shards cannot be written to %s: the shards are indexed in memory at each start", folder)


def read_sidecar(shard: Path, size: int, changed_ns: int) -> ShardIndex | None:
    """Read the sidecar of a shard; None unless it is valid for this size and modification time."""
    path = sidecar_of(shard)
    try:
        if path.stat().st_size > LONGEST_SIDECAR_BYTES:
            return None
        text = path.read_bytes()
    except OSError:
        return None
    index = parse_sidecar(text, size)
    if index is None or index.changed_ns != changed_ns:
        _log.debug("sidecar %s is stale or damaged: walking %s", path, shard)
        return None
    return index


def parse_sidecar(text: bytes, size: int) -> ShardIndex | None:
    """Parse the bytes of a sidecar; None unless they are complete and possible for a shard of `size` bytes."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not text, a number of thousands of digits, nested too deep
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("shard_bytes") != size:
        return None
    changed_ns, ignored, stray_label = (content.get(n) for n in ("shard_changed_ns", "ignored", "stray_label"))
    columns: dict[str, Any] = {name: content.get(name) for name in _COLUMNS}
    if type(changed_ns) is not int or not isinstance(ignored, dict) or not isinstance(stray_label, str):
        return None
    if not all(type(count) is int and count > 0 for count in ignored.values()):
        return None
    if not all(isinstance(column, list) for column in columns.values()) or not _is_possible(columns, size):
        return None
    columns["suffixes"] = [intern(suffix) for suffix in columns["suffixes"]]
    return ShardIndex(size, changed_ns, **columns, ignored=Counter(ignored), stray_label=stray_label)


def _is_possible(columns: dict[str, Any], size: int) -> bool:
    """Return whether columns could come from a walk: types, lengths, keys, and members in the order of the shard."""
    if len({len(column) for column in columns.values()}) != 1:
        return False
    if any(set(map(type, columns[name])) - {kind} for name, kind in _COLUMNS.items()):
        return False
    stems: Sequence[str] = columns["stems"]
    if len(set(stems)) < len(stems) or any(stem.startswith("/") or ".." in stem.split("/") for stem in stems):
        return False
    if any(suffix.lower() not in SHARD_SUFFIXES for suffix in set(columns["suffixes"])):
        return False
    try:
        offsets, sizes, labels = (np.array(columns[name], np.int64) for name in ("offsets", "sizes", "labels"))
    except OverflowError:
        return False
    if not len(offsets):
        return True
    if sizes.min() < LINK or sizes.max() > size or labels.min() < -1 or labels.max() >= 1 << 31:
        return False
    ends = np.minimum(offsets, size) + np.maximum(sizes, 0)  # no overflow
    earliest = np.concatenate([[0], ends[:-1]]) + BLOCK_BYTES  # a header precedes each
    in_order = (offsets >= earliest).all() and (offsets % BLOCK_BYTES == 0).all()
    return bool(in_order and offsets.max() <= size and ends[-1] <= size)


def index_digest(index: ShardIndex) -> bytes:
    """Digest an index; indices of the same images at the same places have equal digests."""
    digest = hashlib.sha256(np.array([index.offsets, index.sizes, index.labels], np.int64).tobytes())
    names = "\0".join(starmap(add, zip(index.stems, index.suffixes, strict=True)))
    digest.update(names.encode("utf-8", "surrogatepass"))
    return digest.digest()
