"""What the checks of the configuration's sections are written with: each raises one line."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sop_faiss.errors import ConfigError

__all__ = ["require", "require_finite", "require_one_of", "require_range", "require_share"]


def require(condition: bool, what: str) -> None:
    """Raise `what`, the whole message, unless the condition holds."""
    if not condition:
        raise ConfigError(what)


def require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not among the allowed ones; the nearest is suggested."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name} = {value!r}: wanted one of {', '.join(allowed)}{hint}")


def require_range(name: str, bounds: tuple[float, float], low: float, high: float) -> None:
    """Refuse bounds that are not ordered or lie outside [low, high]."""
    require(low <= bounds[0] <= bounds[1] <= high, f"{name} = {bounds}: wanted {low} <= smaller <= larger <= {high}")


def require_finite(section: str, settings: Any) -> None:
    """Refuse NaN and infinity in any field of a section."""
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        for number in value if isinstance(value, tuple) else (value,):
            require(
                not isinstance(number, float) or math.isfinite(number),
                f"{section}.{entry.name} = {value}: wanted finite numbers",
            )


def require_share(name: str, value: float) -> None:
    """Refuse what is not between 0 and 1."""
    require(0.0 <= value <= 1.0, f"{name} = {value}: wanted a share between 0 and 1")
