"""Check of some images before training: nothing can be learned from copies of one image, or from black ones."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64
from PIL import Image

from sop_faiss.data.images.source import ImageSource
from sop_faiss.data.images.verified_image import WholeImage, read_whole
from sop_faiss.data.shards.prefetch import fetch_ahead
from sop_faiss.data.stream import epoch_order

LOOKED_AT = 16  # images
_SIDE = 16  # pixels; images are compared at this size, at which noise and JPEG artifacts are averaged out
_SAME_LEVELS = 6  # of 255; no pixel differs by more between copies of one image
_FLAT_LEVELS = 16  # of 255; images whose brightest and darkest pixels differ by less look like one plain area


def describe_degenerate_images(
    source: ImageSource, positions: Int64[np.ndarray, " m"], seed: int, max_pixels: int, top_value: float = 0.0
) -> str | None:
    """Say what is wrong with the first images of a run: all of one brightness, or all the same.

    Args:
        positions: the images that are trained on.
        seed: of the run, whose first epoch begins with the images that are checked, 16 at most.
        max_pixels: larger images are left out, as are bad ones.
        top_value: white in grayscale of more than 8 bits; see `data.top_value`.

    Returns:
        What is wrong and what to do, or None.
    """
    first = positions[epoch_order(len(positions), seed, 0)[:LOOKED_AT]]
    with fetch_ahead(source, lambda: first):
        looked_at = [read_whole(source, position, max_pixels, top_value) for position in first.tolist()]
    images = np.array(
        [
            np.asarray(one.image.resize((_SIDE, _SIDE), Image.Resampling.BOX), np.int16)
            for one in looked_at
            if isinstance(one, WholeImage)
        ]
    )
    if len(images) < 2:
        return None
    darkest, brightest = int(images.min()), int(images.max())
    if brightest - darkest < _FLAT_LEVELS:
        return (
            f"all {len(images)} images checked have almost one brightness, levels {darkest} to {brightest} of 255: "
            "nothing can be learned from them; look at them with sop-data preview"
        )
    if np.abs(images - images[0]).max() <= _SAME_LEVELS:
        return (
            f"all {len(images)} images checked are the same: nothing can be learned from copies of one image; "
            "sop-data check --duplicates names them"
        )
    return None
