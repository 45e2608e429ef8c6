"""The training loop, in the paper's order. Read it beside the paper: algorithm 1 is `train_step`."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.data.stream import Batch, Batches, batch_loader
from sop_faiss.model.teacher import update_teacher
from sop_faiss.progress import ProgressCallback
from sop_faiss.sop.loss import LevelLoss, cls_loss, masked_row_weights, patch_loss
from sop_faiss.train.checkpoint import prune_checkpoints, write_best, write_checkpoint
from sop_faiss.train.monitor import Evaluation, Monitor, check_bad_share, check_finite
from sop_faiss.train.optim import apply_settings, clip_each_gradient
from sop_faiss.train.state import RunState

__all__ = ["StopRequest", "fill_memories", "normalise", "save", "train_step", "train_steps"]


def normalise(views: UInt8[Tensor, "v b s s2 3"], config: Config, device: torch.device) -> Float[Tensor, "v b 3 s s2"]:
    """Views as the networks take them: moved to the device in uint8, then float32, centred and scaled."""
    mean = torch.tensor(config.views.mean, device=device) * 255
    std = torch.tensor(config.views.std, device=device) * 255
    return ((views.to(device, non_blocking=True).float() - mean) / std).movedim(-1, 2)


def train_step(state: RunState, batch: Batch) -> dict[str, Tensor | float]:
    """One optimiser update (algorithm 1).

    Args:
        state: the run.
        batch: this rank's images.

    Returns:
        What the step tells about itself; tensors are scalars and not yet waited for.
    """
    config, device = state.config, state.device
    settings = state.schedules.at(state.step)
    loss_config = config.loss

    # 1. Views: G global ones, seen whole by the teacher and masked by the student, and L local ones.
    global_views = normalise(batch.global_views, config, device)
    local_views = normalise(batch.local_views, config, device)
    masks = batch.masks.to(device, non_blocking=True)
    views, images, patches = masks.shape
    masked = masks.flatten().nonzero().squeeze(1)
    stored_view = _stored_view(views)
    stored = state.draw_stored_patches(images, patches)
    stored = (stored_view * images + torch.arange(images, device=device)) * patches + stored

    # 2. Embeddings. The teacher's patches: those the student must predict, and the one each image will store.
    with torch.no_grad(), _autocast(state):
        wanted = torch.cat([masked, stored]) if state.patch else None
        teacher_cls, teacher_patches = state.teacher(global_views.flatten(0, 1), None, wanted, state.cls is not None)
    with _autocast(state), _seeded_drop_path(state):
        student_cls, student_patches = state.all_views(
            global_views,
            local_views,
            masks if config.masks.kind != "none" else None,
            masked if state.patch else None,
            state.cls is not None,
        )

    # 3. Prototypes from the memories as the last step left them, and 4. the losses (sections 3.2 and 3.3).
    metrics: dict[str, Tensor | float] = {}
    loss = torch.zeros((), device=device)
    if state.cls is not None and student_cls is not None:
        teacher_cls = teacher_cls.view(views, images, -1)
        prototypes = state.cls.maker.draw()
        level = cls_loss(student_cls, teacher_cls, prototypes, loss_config.student_temp, settings.teacher_temp)
        loss = loss + loss_config.cls_weight * level.loss
        metrics.update(_level_metrics("cls", level, prototypes.count))
        metrics["support_similarity"] = prototypes.support_similarities.mean()
    if state.patch is not None:
        prototypes = state.patch.maker.draw()
        level = patch_loss(
            student_patches,
            teacher_patches[: len(masked)],
            masked_row_weights(masks.flatten(0, 1)),
            prototypes,
            loss_config.student_temp,
            settings.teacher_temp,
        )
        loss = loss + loss_config.patch_weight * level.loss
        metrics.update(_level_metrics("patch", level, prototypes.count))

    # 5. The student learns.
    apply_settings(state.optimizer, settings)
    state.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradient_norm = clip_each_gradient(state.student, config.optim.clip_norm)
    state.optimizer.step()

    # 6. The teacher follows, and 7. the memories take in this step's embeddings, once, in rank order.
    # Departs: the released code stores before the backward pass.
    update_teacher(state.teacher, state.student, settings.momentum)
    image_ids = distributed.gather_rows(batch.image_ids.to(device))
    if state.cls is not None:
        state.cls.memory.store(distributed.gather_rows(teacher_cls[stored_view]), image_ids)
    if state.patch is not None:
        state.patch.memory.store(distributed.gather_rows(teacher_patches[len(masked) :]), image_ids)

    state.step += 1
    state.images_seen += config.train.batch_size
    return {"loss": loss.detach(), **metrics, "gradient_norm": gradient_norm, **settings._asdict()}


def _autocast(state: RunState) -> torch.autocast:
    dtype = state.autocast_dtype
    return torch.autocast(state.device.type, dtype=dtype, enabled=dtype is not None)


@contextlib.contextmanager
def _seeded_drop_path(state: RunState) -> Iterator[None]:
    """Drop path draws from torch's global generators: inside, they follow (seed, step, rank) alone."""
    cuda = [state.device] if state.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(distributed.derive_seed("drop path", state.config.train.seed, state.step, distributed.rank()))
        yield


def _stored_view(views: int) -> int:
    """The global view whose teacher embeddings the memories take in: the second."""
    return min(1, views - 1)


def _level_metrics(name: str, level: LevelLoss, count: int) -> dict[str, Tensor | float]:
    log_count = math.log(count)
    return {
        f"loss_{name}": level.loss.detach(),
        f"loss_{name}_over_lnK": level.cross_entropy / log_count,
        f"teacher_entropy_{name}_over_lnK": level.teacher_entropy / log_count,
    }


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


@torch.no_grad()
def fill_memories(state: RunState, batches: Batches) -> None:
    """Store teacher embeddings until no random row is left (memory.fill = teacher), before the first gradient."""
    needed = max(level.memory.capacity for level in state.levels.values())
    steps = range(-(-needed // state.config.train.batch_size))
    for batch in batch_loader(batches, steps, pin_memory=state.device.type == "cuda"):
        views, images, patches = batch.masks.shape
        kept = batch.global_views[_stored_view(views)].unsqueeze(0)
        rows = torch.arange(images, device=state.device) * patches + state.draw_stored_patches(images, patches)
        with _autocast(state):
            cls, patch = state.teacher(normalise(kept, state.config, state.device).flatten(0, 1), None, rows)
        image_ids = distributed.gather_rows(batch.image_ids.to(state.device))
        for level, embeddings in ((state.cls, cls), (state.patch, patch)):
            if level is not None:
                level.memory.store(distributed.gather_rows(embeddings), image_ids)


def train_steps(
    state: RunState,
    batches: Batches,
    run: Path,
    stop: StopRequest,
    *,
    evaluate: Evaluation | None = None,
    progress: ProgressCallback | None = None,
) -> bool:
    """Train from the state's step to the end.

    Args:
        state: the run, fresh or resumed.
        batches: this rank's batches by step.
        run: the run directory; only the main rank writes there.
        stop: says when a signal has asked to stop.
        evaluate: scores the teacher every `evaluate.every_steps`; called on the main rank.
        progress: called after every step with steps done and steps in all.

    Returns:
        True when the run came to its end (or to `train.stop_after_steps`), False when a signal stopped it.

    Raises:
        RunStoppedError: the loss or a gradient is not finite.
        DataError: too many images cannot be read.
    """
    config = state.config.train
    total = state.schedules.total_steps
    last = min(total, config.stop_after_steps) if config.stop_after_steps else total
    monitor = Monitor(run, state.step) if distributed.is_main() else None
    try:
        if state.step == 0:
            if state.config.memory.fill == "teacher":
                fill_memories(state, batches)
            _score(state, run, monitor, evaluate, last)
        for batch in _timed(batch_loader(batches, range(state.step, last), state.device.type == "cuda"), monitor):
            metrics = train_step(state, batch)
            _keep_records(state, batch, metrics, monitor, run, len(batches.positions))
            _score(state, run, monitor, evaluate, last)
            stopping = stop.anywhere(state.device)
            if stopping or state.step == last or state.step % config.checkpoint_every_steps == 0:
                save(state, run)
            if progress is not None:
                progress(state.step, last)
            if stopping:
                return state.step == last
        return True
    finally:
        if monitor is not None:
            monitor.close()


def save(state: RunState, run: Path) -> None:
    """Write a checkpoint (main rank) and prune old ones."""
    if distributed.is_main():
        write_checkpoint(run, state.step, state.tensors(), state.counters())
        prune_checkpoints(run, state.config.train)


def _timed(loader: Iterator[Batch], monitor: Monitor | None) -> Iterator[Batch]:
    """The batches, with the time spent waiting for them noted."""
    while True:
        started = time.monotonic()
        batch = next(loader, None)
        if batch is None:
            return
        if monitor is not None:
            monitor.waited(time.monotonic() - started)
        yield batch


def _keep_records(
    state: RunState,
    batch: Batch,
    metrics: dict[str, Tensor | float],
    monitor: Monitor | None,
    run: Path,
    images: int,
) -> None:
    """Count bad samples, stop at numbers that are not finite, and log every `log_every_steps`; means over all ranks."""
    names = list(metrics)
    bad_here = torch.tensor([float(len(batch.bad))], device=state.device)
    here = torch.stack([torch.as_tensor(metrics[name], device=state.device).float() for name in names])
    *means, mean_bad = distributed.average(torch.cat([here, bad_here])).tolist()
    values = dict(zip(names, means, strict=True))
    if mean_bad > 0:
        bad = [sample for rank_samples in distributed.gather_objects(batch.bad) for sample in rank_samples]
        state.bad_samples += len(bad)
        if monitor is not None:
            monitor.bad_samples(bad, state.step)
        check_bad_share(state.bad_samples, state.images_seen, images, state.config.data.max_bad_fraction)
    place = {
        "step": state.step,
        "epoch": state.step / state.schedules.steps_per_epoch,
        "images": state.images_seen,
    }
    check_finite({**place, **values}, batch.image_ids.tolist(), run)
    if monitor is not None and (state.step % state.config.train.log_every_steps == 0 or state.step == 1):
        monitor.log({**place, **values, **monitor.speed(state.images_seen)})


def _score(state: RunState, run: Path, monitor: Monitor | None, evaluate: Evaluation | None, last: int) -> None:
    """Evaluate at step 0, at multiples of `evaluate.every_steps`, and at the end; keep the best teacher in `best/`."""
    every, step = state.config.evaluate.every_steps, state.step
    if monitor is None or evaluate is None or not every:
        return
    if step % every == 0 or step == last:
        scores = evaluate()
        epoch = step / state.schedules.steps_per_epoch
        monitor.log({"step": step, "epoch": epoch, "images": state.images_seen, **scores})
        score = next(iter(scores.values()))
        if step > 0 and (state.best_score is None or score > state.best_score):
            state.best_score = score
            write_best(run, step, {"teacher": state.teacher.state_dict()}, scores)
