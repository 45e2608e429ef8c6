"""Images from the bodies of requests: limited in bytes, in time, and in total over all clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.refused import Refused


class UploadReader:
    """A reader of bodies; it runs in one event loop, so its count needs no lock."""

    def __init__(self, options: ServeOptions) -> None:
        self._max_bytes = options.max_upload_bytes
        self._seconds = options.upload_seconds
        self._room = options.max_buffered_bytes

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body's bytes; they count as buffered until the context is left.

        The body is counted as it arrives; Content-Length only serves to refuse early.

        Raises:
            Refused: the body is not an image by its type (415), empty (400), too large (413), too slow (408), or too
                much is buffered now (503).
        """
        _check_type(request.headers.get("content-type", ""))
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        taken = 0
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    async for part in request.stream():
                        if taken + len(part) > self._max_bytes:
                            raise self._too_large()
                        if len(part) > self._room:
                            raise Refused(503, "too many images are being received: try again in a few seconds")
                        self._room -= len(part)
                        taken += len(part)
                        parts.append(part)
            except TimeoutError:
                raise Refused(408, f"the image took longer than {self._seconds:g} s to arrive") from None
            except ClientDisconnect:
                raise Refused(400, "the connection ended within the image") from None
            if not taken:
                raise Refused(400, "empty: the body has no bytes, wanted those of an image file")
            yield b"".join(parts)
        finally:
            self._room += taken

    def _too_large(self) -> Refused:
        limit = f"{self._max_bytes / 1e6:,.1f} MB"
        return Refused(413, f"too-large: the image file has more than {limit}: send a smaller one")


def _check_type(content_type: str) -> None:
    """Refuse forms, which pages of other sites can send without permission."""
    kind = content_type.partition(";")[0].strip().lower()
    if not kind.startswith("image/") and kind != "application/octet-stream":
        raise Refused(
            415, "the body's type is not an image: send the file's bytes with Content-Type: application/octet-stream"
        )
