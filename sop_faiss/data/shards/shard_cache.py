"""A folder of fetched shards, of bounded size: each file is complete or absent, the least recently used are removed.

Each file is at `HASH/NAME.tar`, where the hash is of address, size and version, so a remote shard that changes becomes
another file. All files have one modification time, so for their readers a file that is fetched again is the same file;
its access time is when it was last used. Processes may share the folder: a lock keeps two from fetching the same shard;
where locks do not work they fetch it twice, without harm.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sop_faiss.data.shards.address import hide_secrets, name_of_address
from sop_faiss.data.shards.remote import RemoteFile, fetch_file
from sop_faiss.data.shards.shard_index import walk_shard
from sop_faiss.data.shards.sidecar import write_sidecar
from sop_faiss.errors import DataError, UnreachableError
from sop_faiss.files import atomic_file

FETCHED_NS = 10**18
"""Modification time of every shard in the cache, in full seconds, which every file system can store."""

_ENTRY = re.compile(r"[0-9a-f]{32}")
_LIVE: weakref.WeakSet[ShardCache] = weakref.WeakSet()  # the caches of this process, which keep each other's shards
_log = logging.getLogger(__name__)


def default_cache_folder() -> Path:
    """Return `sop_faiss/shards` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sop_faiss" / "shards"


@dataclass(eq=False)
class ShardCache:
    """Fetched shards, of at most `limit_bytes`."""

    folder: Path
    limit_bytes: int
    kept: dict[str, int] = field(default_factory=dict)  # entries of the data sets in use, with the shard's bytes

    def __post_init__(self) -> None:
        _LIVE.add(self)

    def path_of(self, file: RemoteFile) -> Path:
        """Return the path of a shard in the cache."""
        identity = "\n".join((file.address, str(file.size), file.version))
        name = re.sub(r"[^A-Za-z0-9._-]", "_", name_of_address(file.address).removesuffix(".tar"))[-100:].lstrip(".")
        return self.folder / hashlib.sha256(identity.encode()).hexdigest()[:32] / f"{name or 'shard'}.tar"

    def has(self, file: RemoteFile) -> bool:
        """Return whether a shard is in the cache."""
        with contextlib.suppress(OSError):
            status = self.path_of(file).stat()
            return (status.st_size, status.st_mtime_ns) == (file.size, FETCHED_NS)
        return False

    def keep(self, files: Iterable[RemoteFile]) -> None:
        """Reserve room for the shards of a data set, which are never removed; others are removed for them.

        Raises:
            DataError: they do not fit, or the folder cannot be made.
        """
        files = list(files)
        absent = sum(file.size for file in files if not self.has(file))
        wanted = {self.path_of(file).parent.name: file.size for file in files}
        needed = sum((self._all_kept() | wanted).values())
        if needed > self.limit_bytes:
            raise DataError(
                f"the shards in use have {needed} bytes, more than data.cache_bytes = {self.limit_bytes}: raise it, "
                "or read the shards in sequence with data.access=sequential"
            )
        self.kept |= wanted
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise DataError(
                f"cache {self.folder} cannot be made: {error.strerror}; name another data.cache_dir"
            ) from None
        free += sum(entry_bytes for _, entry_bytes, _ in self._other_entries())
        if absent > free:
            raise DataError(
                f"{absent} bytes of shards must be fetched into {self.folder}, where {free} are free: free some space, "
                "name another data.cache_dir, or use data.access=sequential"
            )

    def fetch(self, file: RemoteFile) -> Path:
        """Fetch a shard unless it is in the cache; its headers are walked, and its sidecar is written.

        Raises:
            DataError: the remote shard is damaged.
            UnreachableError: the shard cannot be fetched.
        """
        path = self.path_of(file)
        try:
            if not self.has(file):
                with self._locked(path.parent.name):
                    if not self.has(file):
                        self._fetch(file, path)
        except OSError as error:
            shown = hide_secrets(file.address)
            raise UnreachableError(f"{shown} cannot be put into the cache {self.folder}: {error.strerror}") from None
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), FETCHED_NS))
        return path

    def _fetch(self, file: RemoteFile, path: Path) -> None:
        _log.info("fetching %s (%.1f MB)", hide_secrets(file.address), file.size / 1e6)
        self._make_room(file.size)
        with atomic_file(path) as temporary:
            fetch_file(file, temporary)
            os.utime(temporary, ns=(time.time_ns(), FETCHED_NS))
            write_sidecar(path, walk_shard(temporary, hide_secrets(file.address)))

    @contextlib.contextmanager
    def _locked(self, entry: str, wait: bool = True) -> Iterator[bool]:
        """Admit one process at a time, and clear what a killed one left; a file system without locks admits all.

        Yields False if another process holds the lock and `wait` is off.
        """
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / entry).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            except OSError as error:
                _log.debug("no lock in %s: %s", locks, error.strerror)
            else:
                for leftover in (self.folder / entry).glob(".*.tmp"):
                    leftover.unlink(missing_ok=True)
            try:
                yield True
            finally:  # a process forked meanwhile has the file open too
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)

    def _make_room(self, needed: int) -> None:
        """Remove the least recently used entries of other data sets until `needed` more bytes fit."""
        others = sorted(self._other_entries())
        here = sum(entry_bytes for _, entry_bytes, _ in others)
        here += sum(_entry_bytes(self.folder / name) for name in self._all_kept())
        for _, entry_bytes, entry in others:
            if here + needed <= self.limit_bytes:
                return
            with self._locked(entry.name, wait=False) as free:
                if free:
                    _log.info("the cache is full: removing %s", entry)
                    shutil.rmtree(entry, ignore_errors=True)
                    here -= entry_bytes

    def _all_kept(self) -> dict[str, int]:
        kept = dict(self.kept)
        for cache in _LIVE:
            if cache.folder == self.folder:
                kept |= cache.kept
        return kept

    def _other_entries(self) -> list[tuple[int, int, Path]]:
        """List entries of other data sets: time of last use, bytes, folder. Only what the cache made is listed."""
        entries, kept = [], self._all_kept()
        with contextlib.suppress(FileNotFoundError):
            for entry in self.folder.iterdir():
                if _ENTRY.fullmatch(entry.name) and entry.name not in kept and entry.is_dir():
                    used = max((file.stat().st_atime_ns for file in entry.glob("*.tar")), default=0)
                    entries.append((used, _entry_bytes(entry), entry))
        return entries


def _entry_bytes(entry: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for file in entry.iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
    return total
