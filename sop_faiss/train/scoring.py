"""Quality during training: when the teacher is scored, and what is done with its scores.

The evaluation is passed in by the caller, since the floor of training is below that of evaluation.

In the background, one thread scores a copy of the teacher while the loop continues; the next score waits for the one
before it. The steps do not depend on it, to the bit. Step 0, and a teacher that a resumed run must measure again, are
scored before the first step, because worker processes are forked there, which must not happen next to another thread.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from sop_faiss.bootstrap import Score
from sop_faiss.config import EvaluateConfig
from sop_faiss.model.networks import Network
from sop_faiss.progress import ProgressCallback, Stage, silent_stage
from sop_faiss.train.checkpoints.checkpoint import write_best
from sop_faiss.train.log.monitor import Monitor
from sop_faiss.train.score_history import Measured
from sop_faiss.train.state import RunState
from sop_faiss.train.stop import StopRequest
from sop_faiss.train.verdict import describe_difference

Announce = Callable[[], AbstractContextManager[ProgressCallback]]
"""Announces a part of a measurement, and yields the callback for the images that it reads."""


def unannounced() -> AbstractContextManager[ProgressCallback]:
    """Report nothing."""
    return silent_stage("", "")


_log = logging.getLogger(__name__)
_HOW = ("every_steps", "background", "batch_size", "best_by", "label_free")
"""Settings of `evaluate` that do not change what is measured on which images."""
_LATER = ("pooling", "mirrored")
"""Settings that earlier versions did not have; by default they are empty or False."""


@runtime_checkable
class Evaluation(Protocol):
    """Scores a teacher, in percent, by name."""

    @property
    def best_by(self) -> str:
        """Return the name of the score that `best/` follows."""
        ...

    def __call__(self, teacher: Network, announce: Announce) -> Mapping[str, Score]:
        """Return the scores of a teacher, without changing it."""
        ...


def runs_in_background(background: str, device: torch.device) -> bool:
    """Return whether scores are measured during the steps: as `evaluate.background` says; `auto`: on a CUDA device.

    There the thread decodes while the loop waits for the device. On a CPU both would need the same cores.
    """
    return device.type == "cuda" if background == "auto" else background == "always"


class _NoLongerWanted(Exception):
    """Ends a measurement whose result is no longer needed."""


class Scoring:
    """Scores the teacher at step 0, at multiples of `evaluate.every_steps` and at the end; keeps the best in `best/`.

    The end is the last step, or `train.stop_after_steps`.

    `best/` is the teacher of step 0 until a later one is shown to be better (`score_history`).

    Args:
        state: the run.
        run: its directory.
        monitor: logs the scores; None on all ranks except the main one, and these do nothing.
        evaluate: scores a teacher; None: nothing is scored.
        stop: is asked to stop the run if a measurement fails.
        stage: announces each measurement, except those in the background.
    """

    def __init__(
        self,
        state: RunState,
        run: Path,
        monitor: Monitor | None,
        evaluate: Evaluation | None,
        stop: StopRequest,
        stage: Stage = silent_stage,
    ) -> None:
        self._state, self._run, self._monitor, self._stop = state, run, monitor, stop
        self._stage = stage
        self._evaluate = evaluate if monitor is not None else None
        self._background = runs_in_background(state.config.evaluate.background, state.device)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Mapping[str, Score]] | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._expected = -1  # the last step that the intervals are made for

    def begin(self) -> None:
        """Score, before the first step, step 0 or the teacher whose score was missing in the checkpoint.

        The latter includes a run that was saved at its last step before that one was to be the last.

        Raises:
            SopError: the evaluation raised it.
        """
        evaluate, history = self._evaluate, self._state.scores
        if evaluate is None:
            return
        history.follow(evaluate.best_by, _scored_on(self._state.config.evaluate))
        step = self._state.step
        ends_unscored = step == self._state.last_step and history.newest is not None and history.newest < step
        if step == 0 or (ends_unscored and history.measured is None):
            history.measured = Measured(step, self._state.teacher)
        self._expect()
        if history.measured is not None:
            scores = self._measured_now(evaluate)
            if scores is not None:
                self._keep(scores)

    def _expect(self) -> None:
        """Fit the intervals to the number of scores; while that is not known, to one."""
        state, every = self._state, max(1, self._state.config.evaluate.every_steps)
        self._expected = state.last_step
        known = state.schedules.is_decided or state.config.train.stop_after_steps
        state.scores.expect(state.last_step if known else state.step + 1, every, state.step)

    def after_step(self) -> None:
        """Add a score that is ready after a step, and measure if this step is due.

        If a measurement fails, the run is asked to stop, and is saved first; see `raise_failure`.
        """
        if self._evaluate is None or self._failure is not None:
            return
        step, every = self._state.step, self._state.config.evaluate.every_steps
        if self._state.last_step != self._expected:  # `train.minutes` has decided
            self._expect()
        is_due = step == self._state.last_step or step % every == 0
        if self._pending is not None and (is_due or self._pending.done()):
            self._take(self._pending.result)
        if is_due and self._failure is None:
            self._measure(self._evaluate)

    def _measure(self, evaluate: Evaluation) -> None:
        teacher, at_end = self._state.teacher, self._state.step == self._state.last_step
        if not self._background or at_end:
            self._state.scores.measured = Measured(self._state.step, teacher)
            self._take(lambda: self._measured_now(evaluate))
            return
        frozen = copy.deepcopy(teacher)
        frozen.backbone.register_forward_pre_hook(self._end_if_closed)
        self._state.scores.measured = Measured(self._state.step, frozen)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "scores", initializer=self._choose_device)
        self._pending = self._thread.submit(evaluate, frozen, unannounced)

    def _measured_now(self, evaluate: Evaluation) -> Mapping[str, Score] | None:
        """Score the teacher that waits; None if the run is asked to stop meanwhile, so that a resumed run measures."""
        measured = self._state.scores.measured
        assert measured is not None
        hook = measured.teacher.backbone.register_forward_pre_hook(self._end_if_stopped)
        before, self._stop.saves_after = self._stop.saves_after, "this batch of images"
        try:
            return evaluate(measured.teacher, self._announce)
        except _NoLongerWanted:
            return None
        finally:
            hook.remove()
            self._stop.saves_after = before

    def _end_if_stopped(self, *_: Any) -> None:
        if self._stop.requested:
            raise _NoLongerWanted

    def _announce(self) -> AbstractContextManager[ProgressCallback]:
        measured = self._state.scores.measured
        assert measured is not None
        return self._stage(f"scoring step {measured.step:,}", "images")

    def _choose_device(self) -> None:
        """Choose the run's device: a new thread starts with CUDA's first one."""
        if self._state.device.type == "cuda":
            torch.cuda.set_device(self._state.device)

    def _end_if_closed(self, *_: Any) -> None:
        if self._closed:
            raise _NoLongerWanted

    def _take(self, outcome: Callable[[], Mapping[str, Score] | None]) -> None:
        self._pending = None
        try:
            scores = outcome()
            if scores is not None:
                self._keep(scores)
        except Exception as error:
            self._failure, self._stop.requested = error, True
            step = self._state.step
            _log.error("the teacher could not be scored: the run is saved at step %d and stops", step)

    def _keep(self, scores: Mapping[str, Score]) -> None:
        history, state = self._state.scores, self._state
        measured = history.measured
        assert measured is not None and self._monitor is not None
        step, score = measured.step, scores[history.metric]
        percents = {name: each.percent for name, each in scores.items()}
        difference = history.compare(score, history.comparisons) if step else None
        shown = "" if difference is None else f"; difference to step 0: {describe_difference(difference)}"
        said = ", ".join(f"{name} {each.percent:.2f} {each.unit}" for name, each in scores.items())
        _log.info("step %d: %s%s", step, said, shown)
        # written before the history has it, so that a full disk loses nothing
        if history.moves_best(step, score.percent, difference):
            known = {name: value for name, value in percents.items() if math.isfinite(value)}
            write_best(self._run, step, {"teacher": measured.teacher.state_dict()}, known)
        history.add(step, score, difference)
        history.measured = None
        place = {"epoch": step / state.schedules.steps_per_epoch, "images": step * state.config.train.batch_size}
        self._monitor.log({"step": step, **place, **percents})

    def raise_failure(self) -> None:
        """Raise the error of a failed measurement, if any; called when the run is saved."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the measurement in the background, within a batch of images; a resumed run measures again."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


def _scored_on(settings: EvaluateConfig) -> str:
    """Return the settings that say what is measured; a score under others cannot be compared.

    Those of `_LATER` are left out at their defaults, so that runs of earlier versions keep their scores on resume.
    """
    own = {name: value for name, value in asdict(settings).items() if name not in _HOW}
    return json.dumps({name: value for name, value in own.items() if value or name not in _LATER}, sort_keys=True)
