"""Profile of a configuration's data stream, and of the time that training would wait (`sop-train --profile-data`)."""

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

STEP_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Durations of a training step, in seconds, for which the wait is computed."""
_STAGE_IMAGES = 64


def profile_data(
    config: Config,
    *,
    steps: int = 10,
    step_seconds: Sequence[float] = STEP_SECONDS,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Run the stream without training, and measure where its time goes.

    Args:
        steps: number of batches to make, from the first of the run, or of its last phase if views change their sizes.
        step_seconds: assumed durations of a training step.
        progress: called with the number of batches made and their total.

    Returns:
        Images per second of the stream; milliseconds per image of each stage on one thread; the fraction of time that
        training would wait, by the duration of a step; the number of shards in a batch, and the ideal number. All of it
        at the sizes of `views`; with `train.phases` also the images per second of each phase before.

    Raises:
        ConfigError: a setting is impossible.
        DataError: the images cannot be opened or read.
    """
    if steps < 1:
        raise ConfigError(f"`steps={steps}`: wanted 1 or more")
    odd = [seconds for seconds in step_seconds if not 0 < seconds < math.inf]
    if odd:
        raise ConfigError(f"`step_seconds={odd[0]:g}`: wanted a number of seconds above 0")
    batches = open_batches(config, "a profile")
    *earlier, first = [0, *config.train.phase_ends(batches.steps_per_epoch)]
    before = [time_stream(batches, range(start, start + steps)) for start in earlier]
    speed = time_stream(batches, range(first, first + steps), progress)
    image_ids = batches.image_ids(first + steps)[:_STAGE_IMAGES].tolist()  # of a later step: not yet in the page cache
    stages = time_stages(batches, image_ids, (first + steps) // batches.steps_per_epoch)
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
        **({"images_per_second_of_phases": [each.images / each.seconds for each in before]} if before else {}),
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
    """Return the long-run fraction of time that training waits for data.

    Args:
        batch_seconds: that the stream takes for a batch if it never waits.
        step_seconds: that a training step takes once it has its batch.
        workers: processes that prepare batches meanwhile; with 0, none is prepared during a step.
    """
    if workers == 0:
        return batch_seconds / (batch_seconds + step_seconds)
    return max(0.0, 1.0 - step_seconds / batch_seconds)
