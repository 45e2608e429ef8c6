"""What the loop records of each step, the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.data.batch import Batch
from sop_faiss.train.log.bad_samples import check_bad_share
from sop_faiss.train.log.health import is_logged
from sop_faiss.train.log.monitor import Monitor
from sop_faiss.train.log.stopped import check_alarms, check_finite
from sop_faiss.train.log.wandb_log import WandbLog
from sop_faiss.train.state import RunState


def open_monitor(state: RunState, run: Path) -> Monitor | None:
    """Return the main rank's monitor, at the state's step; None on the other ranks.

    Raises:
        ConfigError: Weights & Biases cannot be started.
    """
    if not distributed.is_main():
        return None
    project, measured = state.config.train.wandb_project, state.scores.measured
    wandb = WandbLog(project, run, state.config) if project else None
    return Monitor(run, state.step, None if measured is None else measured.step, wandb)


def timed_batches(loader: Iterator[Batch], monitor: Monitor | None) -> Iterator[Batch]:
    """Yield the batches, and record the time spent waiting for them."""
    while True:
        started = time.monotonic()
        batch = next(loader, None)
        if batch is None:
            return
        if monitor is not None:
            monitor.waited(time.monotonic() - started)
        yield batch


def keep_records(
    state: RunState,
    batch: Batch,
    metrics: dict[str, Tensor | float],
    health: dict[str, float | int],
    monitor: Monitor | None,
    run: Path,
    images: int,
) -> None:
    """Count bad images, stop at numbers that are not finite, and every `log_every_steps` log and check alarms.

    `metrics` differ by rank, and their means are logged; `health` is the same on all ranks.
    """
    names = list(metrics)
    bad_here = torch.tensor([float(len(batch.bad))], device=state.device)
    here = torch.stack([torch.as_tensor(metrics[name], device=state.device).float() for name in names])
    *means, mean_bad = distributed.average(torch.cat([here, bad_here])).tolist()
    values = dict(zip(names, means, strict=True))
    if mean_bad > 0:
        bad = [sample for rank_samples in distributed.gather_objects(batch.bad) for sample in rank_samples]
        state.bad_samples += len(bad)
        if monitor is not None:
            monitor.bad_samples.add(bad, state.step)
        data = state.config.data
        asked = state.images_seen * (1 if data.groups == "none" else 2)  # another image of the group is read, too
        check_bad_share(state.bad_samples, asked, images, data.max_bad_fraction)
    epoch = state.step / state.schedules.steps_per_epoch
    line = {"step": state.step, "epoch": epoch, "images": state.images_seen, **values, **health}
    check_finite(state, line, run)
    if is_logged(state, state.step):
        if monitor is not None:
            monitor.log({**line, **monitor.speed(state.images_seen)})
        check_alarms(state, line, run)
