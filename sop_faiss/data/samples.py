"""One image of a batch: read, or replaced where it is bad; its views drawn, and written from the decoded picture."""

from __future__ import annotations

import math
import threading

import numpy as np
from jaxtyping import Int64, UInt8

from sop_faiss.config import Config
from sop_faiss.data.batch import BadSample, Buffers
from sop_faiss.data.decode import decode_image, drop_reason
from sop_faiss.data.masks import draw_mask
from sop_faiss.data.scaled import decode_scaled, scale_box, scale_denominator, upright_jpeg_size
from sop_faiss.data.source import ImageSource
from sop_faiss.data.views import View, draw_view, view_generator, write_view
from sop_faiss.errors import DataError

__all__ = ["Samples"]

_REPLACEMENT_TRIES = 32
_REPLACEMENT = 2**63 + 1  # a view of no image: the key of other draws

Picture = UInt8[np.ndarray, "h w 3"]
Drawn = tuple[View, np.random.Generator]  # a view, and the generator that goes on to draw its mask


class Samples:
    """Writes images into batches; safe in threads, and each image a pure function of its id and epoch.

    Args:
        source: the images.
        positions: those of them that may replace a bad one.
        config: sections data, views, masks and train.
        local_count: local views of each image.
    """

    def __init__(
        self, source: ImageSource, positions: Int64[np.ndarray, " m"], config: Config, local_count: int
    ) -> None:
        self.source, self.positions, self.config = source, positions, config
        self._sides = [config.views.global_size] * config.views.global_count + [config.views.local_size] * local_count
        self._kept: dict[int, Picture] = {}
        self._kept_bytes = 0
        self._keeping = threading.Lock()

    def write(self, wanted: int, epoch: int, out: Buffers, place: int) -> tuple[int, list[BadSample]]:
        """Write the views and masks of an image, or of its replacement, at its place in a batch.

        Returns:
            The image that was written, and those that could not be read.

        Raises:
            DataError: no readable image was found in place of a bad one.
        """
        image_id, (picture, drawn), bad = self._readable(wanted, epoch)
        global_count = self.config.views.global_count
        grid = math.isqrt(out.masks.shape[-1])
        for index, (view, generator) in enumerate(drawn):
            if index < global_count:
                number, pixels, colours = index, out.global_views, out.global_colours
                out.masks[number, place] = draw_mask(grid, grid, self.config.masks, generator)
            else:
                number, pixels, colours = index - global_count, out.local_views, out.local_colours
            on_device = colours.shape[-1] > 0
            write_view(picture, view, pixels[number, place], coloured=not on_device)
            if on_device:
                colours[number, place] = view.colours
        return image_id, bad

    def _readable(self, wanted: int, epoch: int) -> tuple[int, tuple[Picture, list[Drawn]], list[BadSample]]:
        """The wanted picture; where it cannot be read, one that (seed, epoch, wanted) determines."""
        generator: np.random.Generator | None = None
        bad: list[BadSample] = []
        image_id = wanted
        for _ in range(_REPLACEMENT_TRIES):
            try:
                return image_id, self._load(image_id, epoch), bad
            except DataError as error:
                bad.append(BadSample(image_id, self.source.keys[image_id], drop_reason(error), str(error)))
            if generator is None:
                generator = view_generator(self.config.train.seed, epoch, wanted, _REPLACEMENT)
            image_id = int(self.positions[generator.integers(len(self.positions))])
        raise DataError(
            f"{_REPLACEMENT_TRIES} images in a row cannot be read (last: {bad[-1].key}: {bad[-1].message}); "
            "check the data with sop-data check"
        )

    def _draw(self, image_id: int, epoch: int, height: int, width: int) -> list[Drawn]:
        """All views of an image of this size."""
        drawn = []
        for index in range(len(self._sides)):
            generator = view_generator(self.config.train.seed, epoch, image_id, index)
            drawn.append((draw_view(height, width, index, self.config.views, generator), generator))
        return drawn

    def _load(self, image_id: int, epoch: int) -> tuple[Picture, list[Drawn]]:
        """A picture and its views. Boxes are drawn on its whole size, however much of it is decoded."""
        if self.config.data.scaled_decoding:
            scaled = self._load_scaled(image_id, epoch)
            if scaled is not None:
                return scaled
        picture = self._decode(image_id)
        return picture, self._draw(image_id, epoch, *picture.shape[:2])

    def _load_scaled(self, image_id: int, epoch: int) -> tuple[Picture, list[Drawn]] | None:
        """The picture at the fraction that its views allow; None where they need the whole, or it has to be decoded."""
        encoded = self.source.read(image_id)
        size = upright_jpeg_size(encoded, self.config.data.max_image_pixels)
        if size is None:
            return None
        drawn = self._draw(image_id, epoch, *size)
        crops = [(view.box, side) for (view, _), side in zip(drawn, self._sides, strict=True)]
        denominator = scale_denominator(*size, crops)
        picture = decode_scaled(encoded, size, denominator) if denominator > 1 else None
        if picture is None:
            return None
        scaled = picture.shape[0], picture.shape[1]
        return picture, [(view._replace(box=scale_box(view.box, size, scaled)), rest) for view, rest in drawn]

    def _decode(self, image_id: int) -> Picture:
        picture = self._kept.get(image_id)
        if picture is None:
            picture = decode_image(self.source.read(image_id), self.config.data.max_image_pixels)
            with self._keeping:
                if self._kept_bytes + picture.nbytes <= self.config.data.decoded_cache_bytes:
                    self._kept_bytes += 0 if image_id in self._kept else picture.nbytes
                    self._kept[image_id] = picture
        return picture
