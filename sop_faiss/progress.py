"""How long work reports how far it is: the library calls back, the commands draw the bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["ProgressCallback", "Stage"]

ProgressCallback = Callable[[int, int], None]
"""Called as `progress(done, total)` now and then, `done` rising to `total`; must be cheap and must not raise."""

Stage = Callable[[str, str], AbstractContextManager[ProgressCallback]]
"""Announces a stage of work (what, unit) and yields where its progress goes."""
