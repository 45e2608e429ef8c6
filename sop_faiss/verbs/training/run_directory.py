"""The directory of a run: who may write there, with which settings, and from which checkpoint it continues."""

from __future__ import annotations

from pathlib import Path

from sop_faiss.config import Config, flat_settings, load_run_config, to_yaml
from sop_faiss.errors import CheckpointError, ConfigError
from sop_faiss.files import remove_leftovers, write_file
from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint
from sop_faiss.output_checks import refuse_occupied
from sop_faiss.train.checkpoints.checkpoint import clear_leftovers
from sop_faiss.train.checkpoints.run_lock import LOCK_NAME, RunLock
from sop_faiss.train.stop import REQUEUE_NAME

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


def stored_config(run: Path) -> Config | None:
    """Load the configuration of a run's start; None if it is missing, or damaged (see `prepare_run`)."""
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
        old = before[name]
        if old != value and not name.startswith(_MAY_CHANGE_ON_RESUME):
            raise ConfigError(
                f"run {run} was started with {name} = {old or repr(old)}, not {value or repr(value)}: "
                "resume with the same settings, or start another run with another `output`"
            )


def prepare_run(output: Path, config: Config, resume: bool, lock: RunLock) -> Path | None:
    """Check that a run may be written there, and find the checkpoint to continue from. For the main rank.

    Raises:
        ConfigError: the directory is not free, or has a run by other settings.
        CheckpointError: the run there cannot be resumed.
    """
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


def open_run(output: Path, config: Config, checkpoint: Path | None, lock: RunLock) -> None:
    """Write the configuration, and clear what a killed process left. For the main rank, after all checks.

    Raises:
        ConfigError: another process was faster.
    """
    output.mkdir(parents=True, exist_ok=True)
    if not lock.held:
        lock.acquire()
        if (output / "config.yaml").exists():
            raise ConfigError(f"output {output} was filled by another process just now: choose another")
    write_file(output / "config.yaml", to_yaml(config))
    clear_leftovers(output, 0 if checkpoint is None else int(checkpoint.name.removeprefix("step_")))
