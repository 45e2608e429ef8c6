"""Training with online evaluation, as `sop-train` does it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sop_faiss import distributed
from sop_faiss.config import Config, flat_settings, load_run_config, to_yaml
from sop_faiss.data.degenerate_images import describe_degenerate_images
from sop_faiss.data.shards.shard_stream import ShardStream
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import refuse_occupied, remove_leftovers, write_file
from sop_faiss.model.backbones.first_layer import whiten_first_layer
from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint
from sop_faiss.model.initial_weights import load_initial_weights, resolve_init
from sop_faiss.model.networks import build_student_and_teacher
from sop_faiss.objectives.choose import choose_objective
from sop_faiss.progress import ProgressCallback, Stage, silent_stage
from sop_faiss.train.allocator import keep_freed_memory
from sop_faiss.train.checkpoints.checkpoint import clear_leftovers
from sop_faiss.train.checkpoints.full_disk import explain_full_disk
from sop_faiss.train.checkpoints.run_lock import LOCK_NAME, RunLock
from sop_faiss.train.log.monitor import read_metrics
from sop_faiss.train.log.wandb_log import require_wandb
from sop_faiss.train.loop import train_steps
from sop_faiss.train.parallel import copy_weights, gets_sharded
from sop_faiss.train.schedules import Schedules
from sop_faiss.train.state import RunState, autocast_dtype
from sop_faiss.train.stop import REQUEUE_NAME, StopRequest
from sop_faiss.verbs.training.dry_run import describe_data, describe_device_memory, with_total
from sop_faiss.verbs.training.online_scores import open_evaluation, scored_encoder
from sop_faiss.verbs.training.training_images import draw_images, make_batches, open_training_images, training_device

_log = logging.getLogger(__name__)

_MAY_CHANGE_ON_RESUME = (
    "data.train",
    "data.workers",
    "data.threads",
    "data.max_bad_fraction",
    "data.decoded_cache_bytes",
    "data.cache_dir",
    "data.cache_bytes",
    "data.shuffle_buffer",
    "neighbors.engine",
    "neighbors.refresh",
    "distill.teacher",  # its place: the checkpoint knows its fingerprint
    "distill.weights",
    "train.accumulate",
    "train.views_apart",
    "train.checkpoint_activations",
    "train.compile",
    "train.parallel",
    "train.check_ranks_every_steps",
    "train.device",
    "train.stop_after_steps",
    "train.stop_on",
    "train.alarm_warmup_steps",
    "train.checkpoint_every_steps",
    "train.keep_last",
    "train.keep_every_steps",
    "train.background_save",
    "train.log_every_steps",
    "train.wandb_project",
    "evaluate.",
)


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


def _stored_config(run: Path) -> Config | None:
    """Load the configuration of a run's start; None if it is missing, or damaged (see `_check_same_run`)."""
    try:
        return load_run_config(run / "config.yaml") if (run / "config.yaml").is_file() else None
    except ConfigError:
        return None


def _check_same_run(run: Path, config: Config) -> None:
    """Refuse to resume a run with another configuration, except for settings that do not change its steps."""
    try:
        before = flat_settings(load_run_config(run / "config.yaml"))
    except ConfigError as error:
        raise CheckpointError(f"run {run} cannot be resumed: {error}") from None
    for name, value in flat_settings(config).items():
        if before[name] != value and not name.startswith(_MAY_CHANGE_ON_RESUME):
            raise ConfigError(
                f"run {run} was started with {name} = {before[name]}, not {value}: resume with the same settings, "
                "or start another run with another `output`"
            )


def _prepare_output(output: Path, config: Config, resume: bool, lock: RunLock) -> Path | None:
    """Check that the run may be written there, and find the checkpoint to continue from. For the main rank."""
    if (output / LOCK_NAME).is_file() or (resume and (output / "config.yaml").is_file()):
        lock.acquire()
        remove_leftovers(output / "config.yaml")  # of a process killed while it wrote the first one
        if resume:
            (output / REQUEUE_NAME).unlink(missing_ok=True)
    if not output.is_dir():
        refuse_occupied(output)  # it finds what else is in the way
    started = output.is_dir() and any(path.name != LOCK_NAME for path in output.iterdir())
    if started and not resume:
        raise ConfigError(f"output {output} exists and is not empty: add `resume` to continue it, or choose another")
    if started and not (output / "config.yaml").is_file():
        raise ConfigError(f"output {output} is not a run (it has no config.yaml): choose another")
    checkpoint = None
    if started:
        _check_same_run(output, config)
        if checkpoint_directories(output):
            checkpoint = find_checkpoint(output)
    return checkpoint


def _open_run(output: Path, config: Config, checkpoint: Path | None, lock: RunLock) -> None:
    """Write the configuration, and clear what a killed process left. For the main rank, after all checks."""
    output.mkdir(parents=True, exist_ok=True)
    if not lock.held:
        lock.acquire()
        if (output / "config.yaml").exists():
            raise ConfigError(f"output {output} was filled by another process just now: choose another")
    write_file(output / "config.yaml", to_yaml(config))
    clear_leftovers(output, 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_")))


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
        request = StopRequest("the next step", saves_on_interrupt=saves_on_interrupt)
        with explain_full_disk(output), request.listening() as stop:
            config = resolve_init(config, _stored_config(output) if resume else None)
            checkpoint = distributed.decide(lambda: _prepare_output(output, config, resume, lock))
            source, trained, held_out = open_training_images(config)
            state = RunState(config, device, len(trained))
            ranks = (distributed.rank(), distributed.world_size())
            batches = make_batches(config, source, trained, state.student.backbone.patch_size, ranks, device)
            state.data_digest = batches.digest()
            scored_encoder(state.teacher.backbone, config)  # a pooling that it lacks is refused before any work
            evaluate = open_evaluation(config, source, trained, held_out)
            if checkpoint is not None:
                state.resume(checkpoint)
            elif config.model.init:
                state.init_sha256 = load_initial_weights(state.teacher.backbone, config.model, config.views)
                copy_weights(state.student, state.teacher.state_dict())
            elif config.model.first_layer != "random":
                whiten_first_layer(state.teacher.backbone, draw_images(config, source, trained), config.train.seed)
                copy_weights(state.student, state.teacher.state_dict())
            distributed.decide(lambda: _open_run(output, config, checkpoint, lock))
            if checkpoint is None and distributed.is_main() and not isinstance(source, ShardStream):
                wrong = describe_degenerate_images(
                    source, trained, config.train.seed, config.data.max_image_pixels, config.data.top_value
                )
                if wrong is not None:
                    _log.warning("%s: %s", source.description, wrong)
            finished = train_steps(state, batches, output, stop, evaluate=evaluate, progress=progress, stage=stage)
            if distributed.is_main():
                _log_verdict(state)
            if not finished:
                distributed.decide(lambda: None if stop.interrupted else (output / REQUEUE_NAME).touch())
        lines = read_metrics(output)
        signs = state.alarms.at_end([line for line in lines if "loss" in line])
        if finished and distributed.is_main():
            _log_signs(state, signs)
        last = {**_last_metrics(state, lines), "signs": list(signs)}
        steps = state.schedules.total_steps if state.schedules.is_decided else None
        return TrainingResult(finished, state.step, steps, last)
    finally:
        lock.release()
        distributed.leave_process_group()


def _last_metrics(state: RunState, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the metrics for `TrainingResult`; a score may be written after the lines of later steps."""
    merged: dict[str, Any] = {}
    for line in sorted(lines, key=lambda line: line["step"]):
        merged.update(line)
    merged.update(step=state.step, epoch=state.step / state.schedules.steps_per_epoch, images=state.images_seen)
    return {**merged, **state.scores.summary()}


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


def describe_run(config: Config) -> dict[str, Any]:
    """Describe a run for `sop-train --dry-run`: its images, parameters, steps, and estimated memory.

    The number of steps of a run of `train.minutes` is None, since it depends on the machine.

    Raises:
        ConfigError: a setting is impossible.
        DataError: the training images cannot be opened.
    """
    config = resolve_init(config)
    source, trained, held_out = open_training_images(config)
    objective = choose_objective(config)
    student, _ = build_student_and_teacher(config, objective.heads)
    device, world_size = training_device(config), distributed.announced_world_size()
    needs = objective.needs(device, len(trained))
    batches = make_batches(config, source, trained, student.backbone.patch_size, (0, world_size))
    scored_encoder(student.backbone, config)
    evaluation = open_evaluation(config, source, trained, held_out)
    schedules = Schedules(config, batches.steps_per_epoch)
    steps = schedules.total_steps if schedules.is_decided else None
    parameters = sum(p.numel() for p in student.parameters())
    trained_parameters = sum(p.numel() for p in student.parameters() if p.requires_grad)
    # student, teacher and two AdamW moments, in float32
    checkpoint_bytes = (
        (parameters + trained_parameters) * 2 * 4 + needs.sizes["memories_bytes"] + needs.sizes["neighbor_lists_bytes"]
    )
    copied = config.train.background_save and device.type == "cpu"  # the copy of a GPU's state is in main memory
    is_sharded = gets_sharded(parameters, config, world_size)
    parts = world_size if is_sharded else 1
    held, learning = -(-parameters // parts), -(-trained_parameters // parts)
    sizes = {
        "checkpoint_copy_bytes": checkpoint_bytes if copied else 0,
        # the teacher, and this rank's part of student, gradients and two AdamW moments, in float32
        "weights_and_optimizer_bytes": (parameters + held + learning * 3) * 4,
        **needs.sizes,
        **describe_device_memory(
            config, student, needs, world_size, autocast_dtype(config, device) is not None, is_sharded
        ),
    }
    return {
        "data": describe_data(config, source),
        "training_images": len(trained),
        "held_out_images": len(held_out),
        "scores": [] if evaluation is None else list(evaluation.names),
        "backbone_parameters": sum(p.numel() for p in student.backbone.parameters()),
        "projector_parameters": sum(p.numel() for p in student.heads.parameters()),
        "trained_parameters": trained_parameters,
        "steps_per_epoch": batches.steps_per_epoch,
        "steps": steps,
        "ends_at_step": min(filter(None, (steps, config.train.stop_after_steps)), default=None),
        "device": device.type,
        "world_size": world_size,
        "parallel": "none" if world_size == 1 else "fsdp" if is_sharded else "ddp",
        "batch_size_per_rank": batches.batch_size_per_rank,
        **with_total(sizes),
        "checkpoint_bytes": checkpoint_bytes,  # on disk
    }
