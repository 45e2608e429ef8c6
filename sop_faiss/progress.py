"""How long work reports its progress: the library calls back, the commands draw the bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

ProgressCallback = Callable[[int, int], None]
"""Called as `progress(done, total)` from time to time, `done` rising to `total`; must be cheap and must not raise."""

Stage = Callable[[str, str], AbstractContextManager[ProgressCallback]]
"""Announces a stage of work (what, unit) and yields the callback for its progress. Stages may be nested."""


@contextmanager
def silent_stage(what: str, unit: str) -> Iterator[ProgressCallback]:
    """Report nothing; a `Stage` for callers that want no reports."""
    yield lambda done, total: None
