"""Images that a user has in Python to unit-norm features."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

from sop_faiss.data.ordered_map import default_workers, map_ordered
from sop_faiss.errors import ConfigError, DataError
from sop_faiss.model.encoders.encoder import Encoder
from sop_faiss.model.encoders.forward import (
    batches_of_equal_shape,
    exact_inference,
    features_of_batch,
    finished_features,
    require_usable,
)
from sop_faiss.model.encoders.image_input import ImageInput, pixels_of
from sop_faiss.model.encoders.preprocess import Preprocess
from sop_faiss.progress import ProgressCallback

MAX_BATCH_SIZE = 65_536
"""More images than any machine has use for; a larger number is a slip of the keyboard."""


def require_batch_size(batch_size: int) -> None:
    """Check the number of images in one forward pass.

    Raises:
        ConfigError: it is out of range.
    """
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ConfigError(f"`batch_size={batch_size}`: wanted 1 to {MAX_BATCH_SIZE:,} images per forward pass")


def encode_images(
    encoder: Encoder,
    images: ImageInput | Iterable[ImageInput],
    *,
    batch_size: int = 64,
    preprocess: Preprocess | None = None,
    progress: ProgressCallback | None = None,
) -> Float32[np.ndarray, "n d"]:
    """Compute what `Encoder.encode` returns; arguments and errors are described there.

    `batch_size` is images per forward pass on a GPU; on a CPU at most 8 at a time.
    """
    require_batch_size(batch_size)
    preprocess = preprocess or encoder.preprocess
    encoder.check_preprocess(preprocess)
    listed = _listed(images)
    names = [str(image) if isinstance(image, str | Path) else f"image {place}" for place, image in enumerate(listed)]
    features = np.empty((len(listed), encoder.token_dimension), np.float32)

    def prepare(position: int) -> tuple[int, UInt8[np.ndarray, "h w 3"]]:
        pixels = pixels_of(listed[position], names[position], preprocess.top_value)
        return position, preprocess.apply(pixels)

    done = 0
    with (
        exact_inference(encoder),
        contextlib.closing(map_ordered(prepare, range(len(listed)), default_workers())) as prepared,  # type: ignore[type-var]
    ):
        for positions, batch in batches_of_equal_shape(prepared, batch_size):
            features[positions] = features_of_batch(encoder, preprocess, batch)
            require_usable(features[positions], [names[position] for position in positions])
            done += len(positions)
            if progress is not None:
                progress(done, len(listed))
    return finished_features(encoder, features, names)


def _listed(images: Any) -> list[Any]:
    """List the images; one that is not in a list counts as a list of one."""
    if isinstance(images, str | Path | bytes | Image.Image):
        return [images]
    if isinstance(images, np.ndarray | Tensor):
        if images.ndim == 3:
            return [images]
        if images.ndim != 4:
            raise DataError(
                f"images of shape {tuple(images.shape)}: wanted an array (number, height, width, 3) or a tensor "
                "(number, 3, height, width), or one image without the number"
            )
    elif not isinstance(images, Iterable):
        raise DataError(f"images are of type {type(images).__name__}: wanted paths, PIL images, arrays or tensors")
    return list(images)
