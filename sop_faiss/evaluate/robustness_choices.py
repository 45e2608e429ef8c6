"""What can be chosen about robustness curves, apart from them: commands show these before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sop_faiss.errors import ConfigError

SHARES = tuple(tenths / 10 for tenths in range(1, 10))
"""Of the patches, dropped."""
GRIDS = (1, 2, 4, 8, 14, 16)
"""Rows and columns of tiles that change places; iBOT's square ones, and 1, which changes nothing."""
QUICK = {"shares": (0.25, 0.5, 0.75), "grids": (2, 4, 8), "most_train": 1000, "most_test": 200}
"""The short form."""
_PATCHES = 14
"""Rows and columns of patches: 16 pixels each at 224, as in iBOT's evaluation of every network."""


@dataclass(frozen=True)
class RobustnessChoices:
    """iBOT's curves, unless changed."""

    shares: tuple[float, ...] = SHARES
    """Of the patches, each from 0 to 1."""
    grids: tuple[int, ...] = ()
    """Of shuffled tiles; each divides the side of the images. Empty: those of `GRIDS` that do."""
    patches: int | None = None
    """Rows and columns of patches that are dropped; None: the largest number up to 14 that divides the side."""
    k: int = 20
    """Neighbors that vote."""
    seed: int = 0
    """Of the dropped patches and the shuffling."""
    most_train: int | None = None
    """Training images, spread evenly over the set; None: all."""
    most_test: int | None = None
    """Test images, spread in the same way."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise ConfigError(f"`shares={_listed(self.shares)}`: wanted shares of the patches, each from 0 to 1")
        bounds = {"patches": (1, 1024), "k": (1, 10**6), "seed": (0, 2**63 - 1)}
        bounds |= {"most_train": (2, 10**9), "most_test": (1, 10**9)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"`{name}={value}`: wanted {low:,} to {high:,}")
        for name in ("shares", "grids"):
            values: tuple[float, ...] = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"`{name}={_listed(values)}`: wanted different ones")

    def for_side(self, side: int) -> tuple[int, tuple[int, ...]]:
        """Return rows and columns of the patches, and the grids of shuffled tiles, for square images of this side.

        Raises:
            ConfigError: one does not divide the side.
        """
        patches = self.patches or max(each for each in range(1, _PATCHES + 1) if side % each == 0)
        grids = self.grids or tuple(each for each in GRIDS if side % each == 0)
        for name, value in (("patches", patches), *(("grids", each) for each in grids)):
            if value < 1 or side % value:
                raise ConfigError(f"`{name}={value}`: does not divide the images' {side} pixels: choose another")
        return patches, grids


def _listed(values: Sequence[float] | Sequence[int]) -> str:
    return ", ".join(f"{value:g}" for value in values)
