"""The projector: features to the unit-norm embeddings that memories hold (paper section 4; docs/method.md, 1)."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class Projector(nn.Module):
    """An MLP with GELU and no batch norm, then L2 norm; one serves [CLS] and patch tokens.

    Args:
        feature_dim: width of the tokens that come in.
        hidden: width of the layers between.
        embedding_dim: d of the embeddings that go out.
        layers: linear layers, 3 in the paper.
    """

    def __init__(self, feature_dim: int, hidden: int, embedding_dim: int, layers: int = 3) -> None:
        super().__init__()
        widths = [feature_dim, *[hidden] * (layers - 1), embedding_dim]
        modules: list[nn.Module] = []
        for i, (width_in, width_out) in enumerate(pairwise(widths)):
            linear = nn.Linear(width_in, width_out)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            modules += [linear] if i == layers - 1 else [linear, nn.GELU()]
        self.mlp = nn.Sequential(*modules)

    def forward(self, features: Float[Tensor, "*batch f"]) -> Float[Tensor, "*batch d"]:
        """Compute embeddings in float32 and unit norm; the input may have another precision."""
        projected = self.mlp(features)
        with torch.autocast(projected.device.type, enabled=False):
            return F.normalize(projected.float(), dim=-1)
