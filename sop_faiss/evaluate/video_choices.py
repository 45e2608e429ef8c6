"""What can be chosen about label propagation in videos, apart from it: commands show these before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.errors import ConfigError

QUICK_SIZE = 240
QUICK_FRAMES = 20


@dataclass(frozen=True)
class VideoChoices:
    """DINO's protocol on DAVIS-2017, unless changed."""

    size: int = 480
    """Shorter side of the frames, in pixels."""
    frames: int = 7
    """Frames before each one whose labels are propagated, beside the first."""
    radius: int = 12
    """Rows and columns of tokens from which labels come; 0: all."""
    top: int = 5
    """Most similar tokens whose labels count."""
    stride: int | None = None
    """Pixels from token to token: of convolutional networks, which map is taken; None: the last."""
    most_frames: int | None = None
    """Only the first frames of each sequence; None: all."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        bounds = {"size": (16, 4096), "frames": (0, 1000), "radius": (0, 1000), "top": (1, 10_000)}
        bounds |= {"stride": (1, 256), "most_frames": (3, 10**6)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"`{name}={value}`: wanted {low} to {high:,}")
