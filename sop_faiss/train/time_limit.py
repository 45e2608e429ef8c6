"""The length of a run in minutes (`train.minutes`): decided once, in steps, from the speed of its first ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from sop_faiss import distributed
from sop_faiss.train.state import RunState

_log = logging.getLogger(__name__)

_MARK_SHARE, _DECIDE_SHARE = 0.025, 0.05
"""Fractions of the time from which on speed is measured, and after which the number of steps is decided; until then the
schedules stay at their start. What comes first does not count: it compiles, and empties what workers had ready."""
_LEAST_STEPS = 5
"""Steps before the speed is measured, and steps measured, at least."""
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
        state.elapsed.seconds += now - self._since
        self._since = now
        decided = distributed.decide(self._decide)
        if decided is not None and decided != state.schedules.decided_steps:
            is_cut = state.schedules.is_decided  # as it is, even within a warm-up, so that nothing is lost
            if distributed.is_main():
                slower = ", since steps have become slower" if is_cut else ""
                _log.info("train.minutes = %g: %d steps%s", state.config.train.minutes, decided, slower)
            schedules = state.schedules
            state.schedules = replace(schedules, decided_steps=decided) if is_cut else schedules.decided(decided)
        return state.last_step if state.schedules.is_decided else self._estimated()

    def _decide(self) -> int | None:
        """Return the number of steps; None if the speed is not known yet."""
        step, known, elapsed = self._state.step, self._state.schedules.decided_steps, self._state.elapsed
        if known is not None:
            return min(known, step + 1) if elapsed.seconds >= _GRACE * self._limit else known
        if not elapsed.mark_step and step >= _LEAST_STEPS and elapsed.seconds >= _MARK_SHARE * self._limit:
            elapsed.mark_step, elapsed.mark_seconds = step, elapsed.seconds
        is_measured = elapsed.mark_step and step - elapsed.mark_step >= _LEAST_STEPS
        is_time = elapsed.seconds >= _DECIDE_SHARE * self._limit
        return self._estimated() if (is_measured and is_time) or elapsed.seconds >= self._limit else None

    def _estimated(self) -> int:
        """Return how many steps the run has at the speed since the mark, or of all steps before there is one."""
        step, elapsed = self._state.step, self._state.elapsed
        is_marked = 0 < elapsed.mark_step < step
        since, steps = (elapsed.mark_seconds, step - elapsed.mark_step) if is_marked else (0.0, step)
        return step + max(1, int((self._limit - elapsed.seconds) / max((elapsed.seconds - since) / steps, 1e-9)))
