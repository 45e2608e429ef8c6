"""What can be chosen about logistic regressions, apart from them: commands show these before scikit-learn is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.errors import ConfigError

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Weights of the squared norm beside the mean loss over training images, tried by default."""


@dataclass(frozen=True)
class LogisticChoices:
    """How the regression is fitted."""

    penalties: tuple[float, ...] = PENALTIES
    """lambda of mean cross-entropy + lambda/2 |W|^2, tried on held-out training images."""
    iterations: int = 1000
    """The most iterations of L-BFGS; it ends earlier where the gradient is below 1e-4."""
    held_out: float = 0.1
    """Share of each class's training images that chooses the penalty; the last fit uses all."""
    seed: int = 0
    """Of the held-out images."""

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        if not self.penalties or not all(0 < penalty < 1e6 for penalty in self.penalties):
            raise ConfigError(
                f"`penalties={list(self.penalties)}`: wanted at least one, each above 0 and below 1,000,000"
            )
        if len(set(self.penalties)) < len(self.penalties):
            raise ConfigError(f"`penalties={list(self.penalties)}`: wanted different ones")
        if not 1 <= self.iterations <= 10**6:
            raise ConfigError(f"`iterations={self.iterations}`: wanted 1 to 1,000,000")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"`held_out={self.held_out}`: wanted a share between 0 and 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"`seed={self.seed}`: wanted 0 or more and below 2^63")
