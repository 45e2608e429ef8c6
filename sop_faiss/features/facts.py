"""What the manifest of a feature store says of how its features were made, and whether that is of the right kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["odd_fact"]


def odd_fact(manifest: Mapping[str, Any]) -> str | None:
    """Name an entry that is there and not of the kind that the extraction writes, since a manifest may be edited."""
    return next((name for name, is_right in _FACTS.items() if name in manifest and not is_right(manifest[name])), None)


def _is_encoder(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("name", "fingerprint"))


def _is_dropped(value: Any) -> bool:
    counts = value.get("reasons", {}) if isinstance(value, dict) else None
    return isinstance(counts, dict) and all(isinstance(count, int) for count in counts.values())


def _is_scores(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    scores = value.get("first_score"), value.get("best_score")
    are_numbers = all(isinstance(score, int | float) and math.isfinite(score) for score in scores)
    return are_numbers and isinstance(value.get("best_by"), str)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_FACTS: dict[str, Callable[[Any], bool]] = {
    "encoder": _is_encoder,
    "preprocess": lambda value: isinstance(value, dict),
    "pooling": lambda value: isinstance(value, str),
    "root": lambda value: isinstance(value, str),
    "class_names": _are_names,
    "dropped": _is_dropped,
    "scores": _is_scores,
}
