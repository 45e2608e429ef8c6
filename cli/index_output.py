"""What the commands of sop-index share: text on stdout."""

from __future__ import annotations

import sys

from sop_faiss.cli.common import one_line
from sop_faiss.cli.json_output import put_json

__all__ = ["counted", "for_stdout", "named", "put_json"]


def counted(dropped: dict[str, int]) -> str:
    """Write counts by reason as `truncated 3, empty 1`."""
    return one_line(", ".join(f"{reason} {count}" for reason, count in dropped.items()))


def named(key: str, label: str | None) -> str:
    """Name an image by its key, and its class where it has one."""
    return one_line(key) + (f"  [{one_line(label)}]" if label is not None else "")


def for_stdout(text: str) -> bytes:
    """Encode text for stdout; without control characters where that is a terminal, which would obey them."""
    if sys.stdout.isatty():
        text = "".join(letter if letter.isprintable() or letter in "\r\n" else "?" for letter in text)
    return text.encode()
