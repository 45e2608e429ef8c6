"""What the loop writes down of each step, the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sop_faiss import distributed
from sop_faiss.data.batch import Batch
from sop_faiss.train.bad_samples import check_bad_share
from sop_faiss.train.monitor import Monitor, check_finite
from sop_faiss.train.state import RunState
from sop_faiss.train.wandb_log import WandbLog

__all__ = ["keep_records", "open_monitor", "timed_batches"]


def open_monitor(state: RunState, run: Path) -> Monitor | None:
    """The main rank's monitor, at the state's step; None on the other ranks.

    Raises:
        ConfigError: Weights & Biases cannot be started.
    """
    if not distributed.is_main():
        return None
    project, measured = state.config.train.wandb_project, state.scores.measured
    wandb = WandbLog(project, run, state.config) if project else None
    return Monitor(run, state.step, None if measured is None else measured.step, wandb)


def timed_batches(loader: Iterator[Batch], monitor: Monitor | None) -> Iterator[Batch]:
    """The batches, with the time spent waiting for them noted."""
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
            monitor.bad_samples.add(bad, state.step)
        check_bad_share(state.bad_samples, state.images_seen, images, state.config.data.max_bad_fraction)
    place = {
        "step": state.step,
        "epoch": state.step / state.schedules.steps_per_epoch,
        "images": state.images_seen,
    }
    check_finite({**place, **values}, batch.image_ids.tolist(), run)
    if monitor is not None and (state.step % state.config.train.log_every_steps == 0 or state.step == 1):
        monitor.log({**place, **values, **monitor.speed(state.images_seen)})
