"""Time spent training, step by step: what a budget of minutes means, and the axis of curves against minutes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from sop_faiss.train.log.json_lines import keep_lines_until, read_lines

_KEPT = 101
"""Steps whose median stands for a step that also measures scores."""
_WRITE_SECONDS = 2.0


def read_clock(file: Path) -> list[tuple[int, float]]:
    """Return (step, seconds of training until its end) as a clock wrote them, rising."""
    return [(line["step"], float(line["seconds"])) for line in read_lines(file) if "seconds" in line]


class StepClock:
    """A progress callback of training that sums the seconds of the steps, over resumes, and says when they are over.

    Starting up, opening data and filling memories do not count: a session's clock starts at the end of its first step,
    which counts as the median of the next ones. A step after which scores are measured counts as the median of those
    before it, so that scores cost nothing. Steps that a kill has lost and that are made again count once.

    Args:
        file: gets a line now and then; a later session continues from it.
        score_every: scores are measured after multiples of this, and after the last step (0: never).
        save_every: checkpoints are saved at multiples of this, where a session may continue.
        limit_seconds: when to call `stop` (0: never).
        stop: asks training to stop.
        now: the time in seconds.
    """

    def __init__(
        self,
        file: Path,
        score_every: int = 0,
        save_every: int = 0,
        limit_seconds: float = 0.0,
        stop: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._score_every, self._save_every = file, score_every, save_every
        self._limit, self._stop, self._now = limit_seconds, stop, now
        lines = read_clock(file)
        self.step, self.seconds = lines[-1] if lines else (0, 0.0)
        self._before: float | None = None
        self._uncounted = 0  # steps before the median was known
        self._recent: list[float] = []
        self._written_at, self._written_step = -_WRITE_SECONDS, self.step

    @property
    def is_over(self) -> bool:
        """Return whether the limit is reached."""
        return self._limit > 0 and self.seconds >= self._limit

    def __call__(self, step: int, last: int) -> None:
        """Count a step that has just ended."""
        now = self._now()
        if self._before is None:
            self.rewind(step - 1)
        measured = self._score_every > 0 and (step % self._score_every == 0 or step == last)
        if self._before is None or measured:
            self._uncounted += 1
        else:
            self._recent = [*self._recent[1 - _KEPT :], now - self._before]
            self.seconds += now - self._before
        if self._recent:
            self.seconds += self._uncounted * statistics.median(self._recent)
            self._uncounted = 0
        self._before, self.step = now, step
        saved = self._save_every > 0 and step % self._save_every == 0
        if measured or saved or now - self._written_at >= _WRITE_SECONDS:
            self.write()
        if self.is_over:
            self._stop()

    def write(self) -> None:
        """Write the time until the last step, unless some of it is not known yet."""
        if self.step > self._written_step and not self._uncounted:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": self.step, "seconds": round(self.seconds, 4)}) + "\n")
            self._written_at, self._written_step = self._now(), self.step

    def rewind(self, step: int) -> None:
        """Forget what was counted of steps after this one, which are made again."""
        keep_lines_until(self._file, step)
        lines = read_clock(self._file)
        self.step, self.seconds = lines[-1] if lines else (0, 0.0)
        self._written_step = self.step
