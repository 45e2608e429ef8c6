"""What can be chosen about clusters of features, apart from them: commands show these before FAISS is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from sop_faiss.errors import ConfigError


@dataclass(frozen=True)
class ClusterChoices:
    """How images are clustered."""

    clusters: int | None = None
    """Number of clusters; None: one for each class of the training images. More of them than classes lower ACC."""
    iterations: int = 50
    """Of k-means."""
    restarts: int = 5
    """Starts of k-means; the clusters with the smallest distances count."""
    seed: int = 0

    def check(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: one is impossible.
        """
        if self.clusters is not None and not 2 <= self.clusters <= 10**6:
            raise ConfigError(f"`clusters={self.clusters}`: wanted 2 to 1,000,000")
        for name in ("iterations", "restarts"):
            if not 1 <= getattr(self, name) <= 10_000:
                raise ConfigError(f"`{name}={getattr(self, name)}`: wanted 1 to 10,000")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"`seed={self.seed}`: wanted 0 or more and below 2^31")
