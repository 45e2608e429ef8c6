"""What a message to the user must look like."""

from __future__ import annotations

import pytest

from sop_faiss.errors import SopError


def assert_one_line(error: pytest.ExceptionInfo[SopError], *parts: str) -> None:
    """The message is one line and holds each of the parts."""
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message
