"""Train a network for a task: one loop for fine-tuning, segmentation and detection.

Every step is a pure function of the choices and its number, so that a training which continues from a kept state ends
as an uninterrupted one: generators are seeded for each image, batch and step, and none has a state to keep. Ranks share
the images of a step and average their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from sop_faiss.distributed import average, on_all_ranks, world_size
from sop_faiss.errors import RunStoppedError, SavedError
from sop_faiss.evaluate.trained.training_batches import Plan
from sop_faiss.evaluate.trained.training_ranks import join_batches, own_places
from sop_faiss.evaluate.trained.training_state import TrainingState
from sop_faiss.progress import ProgressCallback
from sop_faiss.train.parallel import average_gradients


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Attributes:
        name: of the training among those of one state.
        model: what is trained.
        optimizer: `lr_scale` of a group is its learning rate relative to the head's.
        steps: batches to train on.
        plan: of an epoch's number, the images of its batches; every epoch has the same number.
        load: of a plan and its epoch, the batches and their rows.
        loss: of a batch, its rows, the epoch and the number in it; seeds what it draws.
        rate: of a step, the head's learning rate.
        setting: the learning rate as the caller has it, for messages, as `learning_rate=0.1`.
        average: a moving average of the model, which is then the result.
        one_seed: whether all ranks draw what one process would; else each for itself.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    plan: Callable[[int], Plan]
    load: Callable[[Plan, int], Iterator[tuple[Any, Any]]]
    loss: Callable[[Any, Any, int, int], Tensor]
    rate: Callable[[int], float]
    setting: str
    average: ModelEmaV3 | None = None
    one_seed: bool = True


def train(training: Training, state: TrainingState, progress: ProgressCallback | None = None) -> nn.Module:
    """Train to the end, from the last kept state; return what is tested.

    Args:
        training: the same on all ranks.
        state: where it is kept after each epoch, and on a signal.
        progress: called with steps done.

    Raises:
        ConfigError: the ranks cannot share the images of a step evenly.
        DataError: an image cannot be used, on any rank.
        RunStoppedError: the loss is not finite.
        SavedError: a signal has asked for the end, and the state is kept.
    """
    kept = {"model": training.model, "optimizer": training.optimizer, "average": training.average}
    parts = {name: part for name, part in kept.items() if part is not None}
    done = state.restore(training.name, parts)
    join_batches(training.model, drops=training.one_seed)
    per_epoch = len(training.plan(0))
    with state.listening() as stop:
        while done < training.steps:
            epoch, number = divmod(done, per_epoch)
            plan = training.plan(epoch)[number : number + training.steps - done]
            batches = training.load([rows[own_places(len(rows))] for rows in plan], epoch)
            training.model.train()
            for place in range(number, number + len(plan)):
                batch, rows = on_all_ranks(lambda: next(batches))  # noqa: B023
                _step(training, batch, rows, epoch, place, per_epoch)
                done += 1
                if progress is not None:
                    progress(done, training.steps)
                if stop is not None and stop.anywhere(next(training.model.parameters()).device):
                    state.keep(training.name, done, parts)
                    said = f"after step {done:,} of {training.steps:,}: the same command continues"
                    if stop.interrupted:
                        raise KeyboardInterrupt(f"interrupted {said}")
                    raise SavedError(f"stopped by a signal {said}")
            state.keep(training.name, done, parts)
    return training.model if training.average is None else training.average.module


def _step(training: Training, batch: Any, rows: Any, epoch: int, number: int, per_epoch: int) -> None:
    """Make one step, the same on all ranks."""
    step = epoch * per_epoch + number
    for group in training.optimizer.param_groups:
        group["lr"] = training.rate(step) * group["lr_scale"]
    loss = training.loss(batch, rows, epoch, number)
    if not bool(torch.isfinite(average(loss.detach()))):
        raise RunStoppedError(
            f"the loss is not finite at step {step + 1}, epoch {epoch + 1}, at `{training.setting}`: lower it, if the "
            "encoder's weights are sound"
        )
    training.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if world_size() > 1:
        average_gradients(training.model.parameters())
    training.optimizer.step()
    if training.average is not None:
        training.average.update(training.model)
