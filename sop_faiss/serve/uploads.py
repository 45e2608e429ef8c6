"""Images from the bodies of requests: limited in bytes, in time, and in total over all clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from sop_faiss.serve.options import ServeOptions
from sop_faiss.serve.refused import Refused

_SEVERAL = 4
"""Times the size of one image: largest body with several."""
_JSON_COPIES = 3
"""Of the bytes of such a body in memory: as text, parsed, and decoded."""


class UploadReader:
    """A reader of bodies; it runs in one event loop, so its count needs no lock."""

    def __init__(self, options: ServeOptions) -> None:
        self._max_bytes = options.max_upload_bytes
        self._seconds = options.upload_seconds
        self._room = self._most = options.max_buffered_bytes

    @contextlib.asynccontextmanager
    async def read(self, request: Request, *, several: bool = False) -> AsyncIterator[bytes]:
        """Read the body's bytes; they count as buffered until the context is left.

        The body is counted as it arrives; Content-Length only serves to refuse early.

        Args:
            request: whose body.
            several: the body is JSON with several images, which may be four times as large.

        Raises:
            Refused: the body is not of that type (415), empty (400), too large (413), too slow (408), or too much is
                buffered now (503).
        """
        _check_type(request.headers.get("content-type", ""), several)
        copies = _JSON_COPIES if several else 1
        most = min(_SEVERAL * self._max_bytes, self._most // copies) if several else self._max_bytes
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
            raise _too_large(most, several)
        taken = 0
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    async for part in request.stream():
                        if taken + len(part) > most:
                            raise _too_large(most, several)
                        if len(part) * copies > self._room:
                            raise Refused(503, "too many images are being received: try again in a few seconds")
                        self._room -= len(part) * copies
                        taken += len(part)
                        parts.append(part)
            except TimeoutError:
                raise Refused(408, f"the image took longer than {self._seconds:g} s to arrive") from None
            except ClientDisconnect:
                raise Refused(400, "the connection ended within the image") from None
            if not taken:
                what = "a JSON object" if several else "those of an image file"
                raise Refused(400, f"empty: the body has no bytes, wanted {what}")
            yield b"".join(parts)
        finally:
            self._room += taken * copies


def _too_large(most: int, several: bool) -> Refused:
    what = "body has" if several else "image file has"
    return Refused(413, f"too-large: the {what} more than {most / 1e6:,.1f} MB: send a smaller one")


def _check_type(content_type: str, several: bool) -> None:
    """Refuse forms, which pages of other sites can send without permission."""
    kind = content_type.partition(";")[0].strip().lower()
    if several and kind != "application/json":
        raise Refused(415, "the body's type is not JSON: send it with Content-Type: application/json")
    if not several and not kind.startswith("image/") and kind != "application/octet-stream":
        raise Refused(
            415, "the body's type is not an image: send the file's bytes with Content-Type: application/octet-stream"
        )
