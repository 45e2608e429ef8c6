"""Parts of a run whose views have other sizes: low resolution first, then full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sop_faiss.config.checks import require, require_finite, shown
from sop_faiss.errors import ConfigError

PHASES_WANTED = "wanted a list of phases, as [{until: 0.7, global_size: 96, local_size: 48}]"


@dataclass(frozen=True)
class PhaseConfig:
    """The first part of a run, or the one after another phase, with views of its own sizes."""

    until: float
    """Fraction of the run's steps at which it ends."""
    global_size: int
    """Side of global views in pixels."""
    local_size: int | None = None
    """Side of local views in pixels; null: as in `views`."""


def phases_of(entries: Sequence[Any]) -> tuple[PhaseConfig, ...]:
    """Return what a user has written as phases.

    Raises:
        ConfigError: an entry is not a section of known settings with values of their kind.
    """
    return tuple(_phase_of(f"train.phases[{place}]", entry) for place, entry in enumerate(entries))


def _phase_of(name: str, entry: Any) -> PhaseConfig:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{name} = {shown(entry)}: {PHASES_WANTED}")
    known = [each.name for each in fields(PhaseConfig)]
    for key, value in entry.items():
        if key not in known:
            blank = "; write a blank after each colon" if ":" in str(key) else ""
            raise ConfigError(f"{name} has {shown(repr(key))}: wanted {', '.join(known)}{blank}")
        is_number = isinstance(value, int | float if key == "until" else int) and not isinstance(value, bool)
        kind = "a number" if key == "until" else "a whole number"
        require(is_number or (key == "local_size" and value is None), f"{name}.{key} = {shown(value)}: wanted {kind}")
    for key in ("until", "global_size"):
        require(key in entry, f"{name} lacks {key}: {PHASES_WANTED}")
    until = float(min(max(entry["until"], -(10**9)), 10**9))  # a whole number of any size is refused by `check_phases`
    return PhaseConfig(until, entry["global_size"], entry.get("local_size"))


def check_phases(phases: Sequence[PhaseConfig]) -> None:
    """Raise ConfigError unless the phases end one after the other within the run, and their sizes can be views'."""
    before = 0.0
    for place, phase in enumerate(phases):
        name = f"train.phases[{place}]"
        require_finite(name, phase)
        require(
            before < phase.until < 1,
            f"{name}.until = {phase.until:g}: wanted a share of the run's steps, more than {before:g} and less than 1",
        )
        for key in ("global_size", "local_size"):
            size = getattr(phase, key)
            require(size is None or 8 <= size <= 4096, f"{name}.{key} = {size}: wanted 8 to 4096 pixels")
        before = phase.until
