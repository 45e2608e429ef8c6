"""Measure the speed of the data stream, stage by stage, and how well it mixes the shards. Never part of training."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.stream import Batches, batch_loader
from sop_faiss.data.views.color import augment_colors
from sop_faiss.data.views.crops import write_view
from sop_faiss.data.views.masks import draw_mask
from sop_faiss.errors import DataError, UnreachableError
from sop_faiss.progress import ProgressCallback

STAGES = ("read", "decode", "crop and resize", "color", "masks", "collate")
_BATCHES_MIXED = 200


@dataclass(frozen=True)
class StreamSpeed:
    """The speed at which batches come if training steps take no time."""

    images: int
    seconds: float
    """From starting the workers to the last batch."""
    steps: int
    bad: int
    """Images that could not be read."""


def time_stream(batches: Batches, steps: range, progress: ProgressCallback | None = None) -> StreamSpeed:
    """Take the batches of these steps as fast as they come, with the workers of the configuration.

    The time includes the start of the workers: without it, batches that are prepared ahead would seem to take no time.

    Raises:
        DataError: no readable image was found in place of a bad one, or a worker died.
    """
    started = time.perf_counter()
    images = bad = 0
    for done, batch in enumerate(batch_loader(batches, steps, pin_memory=False), start=1):
        images += len(batch.image_ids)
        bad += len(batch.bad)
        if progress is not None:
            progress(done, len(steps))
    return StreamSpeed(images, time.perf_counter() - started, len(steps), bad)


def time_stages(batches: Batches, image_ids: Sequence[int], epoch: int = 0) -> dict[str, float]:
    """Time each of `STAGES`, in seconds per image, one after the other in this process.

    `decode` includes the drawing of boxes and colors, since the boxes decide at which fraction an image may be decoded;
    `color` is absent if it is done on the device. `collate` is one copy of the finished views, as from a worker's
    memory to the trainer's. Images that cannot be read are skipped.

    Args:
        batches: the stream, which has the source and the settings of views and masks.
        image_ids: the images to time, most of them readable.
        epoch: the epoch whose views are made.

    Raises:
        DataError: none of the images can be read.
    """
    views = batches.config.views  # of the last phase
    seconds = {stage: 0.0 for stage in STAGES if stage != "color" or not batches.colors_on_device}
    slots = [np.empty((views.global_size, views.global_size, 3), np.uint8) for _ in range(views.global_count)]
    slots += [np.empty((views.local_size, views.local_size, 3), np.uint8) for _ in range(batches.local_count)]
    grid = views.global_size // batches.patch_size
    timed = 0
    for image_id in image_ids:
        clock = _Clock(seconds)
        try:
            encoded = batches.source.read(image_id)
            clock.stop("read")
            image, drawn = batches.multicrop.load(image_id, epoch, encoded)
            clock.stop("decode")
        except UnreachableError:
            raise
        except DataError:
            continue
        for index, ((view, generator), slot) in enumerate(zip(drawn, slots, strict=True)):
            write_view(image, view, slot, colored=False)
            clock.stop("crop and resize")
            if "color" in seconds:
                augment_colors(slot, view.colors)
                clock.stop("color")
            if index < views.global_count:
                draw_mask(grid, grid, batches.config.masks, generator)
                clock.stop("masks")
        for slot in slots:
            slot.copy()
        clock.stop("collate")
        timed += 1
    if not timed:
        raise DataError(f"none of {len(image_ids)} images can be read: see sop-data check {batches.source.description}")
    return {stage: total / timed for stage, total in seconds.items()}


class _Clock:
    """A clock that adds the time since its last stop to a stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] += now - self._last
        self._last = now


@dataclass(frozen=True)
class ShuffleQuality:
    """The number of different shards that the images of one global batch come from."""

    groups: int
    """Number of shards, or of folders if the images are files."""
    distinct: float
    """Different ones in a batch, on average."""
    ideal: float
    """The number expected of a uniform draw from all images."""


def shuffle_quality(batches: Batches) -> ShuffleQuality:
    """Count the shards in the first batches of the stream, against a uniform draw; `batches` must be of one rank."""
    group_of = _group_numbers(batches.source)
    sizes = np.bincount(group_of[batches.positions])
    steps = range(min(batches.steps_per_epoch, _BATCHES_MIXED))
    distinct = np.mean([len(np.unique(group_of[batches.image_ids(step)])) for step in steps])
    return ShuffleQuality(
        int((sizes > 0).sum()), float(distinct), ideal_distinct(sizes.tolist(), batches.batch_size_per_rank)
    )


def _group_numbers(source: ImageSource) -> Int64[np.ndarray, " n"]:
    """Return a number for each image's shard, or for its folder if it is a file."""
    numbers: Counter[str] = Counter()
    groups = np.empty(len(source), np.int64)
    for position in range(len(source)):
        name = source.source_of(position) or source.member_of(position).rpartition("/")[0]
        if name not in numbers:
            numbers[name] = len(numbers)
        groups[position] = numbers[name]
    return groups


def ideal_distinct(sizes: Sequence[int], drawn: int) -> float:
    """Return the expected number of groups in a uniform draw without replacement: sum of 1 - C(N - n, B) / C(N, B).

    Args:
        sizes: n, the number of members of each group; N is their sum.
        drawn: B, the number of members drawn, at most N.
    """
    total = sum(sizes)
    missed = 0.0
    for size in sizes:
        if drawn <= total - size:
            missed += math.exp(_log_binomial(total - size, drawn) - _log_binomial(total, drawn))
    return len(sizes) - missed


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
