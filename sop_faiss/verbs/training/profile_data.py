"""How fast a configuration's data stream is, and what a trainer would wait for it: `sop-train --profile-data`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sop_faiss.config import Config
from sop_faiss.data.profile import shuffle_quality, time_stages, time_stream
from sop_faiss.errors import ConfigError
from sop_faiss.progress import ProgressCallback
from sop_faiss.verbs.training.training_images import open_batches

__all__ = ["STEP_SECONDS", "profile_data", "wait_share"]

STEP_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Times of a training step, in seconds, for which the wait is told."""
_STAGE_IMAGES = 64


def profile_data(
    config: Config,
    *,
    steps: int = 10,
    step_seconds: Sequence[float] = STEP_SECONDS,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Run the stream without training, and tell where its time goes.

    Args:
        config: of the run.
        steps: batches to make, from the first of the run.
        step_seconds: how long a training step may take.
        progress: called with batches made and their number.

    Returns:
        images per second in all; seconds per image of each stage on one thread; the share of time that a trainer would
        wait, by the seconds its step takes; how many shards a batch is mixed of, and ideally would be.

    Raises:
        ConfigError: settings are impossible.
        DataError: the images cannot be opened or read.
    """
    if steps < 1:
        raise ConfigError(f"--steps {steps}: wanted 1 or more")
    odd = [seconds for seconds in step_seconds if not 0 < seconds < math.inf]
    if odd:
        raise ConfigError(f"--step-seconds {odd[0]:g}: wanted a number of seconds above 0")
    batches = open_batches(config, "a profile")
    speed = time_stream(batches, range(steps), progress)
    asked = [int(image_id) for image_id in batches.image_ids(steps)[:_STAGE_IMAGES]]  # not yet in the page cache
    stages = time_stages(batches, asked, steps // batches.steps_per_epoch)
    total = sum(stages.values())
    batch_seconds = speed.seconds / speed.steps
    mix = shuffle_quality(batches)
    return {
        "batch_size": config.train.batch_size,
        "workers": config.data.workers,
        "threads": batches.threads,
        "steps": speed.steps,
        "bad_images": speed.bad,
        "images_per_second": speed.images / speed.seconds,
        "seconds_per_batch": batch_seconds,
        "stages": {
            stage: {
                "milliseconds_per_image": 1e3 * seconds,
                "images_per_second": 1 / max(seconds, 1e-9),
                "share": seconds / total,
            }
            for stage, seconds in stages.items()
        },
        "wait_share_by_step_seconds": {
            f"{seconds:g}": wait_share(batch_seconds, seconds, config.data.workers) for seconds in step_seconds
        },
        "shuffle": {**asdict(mix), "share_of_ideal": mix.distinct / mix.ideal},
    }


def wait_share(batch_seconds: float, step_seconds: float, workers: int) -> float:
    """The share of time that a trainer waits for data, in the long run.

    Args:
        batch_seconds: that the stream takes for a batch, when nobody makes it wait.
        step_seconds: that the trainer takes for a step, once it has its batch.
        workers: processes that prepare batches meanwhile; with 0 none is prepared while the trainer works.
    """
    if workers == 0:
        return batch_seconds / (batch_seconds + step_seconds)
    return max(0.0, 1.0 - step_seconds / batch_seconds)
