"""Patterns with braces, each of which names many shards."""

from __future__ import annotations

import itertools
import re

from sop_faiss.data.shards.address import hide_secrets
from sop_faiss.errors import DataError

_SHARDS_LIMIT = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def has_braces(text: str) -> bool:
    """Return whether a text has braces to expand."""
    return _BRACES.search(text) is not None


def expand_braces(text: str) -> list[str]:
    """Expand `{000..012}` (zero-padded as its left end) and `{a,b}`; of several, the leftmost changes slowest.

    Raises:
        DataError: the pattern names no shard, or more than a million.
    """
    parts: list[list[str]] = []
    count, position = 1, 0
    for match in _BRACES.finditer(text):
        ends = _RANGE.fullmatch(match[1])
        if ends:
            first, last = int(ends[1]), int(ends[2])
            size = last - first + 1
        else:
            size = match[1].count(",") + 1
        count *= size
        if size < 1 or count > _SHARDS_LIMIT:
            raise DataError(f"pattern {hide_secrets(text)} names {max(count, 0)} shards, wanted 1 to {_SHARDS_LIMIT}")
        values = [str(n).zfill(len(ends[1])) for n in range(first, last + 1)] if ends else match[1].split(",")
        parts += [[text[position : match.start()]], values]
        position = match.end()
    return ["".join(choice) for choice in itertools.product(*parts, [text[position:]])]
