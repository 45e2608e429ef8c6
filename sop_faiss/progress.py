"""How long work reports its progress: the library calls back, the commands draw the bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["ProgressCallback", "Stage"]

ProgressCallback = Callable[[int, int], None]
"""Called as `progress(done, total)` from time to time, `done` rising to `total`; must be cheap and must not raise."""

Stage = Callable[[str, str], AbstractContextManager[ProgressCallback]]
"""Announces a stage of work (what, unit) and yields the callback for its progress."""
