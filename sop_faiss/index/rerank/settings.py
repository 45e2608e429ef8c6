"""How the first images that a search found are put into a better order."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from sop_faiss.errors import ConfigError

FLOAT16 = "float16"
METHODS = ("global", "local", "diffusion")
_NEIGHBORS = {"global": 4, "diffusion": 10}
_MOST_DEPTH = 2000
"""The graph of the candidates has the square of this number of entries, per query."""
_MOST_DIMENSIONS = 4096
_LARGEST_SIDE = 8192
"""As of all images that an encoder takes, in pixels."""


@dataclass(frozen=True)
class TokenSettings:
    """How the tokens of images are made for local re-ranking.

    Raises:
        ConfigError: a number is out of range.
    """

    size: int | None = None
    """Pixels of the longer side of the image, which is not cropped; None: the encoder's size. Larger finds more, and
    is slower."""
    dimension: int = 128
    """Of a token, after a whitening that is learned from the gallery's; at most the encoder's."""
    most: int = 50
    """Tokens kept of each image, those of the largest norm."""
    codes: str = FLOAT16
    """How a token is kept: `float16`, or `pqN`: product-quantized to N bytes, and 2 for its weight."""

    def __post_init__(self) -> None:
        for name, value, largest in (
            ("token_size", 1 if self.size is None else self.size, _LARGEST_SIDE),
            ("token_dimension", self.dimension, _MOST_DIMENSIONS),
            ("token_count", self.most, 10_000),
        ):
            if type(value) is not int or not 1 <= value <= largest:
                raise ConfigError(f"`{name}={value}`: wanted 1 to {largest:,}")
        if self.codes != FLOAT16 and not 1 <= self.code_bytes <= self.dimension:
            raise ConfigError(
                f"`token_codes={self.codes}`: wanted {FLOAT16}, or pq1 to pq{self.dimension}, the bytes of a token"
            )

    @property
    def code_bytes(self) -> int:
        """Return the bytes of a product-quantized token; 0 where `codes` names none."""
        match = re.fullmatch(r"pq([1-9][0-9]{0,4})", self.codes) if isinstance(self.codes, str) else None
        return 0 if match is None else int(match[1])


@dataclass(frozen=True)
class Rerank:
    """Which rule re-ranks, and how many images.

    Raises:
        ConfigError: the method is unknown, or a number is out of range or of another method.
    """

    method: str
    """`global`: features refined by neighbors (SuperGlobal); `local`: tokens compared; `diffusion`: over the graph of
    the candidates."""
    depth: int = 400
    """The first images of each ranking that are put into a new order; the others keep theirs."""
    neighbors: int | None = None
    """Of each candidate, for `global` and `diffusion`; None: 4 and 10."""
    beta: float | None = None
    """Of `global`: weight of a neighbor, times its similarity; None: 1. SuperGlobal has 0.15 and 9 neighbors."""
    mutual: bool = False
    """Of `local`: count only pairs of tokens that are each other's best."""
    one_way: bool = False
    """Of `local`: count the tokens of the query only: for queries that are a part of what is looked for."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"`rerank={self.method}`: wanted {', '.join(METHODS)}")
        if not 2 <= self.depth <= _MOST_DEPTH:
            raise ConfigError(f"`rerank_depth={self.depth}`: wanted 2 to {_MOST_DEPTH:,} images")
        if self.neighbors is not None:
            if self.method not in _NEIGHBORS:
                raise ConfigError(f"`rerank_neighbors` is not of `rerank={self.method}`: leave it out")
            if not 1 <= self.neighbors < self.depth:
                raise ConfigError(
                    f"`rerank_neighbors={self.neighbors}`: wanted 1 or more, and fewer than {self.depth} images"
                )
        for name in ("mutual", "one_way"):
            if getattr(self, name) and self.method != "local":
                raise ConfigError(f"`rerank_{name}` is not of `rerank={self.method}`: leave it out")
        if self.beta is not None:
            if self.method != "global":
                raise ConfigError(f"`rerank_beta` is not of `rerank={self.method}`: leave it out")
            if not (math.isfinite(self.beta) and 0 <= self.beta <= 100):
                raise ConfigError(f"`rerank_beta={self.beta}`: wanted 0 to 100")

    @property
    def neighbors_used(self) -> int:
        """Return the neighbors of each candidate."""
        return self.neighbors or _NEIGHBORS[self.method]

    @property
    def beta_used(self) -> float:
        """Return the weight of a neighbor."""
        return 1.0 if self.beta is None else self.beta

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values, without those of other methods."""
        content: dict[str, Any] = {"method": self.method, "depth": self.depth}
        if self.method != "local":
            content["neighbors"] = self.neighbors_used
        else:
            content |= {"mutual": self.mutual, "one_way": self.one_way}
        if self.method == "global":
            content["beta"] = self.beta_used
        return content
