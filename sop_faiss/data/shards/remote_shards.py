"""Remote shards as a source with random access: through the cache, fetched when they are first needed.

The index of every shard is needed at the start: it comes from the cache, else from the sidecar next to the remote
shard, else the shard is fetched. Names, sizes and checksums come from the remote `manifest.json`, if there is one.
"""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sop_faiss.config import DataConfig
from sop_faiss.data.ordered_map import map_ordered
from sop_faiss.data.shards.address import (
    address_in,
    bare_address,
    folder_of_address,
    hide_secrets,
    is_web,
    name_of_address,
)
from sop_faiss.data.shards.patterns import expand_braces
from sop_faiss.data.shards.remote import RemoteFile, describe_file, list_files, read_small_file
from sop_faiss.data.shards.shard_cache import FETCHED_NS, ShardCache, default_cache_folder
from sop_faiss.data.shards.shard_index import ShardIndex
from sop_faiss.data.shards.shard_source import MANIFEST_NAME, ShardSource, join_shards, name_classes
from sop_faiss.data.shards.sidecar import LONGEST_SIDECAR_BYTES, SIDECAR_SUFFIX, index_digest, load_index, parse_sidecar
from sop_faiss.errors import DataError, UnreachableError

_THREADS = 4  # they mostly wait for the network
_SHARDS_PER_LINE = 50  # of the log
_LONGEST_MANIFEST_BYTES = 64 << 20
_PLAIN_NAME = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*\.tar")  # never outside the folder
_SHA256 = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Manifest:
    """The content of a `manifest.json` next to remote shards."""

    shards: dict[str, RemoteFile]  # by name, in order
    classes: list[str]


@dataclass(frozen=True)
class _Fetcher:
    """A function that fetches shards of one source, by number; picklable, and safe in forked workers."""

    cache: ShardCache
    files: list[RemoteFile]
    digests: list[bytes]  # of the indices from which the source was made

    def __call__(self, number: int) -> None:
        path = self.cache.fetch(self.files[number])
        if index_digest(load_index(path)) != self.digests[number]:
            raise UnreachableError(
                f"shard {hide_secrets(self.files[number].address)} differs from its {SIDECAR_SUFFIX} file, or has "
                "changed: remove that file or make a new one, and start again"
            )


def find_addresses(src: str) -> list[str]:
    """Find the shards of an address, in order: one, a pattern with braces or `*`, or a folder.

    Raises:
        DataError: there are none, or one is named twice.
        UnreachableError: the server does not answer.
    """
    addresses: list[str] = []
    for address in expand_braces(src):
        if not name_of_address(address).lower().endswith(".tar"):
            addresses += _list_folder(address)
        elif glob.has_magic(bare_address(address).partition("://")[2].partition("/")[2]):
            addresses += list_files(address)
        else:
            addresses.append(address)
    shown = hide_secrets(src)
    if not addresses:
        raise DataError(f"source {shown} has no shards: wanted .tar files, or a folder of them with {MANIFEST_NAME}")
    if len(set(addresses)) < len(addresses):
        raise DataError(f"source {shown} names a shard twice: name each once")
    return addresses


def _list_folder(folder: str) -> list[str]:
    """List the shards of a remote folder: those of its manifest, else all that the server lists."""
    manifest = _read_manifest(folder)
    if manifest is not None:
        return [file.address for file in manifest.shards.values()]
    found = list_files(address_in(folder, "*.tar"))
    here = [address for address in found if folder_of_address(address) == folder.rstrip("/")]
    return here or found  # those of a folder with exactly that name, else all that match it as a pattern


def open_remote_shards(description: str, addresses: Sequence[str], settings: DataConfig) -> ShardSource:
    """Open remote shards, in the order given; those without an index are fetched now, the others when they are read.

    Args:
        description: the source as the user named it, without secrets.
        addresses: of the shards, or their paths.

    Raises:
        DataError: the shards do not fit into the cache, are damaged, or have no image.
        UnreachableError: the server does not answer.
    """
    manifests = {folder: _read_manifest(folder) for folder in dict.fromkeys(map(folder_of_address, addresses))}
    files = list(map_ordered(partial(_describe, manifests), addresses, _THREADS))
    folder = Path(settings.cache_dir).expanduser().absolute() if settings.cache_dir else default_cache_folder()
    cache = ShardCache(folder, settings.cache_bytes)
    cache.keep(files)
    indices: list[ShardIndex] = []
    for index in map_ordered(partial(_find_index, cache), files, _THREADS):
        indices.append(index)
        if len(indices) % _SHARDS_PER_LINE == 0 or len(indices) == len(files):
            _log.info("%s: opened %d of %d shards", description, len(indices), len(files))
    source = join_shards(description, [cache.path_of(file) for file in files], indices)
    source.fetch = _Fetcher(cache, files, [index_digest(index) for index in indices])
    classes = [manifest.classes for manifest in manifests.values() if manifest is not None]
    if len(classes) == 1:
        name_classes(source, classes[0])
    return source


def _describe(manifests: dict[str, _Manifest | None], address: str) -> RemoteFile:
    manifest = manifests[folder_of_address(address)]
    listed = manifest.shards.get(name_of_address(address)) if manifest is not None else None
    return describe_file(address) if listed is None else replace(listed, address=address)


def _find_index(cache: ShardCache, file: RemoteFile) -> ShardIndex:
    """Load the index of a shard: from the cache, else from its remote sidecar, else by fetching the shard."""
    if not cache.has(file):
        sidecar = address_in(folder_of_address(file.address), name_of_address(file.address) + SIDECAR_SUFFIX)
        text = read_small_file(sidecar, LONGEST_SIDECAR_BYTES)
        index = None if text is None else parse_sidecar(text, file.size)
        if index is not None:
            index.changed_ns = FETCHED_NS  # as it will be in the cache
            return index
    return load_index(cache.fetch(file))


def _read_manifest(folder: str) -> _Manifest | None:
    """Read the manifest of a remote folder; None if there is none, or if a file of that name is something else.

    Raises:
        DataError: it names something other than a plain file, or gives an impossible size or checksum.
    """
    address = address_in(folder, MANIFEST_NAME)
    text = read_small_file(address, _LONGEST_MANIFEST_BYTES)
    try:
        content = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        _log.warning("%s is not JSON and is ignored", hide_secrets(address))
        return None
    if not isinstance(content, dict) or not isinstance(content.get("shards"), list):
        return None
    shards: dict[str, RemoteFile] = {}
    for entry in content["shards"]:
        listed = _listed_shard(folder, entry)
        if listed is None or name_of_address(listed.address) in shards:
            raise DataError(f"{hide_secrets(address)} is damaged at its shard {len(shards)}: pack again, or remove it")
        shards[name_of_address(listed.address)] = listed
    classes = content.get("classes")
    return _Manifest(shards, [str(name) for name in classes] if isinstance(classes, list) else [])


def _listed_shard(folder: str, entry: Any) -> RemoteFile | None:
    """Parse the manifest's entry of one shard; None if it is impossible."""
    if not isinstance(entry, dict):
        return None
    name, size, sha256 = entry.get("name"), entry.get("bytes"), entry.get("sha256")
    if not isinstance(name, str) or type(size) is not int or not isinstance(sha256, str):
        return None
    if not _PLAIN_NAME.fullmatch(name) or size < 0 or not _SHA256.fullmatch(sha256):
        return None
    if is_web(folder):
        name = re.sub("[?#%]", lambda sign: f"%{ord(sign[0]):X}", name)
    return RemoteFile(address_in(folder, name), size, sha256, sha256)
