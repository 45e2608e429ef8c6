"""What a run keeps of its scores: that of step 0, the best since, and the one that is being measured.

`best/` holds the teacher of step 0 until a later one is shown to be better, then the best of those that are.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from sop_faiss.bootstrap import Interval, Score, paired_difference
from sop_faiss.model.checkpoint import read_tensors
from sop_faiss.model.networks import Network
from sop_faiss.train.checkpoints.checkpoint import load_network
from sop_faiss.train.verdict import Outcome, outcome_of, verdict_of

_log = logging.getLogger(__name__)
_TENSORS = "measured"
"""Name of the file in a checkpoint that has the teacher being measured."""
_EACH = "scores"
"""Name of the file in a checkpoint that has the values of single queries."""
_ADVICE = (
    "try a lower optim.base_lr, a longer optim.warmup_epochs, an optim.momentum nearer 1 or more epochs, and from a "
    "pretrained encoder optim.projector_warmup_epochs"
)


@dataclass
class Measured:
    """A teacher whose score is not known yet, and its step."""

    step: int
    teacher: Network


@dataclass
class ScoreHistory:
    """The scores that `best/` follows. They survive a restart, as does the teacher that is being measured.

    Attributes:
        metric: name of the score; empty before anything was measured.
        scored_on: the settings that say what it is measured on.
        first: the score at step 0, in percent.
        best: the best score of the later steps, in percent: of those shown to be better than step 0, if any, the
            highest, else the highest of all.
        best_step: its step.
        difference: of `best` to `first`, with its interval; None if they cannot be compared.
        first_each: the values of the queries at step 0.
        best_each: those of `best`.
        kept: the step whose teacher is in `best/`; None: an earlier version, which did not note it.
        newest: the last step that was scored.
        later: number of later steps that were scored.
        comparisons: of this many scores the intervals hold together; never fewer than before, since a run that was
            planned longer has had the choice.
        measured: the teacher that is being measured. A checkpoint written meanwhile contains it, and a run resumed
            from that checkpoint measures it again: no score is lost, and saving does not wait for scores.
    """

    metric: str = ""
    scored_on: str = ""
    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    difference: Interval | None = None
    first_each: Float64[np.ndarray, " q"] | None = None
    best_each: Float64[np.ndarray, " q"] | None = None
    measured: Measured | None = None
    kept: int | None = None
    newest: int | None = None
    later: int = 0
    comparisons: int = 0

    def follow(self, metric: str, scored_on: str = "") -> None:
        """Follow this score from now on; scores of another name, or on other images, are forgotten."""
        if self.metric not in ("", metric):
            _log.warning("best/ follows %s from here on: scores of %s no longer count", metric, self.metric)
            self._forget()
        elif self.scored_on not in ("", scored_on):
            _log.warning("settings of `evaluate` were changed: scores of %s so far no longer count", metric)
            self._forget()
        self.metric, self.scored_on = metric, scored_on

    def _forget(self) -> None:
        self.first = self.best = self.best_step = self.difference = self.first_each = self.best_each = None
        self.kept = self.newest = None
        self.later = self.comparisons = 0

    def expect(self, steps: int, every: int, step: int) -> None:
        """Fit the interval of `best` to the number of scores, which a longer run or other settings change on resume.

        Args:
            steps: of the run, to its last one.
            every: steps between two scores.
            step: of the run now; those that follow are scored at multiples of `every`, and at the last step.
        """
        coming = -(-steps // every) - step // every if step < steps else 0
        waiting = self.measured is not None and self.measured.step > 0
        self.comparisons = max(1, self.comparisons, -(-steps // every), self.later + waiting + coming)
        if self.best is not None and self.best_each is not None:
            self.difference = self.compare(Score(self.best, self.best_each), self.comparisons)

    def compare(self, score: Score, scores_taken: int) -> Interval | None:
        """Return the difference of a later score to that of step 0, with its interval; None if it is not known.

        Args:
            score: of a later step.
            scores_taken: how many later steps are scored in this run; the interval is wider the more there are.
        """
        if self.first_each is None:
            return None
        if len(self.first_each) != len(score.each):
            _log.warning(
                "%s has %d values here and %d at step 0: images were lost, so that nothing can be compared",
                *(self.metric, len(score.each), len(self.first_each)),
            )
            return None
        return paired_difference(self.first_each, score.each, comparisons=scores_taken).difference

    def leads(self, percent: float, difference: Interval | None) -> bool:
        """Return whether a later score would be the best: any that beats step 0 leads those that do not."""
        return self.best is None or (_beats(difference), percent) > (_beats(self.difference), self.best)

    def moves_best(self, step: int, percent: float, difference: Interval | None) -> bool:
        """Return whether the teacher of a score goes to `best/`.

        Where the values at step 0 are unknown (it was not scored, or by an earlier version), the highest score does.
        """
        trusted = _beats(difference) or self.first_each is None
        return step == 0 or (trusted and self.leads(percent, difference))

    def add(self, step: int, score: Score, difference: Interval | None = None) -> None:
        """Add a score."""
        if self.moves_best(step, score.percent, difference):
            self.kept = step
        self.newest = step
        self.later += step > 0
        if step == 0:
            self.first, self.first_each = score.percent, score.each
        elif self.leads(score.percent, difference):
            self.best, self.best_step, self.best_each = score.percent, step, score.each
            self.difference = difference

    @property
    def kept_step(self) -> int | None:
        """The step whose teacher is in `best/`."""
        if self.kept is not None:
            return self.kept
        return self.best_step if self.first_each is None or _beats(self.difference) else 0

    def summary(self) -> dict[str, Any]:
        """Return what was measured, with `kept_step` and the `verdict`, for the end of a run; empty without scores."""
        if not self.metric:
            return {}
        verdict = verdict_of(self._facts())
        return {
            **self._facts(),
            "kept_step": self.kept_step,
            "verdict": None if verdict is None else str(verdict.outcome),
        }

    def _facts(self) -> dict[str, Any]:
        shown = self.difference
        return {
            "best_by": self.metric,
            "first_score": self.first,
            "best_score": self.best,
            "best_step": self.best_step,
            "difference": None if shown is None else [shown.mean, shown.low, shown.high],
        }

    def verdict(self, warmup_steps: int = 0) -> tuple[bool, str] | None:
        """Return whether training has beaten step 0, and a line about it; None before a later step was scored.

        Args:
            warmup_steps: of the run; scores up to them say nothing of its settings.
        """
        if self.best is None:
            return None
        found = verdict_of(self._facts())
        if found is None:
            why = "step 0 was not scored" if self.first is None else "an earlier version scored step 0"
            return (
                False,
                f"{self.metric} is at best {self.best:.2f} % (step {self.best_step}); {why}, so that it is "
                "not known whether training beat it",
            )
        kept = "that teacher" if self.kept_step == self.best_step else f"the teacher of step {self.kept_step}"
        if found.outcome is Outcome.BEAT:
            return True, f"{found.text}; best/ has {kept}"
        if self.kept_step:
            kept += ", which had beaten step 0 while fewer scores were expected"
        in_warmup = self.newest is not None and self.newest <= warmup_steps
        advice = f"the warm-up takes {warmup_steps:,} steps: train for longer to know more" if in_warmup else _ADVICE
        return False, f"{found.text}; best/ keeps {kept}; {advice}"

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return, for a checkpoint, the teacher that is being measured and the values of single queries."""
        values = {"first": self.first_each, "best": self.best_each}
        each = {name: torch.from_numpy(value) for name, value in values.items() if value is not None}
        measured = {} if self.measured is None else {_TENSORS: self.measured.teacher.state_dict()}
        return measured | ({_EACH: each} if each else {})

    def counters(self) -> dict[str, Any]:
        """Return the rest, as JSON values."""
        return {
            **self._facts(),
            "scored_on": self.scored_on,
            "kept_step": self.kept_step,
            "newest_scored_step": self.newest,
            "later_scores": self.later,
            "comparisons": self.comparisons,
            "measured_step": None if self.measured is None else self.measured.step,
        }

    def load(self, state: dict[str, Any], checkpoint: Path, teacher: Network, measures: bool) -> None:
        """Continue from what `tensors` and `counters` returned.

        Args:
            state: of the checkpoint.
            checkpoint: where its tensors are.
            teacher: of the run; a copy of it takes the tensors.
            measures: whether this process measures, and so needs them.

        Raises:
            CheckpointError: the tensors are missing, damaged or of another model.
        """
        self.metric, self.first = state.get("best_by", ""), state.get("first_score")
        self.best, self.best_step = state["best_score"], state.get("best_step")
        self.scored_on, shown = state.get("scored_on", ""), state.get("difference")
        self.difference = None if shown is None else Interval(*map(float, shown))
        self.kept, self.newest = state.get("kept_step"), state.get("newest_scored_step")
        self.later, self.comparisons = state.get("later_scores", 0), state.get("comparisons", 0)
        if f"{_EACH}.safetensors" in state["sha256"]:
            each = {name: value.numpy() for name, value in read_tensors(checkpoint, _EACH).items()}
            self.first_each, self.best_each = each.get("first"), each.get("best")
        step = state.get("measured_step")
        if step is not None and measures:
            network = copy.deepcopy(teacher)
            load_network(network, checkpoint, _TENSORS)
            self.measured = Measured(step, network)


def _beats(difference: Interval | None) -> bool:
    return difference is not None and outcome_of(difference) is Outcome.BEAT
