"""What can be chosen about linear probes, apart from them: commands show these before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.errors import ConfigError

LEARNING_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Swept by default, for batches of 256; DINO's own default is 0.001."""


@dataclass(frozen=True)
class LinearChoices:
    """How a linear classifier is trained: DINO's protocol, with a sweep of its learning rate."""

    learning_rates: tuple[float, ...] = LEARNING_RATES
    """Tried on held-out training images; for batches of 256, scaled linearly with the batch (DINO)."""
    epochs: int = 100
    """DINO's 100."""
    batch_size: int = 1024
    """Images per step; no more than there are. DINO's 1024 (128 on each of 8 GPUs)."""
    momentum: float = 0.9
    weight_decay: float = 0.0
    """DINO applies none."""
    held_out: float = 0.1
    """Share of each class's training images that chooses the learning rate; the final training uses all."""
    seed: int = 0
    """Of the held-out images, the weights at the start and the order of the batches."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        if not self.learning_rates or not all(0 < rate < 1e6 for rate in self.learning_rates):
            raise ConfigError(
                f"`learning_rates={list(self.learning_rates)}`: wanted at least one, each above 0 and below 1,000,000"
            )
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise ConfigError(f"`learning_rates={list(self.learning_rates)}`: wanted different ones")
        if not 1 <= self.epochs <= 10**6:
            raise ConfigError(f"`epochs={self.epochs}`: wanted 1 to 1,000,000")
        if not 1 <= self.batch_size <= 10**6:
            raise ConfigError(f"training batches of {self.batch_size} images: wanted 1 to 1,000,000")
        if not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < 1:
            raise ConfigError(
                f"`momentum={self.momentum}`, `weight_decay={self.weight_decay}`: wanted 0 or more and below 1"
            )
        if not 0 < self.held_out < 1:
            raise ConfigError(f"`held_out={self.held_out}`: wanted a share between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"`seed={self.seed}`: wanted 0 or more and below 2^63")
