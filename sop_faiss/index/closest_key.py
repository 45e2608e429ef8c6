"""The key that was probably meant, for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+")


def closest_key(key: str, keys: Sequence[str]) -> str:
    """Suggest a key as `; did you mean 'x'?`, or return an empty string.

    A key with another number is another image, and not suggested: photos are numbered.
    """
    longer = [each for each in keys if each.endswith(f"/{key}")]  # the same name, which has its folder now
    if len(longer) == 1:
        return f"; did you mean {longer[0]!r}?"
    numbers = _NUMBER.findall(key)
    alike = [each for each in keys[:100_000] if _NUMBER.findall(each) == numbers]
    near = difflib.get_close_matches(key, alike, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
