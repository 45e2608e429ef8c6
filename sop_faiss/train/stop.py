"""Stopping on a signal: SIGTERM or SIGUSR1 asks the run to save and end, and a scheduler may start it again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import torch

from sop_faiss import distributed

__all__ = ["StopRequest"]


class StopRequest:
    """Whether SIGTERM or SIGUSR1 has asked the run to save and stop."""

    def __init__(self) -> None:
        self.requested = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Listen to the signals; what listened before listens again afterwards."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def anywhere(self, device: torch.device) -> bool:
        """Whether any rank was asked; all ranks get the same answer."""
        flag = torch.tensor(float(self.requested), device=device)
        return bool(distributed.average(flag) > 0)
