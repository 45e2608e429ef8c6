"""The training images of a run for its report, found by the ids that its memories and records keep."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64

from sop_faiss.config import Config
from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.stream import digest_images
from sop_faiss.errors import DataError
from sop_faiss.report.contact_sheet import SheetImage, Verdict, source_image
from sop_faiss.verbs.training.training_images import open_indexed_images, open_training_images


def _unreadable(reason: str) -> bytes:
    raise DataError(reason)


_RANDOM_ROW = SheetImage("random row", functools.partial(_unreadable, "a random row of the start, without an image"))
_RENEWED = SheetImage("copy", functools.partial(_unreadable, "a copy of step 0, whose row was replaced since"))


@dataclass(frozen=True)
class RunImages:
    """Images by position, which is their id in a run's memories."""

    source: ImageSource
    trained: Int64[np.ndarray, " m"]
    held_out: Int64[np.ndarray, " h"]

    def image(self, image: int | None) -> SheetImage:
        """Return the image of an id, or a tile of text for a random row (-1) or a replaced one (None)."""
        if image is None or image < 0:
            return _RENEWED if image is None else _RANDOM_ROW
        if image >= len(self.source):
            return SheetImage(f"image {image}", functools.partial(_unreadable, f"missing: there is no image {image}"))
        return source_image(self.source, image, self._label(image))

    def same_class(self, image: int | None, other: int | None) -> Verdict | None:
        """Return whether two images are of one class; None if that is not known."""
        labels, count = self.source.labels, len(self.source)
        if labels is None or image is None or other is None or not (0 <= image < count and 0 <= other < count):
            return None
        if labels[image] < 0 or labels[other] < 0:
            return None
        return Verdict.RIGHT if labels[image] == labels[other] else Verdict.WRONG

    def _label(self, image: int) -> str:
        if self.source.labels is None or self.source.labels[image] < 0:
            return ""
        number = int(self.source.labels[image])
        return str(number) if self.source.class_names is None else self.source.class_names[number]


def open_run_images(config: Config, digest: str | None, data: str | None = None) -> RunImages:
    """Open the images that a run was trained on.

    Args:
        digest: of the images, from its checkpoint; None without a checkpoint.
        data: where the images are now, if they were moved.

    Raises:
        ConfigError: the images were read in sequence and have no positions.
        DataError: the images are missing, or are no longer those of the run.
        UnreachableError: a server does not answer.
    """
    if data is not None:
        config = replace(config, data=replace(config.data, train=data))
    source, trained = open_indexed_images(config, "a report with images")
    held_out = open_training_images(config)[2]
    if digest is not None and digest_images(source, trained) != digest:
        raise DataError(
            f"{source.description} has other images than the run was trained on (some were added, removed or "
            "renamed): name the run's images by `data`"
        )
    return RunImages(source, trained, held_out)
