"""Refusals of requests: one line and an HTTP status, never a path or a traceback."""

from __future__ import annotations

from sop_faiss.data.images.decode import drop_reason
from sop_faiss.errors import ConfigError, DataError, one_line, spell_arguments

_STATUS = {"not-an-image": 415, "no-heic-reader": 415, "too-many-pixels": 413, "elongated": 413}
"""The status by the reason why an image is bad; 400 for all others, which are damaged."""


class Refused(Exception):
    """A request is refused with a status of 4xx or 503 and one line of text.

    Args:
        status: HTTP status.
        message: what, got, wanted, remedy; shown to the client.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(one_line(message))
        self.status = status


def refused_image(error: DataError) -> Refused:
    """Make the refusal of an image that a client sent; the messages of the decoder name no files."""
    return Refused(_STATUS.get(drop_reason(error), 400), str(error))


def refused_request(error: ConfigError) -> Refused:
    """Make the refusal of what a client asked for (422); arguments have the names of parameters."""
    return Refused(422, spell_arguments(str(error), lambda name: name))
