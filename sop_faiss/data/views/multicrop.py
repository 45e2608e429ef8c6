"""All views of one image, from its file to their place in a batch: decode, draw, write."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from sop_faiss.config import Config
from sop_faiss.data.batch import Buffers
from sop_faiss.data.images.decode import decode_image
from sop_faiss.data.views.crops import View, draw_view, view_generator, write_view
from sop_faiss.data.views.masks import draw_mask
from sop_faiss.data.views.scaled_decoding import decode_scaled, scale_box, scale_denominator, upright_jpeg_size

Pixels = UInt8[np.ndarray, "h w 3"]


class DrawnView(NamedTuple):
    """A view that was drawn and is not yet written."""

    view: View
    generator: np.random.Generator
    """The view's own; it draws the mask next."""


class MultiCrop:
    """The maker of the views of images; safe in threads. A view is a pure function of seed, epoch, image and view.

    Args:
        config: sections data, views, masks and train.
        local_count: local views of each image.
    """

    def __init__(self, config: Config, local_count: int) -> None:
        self.config = config
        self._sides = [config.views.global_size] * config.views.global_count + [config.views.local_size] * local_count

    def draw(self, image_id: int, epoch: int, height: int, width: int) -> list[DrawnView]:
        """Draw all views of an image of this size, global ones first."""
        drawn = []
        for index in range(len(self._sides)):
            generator = view_generator(self.config.train.seed, epoch, image_id, index)
            drawn.append(DrawnView(draw_view(height, width, index, self.config.views, generator), generator))
        return drawn

    def load(
        self, image_id: int, epoch: int, encoded: bytes, sides: Sequence[int] | None = None
    ) -> tuple[Pixels, list[DrawnView]]:
        """Decode an image and draw its views. Boxes are drawn for its full size, at whatever fraction it is decoded.

        Args:
            image_id: of the image.
            epoch: of the views.
            encoded: content of the image's file.
            sides: of the views in pixels, which `data.scaled_decoding` depends on; None: those of the configuration.

        Raises:
            DataError: the image cannot be read; the message begins with the reason.
        """
        if self.config.data.scaled_decoding:
            scaled = self._load_scaled(image_id, epoch, encoded, sides or self._sides)
            if scaled is not None:
                return scaled
        image = decode_image(encoded, self.config.data.max_image_pixels, self.config.data.top_value)
        return image, self.draw(image_id, epoch, *image.shape[:2])

    def _load_scaled(
        self, image_id: int, epoch: int, encoded: bytes, sides: Sequence[int]
    ) -> tuple[Pixels, list[DrawnView]] | None:
        """Decode the image at the fraction that its views allow; None if it must be decoded at full size."""
        size = upright_jpeg_size(encoded, self.config.data.max_image_pixels)
        if size is None:
            return None
        drawn = self.draw(image_id, epoch, *size)
        crops = [(one.view.box, side) for one, side in zip(drawn, sides, strict=True)]
        denominator = scale_denominator(*size, crops)
        image = decode_scaled(encoded, size, denominator) if denominator > 1 else None
        if image is None:
            return None
        scaled = image.shape[0], image.shape[1]
        return image, [
            DrawnView(view._replace(box=scale_box(view.box, size, scaled)), generator) for view, generator in drawn
        ]

    def write(
        self,
        image: Pixels,
        drawn: list[DrawnView],
        out: Buffers,
        place: int,
        epoch: int,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """Write the views of an image, and the masks on its global views, at its place in a batch of an epoch.

        Args:
            image: decoded.
            drawn: all of its views.
            out: the batch.
            place: in the batch.
            epoch: of the views.
            numbers: of the views that are written; None: all.
        """
        masked = epoch >= self.config.masks.start_epoch
        global_count = self.config.views.global_count
        grid = math.isqrt(out.masks.shape[-1])
        for index in range(len(drawn)) if numbers is None else numbers:
            view, generator = drawn[index]
            if index < global_count:
                number, pixels, colors = index, out.global_views, out.global_colors
                out.masks[number, place] = masked and draw_mask(grid, grid, self.config.masks, generator)
            else:
                number, pixels, colors = index - global_count, out.local_views, out.local_colors
            on_device = colors.shape[-1] > 0
            write_view(image, view, pixels[number, place], colored=not on_device)
            if on_device:
                colors[number, place] = view.colors
