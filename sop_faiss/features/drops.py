"""The images that an extraction could not use: counted by reason, and too many of them are an error."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sop_faiss.data.images.decode import drop_reason
from sop_faiss.data.images.source import ImageSource
from sop_faiss.errors import DataError
from sop_faiss.features.file_states import FileState

_LISTED_DROPS = 100_000
"""Dropped images listed by name in the manifest; all are counted."""
_NAMED = 3
"""Of them in an error."""


class Drops:
    """The unusable images of an extraction by reason; it stops when there are too many.

    Args:
        source: the images.
        max_bad_fraction: share of them that may be unusable.
    """

    def __init__(self, source: ImageSource, max_bad_fraction: float) -> None:
        self.source = source
        self.max_bad_fraction = max_bad_fraction
        self.reasons: Counter[str] = Counter()
        self.listed: list[dict[str, Any]] = []

    def add(self, position: int, error: DataError, state: FileState | None = None) -> None:
        """Count an image that cannot be used; `state` is what was read of it, if known.

        Raises:
            DataError: there are too many of them.
        """
        reason = drop_reason(error)
        self.reasons[reason] += 1
        if len(self.listed) < _LISTED_DROPS:
            source, member = self.source.source_of(position), self.source.member_of(position)
            key = self.source.keys[position]
            listed: dict[str, Any] = {
                "key": key,
                "source": source,
                "member": member,
                "reason": reason,
                "error": str(error),
            }
            if state is not None:
                listed |= {"size": state.size, "mtime_ns": state.time, "sha256": state.digest.hex()}
            self.listed.append(listed)
        self.check()

    def check(self) -> None:
        """Raise DataError if too many are unusable so far."""
        total, bad = len(self.source), self.reasons.total()
        if bad > self.max_bad_fraction * total:
            if self.max_bad_fraction == 0:
                raise DataError(
                    f"{self.source.description}: {bad} of {total} images are unusable so far{self.summary()}, "
                    "and every one is needed: repair them or leave them out of the data"
                )
            raise DataError(
                f"{self.source.description}: {bad} of {total} images are unusable so far{self.summary()}, more than "
                f"`max_bad_fraction={self.max_bad_fraction}`: repair or remove them, or raise it"
            )

    def summary(self) -> str:
        """Return the counts by reason and the first errors in parentheses; nothing where all is well."""
        if not self.reasons:
            return ""
        counted = ", ".join(f"{reason} {count}" for reason, count in self.reasons.most_common())
        first = "; ".join(f"{each['member']}: {each['error']}" for each in self.listed[:_NAMED])
        return f" ({counted}; first {first})"

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest's `dropped`."""
        return {"count": self.reasons.total(), "reasons": dict(self.reasons), "images": self.listed}
