"""Stopping on a signal: SIGTERM, SIGUSR1 or Ctrl-C asks the run to save and end; it can be resumed."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from types import FrameType

import torch

from sop_faiss import distributed

REQUEUE_NAME = "requeue"
"""Name of a file in the run directory of a run that saved itself on SIGTERM or SIGUSR1 and was not yet resumed.

It means what exit status 75 means, which `torchrun` does not pass on.
"""

_log = logging.getLogger(__name__)
_SAME_PRESS_SECONDS = 1.0
"""Two interrupts within this time are one Ctrl-C: `torchrun` also passes it on to its processes."""


class StopRequest:
    """Whether SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) has asked the run to save and stop.

    Args:
        saves_after: what ends before the run is saved; the loop changes it.
        saves_on_interrupt: False: Ctrl-C ends the process at once, where nobody would continue the run.
    """

    def __init__(self, saves_after: str = "this step", *, saves_on_interrupt: bool = True) -> None:
        self.requested = False
        self.saves_after = saves_after
        self._saves_on_interrupt = saves_on_interrupt
        self._interrupted_at: float | None = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            _log.warning("%s: the run ends after %s", signal.Signals(number).name, self.saves_after)
        self.requested = True

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ask to save and stop at the first Ctrl-C, and stop at once at the second."""
        now = time.monotonic()
        if self._interrupted_at is None:
            self.requested, self._interrupted_at = True, now
            _log.warning("interrupted: saving after %s; press Ctrl-C again to stop at once", self.saves_after)
        elif now - self._interrupted_at > _SAME_PRESS_SECONDS:
            raise KeyboardInterrupt("interrupted: continue from the last checkpoint with `resume`")

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals; the handlers of before are restored afterwards.

        Raises:
            KeyboardInterrupt: at the end, after a Ctrl-C; by then the run is saved.
        """
        handlers = {signal.SIGTERM: self._note, signal.SIGUSR1: self._note}
        if (
            self._saves_on_interrupt and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
        ):  # a shell's background job is not interrupted
            handlers[signal.SIGINT] = self._note_interrupt
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._interrupted_at is not None:
            raise KeyboardInterrupt("interrupted: the run is saved, continue with `resume`")

    @property
    def interrupted(self) -> bool:
        """Return whether this process received a Ctrl-C."""
        return self._interrupted_at is not None

    def anywhere(self, device: torch.device, also: bool = False) -> bool:
        """Return, the same on all ranks, whether any rank was asked to stop or has another reason (`also`)."""
        flag = torch.tensor(float(self.requested or also), device=device)
        return bool(distributed.average(flag) > 0)
