"""Images into batches: each is read, or replaced if it cannot be read."""

from __future__ import annotations

import threading

import numpy as np
from jaxtyping import Int64

from sop_faiss.data.batch import BadSample, Buffers
from sop_faiss.data.groups import open_groups
from sop_faiss.data.images.decode import drop_reason
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.views.crops import view_generator
from sop_faiss.data.views.multicrop import DrawnView, MultiCrop, Pixels
from sop_faiss.errors import DataError, UnreachableError

REPLACEMENT_TRIES = 32
"""Bad images in a row before reading fails."""

_REPLACEMENT = 2**63 + 1  # a number that no view has: the key of the draws of replacements


class BatchWriter:
    """Writes images into batches; safe in threads, and each image a pure function of its id and epoch.

    Args:
        source: the images.
        positions: the images that may replace a bad one.
        multicrop: makes the views of the images.

    Raises:
        ConfigError: `data.groups` needs labels, and there are none.
    """

    def __init__(self, source: ImageSource, positions: Int64[np.ndarray, " m"], multicrop: MultiCrop) -> None:
        self.source, self.positions, self.multicrop = source, positions, multicrop
        self.config = multicrop.config
        self.groups = open_groups(source, positions) if self.config.data.groups == "labels" else None
        self._kept: dict[int, Pixels] = {}
        self._kept_bytes = 0
        self._keeping = threading.Lock()

    def write(self, image_id: int, epoch: int, out: Buffers, place: int) -> tuple[int, list[BadSample]]:
        """Write the views and masks of an image, or of its replacement, at its place in a batch.

        With `data.groups` every second view is one of another image of its group; if that cannot be read, its own.

        Returns:
            The id of the image that was written, and the images that could not be read.

        Raises:
            DataError: no readable image was found in place of a bad one.
        """
        image_id, (image, drawn), bad = self._load_readable(image_id, epoch, out.sides)
        own = range(len(drawn))
        partner = image_id if self.groups is None else self.groups.partner(image_id, self.config.train.seed, epoch)
        if partner != image_id:
            try:
                other, of_other = self._load(partner, epoch, out.sides, views_of=image_id)
            except UnreachableError:
                raise
            except DataError as error:
                bad.append(self._bad_sample(partner, error, image_id))
            else:
                own = range(0, len(drawn), 2)
                self.multicrop.write(other, of_other, out, place, epoch, range(1, len(drawn), 2))
        self.multicrop.write(image, drawn, out, place, epoch, own)
        return image_id, bad

    def _load_readable(
        self, wanted: int, epoch: int, sides: list[int]
    ) -> tuple[int, tuple[Pixels, list[DrawnView]], list[BadSample]]:
        """Load the wanted image or, if it cannot be read, one that (seed, epoch, wanted) determines."""
        generator: np.random.Generator | None = None
        failed: dict[int, DataError] = {}
        image_id = wanted
        for _ in range(REPLACEMENT_TRIES):
            if image_id not in failed:
                try:
                    loaded = self._load(image_id, epoch, sides)
                except UnreachableError:  # not this image's fault: others would fail too
                    raise
                except DataError as error:
                    failed[image_id] = error
                else:
                    return image_id, loaded, [self._bad_sample(*failure, image_id) for failure in failed.items()]
            if generator is None:
                generator = view_generator(self.config.train.seed, epoch, wanted, _REPLACEMENT)
            image_id = int(self.positions[generator.integers(len(self.positions))])
        last, reason = failed.popitem()
        raise DataError(
            f"{REPLACEMENT_TRIES} images in a row cannot be read (last: {self.source.keys[last]}: {reason}); "
            "check the data with sop-data check"
        )

    def _bad_sample(self, position: int, error: DataError, replacement: int) -> BadSample:
        source = self.source
        return BadSample(
            position=position,
            key=source.keys[position],
            shard=source.source_of(position),
            member=source.member_of(position),
            offset=source.offset_of(position),
            reason=drop_reason(error),
            message=str(error),
            replacement=source.keys[replacement],
        )

    def _load(
        self, image_id: int, epoch: int, sides: list[int], views_of: int | None = None
    ) -> tuple[Pixels, list[DrawnView]]:
        """Load an image, and draw the views of it, or those that it gives to another image."""
        drawn_for = image_id if views_of is None else views_of
        image = self._kept.get(image_id)
        if image is not None:
            return image, self.multicrop.draw(drawn_for, epoch, *image.shape[:2])
        image, drawn = self.multicrop.load(drawn_for, epoch, self.source.read(image_id), sides)
        self._keep(image_id, image)
        return image, drawn

    def _keep(self, image_id: int, image: Pixels) -> None:
        with self._keeping:
            if self._kept_bytes + image.nbytes <= self.config.data.decoded_cache_bytes:
                self._kept_bytes += 0 if image_id in self._kept else image.nbytes
                self._kept[image_id] = image
