"""What can be chosen about detection, apart from it: commands show these before torch is loaded.

iBOT's recipe on COCO (its `evaluation/object_detection` and README), with Mask R-CNN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sop_faiss.evaluate.trained.training_choices import Bounds, check_choices, fill_choices

RECIPES = {"S": (0.8, 0.1), "B": (0.75, 0.2), "L": (0.75, 0.2), "other": (1.0, 0.2)}
"""Layer decay and drop path by the size of a ViT, from iBOT's README and files: its Swin is `other`. It has none for
ViT-L, which takes those of ViT-B."""
QUICK: dict[str, Any] = {
    "size": 256,
    "batch_size": 2,
    "learning_rate": 1e-3,
    "warmup_steps": 50,
    "layer_decay": 0.85,
    "width": 64,
    "anchor": 4.0,
    "rois": 64,
    "crop": 0.0,
    "drop_path": 0.0,
}
"""A short training of small images with a narrow head."""
_BOUNDS: Bounds = {
    "size": (64, 4096),
    "epochs": (1, 10**6),
    "batch_size": (1, 10**4),
    "learning_rate": (1e-12, 10),
    "warmup_steps": (0, 10**9),
    "min_scale": (0.1, 1),
    "crop": (0, 1),
    "width": (4, 4096),
    "anchor": (0.5, 64),
    "rois": (4, 10**5),
    "images": (1, 10**9),
}


@dataclass(frozen=True)
class DetectChoices:
    """How a detector is trained and tested. None: as in the recipe of the network's size."""

    size: int = 800
    """Shorter side of test images in pixels; the longer one is at most 5/3 of it (1,333)."""
    epochs: int = 12
    """Passes over the training images; the learning rate falls to a tenth after 2/3 of them, and again after 11/12."""
    batch_size: int = 16
    """Images of a step."""
    learning_rate: float = 1e-4
    """Of the new layers, for any batch; the network's layers scale it by `layer_decay`."""
    warmup_steps: int = 500
    """In which the learning rate rises linearly from a thousandth."""
    layer_decay: float | None = None
    """A layer's learning rate relative to that of the layer above it."""
    drop_path: float | None = None
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""
    weight_decay: float = 0.05
    """Of all but biases, norms, positions and the [CLS] token."""
    min_scale: float = 0.6
    """Smallest of 11 shorter sides of training images, relative to `size`: 480 of 800."""
    crop: float = 0.5
    """Probability that a training image is a random crop, as in DETR's recipe."""
    flip: float = 0.5
    """Probability of a mirrored training image."""
    width: int = 256
    """Channels of the feature pyramid and the mask head; a quarter of the box head's."""
    anchor: float = 8.0
    """Side of the anchors relative to the stride of their map; 32 to 512 pixels by default."""
    rois: int = 512
    """Proposals of an image that the heads learn from, at most a quarter of them of an object."""
    cascade: bool = False
    """Three box and mask heads one after the other (Cascade Mask R-CNN)."""
    batchnorm: str = "frozen"
    """`frozen`: the network's batch norms keep their running statistics; `batch`: they follow the batch."""
    precision: str = "fp32"
    """`fp32`, or `bf16` (autocast)."""
    images: int | None = None
    """Only the first training images; None: all."""
    seed: int = 0
    """Of everything that is drawn."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        check_choices(self, _BOUNDS, batchnorm=("frozen", "batch"))

    def filled(self, size: str, *, has_layers: bool, has_drop_path: bool) -> DetectChoices:
        """Return the same with nothing left to a recipe.

        Args:
            size: of `RECIPES`.
            has_layers: see `fill_choices`.
            has_drop_path: see `fill_choices`.
        """
        layer_decay, drop_path = RECIPES[size]
        return fill_choices(self, has_layers, has_drop_path, layer_decay=layer_decay, drop_path=drop_path)

    @property
    def longest(self) -> int:
        """Return the longest side of an image, in pixels."""
        return round(self.size * 1333 / 800)

    @property
    def sides(self) -> tuple[int, ...]:
        """Return the shorter sides of training images, the last that of test images."""
        return tuple(round(self.size * (self.min_scale + (1 - self.min_scale) * step / 10)) for step in range(11))
