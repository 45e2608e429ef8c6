"""One image as a user has it (a file, a PIL image, an array, a tensor), and the way from there to a model's input."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

from sop_faiss.data.images.decode import MAX_PIXELS, decode_image, rgb_of_pillow, size_problem
from sop_faiss.data.images.listing import read_image_file
from sop_faiss.errors import DataError
from sop_faiss.model.encoders.preprocess import Preprocess

ImageInput: TypeAlias = str | Path | bytes | Image.Image | np.ndarray | Tensor
"""A file's path, or its bytes; a PIL image; an RGB array (height, width, 3); an RGB tensor (3, height, width).

The values of arrays and tensors are uint8 from 0 to 255, or floats from 0 to 1, which are rounded to the 256 levels of
a file."""


def pixels_of(image: ImageInput, name: str, top_value: float = 0.0) -> UInt8[np.ndarray, "h w 3"]:
    """Return the pixels of one image as they are decoded from a file: upright RGB.

    Args:
        image: see `ImageInput`.
        name: of an image that is not a file, for messages.
        top_value: white in grayscale of more than 8 bits, see `decode_image`.

    Raises:
        DataError: the image cannot be read or is of another kind; the message names it.
    """
    if isinstance(image, str | Path):
        if os.path.isdir(image):  # noqa: PTH112  # which is False for what cannot be a path, too
            raise DataError(f"{image} is a folder: wanted image files, as in Path({str(image)!r}).rglob('*.jpg')")
        name, image = f"image {image}", read_image_file(Path(image))
    try:
        if isinstance(image, bytes):
            return decode_image(image, top_value=top_value)
        if isinstance(image, Image.Image):
            return np.array(rgb_of_pillow(image, top_value))
        if isinstance(image, Tensor):
            return _pixels_of_tensor(image)
        if isinstance(image, np.ndarray):
            return _pixels_of_array(image, (2, 0, 1), "an array (height, width, 3)")
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    raise DataError(
        f"{name} is of type {type(image).__name__}: wanted a path, the bytes of a file, a PIL image, an array "
        "(height, width, 3) or a tensor (3, height, width)"
    )


def _pixels_of_tensor(image: Tensor) -> UInt8[np.ndarray, "h w 3"]:
    if image.layout is not torch.strided or image.is_meta:
        raise DataError("a sparse tensor, or one without values: wanted a plain tensor (3, height, width)")
    array: np.ndarray = (image.detach().float() if image.is_floating_point() else image).cpu().numpy()  # bfloat16, too
    return _pixels_of_array(array, (0, 1, 2), "a tensor (3, height, width)")


def _pixels_of_array(values: np.ndarray, axes: tuple[int, ...], wanted: str) -> UInt8[np.ndarray, "h w 3"]:
    """Check and convert; `axes` are those of channel, row and column."""
    shape = values.shape
    if values.ndim != 3 or shape[axes[0]] != 3:
        raise DataError(f"shape {shape}: wanted {wanted} of RGB values")
    rows_first = values.transpose(axes[1], axes[2], axes[0])
    if problem := size_problem(rows_first.shape[1], rows_first.shape[0], MAX_PIXELS):
        raise DataError(problem)
    if values.dtype == np.uint8:
        return np.ascontiguousarray(rows_first)
    if values.dtype.kind != "f":
        raise DataError(f"values of {values.dtype}: wanted uint8 from 0 to 255, or floats from 0 to 1")
    if not ((values >= 0) & (values <= 1)).all():  # NaN is neither
        raise DataError(
            f"floats from {values.min():.4g} to {values.max():.4g}: wanted 0 to 1, not normalized (`encoder(batch)` "
            "takes what `encoder.transform` returns)"
        )
    return np.ascontiguousarray(np.rint(rows_first.astype(np.float32) * 255).astype(np.uint8))


@dataclass(frozen=True)
class ImageTransform:
    """An encoder's preprocessing of one image, for a data set of one's own; it can be sent to another process."""

    preprocess: Preprocess

    def __call__(self, image: ImageInput) -> Float32[Tensor, "3 rows columns"]:
        """Return what the model is given of an image: resized, cropped unless whole images are wanted, normalized.

        Raises:
            DataError: as `pixels_of`.
        """
        pixels: Any = self.preprocess.apply(pixels_of(image, "image", self.preprocess.top_value))
        return self.preprocess.normalize(torch.from_numpy(pixels).unsqueeze(0))[0]
