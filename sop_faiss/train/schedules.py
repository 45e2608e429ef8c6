"""What changes over a run, as pure functions of the step (docs/method.md, 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sop_faiss.config import Config
from sop_faiss.objectives.objective import StepSettings

__all__ = ["Schedules", "cosine"]


def cosine(start: float, end: float, progress: float) -> float:
    """Return the value at this progress along half a cosine from `start` (progress 0) to `end` (progress 1)."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))


@dataclass(frozen=True)
class Schedules:
    """All schedules of a run.

    Args:
        config: sections optim, loss and train.
        steps_per_epoch: optimizer updates per pass over the data.
    """

    config: Config
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Return the optimizer updates of the whole run."""
        return max(1, round(self.config.train.epochs * self.steps_per_epoch))

    def at(self, step: int) -> StepSettings:
        """Return the settings of a step, counted from 0.

        Departs: a warm-up of W steps reaches its peak, or the teacher's final temperature, at step W, so that no value
        occurs twice; iBOT and the released code reach it at W - 1. Departs: iBOT raises the temperature once per epoch;
        here it rises with every step, as in the released code. In the recipe's 30 epochs they differ by at most 0.001.
        """
        optim, loss = self.config.optim, self.config.loss
        if optim.lr_scaling == "linear":  # as DINO and iBOT
            peak = optim.base_lr * self.config.train.batch_size / 256
        else:  # as DINOv2
            peak = optim.base_lr * math.sqrt(self.config.train.batch_size / 256)
        warmup_steps = round(optim.warmup_epochs * self.steps_per_epoch)
        if step < warmup_steps:
            learning_rate = peak * step / warmup_steps
        else:
            progress = (step - warmup_steps) / max(1, self.total_steps - warmup_steps)
            learning_rate = cosine(peak, optim.min_lr, progress)
        progress = step / self.total_steps
        temp_steps = round(loss.teacher_temp_epochs * self.steps_per_epoch)
        temp_progress = min(1.0, step / temp_steps) if temp_steps else 1.0
        frozen_steps = round(optim.projector_warmup_epochs * self.steps_per_epoch)
        thawed = max(0, step + 1 - frozen_steps)
        return StepSettings(
            learning_rate=learning_rate,
            weight_decay=cosine(optim.weight_decay, optim.weight_decay_end, progress),
            momentum=cosine(optim.momentum, optim.momentum_end, progress),
            teacher_temp=loss.teacher_temp_start + (loss.teacher_temp - loss.teacher_temp_start) * temp_progress,
            backbone_lr_scale=min(1.0, thawed / max(1, warmup_steps)) if frozen_steps else 1.0,
        )
