"""The stream of training batches: a pure function of (seed, step), so that any step can be made again.

The order of the images is a permutation that (seed, epoch) determines; a global batch is a section of it, and rank r of
R makes the r-th part. A worker gets the number of a step and returns its batch: the position in the data is the step
number, so a resumed run only starts to count there.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import cv2
import numpy as np
import torch
from jaxtyping import Int64

from sop_faiss import distributed
from sop_faiss.config import Config
from sop_faiss.data.batch import BadSample, Batch, empty_tensor
from sop_faiss.data.batch_writer import BatchWriter
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.ordered_map import default_threads, map_ordered
from sop_faiss.data.shards.prefetch import fetch_ahead
from sop_faiss.data.views.color import COLUMNS
from sop_faiss.data.views.crops import view_generator
from sop_faiss.data.views.device_color import colors_on_device
from sop_faiss.data.views.multicrop import MultiCrop
from sop_faiss.data.workers import Workers
from sop_faiss.errors import ConfigError

_ORDER, _HOLDOUT = 2**63, 2**63 + 2  # numbers that no view has: keys of other draws
_CPU = torch.device("cpu")

A = TypeVar("A")
B = TypeVar("B")


def epoch_order(count: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """Return the order of `count` images in an epoch."""
    return view_generator(seed, epoch, 0, _ORDER).permutation(count)


def split_holdout(count: int, share: float, seed: int) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " h"]]:
    """Draw round(share * count) positions to hold out; return those to train on and those held out, each sorted."""
    order = view_generator(seed, 0, 0, _HOLDOUT).permutation(count)
    held_out = round(share * count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def digest_images(
    source: ImageSource, trained: Int64[np.ndarray, " m"], groups: Int64[np.ndarray, " n"] | None = None
) -> str:
    """Digest a source's images, which of them are trained on, and their groups if these matter, as 64 hex digits."""
    digest = hashlib.sha256(trained.tobytes())
    for key in source.keys:
        digest.update(key.encode() + b"\n")
    if groups is not None:
        digest.update(np.ascontiguousarray(groups, np.int64).tobytes())
    return digest.hexdigest()


class Batches:
    """Batches by step number.

    Args:
        source: the images.
        positions: the images that are trained on.
        config: sections data, views, masks and train.
        patch_size: side of a mask's unit, in pixels.
        rank: the rank whose part is made.
        world_size: number of parts of a global batch.
        device: where the views will be used; `views.color: auto` depends on it.

    Raises:
        ConfigError: the batch is larger than the data set, or cannot be cut into equal parts.
    """

    def __init__(
        self,
        source: ImageSource,
        positions: Int64[np.ndarray, " m"],
        config: Config,
        patch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        self._plan(positions, source.description, config, patch_size, (rank, world_size), device)
        self.source = source
        self.writer = BatchWriter(source, positions, self.multicrop)

    def _plan(
        self,
        positions: Int64[np.ndarray, " m"],
        description: str,
        config: Config,
        patch_size: int,
        ranks: tuple[int, int],
        device: torch.device,
    ) -> None:
        """Set everything that is known without the images; `ranks` are rank and world size."""
        rank, world_size = ranks
        batch_size = config.train.batch_size
        if batch_size > len(positions):
            raise ConfigError(
                f"train.batch_size = {batch_size} exceeds the {len(positions)} training images of "
                f"{description}: lower it"
            )
        if batch_size % world_size:
            raise ConfigError(f"train.batch_size = {batch_size} is not divisible by the {world_size} ranks")
        if batch_size // world_size % config.train.accumulate:
            raise ConfigError(
                f"train.accumulate = {config.train.accumulate} does not divide the {batch_size // world_size} images "
                "that a rank takes per step: choose a divisor, or another train.batch_size"
            )
        self.positions = positions
        self.config = config
        self.patch_size = patch_size
        self.steps_per_epoch = len(positions) // batch_size
        self.batch_size_per_rank = batch_size // world_size
        self._offset = rank * self.batch_size_per_rank
        self.local_count = config.views.local_count if config.term_weights()["cls"] else 0
        self.multicrop = MultiCrop(config, self.local_count)
        self.threads = config.data.threads or default_threads(config.data.workers, distributed.local_world_size())
        self.colors_on_device = colors_on_device(config.views, device)
        self._order: tuple[int, Int64[np.ndarray, " m"]] = (-1, positions[:0])

    def image_ids(self, step: int) -> Int64[np.ndarray, " b"]:
        """Return this rank's images of a step, before any bad one is replaced."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = self.positions[epoch_order(len(self.positions), self.config.train.seed, epoch)]
            self._order = (epoch, order)
        start = within * self.config.train.batch_size + self._offset
        return self._order[1][start : start + self.batch_size_per_rank]

    def fetching_ahead(self, step: int) -> AbstractContextManager[None]:
        """Fetch missing shards while the context is open, in the order in which this rank needs them from `step` on."""
        return fetch_ahead(self.source, functools.partial(self._positions_from, step))

    def _positions_from(self, step: int) -> Int64[np.ndarray, " n"]:
        """Return this rank's images up to the end of the next epoch, in order."""
        end = (step // self.steps_per_epoch + 2) * self.steps_per_epoch
        return np.concatenate([self.image_ids(each) for each in range(step, end)])

    def digest(self) -> str:
        """Digest the images and their order, as 64 hex digits; a run is resumed on the same images."""
        groups = self.writer.groups
        return digest_images(self.source, self.positions, None if groups is None else groups.labels)

    def __getitem__(self, step: int) -> Batch:
        """Make the batch of a step, as `make`."""
        return self.make(step)

    def make(self, step: int) -> Batch:
        """Make the batch of a step.

        Raises:
            DataError: no readable image was found in place of a bad one.
        """
        batch = self._empty_batch(step)
        epoch, out = step // self.steps_per_epoch, batch.buffers()

        def write(placed: tuple[int, int]) -> tuple[int, list[BadSample]]:
            place, image_id = placed
            return self.writer.write(image_id, epoch, out, place)

        for place, (image_id, bad) in enumerate(self._in_threads(write, enumerate(batch.image_ids.tolist()))):
            batch.image_ids[place] = image_id
            batch.bad += bad
        return batch

    def _in_threads(self, function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
        return map(function, items) if self.threads == 1 else map_ordered(function, items, self.threads)

    def _empty_batch(self, step: int) -> Batch:
        """Return a batch of the step's images, without their views, which have the sizes of the step's phase."""
        views, count = self.config.in_phase(step, self.steps_per_epoch).views, self.batch_size_per_rank
        patches = (views.global_size // self.patch_size) ** 2
        columns = len(COLUMNS) if self.colors_on_device else 0
        return Batch(
            empty_tensor((views.global_count, count, views.global_size, views.global_size, 3), torch.uint8),
            empty_tensor((self.local_count, count, views.local_size, views.local_size, 3), torch.uint8),
            empty_tensor((views.global_count, count, columns), torch.float32),
            empty_tensor((self.local_count, count, columns), torch.float32),
            empty_tensor((views.global_count, count, patches), torch.bool),
            torch.from_numpy(self.image_ids(step).copy()),
            [],
        )


def batch_loader(batches: Batches, steps: range, pin_memory: bool) -> Iterator[Batch]:
    """Yield the batches of `steps`, made ahead by `data.workers` processes, at most two each (if 0, in this process).

    Raises:
        DataError: no readable image was found in place of a bad one.
        WorkerDiedError: a worker died.
    """
    count = batches.config.data.workers
    # here and in the forked workers, the threads work on different images of a batch, not on the rows of one image
    threads_of_opencv = cv2.getNumThreads()
    cv2.setNumThreads(0)
    try:
        workers = Workers(batches.make, count) if count else None
        with batches.fetching_ahead(steps.start):
            if workers is not None:
                yield from workers.map(steps, _pinning() if pin_memory else None)
                return
            for step in steps:
                batch = batches.make(step)
                yield batch.pin_memory() if pin_memory else batch
    finally:
        cv2.setNumThreads(threads_of_opencv)


def _pinning() -> Callable[[Batch], Batch]:
    """Return a function that pins batches for the current GPU, in any thread."""
    device = torch.cuda.current_device()

    def pin(batch: Batch) -> Batch:
        with torch.cuda.device(device):
            return batch.pin_memory()

    return pin
