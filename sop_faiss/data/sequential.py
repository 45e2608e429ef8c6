"""Batches from shards that are read in sequence (`data.access: sequential`): their images come as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64, UInt8
from torch.utils.data import get_worker_info

from sop_faiss.config import Config
from sop_faiss.data.decode import decode_image, drop_reason
from sop_faiss.data.shard_stream import Damage, ShardStream, StreamedPicture, stable_image_id
from sop_faiss.data.stream import REPLACEMENT_TRIES, BadSample, Batch, Batches
from sop_faiss.errors import DataError

__all__ = ["SequentialBatches", "stand_in_positions"]

_log = logging.getLogger(__name__)


def stand_in_positions(config: Config) -> Int64[np.ndarray, " m"]:
    """As many -1 as an epoch has images: they have no positions. One number in memory."""
    return np.broadcast_to(np.int64(-1), (config.data.samples_per_epoch,))


class SequentialBatches(Batches):
    """Batches by step number, each of the next images that this worker's part of the stream has.

    A step asked for twice has other images the second time. All ranks have the same number of steps.

    Args:
        stream: the shards.
        config: as of `Batches`.
        patch_size: side of a mask's unit, in pixels.
        rank: whose part is made.
        world_size: into how many parts a global batch is cut.

    Raises:
        ConfigError: as `Batches`.
    """

    def __init__(
        self, stream: ShardStream, config: Config, patch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self._plan(stand_in_positions(config), stream.description, config, patch_size, rank, world_size)
        self.stream = stream
        self._rank, self._world_size = rank, world_size
        self._pictures: Iterator[StreamedPicture | Damage] | None = None
        if rank == 0:
            _log.info(
                "%s is read in sequence: shuffled by shards and among %d images, counted as %d per epoch, and begun "
                "anew when resumed",
                *(stream.description, config.data.shuffle_buffer, config.data.samples_per_epoch),
            )

    def image_ids(self, step: int) -> Int64[np.ndarray, " b"]:
        """Not known before they are read: -1."""
        return np.full(self.batch_size_per_rank, -1)

    def digest(self) -> str:
        """Which shards these are, as 64 hex digits."""
        return self.stream.digest()

    def make(self, step: int) -> Batch:
        """As `Batches.make`; the first step asked for tells where the run goes on, which chooses the order."""
        if self._pictures is None:
            worker = get_worker_info()
            number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
            self._pictures = self.stream.pictures(
                self._rank * workers + number,
                self._world_size * workers,
                self.config.data.shuffle_buffer,
                self.config.train.seed,
                max(0, step - number),  # the loader asks its workers for one step after the other
            )
        return super().make(step)

    def _readable_picture(
        self, wanted: int, epoch: int, bad: list[BadSample]
    ) -> tuple[int, UInt8[np.ndarray, "h w 3"]]:
        """The next picture of the stream that can be read."""
        assert self._pictures is not None
        for _ in range(REPLACEMENT_TRIES):
            item = next(self._pictures)
            image_id = stable_image_id(item.key)
            if isinstance(item, Damage):
                bad.append(BadSample(image_id, item.key, item.reason, item.message))
                continue
            try:
                return image_id, decode_image(item.encoded, self.config.data.max_image_pixels)
            except DataError as error:
                bad.append(BadSample(image_id, item.key, drop_reason(error), str(error)))
        raise DataError(
            f"{REPLACEMENT_TRIES} images in a row cannot be read (last: {bad[-1].key}: {bad[-1].message}); "
            "check the data"
        )
