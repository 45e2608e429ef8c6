"""HTTP connections that must ask for something within a time: uvicorn itself waits for a request's headers for ever.

Without this a client that opens connections and sends nothing, or a letter now and then, holds them all, and nobody
else is served. The time of an image's bytes is bounded in `uploads.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["prompt_protocol"]


class _PromptProtocol(H11Protocol):
    """Closes a connection on which no request was answered, or is being answered, for a time."""

    header_seconds: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._forget_deadline()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock where it does not run yet; stop it once the headers are whole."""
        if self._is_answering():
            self._forget_deadline()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.header_seconds, self._close_late)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_late(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def prompt_protocol(header_seconds: float) -> type[H11Protocol]:
    """The class of connections whose requests' headers must arrive within so many seconds, for `uvicorn.Config.http`.

    The clock starts with the connection, and with the first byte after an answer; between requests uvicorn's own
    `timeout_keep_alive` holds.
    """
    return type("PromptProtocol", (_PromptProtocol,), {"header_seconds": header_seconds})
