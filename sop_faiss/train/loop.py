"""The training loop, in the paper's order. Read it beside the paper: algorithm 1 is `train_step` with `_learn_from`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.data.batch import Batch
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.data.views.device_color import normalize
from sop_faiss.model.networks import update_teacher
from sop_faiss.progress import ProgressCallback
from sop_faiss.sop.loss import cls_loss, masked_row_weights, patch_loss
from sop_faiss.sop.prototypes import Prototypes
from sop_faiss.train.checkpoints.saver import CheckpointSaver
from sop_faiss.train.log.health import watching
from sop_faiss.train.log.prototype_log import PrototypeLog
from sop_faiss.train.log.records import keep_records, open_monitor, timed_batches
from sop_faiss.train.optim import apply_settings, clip_each_gradient
from sop_faiss.train.rank_agreement import check_ranks_agree
from sop_faiss.train.schedules import StepSettings
from sop_faiss.train.scoring import Evaluation, Scoring
from sop_faiss.train.state import Level, RunState
from sop_faiss.train.stop import StopRequest

__all__ = ["fill_memories", "train_step", "train_steps"]


def train_step(state: RunState, batch: Batch, log: PrototypeLog | None = None) -> dict[str, Tensor | float]:
    """One optimizer update (algorithm 1).

    Args:
        state: the run.
        batch: this rank's images.
        log: is shown the prototypes.

    Returns:
        What the step tells about itself; tensors are scalars and not yet waited for.
    """
    config, device = state.config, state.device
    settings = state.schedules.at(state.step)
    _, images, patches = batch.masks.shape
    batch = batch.to(device)
    parts = batch.split(config.train.accumulate)

    # 1. Prototypes from the memories as the last step left them, shared by student and teacher (section 3.2).
    prototypes = {name: level.maker.draw() for name, level in state.levels.items()}
    health = {f"{key}_{name}": value for name in prototypes for key, value in prototypes[name].health().items()}
    if log is not None:
        log.note(state.step + 1, prototypes)

    # 2. to 5. Views, embeddings, losses and gradients; with train.accumulate, of one part of the images at a time.
    state.optimizer.zero_grad(set_to_none=True)
    state.student.freeze_backbone(settings.trunk_lr_scale == 0)
    stored_patches = state.draw_stored_patches(images, patches).chunk(len(parts))
    with _seeded_drop_path(state):
        learned = [_learn_from(state, *part, prototypes, settings) for part in zip(parts, stored_patches, strict=True)]
    state.average_gradients()

    # 6. The student learns.
    apply_settings(state.optimizer, settings)
    gradient_norm = clip_each_gradient(state.student, config.optim.clip_norm)
    state.optimizer.step()

    # 7. The teacher follows, and 8. the memories take in this step's embeddings, once, in rank order.
    # Departs: the released code stores before the backward pass.
    update_teacher(state.teacher, state.student, settings.momentum)
    image_ids = distributed.gather_rows(batch.image_ids)
    for name, level in state.levels.items():
        level.memory.store(distributed.gather_rows(torch.cat([part.to_store[name] for part in learned])), image_ids)

    state.step += 1
    state.images_seen += config.train.batch_size
    metrics: dict[str, Tensor | float] = {"loss": torch.zeros((), device=device)}
    for name, level in state.levels.items():
        sums = distributed.average(torch.stack([part.sums[name] for part in learned]).sum(0))
        metrics.update(_level_metrics(name, level, sums, len(parts)))
        metrics["loss"] += getattr(config.loss, f"{name}_weight") * metrics[f"loss_{name}"]
    return {**metrics, **health, "gradient_norm": gradient_norm, **settings._asdict()}


@dataclass
class _Learned:
    """What some of a step's images leave behind, by level: `TermLoss.sums`, and embeddings for the memory."""

    sums: dict[str, Float[Tensor, " sums"]]
    to_store: dict[str, Float[Tensor, "b d"]]


def _learn_from(
    state: RunState,
    part: Batch,
    stored_patches: Int64[Tensor, " b"],
    prototypes: dict[str, Prototypes],
    settings: StepSettings,
) -> _Learned:
    """Points 2 to 5 of `train_step` for some of its images: their share of the step's gradients is added."""
    config, device = state.config, state.device
    has_cls, has_patch = "cls" in prototypes, "patch" in prototypes
    temperatures = (config.loss.student_temp, settings.teacher_temp)

    # 2. Views: G global ones, seen whole by the teacher and masked by the student, and L local ones.
    global_views = normalize(part.global_views, part.global_colors, config.views, device)
    local_views = normalize(part.local_views, part.local_colors, config.views, device)
    masks = part.masks
    views, images, patches = masks.shape
    masked = masks.flatten().nonzero().squeeze(1)
    stored_view = _stored_view(views)
    stored = (stored_view * images + torch.arange(images, device=device)) * patches + stored_patches

    # 3. The teacher's embeddings. Of patches: those the student must predict, and the one each image will store.
    with torch.no_grad(), _autocast(state):
        wanted = torch.cat([masked, stored]) if has_patch else None
        teacher_cls, teacher_patches = state.teacher(global_views.flatten(0, 1), None, wanted, has_cls)
    teacher_cls = teacher_cls.view(views, -1, teacher_cls.shape[-1])
    learned = _Learned(
        {name: torch.zeros(5, device=device) for name in prototypes},
        {"cls": teacher_cls[stored_view], "patch": teacher_patches[len(masked) :]},
    )

    # 4. The student's embeddings, and 5. the losses (section 3.3); all views at once, or the local ones first.
    shown = [(global_views, local_views)]
    if config.train.views_apart and has_cls and len(local_views):
        shown = [(global_views[:0], local_views), (global_views, local_views[:0])]
    for shown_globals, shown_locals in shown:
        with_globals = len(shown_globals) > 0
        with _autocast(state):
            student_cls, student_patches = state.all_views(
                shown_globals,
                shown_locals,
                masks if with_globals and config.masks.kind != "none" else None,
                masked if with_globals and has_patch else None,
                has_cls,
            )
        loss = torch.zeros((), device=device)
        if has_cls:
            first_view = 0 if with_globals else views
            level = cls_loss(
                student_cls, teacher_cls, prototypes["cls"], *temperatures, first_view, views + len(local_views)
            )
            loss = loss + config.sop.cls.weight * level.loss
            learned.sums["cls"] += level.sums()
        if has_patch and with_globals:
            weights = masked_row_weights(masks.flatten(0, 1))
            level = patch_loss(
                student_patches, teacher_patches[: len(masked)], weights, prototypes["patch"], *temperatures
            )
            loss = loss + config.sop.patch.weight * level.loss
            learned.sums["patch"] += level.sums()
        (loss / config.train.accumulate).backward()
    return learned


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


def _level_metrics(name: str, level: Level, sums: Float[Tensor, " sums"], parts: int) -> dict[str, Tensor | float]:
    """What one level's loss tells, of `TermLoss.sums` over parts and ranks; ratios are NaN without a masked patch."""
    loss, weight, entropies, rows, target_entropy = sums
    log_count = math.log(level.maker.level.num_anchors)
    return {
        f"loss_{name}": loss / parts,
        f"loss_{name}_over_lnK": loss / weight / log_count,
        f"kl_{name}": (loss - target_entropy) / weight,
        f"teacher_entropy_{name}_over_lnK": entropies / rows / log_count,
    }


@torch.no_grad()
def fill_memories(state: RunState, batches: Batches) -> None:
    """Store teacher embeddings until no random row is left (sop.fill = teacher), before the first gradient."""
    needed = max(level.memory.capacity for level in state.levels.values())
    steps = range(-(-needed // state.config.train.batch_size))
    for batch in batch_loader(batches, steps, pin_memory=state.device.type == "cuda"):
        views, images, patches = batch.masks.shape
        stored = [_stored_view(views)]
        kept = normalize(batch.global_views[stored], batch.global_colors[stored], state.config.views, state.device)
        rows = torch.arange(images, device=state.device) * patches + state.draw_stored_patches(images, patches)
        with _autocast(state):
            wanted = None if state.patch is None else rows
            cls, patch = state.teacher(kept.flatten(0, 1), None, wanted, state.cls is not None)
        image_ids = distributed.gather_rows(batch.image_ids.to(state.device))
        for level, embeddings in ((state.cls, cls), (state.patch, patch)):
            if level is not None:
                level.memory.store(distributed.gather_rows(embeddings), image_ids, ends_step=False)


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
        evaluate: scores a teacher; called on the main rank, beside the steps or between them (`scoring`).
        progress: called after every step with steps done and steps in all.

    Returns:
        True when the run came to its end (or to `train.stop_after_steps`), False when a signal stopped it.

    Raises:
        RunStoppedError: numbers are not finite, or an alarm that stops the run (train.stop_on) went off.
        DataError: too many images cannot be read.
        OSError: the disk is full.
    """
    config = state.config.train
    total = state.schedules.total_steps
    last = min(total, config.stop_after_steps) if config.stop_after_steps else total
    monitor = open_monitor(state, run)
    log = PrototypeLog(run, state.step, config.checkpoint_every_steps) if distributed.is_main() else None
    saver = CheckpointSaver(state, run)
    scoring = Scoring(state, run, monitor, evaluate, last, stop)
    try:
        if state.step == 0 and state.config.memory.fill == "teacher":
            fill_memories(state, batches)
        distributed.decide(scoring.begin)
        for batch in timed_batches(
            batch_loader(batches, range(state.step, last), state.device.type == "cuda"), monitor
        ):
            with watching(state) as health:
                metrics = train_step(state, batch, log)
            check_ranks_agree(state)
            keep_records(state, batch, metrics, health, monitor, run, len(batches.positions))
            scoring.after_step()
            stopping = stop.anywhere(state.device, saver.failed)
            due = state.step % config.checkpoint_every_steps == 0 and not state.alarms.may_stop_soon
            if stopping or state.step == last or due:
                saver.save(wait=stopping or state.step == last)
            if progress is not None:
                progress(state.step, last)
            if stopping:
                distributed.decide(scoring.raise_failure)
                return state.step == last
        return True
    finally:
        scoring.close()
        saver.close()
        if monitor is not None:
            monitor.close()
