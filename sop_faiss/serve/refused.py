"""Requests that are refused: one line and an HTTP status, never a path or a traceback."""

from __future__ import annotations

from sop_faiss.data.images.decode import drop_reason
from sop_faiss.errors import DataError, one_line

__all__ = ["Refused", "refused_image"]

_STATUS = {"not-an-image": 415, "too-many-pixels": 413, "elongated": 413}
"""By the reason of an image that cannot be used; 400 for all others, which are damaged."""


class Refused(Exception):
    """A request that is answered by a status of 4xx or 503 and one line of text.

    Args:
        status: HTTP status.
        message: what, got, wanted, remedy; shown to whoever asked.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(one_line(message))
        self.status = status


def refused_image(error: DataError) -> Refused:
    """What a client is told about an image that it sent; the messages of the decoder name no files."""
    return Refused(_STATUS.get(drop_reason(error), 400), str(error))
