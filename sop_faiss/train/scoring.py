"""Quality while training: when the teacher is scored, beside the steps or between them, and what becomes of the score.

How it is scored is handed in from above, since training does not know of evaluation.

In the background one thread scores a copy of the teacher while the loop goes on; one score at a time, so that the next
one waits for it. The steps do not depend on it in any bit. The score at step 0, and one that a resumed run has to
measure again, are measured before the first step: worker processes, which are forked there, find no other thread.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from sop_faiss.model.networks import Network
from sop_faiss.train.checkpoints.checkpoint import write_best
from sop_faiss.train.log.monitor import Monitor
from sop_faiss.train.score_history import Measured
from sop_faiss.train.state import RunState
from sop_faiss.train.stop import StopRequest

__all__ = ["Evaluation", "Scoring", "runs_in_background"]

_log = logging.getLogger(__name__)


@runtime_checkable
class Evaluation(Protocol):
    """Scores a teacher, in percent, by name."""

    @property
    def best_by(self) -> str:
        """The score that `best/` follows."""
        ...

    def __call__(self, teacher: Network) -> dict[str, float]:
        """The scores of a teacher, which is only read."""
        ...


def runs_in_background(background: str, device: torch.device) -> bool:
    """Whether scores are measured beside the steps: as `evaluate.background` says, and for `auto` on a CUDA device.

    There the thread's decoding and waiting fall where the loop waits for the device. On a CPU both want the same cores.
    """
    return device.type == "cuda" if background == "auto" else background == "always"


class _NoLongerWanted(Exception):
    """Ends a measurement that nobody waits for."""


class Scoring:
    """Scores the teacher at step 0, at multiples of `evaluate.every_steps` and at the end; keeps the best in `best/`.

    Args:
        state: the run.
        run: its directory.
        monitor: takes the scores; None on all ranks but the main one, which alone does something.
        evaluate: scores a teacher; None: nothing is scored.
        last: the step that training ends at.
        stop: asked to stop the run where a measurement fails.
    """

    def __init__(
        self,
        state: RunState,
        run: Path,
        monitor: Monitor | None,
        evaluate: Evaluation | None,
        last: int,
        stop: StopRequest,
    ) -> None:
        self._state, self._run, self._monitor, self._last, self._stop = state, run, monitor, last, stop
        self._evaluate = evaluate if monitor is not None else None
        self._background = runs_in_background(state.config.evaluate.background, state.device)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[dict[str, float]] | None = None
        self._failure: Exception | None = None
        self._closed = False

    def begin(self) -> None:
        """Before the first step: score step 0, or again what was being measured when a checkpoint was written.

        Raises:
            SopError: as the evaluation raises.
        """
        evaluate, history = self._evaluate, self._state.scores
        if evaluate is None:
            return
        history.follow(evaluate.best_by)
        if self._state.step == 0:
            history.measured = Measured(0, self._state.teacher)
        if history.measured is not None:
            self._keep(evaluate(history.measured.teacher))

    def after_step(self) -> None:
        """After every step: take in a score that has come, and measure if this step is due.

        A measurement that fails asks the run to stop, which saves it first; see `raise_failure`.
        """
        if self._evaluate is None or self._failure is not None:
            return
        step, every = self._state.step, self._state.config.evaluate.every_steps
        is_due = step == self._last or step % every == 0
        if self._pending is not None and (is_due or self._pending.done()):
            self._take(self._pending.result)
        if is_due and self._failure is None:
            self._measure(self._evaluate)

    def _measure(self, evaluate: Evaluation) -> None:
        teacher, at_end = self._state.teacher, self._state.step == self._last
        if not self._background or at_end:
            self._state.scores.measured = Measured(self._state.step, teacher)
            self._take(lambda: evaluate(teacher))
            return
        frozen = copy.deepcopy(teacher)
        frozen.backbone.register_forward_pre_hook(self._end_if_closed)
        self._state.scores.measured = Measured(self._state.step, frozen)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "scores", initializer=self._choose_device)
        self._pending = self._thread.submit(evaluate, frozen)

    def _choose_device(self) -> None:
        """A thread begins with CUDA's first device, whatever the others use."""
        if self._state.device.type == "cuda":
            torch.cuda.set_device(self._state.device)

    def _end_if_closed(self, *_: Any) -> None:
        if self._closed:
            raise _NoLongerWanted

    def _take(self, outcome: Callable[[], dict[str, float]]) -> None:
        self._pending = None
        try:
            self._keep(outcome())
        except Exception as error:
            self._failure, self._stop.requested = error, True
            step = self._state.step
            _log.error("the teacher could not be scored: the run is saved at step %d and stops", step)

    def _keep(self, scores: dict[str, float]) -> None:
        history, state = self._state.scores, self._state
        measured = history.measured
        assert measured is not None and self._monitor is not None
        step, score = measured.step, scores[history.metric]
        _log.info("step %d: %s", step, ", ".join(f"{name} {score:.2f} %" for name, score in scores.items()))
        if history.is_best(step, score):  # written before it counts, so that a full disk loses nothing
            write_best(self._run, step, {"teacher": measured.teacher.state_dict()}, scores)
        history.add(step, score)
        history.measured = None
        place = {"epoch": step / state.schedules.steps_per_epoch, "images": step * state.config.train.batch_size}
        self._monitor.log({"step": step, **place, **scores})

    def raise_failure(self) -> None:
        """Raise what a measurement failed with, if one did; for when the run is saved."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the measurement in the background, within a batch of images; a resumed run takes it up again."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
