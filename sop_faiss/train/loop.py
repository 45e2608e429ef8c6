"""The training loop. `train_step` is the paper's algorithm 1; its points 2 to 5 are `learn` in `objectives/sop.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.data.batch import Batch
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.model.networks import update_teacher
from sop_faiss.objectives.objective import Learned
from sop_faiss.progress import ProgressCallback, Stage, silent_stage
from sop_faiss.train.checkpoints.saver import CheckpointSaver
from sop_faiss.train.log.health import watching
from sop_faiss.train.log.phase_progress import steps_stage
from sop_faiss.train.log.prototype_log import PrototypeLog
from sop_faiss.train.log.records import keep_records, open_monitor, timed_batches
from sop_faiss.train.optim import apply_settings, clip_each_gradient
from sop_faiss.train.rank_agreement import check_ranks_agree
from sop_faiss.train.scoring import Evaluation, Scoring
from sop_faiss.train.state import RunState
from sop_faiss.train.stop import StopRequest
from sop_faiss.train.time_limit import TimeLimit


class Step(NamedTuple):
    """Results of a step."""

    metrics: dict[str, Tensor | float]
    """Tensors are scalars, which the device may still be computing."""
    learned: list[Learned]
    """What `Objective.learn` returned for each part of the batch."""


def train_step(state: RunState, batch: Batch, log: PrototypeLog | None = None) -> Step:
    """Make one optimizer update (algorithm 1). The objective decides what is learned (`objectives/sop.py`).

    Args:
        state: the run.
        batch: this rank's images.
        log: records some prototypes, if the objective has any; None: records nothing.
    """
    config, objective = state.config, state.objective
    settings = state.schedules.at(state.step)
    _, images, patches = batch.masks.shape  # G, b, n
    batch = batch.to(state.device)

    # 1. Prototypes for the whole step, drawn from the memories as the last step left them (section 3.2).
    objective.begin_step(settings, images, patches)
    if log is not None:
        log.note(state.step + 1, objective)

    # 2. The views are normalized. 3. Both networks embed them. 4. Losses (section 3.3). 5. Gradients.
    # Each `learn` does all four for one part of the images, and adds `share` times the part's gradients.
    state.optimizer.zero_grad(set_to_none=True)
    state.student.freeze_backbone(settings.backbone_lr_scale == 0)
    share = 1.0 / config.train.accumulate
    parts = batch.split(config.train.accumulate)
    if len(parts) > 1:
        with _seeded_drop_path(state):  # the draws of `learn`
            objective.look_ahead(state.networks, parts)
    with _seeded_drop_path(state):
        learned = [objective.learn(state.networks, part, settings, share) for part in parts]
    state.average_gradients()  # over ranks

    # 6. The optimizer updates the student.
    apply_settings(state.optimizer, settings)
    gradient_norm = clip_each_gradient(state.student, config.optim.clip_norm)
    state.optimizer.step()

    # 7. The teacher follows by its moving average.
    update_teacher(state.teacher, state.student, settings.momentum)

    # 8. The memories store the embeddings that the teacher of point 3 made (section 3.1).
    metrics = objective.end_step(learned, batch.image_ids)

    state.step += 1
    state.images_seen += config.train.batch_size  # of all ranks
    return Step({**metrics, "gradient_norm": gradient_norm, **settings._asdict()}, learned)


@contextlib.contextmanager
def _seeded_drop_path(state: RunState) -> Iterator[None]:
    """Make drop path, which uses torch's global generators, depend on (seed, step, rank) only."""
    cuda = [state.device] if state.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(distributed.derive_seed("drop path", state.config.train.seed, state.step, distributed.rank()))
        yield


def train_steps(
    state: RunState,
    batches: Batches,
    run: Path,
    stop: StopRequest,
    *,
    evaluate: Evaluation | None = None,
    progress: ProgressCallback | None = None,
    stage: Stage = silent_stage,
) -> bool:
    """Train from the state's step to the end.

    Args:
        state: the run, fresh or resumed.
        batches: this rank's batches by step.
        run: the run directory; only the main rank writes there.
        stop: whether a signal has asked the run to stop.
        evaluate: scores a teacher; called on the main rank, during the steps or between them (`train/scoring.py`).
        progress: called after every step with the steps done and the last step.
        stage: announces filling the memories, each score between the steps, and the steps themselves.

    Returns:
        True when the last step is done (the end, or `train.stop_after_steps`) and scored; False when a signal stopped
        the run before.

    Raises:
        RunStoppedError: a number is not finite, or an alarm stopped the run (train.stop_on).
        DataError: too many images cannot be read.
        OSError: the disk is full.
    """
    monitor = open_monitor(state, run)
    every_steps = state.config.train.checkpoint_every_steps
    log = PrototypeLog(run, state.step, every_steps) if distributed.is_main() else None
    saver = CheckpointSaver(state, run)
    scoring = Scoring(state, run, monitor, evaluate, stop, stage)
    limit = TimeLimit(state)
    with contextlib.ExitStack() as closing:  # the last one first
        if monitor is not None:
            closing.callback(monitor.close)
        closing.callback(saver.close)
        closing.callback(scoring.close)
        _before_first_step(state, batches, scoring, saver, stage)
        if stop.anywhere(state.device):  # by then a fresh run has nothing to save
            if state.step > 0:
                saver.save(wait=True)
            return False
        show = closing.enter_context(steps_stage(stage, state.config, state.schedules.steps_per_epoch))
        limit.start()
        stop.saves_after = "this step"
        steps = range(state.step, state.last_step)
        for batch in timed_batches(batch_loader(batches, steps, state.device.type == "cuda"), monitor):
            with watching(state) as watch:
                step = train_step(state, batch, log)
            check_ranks_agree(state)
            health = watch.numbers(step.learned)
            keep_records(state, batch, step.metrics, health, monitor, run, len(batches.positions))
            expected = limit.after_step()
            scoring.after_step()
            limit.start()
            at_end = state.step == state.last_step
            stopping = stop.anywhere(state.device, saver.failed)  # also when a score failed
            if stopping or at_end or _is_checkpoint_due(state):
                saver.save(wait=stopping or at_end)
            show(state.step, expected)
            if progress is not None:
                progress(state.step, expected)
            if stopping:
                distributed.decide(scoring.raise_failure)
            if stopping or at_end:
                return at_end and distributed.decide(lambda: state.scores.measured is None)
        return True


def _before_first_step(
    state: RunState, batches: Batches, scoring: Scoring, saver: CheckpointSaver, stage: Stage
) -> None:
    """Fill the memories of a fresh run, make the scores that are due, and save them if no step follows."""
    if state.step == 0:
        state.objective.fill(state.networks, batches, stage)
    known = state.scores.counters()
    distributed.decide(scoring.begin)
    if state.step == state.last_step and distributed.decide(lambda: state.scores.counters() != known):
        saver.save(wait=True)


def _is_checkpoint_due(state: RunState) -> bool:
    """Return whether to save now; a run that may be lost must not push out its last good checkpoint."""
    return state.step % state.config.train.checkpoint_every_steps == 0 and not state.alarms.may_stop_soon
