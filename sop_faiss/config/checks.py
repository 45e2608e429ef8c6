"""Checks of settings; each raises a ConfigError with a message of one line."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sop_faiss.errors import ConfigError, one_line

_SHOWN_LENGTH = 60  # so that a long value does not hide the rest of a message


def shown(text: object) -> str:
    """Return what a user has written for a message: at most 60 characters, without control characters."""
    printable = one_line(str(text))
    return printable if len(printable) <= _SHOWN_LENGTH else printable[:_SHOWN_LENGTH] + "..."


def require(condition: bool, what: str) -> None:
    """Raise `what`, the complete message, unless the condition holds."""
    if not condition:
        raise ConfigError(what)


def require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not among the allowed ones, and suggest the nearest."""
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name} = {shown(repr(value))}: wanted one of {', '.join(allowed)}{hint}")


def require_range(name: str, bounds: tuple[float, float], low: float, high: float) -> None:
    """Refuse bounds that are not ordered or are outside [low, high]."""
    require(low <= bounds[0] <= bounds[1] <= high, f"{name} = {bounds}: wanted {low} <= smaller <= larger <= {high}")


def require_between(name: str, value: int | float, low: int, high: int) -> None:
    """Refuse a number outside [low, high]."""
    require(low <= value <= high, f"{name} = {value}: wanted {low:,} to {high:,}")


def require_finite(section: str, settings: Any) -> None:
    """Refuse NaN and infinity in any field of a section, and integers of more than 64 bits."""
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        for number in value if isinstance(value, tuple) else (value,):
            require(
                not isinstance(number, float) or math.isfinite(number),
                f"{section}.{entry.name} = {value}: wanted finite numbers",
            )
            require(
                not isinstance(number, int) or abs(number) < 2**63,
                f"{section}.{entry.name} is an integer of more than 64 bits: wanted a smaller one",
            )


def require_share(name: str, value: float) -> None:
    """Refuse a value that is not between 0 and 1."""
    require(0.0 <= value <= 1.0, f"{name} = {value}: wanted a share between 0 and 1")
