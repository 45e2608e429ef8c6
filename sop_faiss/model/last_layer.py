"""The last layer of DINO's and iBOT's heads: similarities of an embedding to learned prototypes (docs/method.md, 8)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class LastLayer(nn.Module):
    """A linear layer without bias, whose weight is a learned direction times a norm, for each of K prototypes.

    Args:
        embedding_dim: d of the embeddings that come in.
        prototypes: K.
        learns_norm: whether the norms are learned; otherwise they stay 1.
    """

    def __init__(self, embedding_dim: int, prototypes: int, learns_norm: bool) -> None:
        super().__init__()
        # torch's initialization of a linear layer, as in DINO; only its directions matter
        self.direction = nn.Parameter(nn.Linear(embedding_dim, prototypes, bias=False).weight.detach())
        self.norm = nn.Parameter(torch.ones(prototypes, 1)) if learns_norm else None

    def forward(self, embeddings: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch K"]:
        """Return the logits, in float32 or what the weights have."""
        with torch.autocast(embeddings.device.type, enabled=False):
            weight = F.normalize(self.direction, dim=1)
            weight = weight if self.norm is None else weight * self.norm
            return F.linear(embeddings.to(weight.dtype), weight)
