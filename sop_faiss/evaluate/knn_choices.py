"""What can be chosen about weighted k-NN classification, apart from it: commands show these before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from sop_faiss.errors import ConfigError

KS = (10, 20, 100, 200)
"""The numbers of neighbors that DINO reports."""
TEMPERATURE = 0.07
"""Of the votes, as in DINO: weight exp(similarity / temperature)."""


def used_ks(ks: Sequence[int], train_count: int) -> dict[int, int]:
    """Return how many neighbors each k uses: k, but never more than there are training images."""
    return {k: min(k, train_count) for k in ks}


def check_choices(ks: Sequence[int], temperature: float) -> None:
    """Check the numbers of neighbors and the temperature.

    Raises:
        ConfigError: no k is given, one is below 1, or the temperature is not above 0.
    """
    if not ks or min(ks) < 1:
        raise ConfigError(f"`k={', '.join(map(str, ks)) or 'nothing'}`: wanted at least one k, each at least 1")
    if not temperature > 0:
        raise ConfigError(f"temperature {temperature} of the k-NN votes: wanted above 0")
