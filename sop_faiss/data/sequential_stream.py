"""Batches from shards that are read in sequence (`data.access: sequential`), without random access."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from jaxtyping import Int64

from sop_faiss.config import Config
from sop_faiss.data.batch import BadSample, Batch, Buffers
from sop_faiss.data.batch_writer import REPLACEMENT_TRIES
from sop_faiss.data.images.decode import drop_reason
from sop_faiss.data.shards.shard_stream import Damage, ShardStream, StreamedImage, stable_image_id
from sop_faiss.data.stream import Batches
from sop_faiss.data.workers import this_worker
from sop_faiss.errors import DataError

_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


def stand_in_positions(config: Config) -> Int64[np.ndarray, " m"]:
    """Return -1 for each image of an epoch, since they have no positions; it takes the memory of one number."""
    return np.broadcast_to(np.int64(-1), (config.data.samples_per_epoch,))


class SequentialBatches(Batches):
    """Batches by step number, each of the next images in this worker's part of the stream.

    A step that is made twice has other images the second time. All ranks have the same number of steps.

    Args:
        stream: the shards.
        config: as of `Batches`.
        patch_size: side of a mask's unit, in pixels.
        rank: the rank whose part is made.
        world_size: number of parts of a global batch.
        device: where the views will be used.

    Raises:
        ConfigError: as `Batches`.
    """

    def __init__(
        self,
        stream: ShardStream,
        config: Config,
        patch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        self._plan(stand_in_positions(config), stream.description, config, patch_size, (rank, world_size), device)
        self.stream = stream
        self._rank, self._world_size = rank, world_size
        self._images: Iterator[StreamedImage | Damage] | None = None
        if rank == 0:
            _log.info(
                "%s is read in sequence: it is shuffled by shards and among %d images, an epoch is %d images, and a "
                "resumed run starts a new pass",
                *(stream.description, config.data.shuffle_buffer, config.data.samples_per_epoch),
            )

    def image_ids(self, step: int) -> Int64[np.ndarray, " b"]:
        """Return -1 for each image: the ids are not known before the images are read."""
        return np.full(self.batch_size_per_rank, -1)

    def fetching_ahead(self, step: int) -> AbstractContextManager[None]:
        """Do nothing: no shards are kept, so none are fetched."""
        return nullcontext()

    def digest(self) -> str:
        """Digest the addresses of the shards, as 64 hex digits."""
        return self.stream.digest()

    def make(self, step: int) -> Batch:
        """Make the batch of a step, as `Batches.make`; the first step made is where the run starts, and sets the order.

        Images are taken from the stream in the order of their places, then written in threads, then others are taken
        for those that could not be read: the batch does not depend on the number of threads.
        """
        images = self._images = self._images or self._start(step)
        batch = self._empty_batch(step)
        write = functools.partial(self._write_image, step // self.steps_per_epoch, batch.buffers())
        failed: dict[int, list[Damage]] = {place: [] for place in range(self.batch_size_per_rank)}
        bad: dict[int, list[BadSample]] = {}
        for _ in range(REPLACEMENT_TRIES):
            tried = [(place, _next_image(images, damages)) for place, damages in failed.items()]
            for (place, image), damage in zip(tried, self._in_threads(write, tried), strict=True):
                if damage is not None:
                    failed[place].append(damage)
                    continue
                batch.image_ids[place] = stable_image_id(image.key)
                bad[place] = [_bad_sample(damage, image.key) for damage in failed.pop(place)]
            if not failed:
                batch.bad += [sample for place in sorted(bad) for sample in bad[place]]
                return batch
        raise _too_many(next(iter(failed.values())))

    def _start(self, step: int) -> Iterator[StreamedImage | Damage]:
        """Start this worker's part of the stream."""
        number, workers = this_worker() or (0, 1)
        return self.stream.images(
            self._rank * workers + number,
            self._world_size * workers,
            self.config.data.shuffle_buffer,
            self.config.train.seed,
            max(0, step - number),  # the run's first step: worker `number` begins `number` steps later
        )

    def _write_image(self, epoch: int, out: Buffers, tried: tuple[int, StreamedImage]) -> Damage | None:
        """Write the views of an image at its place, or return why it cannot be read."""
        place, item = tried
        try:
            image, drawn = self.multicrop.load(stable_image_id(item.key), epoch, item.encoded, out.sides)
        except DataError as error:
            return Damage(item.key, item.shard, item.member, item.offset, drop_reason(error), str(error))
        self.multicrop.write(image, drawn, out, place, epoch)
        return None


def _next_image(images: Iterator[StreamedImage | Damage], damages: list[Damage]) -> StreamedImage:
    """Return the next image of the stream; what cannot be read before it is added to `damages`.

    Raises:
        DataError: too many images in a row cannot be read.
    """
    for _ in range(REPLACEMENT_TRIES):
        item = next(images)
        if isinstance(item, StreamedImage):
            return item
        damages.append(item)
    raise _too_many(damages)


def _bad_sample(damage: Damage, replacement: str) -> BadSample:
    return BadSample(
        position=stable_image_id(damage.key),
        key=damage.key,
        shard=damage.shard,
        member=damage.member,
        offset=damage.offset,
        reason=damage.reason,
        message=damage.message,
        replacement=replacement,
    )


def _too_many(damages: list[Damage]) -> DataError:
    return DataError(
        f"{REPLACEMENT_TRIES} images in a row cannot be read (last: {damages[-1].key}: {damages[-1].message}); "
        "check the data"
    )
