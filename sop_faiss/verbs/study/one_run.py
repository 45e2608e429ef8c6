"""One run of a study in this process: train, or continue, measure the last teacher, and record how it ended."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sop_faiss.config import Config, load_run_config
from sop_faiss.config.study import StudyConfig, load_study
from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.results import environment
from sop_faiss.files import write_json
from sop_faiss.model.checkpoint import checkpoint_directories, find_checkpoint
from sop_faiss.model.encoders.load import encoder_of_spec
from sop_faiss.model.encoders.spec import EncoderSpec
from sop_faiss.verbs.study.clock import StepClock
from sop_faiss.verbs.study.final_tasks import open_final_tasks
from sop_faiss.verbs.study.folder import DONE, StudyFolder
from sop_faiss.verbs.study.plan import arm_configs
from sop_faiss.verbs.training.train import run_training
from sop_faiss.verbs.training.training_images import training_device

_PROBE_STEPS, _PROBE_SECONDS = 200, 20.0
"""A trial ends after this many steps, or after this time and eight steps."""


def run_one(root: Path, name: str, driver: int = 0) -> bool:
    """Train one run of a study to its end, measure its last teacher, and write its record.

    Args:
        root: the study's directory, in which `sop-study` has planned the run.
        name: `ARM/seed_N`.
        driver: process that has started this one; the run is saved and stops if it ends. 0: none.

    Returns:
        Whether the run is done; False if a signal stopped it, which saves it.

    Raises:
        ConfigError: the study has no such run.
        SopError: as of `run_training` and of the tasks.
    """
    folder = StudyFolder(root)
    if not folder.plan(name).is_file():
        raise ConfigError(f"{root} has no run {name}: wanted ARM/seed_N of its study")
    if folder.is_done(name):
        return True
    study, config = load_study(folder.study_file), load_run_config(folder.plan(name))
    clock = StepClock(
        folder.clock(name),
        config.evaluate.every_steps,
        config.train.checkpoint_every_steps,
        study.budget.minutes * 60,
        _stop_this_process,
    )
    clock.rewind(_saved_step(folder.run(name)))  # a kill may have lost the steps that reached the limit
    if not clock.is_over:
        result = run_training(config, folder.run(name), resume=True, progress=_watching(driver, clock))
        clock.write()
        if not (result.finished or clock.is_over):
            return False
    write_json(folder.record_file(name), _record(study, config, folder.run(name), clock))
    return True


def _saved_step(run: Path) -> int:
    """Return the step that a run continues from; 0 if nothing was saved."""
    return int(find_checkpoint(run).name.removeprefix("step_")) if checkpoint_directories(run) else 0


def _stop_this_process() -> None:
    """Ask the training of this process to save and stop, as a scheduler would."""
    os.kill(os.getpid(), signal.SIGTERM)


def _watching(driver: int, callback: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return the callback with a look at whether the driver still lives."""

    def watched(step: int, last: int) -> None:
        if driver and os.getppid() != driver:
            _stop_this_process()
        callback(step, last)

    return watched


def _record(study: StudyConfig, config: Config, run: Path, clock: StepClock) -> dict[str, Any]:
    device = training_device(config)
    cuda_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    peak_bytes = _peak_bytes()  # of training, before the tasks
    started = time.perf_counter()
    encoder = encoder_of_spec(EncoderSpec(str(run), device=device.type)) if study.final.tasks else None
    scores: dict[str, float] = {}
    for task in open_final_tasks(study.final, config):
        assert encoder is not None
        scores |= task.measure(encoder)
    steps = _saved_step(run)
    return {
        "status": DONE,
        "steps": steps,
        "images": steps * config.train.batch_size,
        "seconds": round(clock.seconds, 3),
        "stopped_by_minutes": clock.is_over,
        "final_seconds": round(time.perf_counter() - started, 3),
        "peak_memory_bytes": peak_bytes,
        "cuda_peak_bytes": cuda_bytes,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "commit": _commit(),
        "scores": scores,
        "environment": environment(),
    }


def _peak_bytes() -> int:
    """Return the most main memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _commit() -> str:
    """Return the commit of this code if it is in a git checkout, with `+` if it has been changed; else empty."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an environment may be inside another project's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def probe_arm(root: Path, arm: str) -> None:
    """Measure an arm's seconds per step by a short training, which is thrown away, and write them.

    With `train.phases` each phase is measured by itself, and the mean is that of a complete run.

    Raises:
        ConfigError: the study has no such arm.
        SopError: as of `run_training`.
    """
    folder = StudyFolder(root)
    configs = arm_configs(load_study(folder.study_file))
    if arm not in configs:
        raise ConfigError(f"{root} has no arm {arm}: wanted one of {', '.join(configs)}")
    train = replace(configs[arm].train, stop_after_steps=_PROBE_STEPS, checkpoint_every_steps=10**9, wandb_project="")
    config = replace(configs[arm], train=train, evaluate=replace(configs[arm].evaluate, every_steps=0, best_by=""))
    place = folder.probe(arm).with_suffix(".trial")
    ends = [0.0, *(phase.until for phase in train.phases), 1.0]
    measured = [_measure(replace(each, train=replace(train, phases=())), place, arm) for each in config.each_phase()]
    seconds = sum((end - start) * each for start, end, (each, _) in zip(ends, ends[1:], measured, strict=False))
    write_json(folder.probe(arm), {"seconds_per_step": seconds, "steps": sum(steps for _, steps in measured)})


def _measure(config: Config, place: Path, arm: str) -> tuple[float, int]:
    """Train for a short time; return the seconds per step, and how many steps were made."""
    shutil.rmtree(place, ignore_errors=True)
    moments: list[float] = []

    def note(step: int, last: int) -> None:
        moments.append(time.monotonic())
        if len(moments) > 8 and moments[-1] - moments[0] > _PROBE_SECONDS:
            _stop_this_process()

    run_training(config, place, progress=note)
    shutil.rmtree(place, ignore_errors=True)
    if len(moments) < 4:
        raise ConfigError(f"arm {arm} ended after {len(moments)} steps, too few to measure its speed: use budget.steps")
    later = moments[len(moments) // 4 :]  # the first steps are slower: memory is allocated, files are read first
    return (later[-1] - later[0]) / (len(later) - 1), len(moments)
