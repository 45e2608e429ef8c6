"""What can be chosen about fine-tuning, apart from it: commands show these before torch is loaded.

BEiT's recipe (arXiv 2106.08254) as iBOT's `classification_layer_decay` and its README run it on ImageNet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sop_faiss.errors import ConfigError

__all__ = ["LEARNING_RATES", "QUICK", "QUICK_SIZE", "FinetuneChoices"]

LEARNING_RATES = (5e-4, 1e-3, 2e-3, 4e-3)
"""Peaks at a batch of 1,024 images, tried by default; the script's own is 4e-3, and its README says to sweep."""
QUICK_SIZE = 64
QUICK: dict[str, Any] = {
    "learning_rates": (0.12,),
    "epochs": 10,
    "batch_size": 32,
    "layer_decay": 0.9,
    "min_crop": 0.5,
    "randaugment": 0,
    "erasing": 0.0,
}
"""A short training: few steps need a higher rate, and strong augmentation needs many."""


@dataclass(frozen=True)
class Recipe:
    """What depends on the size of a ViT."""

    epochs: int
    warmup_epochs: int
    layer_decay: float
    drop_path: float


RECIPES = {"S": Recipe(200, 20, 0.75, 0.1), "B": Recipe(100, 20, 0.65, 0.2), "L": Recipe(50, 5, 0.75, 0.4)}
"""By the size of the ViT; other networks take that of S."""


@dataclass(frozen=True)
class FinetuneChoices:
    """How a network is fine-tuned. None: as in the recipe of its size."""

    learning_rates: tuple[float, ...] = LEARNING_RATES
    """Peaks at a batch of 1,024 images, scaled with the batch; of several, held-out training images choose."""
    epochs: int | None = None
    """Passes over the training images."""
    sweep_epochs: int | None = None
    """Passes for each learning rate that is tried; None: a tenth of `epochs`, at least one."""
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
        for name in ("epochs", "sweep_epochs"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 10**6:
                raise ConfigError(f"`{name}={value}`: wanted 1 to 1,000,000")
        _within("warmup_epochs", self.warmup_epochs, 0.0, 1e6)
        if self.warmup_epochs is not None and self.epochs is not None and self.warmup_epochs > self.epochs:
            raise ConfigError(f"`warmup_epochs={self.warmup_epochs:g}`: wanted at most the {self.epochs} epochs")
        if not 2 <= self.batch_size <= 10**6 or (self.mixes and self.batch_size % 2):
            raise ConfigError(f"`batch_size={self.batch_size}`: wanted 2 or more, an even number with mixup or cutmix")
        for name, highest in (("mixup", 100.0), ("cutmix", 100.0), ("weight_decay", 100.0)):
            _within(name, getattr(self, name), 0.0, highest)
        if not 0 <= self.randaugment <= 10:
            raise ConfigError(f"`randaugment={self.randaugment}`: wanted 0 to 10")
        for name in ("drop_path", "smoothing", "ema"):
            _within(name, getattr(self, name), 0.0, math.nextafter(1, 0))
        for name in ("erasing", "flip"):
            _within(name, getattr(self, name), 0.0, 1.0)
        for name in ("layer_decay", "min_crop"):
            _within(name, getattr(self, name), 0.001, 1.0)
        if not 0 < self.held_out < 1:
            raise ConfigError(f"`held_out={self.held_out}`: wanted a share between 0 and 1")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"`precision={self.precision}`: wanted fp32 or bf16")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"`seed={self.seed}`: wanted 0 or more and below 2^63")

    def filled(self, size: str, *, has_layers: bool, has_drop_path: bool) -> FinetuneChoices:
        """Return the same with nothing left to a recipe.

        Args:
            size: of `RECIPES`.
            has_layers: whether the network's layers are known; else all have one learning rate by default.
            has_drop_path: whether stochastic depth can be set; else it is 0 by default.
        """
        recipe = RECIPES[size]
        epochs = recipe.epochs if self.epochs is None else self.epochs
        sweep, warmup = self.sweep_epochs, self.warmup_epochs
        decay, drop_path = self.layer_decay, self.drop_path
        filled = replace(
            self,
            epochs=epochs,
            sweep_epochs=max(1, epochs // 10) if sweep is None else sweep,
            warmup_epochs=epochs * recipe.warmup_epochs / recipe.epochs if warmup is None else warmup,
            layer_decay=(recipe.layer_decay if has_layers else 1.0) if decay is None else decay,
            drop_path=(recipe.drop_path if has_drop_path else 0.0) if drop_path is None else drop_path,
        )
        filled.check()
        return filled


def _within(name: str, value: float | None, lowest: float, highest: float) -> None:
    if value is not None and not lowest <= value <= highest:
        raise ConfigError(
            f"`{name}={value}`: wanted {lowest:g} to {'below 1' if 0.99 < highest < 1 else f'{highest:g}'}"
        )
