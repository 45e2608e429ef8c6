"""Remote files through fsspec: look up, list, fetch, or read from front to back; with retries."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.core import url_to_fs

from sop_faiss.data.shards.address import hide_secrets, is_address, is_web, name_of_address
from sop_faiss.errors import DataError, UnreachableError
from sop_faiss.files import NO_ROOM, sha256_file

T = TypeVar("T")

_TRIES = 4
_FIRST_PAUSE_SECONDS = 1.0  # doubled after each try
_CONNECT_SECONDS, _SILENCE_SECONDS = 30.0, 60.0  # of http and s3; other protocols have their own limits
_VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "created",
)
_WRAPPERS = (  # file systems inside others, or that keep copies of files
    *("async_wrapper", "asyncwrapper", "blockcache", "cached", "data", "dir", "filecache", "generic", "libarchive"),
    *("reference", "simplecache", "tar", "zip"),
)
_TRANSIENT_STATUSES = (408, 425, 429)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """What is known about a remote file before it is read."""

    address: str
    size: int  # bytes
    version: str  # changes with the file: ETag, time, or sha256; "" if the server states none
    sha256: str  # of the content, "" if it is not known


class _WrongContentError(Exception):
    """The content differs from what was announced."""


def describe_file(address: str) -> RemoteFile:
    """Look up a file.

    Raises:
        DataError: there is no such file, or the server does not state its size.
        UnreachableError: the server does not answer.
    """
    info = _persist(address, "looked up", lambda files, path: files.info(path))
    size = info.get("size")
    if info.get("type") == "directory" or type(size) is not int:
        raise DataError(
            f"shard {hide_secrets(address)}: the server does not state its size, which the cache needs: use "
            "data.access=sequential"
        )
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return RemoteFile(address, size, version, "")


def list_files(pattern: str) -> list[str]:
    """List the addresses that match a pattern with `*`, sorted; hidden files are skipped.

    In an object store, a file with exactly that name takes precedence.

    Raises:
        UnreachableError: the server does not answer, or lists nothing.
    """

    def search(files: Any, path: str) -> list[str]:
        if not is_web(pattern) and files.isfile(path):
            return [pattern]
        host = pattern.removesuffix(path) if pattern.endswith(path) else None
        matches = sorted(files.unstrip_protocol(found) if host is None else host + found for found in files.glob(path))
        return [address for address in matches if not name_of_address(address).startswith(".")]

    return _persist(pattern, "listed", search)


def read_small_file(address: str, limit_bytes: int) -> bytes | None:
    """Read a file that may be missing or forbidden; None if it is, or if it is longer than the limit.

    Raises:
        UnreachableError: the server does not answer.
    """

    def read(files: Any, path: str) -> bytes | None:
        try:
            with _open(files, path) as stream:
                content = bytearray()
                while chunk := stream.read(limit_bytes + 1 - len(content)):
                    content += chunk
                    if len(content) > limit_bytes:
                        return None
                return bytes(content)
        except Exception as error:
            if _is_missing(error) or _status(error) in (400, 401, 403, 404, 405, 410):
                return None
            raise

    return _persist(address, "read", read)


def fetch_file(file: RemoteFile, path: Path) -> None:
    """Copy a remote file to `path`; its length, and its sha256 where known, are verified.

    Raises:
        UnreachableError: there is no such file, the server does not answer or sends other content, or the disk is full.
    """

    def copy(files: Any, remote_path: str) -> None:
        files.get_file(remote_path, str(path))
        got = path.stat().st_size
        if got != file.size:
            raise _WrongContentError(f"{got} bytes were received, wanted {file.size}")
        if file.sha256 and sha256_file(path) != file.sha256:
            raise _WrongContentError("the sha256 differs from the manifest's")

    _persist(file.address, "fetched", copy)


class RemoteStream:
    """A remote file read once from front to back; if the connection breaks, it is opened again at the same position."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._file: Any = None
        self._position = 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes; none at the end.

        Raises:
            UnreachableError: there is no such file, or the server does not answer.
        """
        return _persist(self.address, "read", lambda files, path: self._read_once(files, path, size))

    def close(self) -> None:
        """Close the connection."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _read_once(self, files: Any, path: str, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = _open(files, path)
                behind = self._position
                while behind:
                    skipped = len(self._file.read(min(behind, 1 << 20)))
                    if not skipped:
                        raise _WrongContentError("the file became shorter")
                    behind -= skipped
            chunk: bytes = self._file.read(size)
        except Exception:
            self.close()
            raise
        self._position += len(chunk)
        return chunk


def _open(files: Any, path: str) -> Any:
    """Open for reading forwards; over http as one request, which every server understands."""
    options = {"block_size": 0} if path.startswith(("http://", "https://")) else {}
    return files.open(path, "rb", **options)


def _file_system(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and the file's path in it; after a fork, each process has its own.

    Raises:
        DataError: the protocol is unknown, refused, or needs a package that is not installed.
    """
    if not is_address(address):
        return fsspec.filesystem("file"), address
    protocol, _, rest = address.partition("://")
    protocol, shown = protocol.lower(), hide_secrets(address)
    if protocol in _WRAPPERS:
        raise DataError(f"source {shown}: {protocol}:// wraps other files: name the shards themselves")
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise DataError(
            f"source {shown}: {protocol}:// is unknown; wanted a path, or http, https, s3, gs or another of fsspec"
        ) from None
    except ImportError as error:
        package = "pip install 'sop-faiss[remote]' has http and s3" if protocol in ("http", "https", "s3") else "pip"
        raise DataError(f"source {shown}: {protocol}:// needs a package that is missing ({error}; {package})") from None
    options: dict[str, Any] = {}
    if protocol in ("http", "https"):
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        options["client_kwargs"] = {"timeout": limits}
    if protocol in ("s3", "s3a"):  # `_persist` tries again, and logs it
        limits_of_s3 = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _SILENCE_SECONDS}
        options["config_kwargs"] = limits_of_s3 | {"retries": {"max_attempts": 0}}
    files, path = url_to_fs(f"{protocol}://{rest}", **options)
    return files, str(path)


def _persist(address: str, done: str, action: Callable[[Any, str], T]) -> T:
    """Act on a file; after a transient error try again, with a pause that doubles."""
    shown = hide_secrets(address)
    pause = _FIRST_PAUSE_SECONDS
    for left in reversed(range(_TRIES)):
        try:
            return action(*_file_system(address))
        except DataError:
            raise
        except Exception as error:  # each file system has errors of its own; their text may hold the whole address
            if _is_missing(error):
                raise UnreachableError(f"{shown} does not exist") from None
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise UnreachableError(f"{shown} cannot be {done}: {error.strerror}; see data.cache_dir") from None
            if not left or not _is_transient(error):
                raise UnreachableError(f"{shown} cannot be {done}: {_reason(error)}") from None
            _log.warning("%s cannot be %s: %s; trying again in %g s", shown, done, _reason(error), pause)
        time.sleep(pause)
        pause *= 2
    raise AssertionError("unreachable")


def _cause(error: BaseException) -> BaseException:
    """Find the root cause: fsspec's http wraps everything in FileNotFoundError."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int:
    """Return the http status of an error, 0 for none."""
    cause = _cause(error)
    status = getattr(cause, "status", None)
    if status is None:
        status = getattr(cause, "response", None)
        metadata = status.get("ResponseMetadata", {}) if isinstance(status, dict) else {}  # botocore's
        status = metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None
    return status if isinstance(status, int) else 0


def _is_missing(error: BaseException) -> bool:
    cause = _cause(error)
    return isinstance(cause, FileNotFoundError | IsADirectoryError) or _status(error) in (404, 410)


def _is_transient(error: BaseException) -> bool:
    """Return whether another try may succeed: not after a refusal (4xx), nor without permission."""
    status = _status(error)
    if status in _TRANSIENT_STATUSES or status >= 500:
        return True
    return not status and not isinstance(_cause(error), PermissionError | TypeError | NotImplementedError)


def _reason(error: BaseException) -> str:
    cause, status = _cause(error), _status(error)
    if isinstance(cause, _WrongContentError):
        return str(cause)
    if status:
        return f"status {status}"
    return getattr(cause, "strerror", None) or type(cause).__name__
