"""From tokens to one feature: [CLS], mean, both, GeM, means of quadrants, and the last blocks of a ViT.

A pooling is named by a word, as in `cls_mean`; that of the last n blocks ends in `_lastN`. The name travels with
the features, so that features of different poolings are never compared.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from sop_faiss.errors import ConfigError

TOKEN_POOLINGS = ("cls", "mean", "cls_mean", "gem", "quadrants")
"""What can be made of a [CLS] and patch tokens."""
GEM_POWER = 3.0
"""p of generalized-mean pooling, as in Radenovic et al. 2018 (arXiv 1711.02512), section 3.2."""
_GEM_FLOOR = 1e-6
"""GeM's tokens are raised to at least this: a fractional power of a negative number is undefined."""
_NAME = re.compile(r"([a-z_]+?)(?:_last(\d+))?")


def pool_tokens(
    cls: Float[Tensor, "b d"], patches: Float[Tensor, "b n d"], grid: tuple[int, int], pooling: str
) -> Float[Tensor, "b pooled"]:
    """Make one feature of an image's tokens.

    Args:
        cls: the [CLS] token, or what stands for it.
        patches: patch tokens, or the positions of a map.
        grid: rows and columns of the patches, which are in rows.
        pooling: `cls`; `mean` of the patches; `cls_mean`, both concatenated (2 d wide); `gem`,
            (mean of max(x, 1e-6)^p)^(1/p) of the patches with p = 3; or `quadrants`, the means of the upper left, upper
            right, lower left and lower right patches (4 d wide), which know where in the image something is. A middle
            row or column belongs to both halves.
    """
    if pooling == "cls":
        return cls
    if pooling == "mean":
        return patches.mean(1)
    if pooling == "cls_mean":
        return torch.cat([cls, patches.mean(1)], dim=1)
    if pooling == "quadrants":
        of_places = patches.transpose(1, 2).unflatten(2, grid)
        return functional.adaptive_avg_pool2d(of_places, 2).permute(0, 2, 3, 1).flatten(1)
    assert pooling == "gem", pooling
    return patches.clamp(min=_GEM_FLOOR).pow(GEM_POWER).mean(1).pow(1 / GEM_POWER)


def pooled_width(width: int, pooling: str) -> int:
    """Return the width of a feature pooled over the last block's tokens of this width."""
    return width * {"cls_mean": 2, "quadrants": 4}.get(pooling, 1)


def features_of_last_blocks(
    vit: Any, images: Float[Tensor, "b 3 h w"], blocks: int, pooling: str
) -> Float[Tensor, "b pooled"]:
    """Concatenate the [CLS] tokens of a ViT's last blocks, each after the final norm, the last block's last.

    As DINO's linear evaluation takes them (n = 4 for ViT-S). With `cls_mean` the mean patch token of the last block
    follows (its choice for ViT-B, with n = 1).

    Args:
        vit: a timm VisionTransformer or Eva with a [CLS] token.
        images: normalized.
        blocks: n.
        pooling: `cls` or `cls_mean`.
    """
    kept = vit.forward_intermediates(
        images, indices=blocks, return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )
    tokens = [prefix[:, 0] for _, prefix in kept]
    if pooling == "cls_mean":
        tokens.append(kept[-1][0].mean(1))
    return torch.cat(tokens, dim=1)


def pooling_name(pooling: str, blocks: int | None, available: int) -> str:
    """Return the name of a pooling over the last blocks.

    Args:
        pooling: over the last block alone.
        blocks: how many blocks; None or 1 is the last alone.
        available: how many the model has; 0 for one whose blocks cannot be chosen.

    Raises:
        ConfigError: the model has no such blocks, or the pooling is not one of theirs.
    """
    if blocks is None:
        return pooling
    if available == 0:
        raise ConfigError(
            f"`last_blocks={blocks}`: only ViTs with a [CLS] token have blocks to choose from: leave it out"
        )
    if not 1 <= blocks <= available:
        raise ConfigError(f"`last_blocks={blocks}`: the model has {available} blocks, wanted 1 to {available}")
    if pooling not in ("cls", "cls_mean"):
        raise ConfigError(f"`last_blocks={blocks}` with pooling {pooling!r}: wanted `pooling=cls` or cls_mean")
    return pooling if blocks == 1 else f"{pooling}_last{blocks}"


def split_pooling(name: str) -> tuple[str, int]:
    """Return the pooling over one block, and how many blocks: the inverse of `pooling_name`."""
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return found[1], int(found[2] or 1)
