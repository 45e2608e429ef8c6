"""What a run keeps of its scores: that of step 0, the best since, and the one that is being measured."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sop_faiss.model.networks import Network
from sop_faiss.train.checkpoints.checkpoint import load_network

__all__ = ["Measured", "ScoreHistory"]

_log = logging.getLogger(__name__)
_TENSORS = "measured"
"""Name of the file in a checkpoint."""


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
        first: the score at step 0, in percent.
        best: the highest score of the later steps, in percent; its teacher is in `best/`.
        best_step: the step of the best score.
        measured: the teacher that is being measured. A checkpoint written meanwhile contains it, and a run resumed
            from that checkpoint measures it again: no score is lost, and saving does not wait for scores.
    """

    metric: str = ""
    first: float | None = None
    best: float | None = None
    best_step: int | None = None
    measured: Measured | None = None

    def follow(self, metric: str) -> None:
        """Follow this score from now on, and forget those of another name."""
        if self.metric not in ("", metric):
            _log.warning(
                "best/ follows %s from here on instead of %s, whose scores no longer count", metric, self.metric
            )
            self.first = self.best = self.best_step = None
        self.metric = metric

    def is_best(self, step: int, score: float) -> bool:
        """Return whether a score would be the best of the trained teachers."""
        return step > 0 and (self.best is None or score > self.best)

    def add(self, step: int, score: float) -> None:
        """Add a score."""
        if step == 0:
            self.first = score
        elif self.is_best(step, score):
            self.best, self.best_step = score, step

    def summary(self) -> dict[str, Any]:
        """Return `best_by`, `first_score`, `best_score` and `best_step` for the end of a run; empty without scores."""
        if not self.metric:
            return {}
        return {
            "best_by": self.metric,
            "first_score": self.first,
            "best_score": self.best,
            "best_step": self.best_step,
        }

    def verdict(self) -> tuple[bool, str] | None:
        """Return whether training has beaten step 0, and a line about it; None if one of the two scores is missing."""
        if self.first is None or self.best is None:
            return None
        scores = f"{self.metric} was {self.first:.2f} % at step 0 and at best {self.best:.2f} % (step {self.best_step})"
        if self.best > self.first:
            return True, f"{scores}; best/ has that teacher"
        return False, (
            f"{scores}: training never beat step 0; try a lower optim.base_lr, a longer optim.warmup_epochs, an "
            "optim.momentum nearer 1 or more epochs, and from a pretrained encoder optim.projector_warmup_epochs"
        )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the teacher that is being measured, for a checkpoint."""
        return {} if self.measured is None else {_TENSORS: self.measured.teacher.state_dict()}

    def counters(self) -> dict[str, Any]:
        """Return the rest, as JSON values."""
        return {
            "best_by": self.metric,
            "first_score": self.first,
            "best_score": self.best,
            "best_step": self.best_step,
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
        step = state.get("measured_step")
        if step is not None and measures:
            network = copy.deepcopy(teacher)
            load_network(network, checkpoint, _TENSORS)
            self.measured = Measured(step, network)
