"""Training with online evaluation, as `sop-train` does it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.data.degenerate_images import describe_degenerate_images
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.model.backbones.first_layer import whiten_first_layer
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from sop_faiss.progress import ProgressCallback, Stage, silent_stage
from sop_faiss.train.allocator import keep_freed_memory
from sop_faiss.train.checkpoints.full_disk import explain_full_disk
from sop_faiss.train.checkpoints.run_lock import RunLock
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.log.wandb_log import require_wandb
from sop_faiss.train.loop import train_steps
from sop_faiss.train.parallel import copy_weights
from sop_faiss.train.state import RunState
from sop_faiss.train.stop import REQUEUE_NAME, StopRequest
from sop_faiss.verbs.training.online_scores import open_evaluation, scored_encoder
from sop_faiss.verbs.training.run_directory import open_run, prepare_run, stored_config
from sop_faiss.verbs.training.training_images import draw_images, make_batches, open_training_images

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    finished: bool
    """Whether it reached its end, or `train.stop_after_steps`; False if a signal stopped it; then it can be resumed."""
    step: int
    """The last step made."""
    steps: int | None
    """Total number of steps, by its schedules; None: not decided yet (`train.minutes`)."""
    last_metrics: dict[str, Any]
    """The last line of `metrics.jsonl` with a loss and the last with a score, merged, with the current step and epoch.

    `signs`: names of the alarms whose signs the last logged steps show.
    A run with scores also has `best_by`, `first_score` (of step 0), `best_score`, `best_step`, `difference` (mean, low,
    high), `verdict` (an `Outcome`) and `kept_step`, the step whose teacher is in `best/`.
    """


def run_training(
    config: Config,
    output: Path,
    *,
    resume: bool = False,
    progress: ProgressCallback | None = None,
    stage: Stage = silent_stage,
    saves_on_interrupt: bool = True,
) -> TrainingResult:
    """Train, from the start or from the last checkpoint.

    Args:
        output: the run directory; new or empty unless `resume`.
        resume: continue from the newest complete checkpoint there; in an empty directory, start.
        progress: called with the number of steps done and their total.
        stage: announces filling the memories, scores, and the steps.
        saves_on_interrupt: False: Ctrl-C ends the run at once, for a run that nobody would continue.

    Raises:
        ConfigError: a setting is impossible, or differs from when the run was started, or another process is training
            there.
        DataError: images are missing, or too many are damaged.
        CheckpointError: no checkpoint can be used.
        RunStoppedError: the run stopped itself.
        OSError: the disk is full; the last checkpoint is kept.
        KeyboardInterrupt: Ctrl-C; the run is saved, unless it is pressed twice or `saves_on_interrupt` is False.
    """
    require_wandb(config)
    device = distributed.join_process_group(config.train.device)
    if device.type == "cpu":
        keep_freed_memory()
    lock = RunLock(output)
    try:
        request = StopRequest("the start", saves_on_interrupt=saves_on_interrupt)
        with explain_full_disk(output), request.listening() as stop:
            config = resolve_init(config, stored_config(output) if resume else None)
            checkpoint = distributed.decide(lambda: prepare_run(output, config, resume, lock))
            source, trained, held_out = open_training_images(config)
            state = RunState(config, device, len(trained))
            ranks = (distributed.rank(), distributed.world_size())
            batches = make_batches(config, source, trained, state.student.backbone.patch_size, ranks, device)
            state.data_digest = batches.digest()
            scored_encoder(state.teacher.backbone, config)  # a pooling that it lacks is refused before any work
            evaluate = open_evaluation(config, source, trained, held_out)
            if checkpoint is not None:
                state.resume(checkpoint)
            else:
                _fill_networks(state, source, trained)
            distributed.decide(lambda: open_run(output, config, checkpoint, lock))
            if checkpoint is None and distributed.is_main():
                _warn_of_degenerate_images(config, source, trained)
            finished = train_steps(state, batches, output, stop, evaluate=evaluate, progress=progress, stage=stage)
            if distributed.is_main():
                _log_verdict(state)
            if not finished:
                distributed.decide(lambda: None if stop.interrupted else (output / REQUEUE_NAME).touch())
        return _result(state, output, finished)
    finally:
        lock.release()
        distributed.leave_process_group()


def _fill_networks(state: RunState, source: ImageSource | ShardStream, trained: Int64[np.ndarray, " m"]) -> None:
    """Give student and teacher of a fresh run the weights it starts from, unless all of them are random."""
    config, backbone = state.config, state.teacher.backbone
    if config.model.init:
        state.init_sha256 = load_initial_weights(backbone, config.model, config.views)
    elif config.model.first_layer != "random":
        whiten_first_layer(backbone, draw_images(config, source, trained), config.train.seed)
    else:
        return
    copy_weights(state.student, state.teacher.state_dict())


def _warn_of_degenerate_images(
    config: Config, source: ImageSource | ShardStream, trained: Int64[np.ndarray, " m"]
) -> None:
    if isinstance(source, ShardStream):
        return
    wrong = describe_degenerate_images(
        source, trained, config.train.seed, config.data.max_image_pixels, config.data.top_value
    )
    if wrong is not None:
        _log.warning("%s: %s", source.description, wrong)


def _result(state: RunState, run: Path, finished: bool) -> TrainingResult:
    """Say how a run ended, and warn of the signs it ends with."""
    lines = read_metrics(run)
    signs = state.alarms.at_end([line for line in lines if "loss" in line])
    if finished and distributed.is_main():
        _log_signs(state, signs)
    last: dict[str, Any] = {}
    for line in sorted(lines, key=lambda line: line["step"]):  # a score may stand after the lines of later steps
        last.update(line)
    last.update(step=state.step, epoch=state.step / state.schedules.steps_per_epoch, images=state.images_seen)
    last.update(state.scores.summary(), signs=list(signs))
    steps = state.schedules.total_steps if state.schedules.is_decided else None
    return TrainingResult(finished, state.step, steps, last)


def _log_signs(state: RunState, signs: dict[str, str]) -> None:
    """Warn of what is wrong at the end, even if the run ended before any alarm could be raised."""
    warmup = state.alarms.rules.warmup_steps
    short = f"; networks may look like this in their first {warmup} steps: train for longer to be sure"
    for name, sign in signs.items():
        _log.warning("the run ends with the sign of %s: %s%s", name, sign, short if state.step <= warmup else "")


def _log_verdict(state: RunState) -> None:
    """Log whether training beat step 0, at the end or after a signal."""
    verdict = state.scores.verdict(state.schedules.warmup_steps)
    if verdict is not None:
        is_better, said = verdict
        _log.log(logging.INFO if is_better else logging.WARNING, "%s", said)
    elif not state.config.evaluate.every_steps:
        _log.info(
            "nothing was scored, so that it is not known whether training beat step 0: evaluate.every_steps=100 scores "
            "a new run from step 0 on"
        )
    else:
        _log.info("no later step was scored yet, so that it is not known whether training beats step 0")
