"""Time limits for the headers of HTTP requests and for taking answers, for which uvicorn itself waits forever.

Without them, a client that opens connections and sends nothing, or one byte now and then, or reads no answer, could use
up all connections, so that no other client is served. The time for an image's bytes is limited in `uploads.py`. Bytes
that are not HTTP within a request end the connection; uvicorn would send a second answer, with a traceback in its log.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class _PromptProtocol(H11Protocol):
    """A protocol that closes a connection if headers take too long to arrive, or an answer to be taken."""

    header_seconds: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock with the connection; asyncio calls this."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that the clock is for every byte that waits
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Start or stop the clock when bytes arrive; asyncio calls this."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks with the connection; asyncio calls this."""
        self._forget_deadline()
        self._forget_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the other clock when bytes of an answer wait to be read; asyncio calls this."""
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size())

    def _await_reader(self, waiting: int) -> None:
        """Drop a client that takes nothing for as long; `waiting` bytes are not taken now."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left >= waiting:
                self.transport.abort()
            else:
                self._await_reader(left)

        self._unread = self.loop.call_later(self.header_seconds, look)

    def resume_writing(self) -> None:
        """Stop that clock; asyncio calls this."""
        self._forget_unread()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, unless an answer has begun; the application's own is dropped. uvicorn calls this."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _watch(self) -> None:
        """Start the clock unless it runs; stop it when the headers are complete."""
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

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def prompt_protocol(header_seconds: float) -> type[H11Protocol]:
    """Make a class of connections with a time limit for the headers of requests, for `uvicorn.Config.http`.

    The clock starts with the connection, and with the first byte after an answer; between requests uvicorn's
    `timeout_keep_alive` applies. An answer whose bytes wait for as long to be read ends the connection, too.
    """
    return type("PromptProtocol", (_PromptProtocol,), {"header_seconds": header_seconds})
