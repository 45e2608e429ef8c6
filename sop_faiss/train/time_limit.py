"""The length of a run in minutes (`train.minutes`): decided once, in steps, from the speed of its first ones."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

from sop_faiss import distributed
from sop_faiss.train.state import RunState

__all__ = ["TimeLimit"]

_log = logging.getLogger(__name__)

_MEASURED_SHARE = 0.05
"""Fraction of the time after which the number of steps is decided; until then the schedules stay at their start."""
_LEAST_STEPS = 10
"""Steps measured at least. The first half of them does not count: it compiles, and empties what workers had ready."""
_GRACE = 1.1
"""A run that has become slower ends at this many times its minutes."""


class TimeLimit:
    """Counts the seconds of a run's steps, and decides how many steps it has; without `train.minutes` it does nothing.

    All ranks have one, and the main rank's clock decides for all.

    Args:
        state: the run, which keeps the seconds and the decision in its checkpoints.
        now: the time in seconds.
    """

    def __init__(self, state: RunState, now: Callable[[], float] = time.monotonic) -> None:
        self._state, self._now = state, now
        self._limit = 60.0 * state.config.train.minutes
        self._since = now()
        self._steps: list[float] = []

    def start(self) -> None:
        """Start to count; the time since the last step does not count."""
        self._since = self._now()

    def after_step(self) -> int:
        """Count a step that has just ended, and decide the number of steps if it is time to; all ranks together.

        Returns:
            The run's last step; an estimate while it is not decided.

        Raises:
            ConfigError: the run would be shorter than its warm-up.
        """
        state = self._state
        if not self._limit:
            return state.last_step
        now = self._now()
        self._steps.append(now - self._since)
        state.training_seconds += now - self._since
        self._since = now
        decided = distributed.decide(self._decide)
        if decided is not None and decided != state.schedules.decided_steps:
            if state.schedules.is_decided:
                _log.warning("train.minutes: steps have become slower, so the run ends at step %d", decided)
            else:
                _log.info("train.minutes = %g: %d steps", state.config.train.minutes, decided)
            state.schedules = state.schedules.decided(decided)
        return state.last_step if state.schedules.is_decided else self._estimated()

    def _decide(self) -> int | None:
        """Return the number of steps; None if the speed is not known yet."""
        state, known = self._state, self._state.schedules.decided_steps
        if known is not None:
            return min(known, state.step + 1) if state.training_seconds >= _GRACE * self._limit else known
        is_measured = len(self._steps) >= _LEAST_STEPS and state.training_seconds >= _MEASURED_SHARE * self._limit
        return self._estimated() if is_measured or state.training_seconds >= self._limit else None

    def _estimated(self) -> int:
        """Return how many steps the run has at the speed of the later half of the steps measured."""
        seconds = statistics.fmean(self._steps[len(self._steps) // 2 :])
        left = self._limit - self._state.training_seconds
        return self._state.step + max(1, int(left / max(seconds, 1e-9)))
