"""The stream of training batches: a pure function of (seed, step), so that any step can be made again.

The order of the images is a permutation that (seed, epoch) determines; a global batch is a run of it, and rank r of R
makes the r-th part. A worker is asked for a step and returns its batch: the position in the data is the step number,
and resuming is starting to count there.
"""

from __future__ import annotations

import hashlib
import signal
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sop_faiss.config import Config
from sop_faiss.data.decode import decode_image, drop_reason
from sop_faiss.data.masks import draw_mask
from sop_faiss.data.source import ImageSource
from sop_faiss.data.views import view_generator, write_view
from sop_faiss.errors import ConfigError, DataError, UnreachableError

__all__ = ["REPLACEMENT_TRIES", "BadSample", "Batch", "Batches", "batch_loader", "epoch_order", "split_holdout"]

REPLACEMENT_TRIES = 32
"""Bad images in a row before the data are given up."""

_ORDER, _REPLACEMENT, _HOLDOUT = 2**63, 2**63 + 1, 2**63 + 2  # views of no image: keys of other draws


@dataclass(frozen=True)
class BadSample:
    """An image that could not be read; another took its place."""

    position: int
    key: str
    reason: str
    message: str


@dataclass
class Batch:
    """One rank's part of a global batch, in uint8; views of an image have the same place in each view."""

    global_views: UInt8[Tensor, "G b s s 3"]
    local_views: UInt8[Tensor, "L b t t 3"]
    masks: Bool[Tensor, "G b n"]
    image_ids: Int64[Tensor, " b"]
    bad: list[BadSample]

    def split(self, parts: int) -> list[Batch]:
        """As many batches of equal size, in order; the bad samples stay with the first."""
        pieces = zip(
            self.global_views.chunk(parts, 1),
            self.local_views.chunk(parts, 1),
            self.masks.chunk(parts, 1),
            self.image_ids.chunk(parts),
            [self.bad, *([] for _ in range(parts - 1))],
            strict=True,
        )
        return [Batch(*piece) for piece in pieces]

    def to(self, device: torch.device) -> Batch:
        """The same on a device, without waiting for the copy."""
        return Batch(
            self.global_views.to(device, non_blocking=True),
            self.local_views.to(device, non_blocking=True),
            self.masks.to(device, non_blocking=True),
            self.image_ids.to(device, non_blocking=True),
            self.bad,
        )

    def pin_memory(self) -> Batch:
        """Page-locked tensors, for copies that run beside the computation."""
        self.global_views, self.local_views = self.global_views.pin_memory(), self.local_views.pin_memory()
        self.masks, self.image_ids = self.masks.pin_memory(), self.image_ids.pin_memory()
        return self


def epoch_order(count: int, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """The order of `count` images in an epoch."""
    return view_generator(seed, epoch, 0, _ORDER).permutation(count)


def split_holdout(count: int, share: float, seed: int) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " h"]]:
    """Positions to train on, and positions held out; a seeded draw of round(share * count), both in rising order."""
    order = view_generator(seed, 0, 0, _HOLDOUT).permutation(count)
    held_out = round(share * count)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


class Batches(Dataset["Batch | DataError"]):
    """Batches by step number.

    Args:
        source: the images.
        positions: those of them that are trained on.
        config: sections data, views, masks and train.
        patch_size: side of a mask's unit, in pixels.
        rank: whose part is made.
        world_size: into how many parts a global batch is cut.

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
    ) -> None:
        self._plan(positions, source.description, config, patch_size, rank, world_size)
        self.source = source

    def _plan(
        self,
        positions: Int64[np.ndarray, " m"],
        description: str,
        config: Config,
        patch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        """All that is known without the images."""
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
        self.local_count = config.views.local_count if config.loss.cls_weight else 0
        self._order: tuple[int, Int64[np.ndarray, " m"]] = (-1, positions[:0])
        self._decoded: OrderedDict[int, UInt8[np.ndarray, "h w 3"]] = OrderedDict()
        self._decoded_bytes = 0

    def image_ids(self, step: int) -> Int64[np.ndarray, " b"]:
        """This rank's images of a step, before any bad one is replaced."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = self.positions[epoch_order(len(self.positions), self.config.train.seed, epoch)]
            self._order = (epoch, order)
        start = within * self.config.train.batch_size + self._offset
        return self._order[1][start : start + self.batch_size_per_rank]

    def digest(self) -> str:
        """What the images are and in which order, as 64 hex digits; a run is resumed on the same ones."""
        digest = hashlib.sha256(self.positions.tobytes())
        for key in self.source.keys:
            digest.update(key.encode() + b"\n")
        return digest.hexdigest()

    def __getitem__(self, step: int) -> Batch | DataError:
        """The batch of a step, or why there is none: a value, since worker processes garble raised errors."""
        try:
            return self.make(step)
        except DataError as error:
            return error

    def make(self, step: int) -> Batch:
        """Make the batch of a step.

        Raises:
            DataError: no readable image was found in place of a bad one.
        """
        views, masks = self.config.views, self.config.masks
        count, epoch = self.batch_size_per_rank, step // self.steps_per_epoch
        global_views = np.empty((views.global_count, count, views.global_size, views.global_size, 3), np.uint8)
        local_views = np.empty((self.local_count, count, views.local_size, views.local_size, 3), np.uint8)
        grid = views.global_size // self.patch_size
        hidden = np.zeros((views.global_count, count, grid * grid), bool)
        image_ids = self.image_ids(step).copy()
        bad: list[BadSample] = []
        for i, wanted in enumerate(image_ids):
            image_id, picture = self._readable_picture(int(wanted), epoch, bad)
            image_ids[i] = image_id
            for view in range(views.global_count + self.local_count):
                generator = view_generator(self.config.train.seed, epoch, image_id, view)
                is_global = view < views.global_count
                slot = global_views[view, i] if is_global else local_views[view - views.global_count, i]
                write_view(picture, view, views, generator, slot)
                if is_global:
                    hidden[view, i] = draw_mask(grid, grid, masks, generator)
        return Batch(
            global_views=torch.from_numpy(global_views),
            local_views=torch.from_numpy(local_views),
            masks=torch.from_numpy(hidden),
            image_ids=torch.from_numpy(image_ids),
            bad=bad,
        )

    def _readable_picture(
        self, wanted: int, epoch: int, bad: list[BadSample]
    ) -> tuple[int, UInt8[np.ndarray, "h w 3"]]:
        """The wanted picture; where it cannot be read, one that (seed, epoch, wanted) determines."""
        generator: np.random.Generator | None = None
        image_id = wanted
        for _ in range(REPLACEMENT_TRIES):
            try:
                return image_id, self._decode(image_id)
            except UnreachableError:  # not this image's fault: others would fail too
                raise
            except DataError as error:
                bad.append(BadSample(image_id, self.source.keys[image_id], drop_reason(error), str(error)))
            if generator is None:
                generator = view_generator(self.config.train.seed, epoch, wanted, _REPLACEMENT)
            image_id = int(self.positions[generator.integers(len(self.positions))])
        raise DataError(
            f"{REPLACEMENT_TRIES} images in a row cannot be read (last: {bad[-1].key}: {bad[-1].message}); "
            "check the data with sop-data check"
        )

    def _decode(self, image_id: int) -> UInt8[np.ndarray, "h w 3"]:
        picture = self._decoded.get(image_id)
        if picture is None:
            picture = decode_image(self.source.read(image_id), self.config.data.max_image_pixels)
            if self._decoded_bytes + picture.nbytes <= self.config.data.decoded_cache_bytes:
                self._decoded[image_id] = picture
                self._decoded_bytes += picture.nbytes
        return picture


def _start_worker(_: int) -> None:
    """One thread per worker process; signals are the training process's business."""
    cv2.setNumThreads(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def batch_loader(batches: Batches, steps: range, pin_memory: bool) -> Iterator[Batch]:
    """The batches of `steps`, made ahead by `data.workers` processes (in this one if 0).

    Raises:
        DataError: no readable image was found in place of a bad one, or a worker died.
    """
    workers = batches.config.data.workers
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        worker_init_fn=_start_worker if workers else None,
        multiprocessing_context="fork" if workers else None,
        pin_memory=pin_memory,
    )
    try:
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise DataError(
            f"a process that prepares images died ({reason}): too little memory? lower data.workers"
        ) from None
