"""Checkpoints that do not stall training: copied at their step, then written by a thread."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.train.checkpoints.checkpoint import prune_checkpoints, write_checkpoint
from sop_faiss.train.log.stopped import check_weights
from sop_faiss.train.state import RunState

_log = logging.getLogger(__name__)


class CheckpointSaver:
    """Saves a run; every rank has a saver, and only the main rank's writes files.

    At most one write runs at a time. It writes a copy, so that the next steps may change the state meanwhile; the next
    save fills the same copy again instead of allocating another. With `train.background_save` off there is neither
    thread nor copy.

    Args:
        state: the run to save.
        run: the run directory.
    """

    def __init__(self, state: RunState, run: Path) -> None:
        self._state = state
        self._run = run
        self._settings = state.config.train
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Return whether a write in the background has failed; `save` or `finish` will raise its error."""
        return self._error is not None

    def save(self, *, wait: bool) -> None:
        """Save the run as it is now, after the write that still runs, if any; all ranks together.

        Args:
            wait: return only when the checkpoint is complete.

        Raises:
            RunStoppedError: a weight is not finite.
            OSError: this write, or the one before it, failed, for example on a full disk; on every rank. Complete
                checkpoints stay.
        """
        check_weights(self._state, self._run)
        # of a sharded student, each rank must provide its part
        tensors = self._state.tensors() if distributed.is_main() or self._state.is_sharded else {}
        distributed.decide(lambda: self._start(tensors))
        if wait:
            distributed.decide(self.finish)

    def finish(self) -> None:
        """Wait for the write that still runs, if any.

        Raises:
            OSError: the write has failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the write that still runs, when the run ends for another reason; log a failure."""
        try:
            self.finish()
        except OSError as error:
            _log.warning("the last checkpoint was not written: %s", error)

    def _start(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Start a write; on the main rank."""
        self.finish()
        step, counters = self._state.step, copy.deepcopy(self._state.counters())
        prune = not self._state.alarms.may_stop_soon  # a run that may be lost keeps all its checkpoints
        if not self._settings.background_save:
            self._write(step, tensors, counters, prune)
            return
        self._copy(tensors)
        self._thread = threading.Thread(
            target=self._write_noting, args=(step, self._copies, counters, prune), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, step: int, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any], prune: bool) -> None:
        write_checkpoint(self._run, step, tensors, counters)
        if prune:
            prune_checkpoints(self._run, self._settings)

    def _write_noting(
        self, step: int, tensors: dict[str, dict[str, Tensor]], counters: dict[str, Any], prune: bool
    ) -> None:
        """Write, in the thread, and keep an error for the training thread."""
        try:
            self._write(step, tensors, counters, prune)
        except BaseException as error:
            self._error = error

    @torch.no_grad()
    def _copy(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Copy all tensors to main memory, page-locked where they come from a GPU."""
        former, self._copies = self._copies, {}
        for file, content in tensors.items():
            kept = former.get(file, {})
            self._copies[file] = {name: _copied(value, kept.get(name)) for name, value in content.items()}
        if self._state.device.type == "cuda":
            torch.cuda.synchronize(self._state.device)


def _copied(value: Tensor, former: Tensor | None) -> Tensor:
    """Copy to the CPU, into a former copy of the same shape if there is one; on CUDA the copy may still run."""
    if former is None or former.shape != value.shape or former.dtype != value.dtype:
        former = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return former.copy_(value, non_blocking=True)
