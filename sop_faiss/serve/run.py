"""Open an index and serve it until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from sop_faiss.errors import ConfigError
from sop_faiss.index.own_encoder import encoder_of_index
from sop_faiss.index.search import FeatureIndex
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.serve.app import create_app
from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.request_timeout import prompt_protocol

_log = logging.getLogger(__name__)
_FINISH_SECONDS = 5
"""Time for running requests to finish after Ctrl-C."""
_MOST_CONNECTIONS = 1000


def serve(
    directory: Path,
    encoder: EncoderSpec | None = None,
    options: ServeOptions | None = None,
    *,
    with_encoder: bool = True,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve an index directory; return after Ctrl-C.

    Args:
        directory: made by `sop-index build`.
        encoder: another way to open the index's encoder; None: as the index remembers.
        with_encoder: open it. Without one, as of an index that remembers none, only its own images can be queries.
        ready: called with the page's address as soon as it can be opened.

    Raises:
        ConfigError: the server cannot listen at the address.
        IndexMismatchError: the index is damaged, or the encoder is another.
        CheckpointError: the encoder's weights are missing or damaged.
    """
    options = options or ServeOptions()
    with listen(options.host, options.port) as listener:  # before the slow part: a port in use is reported at once
        index = FeatureIndex.open(directory)
        root = Path(index.manifest.root) if options.images_root is None else options.images_root
        if not root.is_dir():
            _log.warning("the images are no longer at %s: set `images_root` to show them", root)
        app = create_app(index, _encoder(index, encoder) if with_encoder else None, options)
        config = uvicorn.Config(
            app,
            http=prompt_protocol(options.header_seconds),
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_FINISH_SECONDS,
        )
        server = _Server(config, ready, address_of(listener))
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has finished by then and raises it again
            server.run(sockets=[listener])


def _encoder(index: FeatureIndex, given: EncoderSpec | None) -> Encoder | None:
    """Open the encoder of an index; an index of an earlier version may be served without one."""
    if given is None and index.manifest.encoder_spec is None:
        _log.warning("no encoder: only images of the index can be queries; give `model` to search by others")
        return None
    return encoder_of_index(index, given)


class _Server(uvicorn.Server):
    """A server that calls a function when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None] | None, address: str) -> None:
        super().__init__(config)
        self._ready = ready
        self._address = address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then call the function."""
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready(self._address)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        ConfigError: the port is in use or not allowed, or the address is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        # with TCP named, asyncio sends small answers at once; else each waits 40 ms for the client's acknowledgment
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        raise ConfigError(
            f"`host={host}` is not an address of this machine: wanted 127.0.0.1, or 0.0.0.0 for all"
        ) from None
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(_bind_message(error, host, port)) from None
    return listener


def _bind_message(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use: choose another `port`, or `port=0` for a free one"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than you have: choose a `port` above 1023"
    return f"cannot listen at {host}, port {port} ({error.strerror}): choose another `host` or `port`"


def address_of(listener: socket.socket) -> str:
    """Return the page's address for a browser on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
