"""What can be chosen about semantic segmentation, apart from it: commands show these before torch is loaded.

iBOT's configs on ADE20K and its README, which go back to BEiT's; the linear head with batch norm is DINOv2's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.training_choices import Bounds, check_choices, fill_choices

HEADS = ("linear", "upernet")
QUICK: dict[str, dict[str, Any]] = {
    "linear": {"size": 256, "steps": 100, "batch_size": 8, "learning_rate": 0.01, "distort": 0.0},
    "upernet": {
        "size": 128,
        "steps": 100,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "distort": 0.0,
        "channels": 64,
    },
}
"""Short trainings, by the head: few steps need a higher rate."""
_WARMUP_SHARE = 1500 / 160_000
"""Of the steps, in which the learning rate rises."""


class Recipe(NamedTuple):
    """What depends on the head and the size of a ViT."""

    learning_rate: float
    layer_decay: float
    drop_path: float


RECIPES = {"S": Recipe(3e-5, 0.9, 0.1), "B": Recipe(8e-5, 0.65, 0.1), "L": Recipe(2e-5, 0.95, 0.2)}
"""Of `upernet`, by the size of the ViT; other networks take that of S."""
_LINEAR_RATE = 8e-4
_BOUNDS: Bounds = {
    "size": (8, 4096),
    "steps": (1, 10**9),
    "warmup_steps": (0, 10**9),
    "batch_size": (2, 10**5),
    "learning_rate": (1e-9, 100),
    "channels": (8, 8192),
    "auxiliary": (0, 100),
    "min_scale": (0.1, 10),
    "max_scale": (0.1, 10),
    "distort": (0, 1),
    "stride": (1, 256),
}
_UPERNET_ALONE = ("layer_decay", "drop_path", "channels", "auxiliary")


@dataclass(frozen=True)
class SegmentChoices:
    """How a head is trained to name the class of each pixel. None: as in the recipe."""

    head: str = "linear"
    """`linear`: batch norm and a 1 x 1 convolution on frozen tokens; `upernet`: the network is trained, too."""
    size: int = 512
    """Side of crops and windows, and shorter side of the images, in pixels."""
    steps: int = 160_000
    """Batches to train on."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises linearly; it then falls linearly to 0. None: 1,500 of 160,000."""
    batch_size: int = 16
    """Crops of a step."""
    learning_rate: float | None = None
    """Of the head, at its highest."""
    weight_decay: float = 0.05
    """Of all but biases, norms, positions and the [CLS] token."""
    layer_decay: float | None = None
    """A layer's learning rate relative to that of the layer above it."""
    drop_path: float | None = None
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""
    channels: int | None = None
    """Of UPerNet's decoder; None: the width of a ViT, 512 of other networks."""
    auxiliary: float = 0.4
    """Weight of the loss of UPerNet's second head, on the map of stride 16."""
    min_scale: float = 0.5
    """Images are resized to a random multiple of `size`, from this one."""
    max_scale: float = 2.0
    """See `min_scale`."""
    flip: float = 0.5
    """Probability of a mirrored crop."""
    distort: float = 0.5
    """Probability of each change of color: brightness, contrast, saturation, hue."""
    stride: int | None = None
    """Linear: pixels from token to token; of convolutional networks, which map is taken; None: the last."""
    blocks: int = 1
    """Linear: 1: tokens of the last block or map; 4: of a ViT, those of four blocks, joined, as in iBOT's config."""
    precision: str = "fp32"
    """`fp32`, or `bf16` (autocast)."""
    seed: int = 0
    """Of everything that is drawn."""

    @property
    def window_stride(self) -> int:
        """Pixels from window to window of a test image: 341 of 512, as in the configs."""
        return max(1, self.size * 2 // 3)

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        if self.head not in HEADS:
            raise ConfigError(f"`head={self.head}`: wanted {' or '.join(HEADS)}")
        idle = ("stride", "blocks") if self.head == "upernet" else _UPERNET_ALONE
        for name in idle:
            if getattr(self, name) != getattr(SegmentChoices, name):  # its default
                raise ConfigError(f"`{name}` does not apply to `head={self.head}`: leave it out")
        if self.blocks not in (1, 4) or (self.blocks == 4 and self.stride is not None):
            raise ConfigError(f"`blocks={self.blocks}`: wanted 1, or 4 of a ViT and no `stride`")
        check_choices(self, _BOUNDS)
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ConfigError(f"`warmup_steps={self.warmup_steps}`: wanted at most the {self.steps} steps")
        if self.min_scale > self.max_scale:
            raise ConfigError(f"`min_scale={self.min_scale:g}`: wanted at most `max_scale={self.max_scale:g}`")

    def filled(self, size: str, width: int | None, *, has_layers: bool, has_drop_path: bool) -> SegmentChoices:
        """Return the same with nothing left to a recipe.

        Args:
            size: of `RECIPES`.
            width: of a ViT; None: another network.
            has_layers: see `fill_choices`.
            has_drop_path: see `fill_choices`.
        """
        given: dict[str, Any] = {"warmup_steps": round(self.steps * _WARMUP_SHARE), "learning_rate": _LINEAR_RATE}
        if self.head == "upernet":
            rate, decay, drop_path = RECIPES[size]
            given |= {"learning_rate": rate, "layer_decay": decay, "drop_path": drop_path, "channels": width or 512}
        return fill_choices(self, has_layers, has_drop_path, **given)
