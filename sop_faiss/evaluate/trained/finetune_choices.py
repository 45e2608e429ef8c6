"""What can be chosen about fine-tuning, apart from it: commands show these before torch is loaded.

BEiT's recipe (arXiv 2106.08254) as iBOT's `classification_layer_decay` and its README run it on ImageNet; DeiT's as
iBOT's `eval_cls.py`, `semi_supervised/eval_cls.py` and `run.sh` run it on smaller sets and on few labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sop_faiss.errors import ConfigError
from sop_faiss.evaluate.trained.training_choices import BELOW_ONE, Bounds, check_choices, fill_choices

LEARNING_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
"""Peaks at a batch of 1,024 images, tried by default; the script's own is 4e-3, and its README says to sweep."""
QUICK_SIZE = 64
QUICK: dict[str, Any] = {
    "learning_rates": (0.03,),
    "epochs": 10,
    "batch_size": 32,
    "layer_decay": 0.9,
    "min_crop": 0.5,
    "mixup": 0.0,
    "cutmix": 0.0,
    "randaugment": 0,
    "erasing": 0.0,
}
"""A short training: few steps need a higher rate, and strong augmentation and mixing need many. On held-out training
images of Imagenette 74.2 %, with mixing and a rate of 0.12 71.4 % (benchmarks/RESULTS.md)."""


DEIT: dict[str, Any] = {
    "learning_rates": (1.5e-5,),
    "epochs": 1000,
    "warmup_epochs": 5.0,
    "batch_size": 768,
    "layer_decay": 1.0,
    "drop_path": 0.1,
    "end_rate": 1e-5,
    "repeats": 3,
}
"""What differs from BEiT's recipe; the learning rate is 7.5e-6 at a batch of 512 there."""


@dataclass(frozen=True)
class Recipe:
    """What depends on the size of a ViT."""

    epochs: int
    warmup_epochs: int
    layer_decay: float
    drop_path: float


RECIPES = {"S": Recipe(200, 20, 0.75, 0.1), "B": Recipe(100, 20, 0.65, 0.2), "L": Recipe(50, 5, 0.75, 0.4)}
"""By the size of the ViT; other networks take that of S."""
_BOUNDS: Bounds = {
    "epochs": (1, 10**6),
    "sweep_epochs": (1, 10**6),
    "warmup_epochs": (0, 10**6),
    "batch_size": (2, 10**6),
    "mixup": (0, 100),
    "cutmix": (0, 100),
    "smoothing": (0, BELOW_ONE),
    "randaugment": (0, 10),
    "erasing": (0, 1),
    "min_crop": (0.001, 1),
    "ema": (0, BELOW_ONE),
    "end_rate": (0, 10),
    "repeats": (1, 100),
    "held_out": (1e-6, BELOW_ONE),
}


@dataclass(frozen=True)
class FinetuneChoices:
    """How a network is fine-tuned. None: as in the recipe of its size."""

    learning_rates: tuple[float, ...] = LEARNING_RATES
    """Peaks at a batch of 1,024 images, scaled with the batch; of several, held-out training images choose."""
    epochs: int | None = None
    """Passes over the training images."""
    sweep_epochs: int | None = None
    """Passes for each learning rate that is tried; None: a tenth of `epochs`, at least one."""
    end_rate: float = 1e-6
    """Where the cosine of the classifier's learning rate ends; at most the peak."""
    warmup_epochs: float | None = None
    """Passes in which the rate rises linearly from 1e-6; None: the recipe's share of `epochs`."""
    batch_size: int = 128
    """Images of a step."""
    layer_decay: float | None = None
    """A layer's learning rate relative to that of the layer above it."""
    drop_path: float | None = None
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""
    weight_decay: float = 0.05
    """Of all but biases, norms, positions and the [CLS] token."""
    mixup: float = 0.8
    """Alpha of mixup; 0: off."""
    cutmix: float = 1.0
    """Alpha of CutMix; where both are on, each batch takes one of them."""
    smoothing: float = 0.1
    """Label smoothing."""
    randaugment: int = 9
    """Magnitude of RandAugment (2 operations, its standard deviation 0.5, stronger with magnitude); 0: off."""
    erasing: float = 0.25
    """Probability that a rectangle is replaced by noise."""
    min_crop: float = 0.08
    """Smallest share of an image's area that a random crop takes; 1: no crop, the encoder's own preprocessing. Up to
    32 pixels the complete image, shifted by up to 4 pixels, takes the place of the random crop, as in BEiT's script."""
    flip: float = 0.5
    """Probability of a mirrored image."""
    ema: float = 0.0
    """Decay of a moving average of the weights, which is then what is tested; 0: none, as in the recipe."""
    precision: str = "fp32"
    """`fp32`, or `bf16` (autocast)."""
    repeats: int = 1
    """Differently augmented copies of an image in a batch; an epoch then has that many times fewer images."""
    head_layer: str = "none"
    """`none`: the classifier is on the encoder's features; `first`: on the first layer of the run's projection head."""
    held_out: float = 0.1
    """Share of each class's training images that chooses the learning rate; the last training uses all."""
    seed: int = 0
    """Of everything that is drawn."""

    @property
    def mixes(self) -> bool:
        """Return whether batches are mixed."""
        return self.mixup > 0 or self.cutmix > 0

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        rates = self.learning_rates
        if not rates or not all(0 < rate <= 10 for rate in rates) or len(set(rates)) < len(rates):
            raise ConfigError(f"`learning_rates={list(rates)}`: wanted different ones, each above 0 and at most 10")
        check_choices(self, _BOUNDS, head_layer=("none", "first"))
        if self.warmup_epochs is not None and self.epochs is not None and self.warmup_epochs > self.epochs:
            raise ConfigError(f"`warmup_epochs={self.warmup_epochs:g}`: wanted at most the {self.epochs} epochs")
        if self.mixes and self.batch_size % 2:
            raise ConfigError(f"`batch_size={self.batch_size}`: wanted an even number with mixup or cutmix")

    def filled(self, size: str, *, has_layers: bool, has_drop_path: bool) -> FinetuneChoices:
        """Return the same with nothing left to a recipe.

        Args:
            size: of `RECIPES`.
            has_layers: see `fill_choices`.
            has_drop_path: see `fill_choices`.
        """
        recipe = RECIPES[size]
        epochs = recipe.epochs if self.epochs is None else self.epochs
        filled = fill_choices(
            self,
            has_layers,
            has_drop_path,
            epochs=epochs,
            sweep_epochs=max(1, epochs // 10),
            warmup_epochs=epochs * recipe.warmup_epochs / recipe.epochs,
            layer_decay=recipe.layer_decay,
            drop_path=recipe.drop_path,
        )
        filled.check()
        return filled
