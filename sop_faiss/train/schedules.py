"""What changes over a run, as pure functions of the step (docs/method.md, 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sop_faiss.config import Config
from sop_faiss.errors import ConfigError
from sop_faiss.objectives.objective import StepSettings

UNDECIDED = 2**40
"""The number of steps of a run whose length is not decided yet: so many that its schedules stay at their start."""


def cosine(start: float, end: float, progress: float) -> float:
    """Return the value at this progress along half a cosine from `start` (progress 0) to `end` (progress 1)."""
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * min(1.0, max(0.0, progress))))


@dataclass(frozen=True)
class Schedules:
    """All schedules of a run.

    Args:
        config: sections optim, loss and train.
        steps_per_epoch: optimizer updates per pass over the data.
        decided_steps: of a run of `train.minutes`, when its length is decided (`train/time_limit.py`).
    """

    config: Config
    steps_per_epoch: int
    decided_steps: int | None = None

    @property
    def total_steps(self) -> int:
        """Return the optimizer updates of the whole run; `UNDECIDED` before it is known."""
        if self.decided_steps is not None:
            return self.decided_steps
        return UNDECIDED if self.config.train.minutes else self.config.train.total_steps(self.steps_per_epoch)

    @property
    def is_decided(self) -> bool:
        """Return whether the number of steps is known."""
        return self.total_steps != UNDECIDED

    @property
    def warmup_steps(self) -> int:
        """Return the first steps, of the projector alone and of the learning rate's rise."""
        optim = self.config.optim
        return round((optim.warmup_epochs + optim.projector_warmup_epochs) * self.steps_per_epoch)

    def decided(self, steps: int) -> Schedules:
        """Return the schedules of a run of `train.minutes` with this number of steps.

        Raises:
            ConfigError: a warm-up is longer.
        """
        optim = self.config.optim
        epochs = {
            "optim.warmup_epochs": optim.warmup_epochs + optim.projector_warmup_epochs,
            "masks.start_epoch": self.config.masks.start_epoch if self.config.term_weights()["patch"] else 0,
        }
        for name, needed in epochs.items():
            first = round(needed * self.steps_per_epoch)
            if first > steps:
                raise ConfigError(
                    f"{name}: these first {first:,} steps would not end, since train.minutes = "
                    f"{self.config.train.minutes:g} are {steps:,} steps here: lower it, or train for longer"
                )
        return replace(self, decided_steps=steps)

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
