"""From a decoded image to what an encoder sees: resize, crop or keep whole, normalize.

Resizing is torch's antialiased bicubic on uint8, for its speed: within 2 of 255 levels of PIL's in any pixel and 0.01
on average, and the same for every batch and thread.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch.nn import functional

from sop_faiss.data.images.deep_grayscale import require_top_value
from sop_faiss.errors import ConfigError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

MOST_PIXELS = 64_000_000
"""Largest image that is resized whole before the central crop, in pixels after resizing."""
_LARGEST_SIDE = 8192
SMALL_SIDE = 64
"""Up to this side in pixels the whole image is used: no border is cropped away from a thumbnail."""


@dataclass(frozen=True)
class Preprocess:
    """How images become a model's inputs; compared field by field when features meet an index.

    Two modes. *Crop* (default; the k-NN protocol): the shorter side is resized to `resize`, then the central
    `crop` x `crop` is taken. *Keep aspect* (retrieval): the longer side is resized to `resize`, nothing is cropped,
    and the shorter side is rounded to the nearest multiple of `multiple`, so that a ViT's patches tile the image;
    that stretches it by at most half a patch and adds no borders.
    """

    resize: int
    """Pixels: the shorter side before the crop, or with `keep_aspect` the longer side."""
    crop: int
    """Pixels: side of the central square; equal to `resize` and unused with `keep_aspect`."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Per channel, of values in [0, 1]."""
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: str = "bicubic"
    """Always `bicubic`, antialiased."""
    keep_aspect: bool = False
    multiple: int = 1
    """Sides of the result are multiples of this: the encoder's patch size."""
    scales: tuple[float, ...] = (1.0,)
    """The model sees the image at each of these sizes, relative to the above; the unit-norm features are added and
    scaled to unit norm again. (1, 0.7071, 0.5) is what DINO's evaluation of retrieval and the revisited Oxford/Paris
    benchmark use; the latter adds unit-norm features too, DINO's script raw ones."""
    mirrored: bool = False
    """The model sees the mirrored image, too; the unit-norm features of both are added, as those of scales are."""
    top_value: float = 0.0
    """White in grayscale of more than 8 bits, for the decoder; 0: what the file states, else what its type holds."""

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"preprocess multiple = {self.multiple}: wanted 1 or more")
        for name in ("resize", "crop"):
            value = getattr(self, name)
            if not 1 <= value <= _LARGEST_SIDE:
                raise ConfigError(f"image size {name} = {value}: wanted 1 to {_LARGEST_SIDE} pixels")
        if self.crop > self.resize or (self.keep_aspect and self.crop != self.resize):
            raise ConfigError(f"crop = {self.crop} and resize = {self.resize}: wanted a crop within the resized image")
        if self.crop % self.multiple:
            lower = self.crop - self.crop % self.multiple
            near = " or ".join(str(size) for size in (lower, lower + self.multiple) if size > 0)
            raise ConfigError(
                f"image size {self.crop} is not divisible by the encoder's patch size {self.multiple}: take {near}"
            )
        if self.interpolation != "bicubic":
            raise ConfigError(f"interpolation = {self.interpolation!r}: wanted 'bicubic'")
        if not all(math.isfinite(value) for value in (*self.mean, *self.std)) or min(self.std) <= 0:
            raise ConfigError(f"mean = {self.mean}, std = {self.std}: wanted finite numbers, std above 0")
        apart = len(set(self.scales)) == len(self.scales)
        if not 1 <= len(self.scales) <= 16 or not apart or not all(0.05 <= scale <= 4 for scale in self.scales):
            raise ConfigError(f"scales = {self.scales}: wanted 1 to 16 different numbers from 0.05 to 4")
        require_top_value(self.top_value)

    @classmethod
    def square(
        cls,
        size: int,
        *,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        multiple: int = 1,
        top_value: float = 0.0,
    ) -> Preprocess:
        """Make the k-NN protocol at a size: resize to 256/224 of it and crop; up to 64 px no border is cropped.

        Raises:
            ConfigError: the size is not divisible by `multiple`, or out of range.
        """
        if not 1 <= size <= _LARGEST_SIDE * 224 // 256:
            raise ConfigError(f"image size {size}: wanted 1 to {_LARGEST_SIDE * 224 // 256} pixels")
        resize = size if size <= SMALL_SIDE else round(size * 256 / 224)
        return cls(resize=resize, crop=size, mean=mean, std=std, multiple=multiple, top_value=top_value)

    def keeping_aspect(self, size: int | None = None) -> Preprocess:
        """Return the retrieval mode: longer side `size` (the crop's side if not given), whole image, no crop.

        Raises:
            ConfigError: the size is not divisible by `multiple`, or out of range.
        """
        side = self.crop if size is None else size
        return replace(self, resize=side, crop=side, keep_aspect=True)

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width, in pixels, after resizing an image of this height and width (before any crop)."""
        if self.keep_aspect:
            longer = max(height, width)
            sides = (max(1, round(side * self.resize / longer / self.multiple)) for side in (height, width))
            rows, columns = (side * self.multiple for side in sides)
            return rows, columns
        if height <= width:  # torchvision's rule: the longer side is rounded down
            return self.resize, int(self.resize * width / height)
        return int(self.resize * height / width), self.resize

    def apply(self, image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "rows columns 3"]:
        """Resize one RGB image and crop it (or not, with `keep_aspect`); an image already at the size is untouched.

        One that would be larger than `MOST_PIXELS` before the crop is cropped to its central square first.
        """
        height, width = image.shape[:2]
        rows, columns = self.target_size(height, width)
        if rows * columns > MOST_PIXELS and not self.keep_aspect:
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            image, height, width = image[top : top + side, left : left + side], side, side
            rows, columns = self.resize, self.resize
        if (rows, columns) != (height, width):
            # NHWC memory viewed as NCHW: torch keeps channels last and takes its fast path
            channels_last = (
                torch.from_numpy(np.require(image, requirements=["C", "W"])).unsqueeze(0).permute(0, 3, 1, 2)
            )
            resized = functional.interpolate(channels_last, size=(rows, columns), mode="bicubic", antialias=True)
            image = resized[0].permute(1, 2, 0).numpy()
        if not self.keep_aspect:
            top, left = round((rows - self.crop) / 2.0), round((columns - self.crop) / 2.0)
            image = image[top : top + self.crop, left : left + self.crop]
        return np.ascontiguousarray(image)

    def normalize(self, images: UInt8[Tensor, "b h w 3"]) -> Float32[Tensor, "b 3 h w"]:
        """Convert bytes to float32, subtract the mean and divide by std, on the images' device.

        Channels are the second dimension and the last in memory, the layout that convolutions on a CPU like best.
        """
        mean = torch.tensor(self.mean, device=images.device) * 255.0
        std = torch.tensor(self.std, device=images.device) * 255.0
        return ((images.float() - mean) / std).permute(0, 3, 1, 2)

    def scaled(self, images: Float32[Tensor, "b 3 h w"], scale: float) -> Float32[Tensor, "b 3 rows columns"]:
        """Resize normalized images, bilinear and not antialiased as DINO's script has it.

        The sides are rounded to multiples of `multiple`.
        """
        if scale == 1:
            return images
        rows, columns = (max(1, round(side * scale / self.multiple)) * self.multiple for side in images.shape[2:])
        return functional.interpolate(images, size=(rows, columns), mode="bilinear", align_corners=False)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values for manifests; a single scale of 1, no mirroring and a top value of 0 are left out."""
        content = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.scales == (1.0,):
            del content["scales"]
        if not self.mirrored:
            del content["mirrored"]
        if not self.top_value:
            del content["top_value"]
        return content
