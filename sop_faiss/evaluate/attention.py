"""What an encoder looks at in an image: the attention of [CLS], and its patch tokens as three colors.

Source: figures of the paper and of DINO (Caron et al. 2021, figure 1: self-attention of [CLS] in the last block) and
DINOv2 (Oquab et al. 2023, figure 1: first three principal components of patch tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from sop_faiss.model.encoders.encoder import Encoder

_CLIPPED = 1.0  # percent of patches at each end that share the darkest or brightest color: outliers would hide the rest


@dataclass(frozen=True)
class Looked:
    """One image."""

    patches: Float32[np.ndarray, "rows columns d"]
    """Its patch tokens."""
    heads: Float32[np.ndarray, "heads rows columns"] | None
    """Attention of [CLS] to each patch in the last block, by head: softmax values. None: there is no [CLS], or its
    attention is not of timm's plain kind (rotary positions)."""


@torch.no_grad()
def look(encoder: Encoder, image: Float[Tensor, "3 h w"]) -> Looked:
    """Compute the patch tokens of an image and what [CLS] attends to.

    Args:
        encoder: any that makes tokens or a map.
        image: normalized.

    Raises:
        ConfigError: the encoder makes neither.
    """
    attentions = [module for module in encoder.model.modules() if isinstance(module, Attention)]
    seen: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0])

    hook = attentions[-1].register_forward_pre_hook(keep) if attentions else None
    try:
        _, tokens = encoder.tokens(image.unsqueeze(0).to(next(encoder.parameters()).device))
    finally:
        if hook is not None:
            hook.remove()
    rows, columns = tokens.grid
    heads = None
    if seen and seen[-1].shape[1] > rows * columns:
        weights = _attention(attentions[-1], seen[-1])[0, :, 0, -rows * columns :]
        heads = weights.unflatten(1, (rows, columns)).float().cpu().numpy()
    return Looked(tokens.patches[0].unflatten(0, (rows, columns)).float().cpu().numpy(), heads)


def _attention(module: Any, inputs: Float[Tensor, "b n d"]) -> Float[Tensor, "b heads n n"]:
    """Compute softmax(q k / sqrt(d)) as timm's attention does."""
    batch, count, _ = inputs.shape
    queries, keys, _ = module.qkv(inputs).reshape(batch, count, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
    queries, keys = module.q_norm(queries), module.k_norm(keys)
    return (queries * module.scale @ keys.transpose(-2, -1)).softmax(dim=-1)


def components_as_colors(
    images: Sequence[Float32[np.ndarray, "_ _ d"]],
) -> list[Float32[np.ndarray, "_ _ 3"]]:
    """Return the first three principal components of all patches together, each from 0 to 1: red, green, blue.

    The same color means the same kind of patch in all of the images.

    Args:
        images: patch tokens of each.
    """
    rows = np.concatenate([each.reshape(-1, each.shape[-1]) for each in images]).astype(np.float64)
    centered = rows - rows.mean(axis=0)
    _, directions = np.linalg.eigh(centered.T @ centered)
    axes = directions[:, ::-1][:, :3]
    axes *= np.where(np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0) < 0, -1.0, 1.0)  # a fixed sign
    points = np.zeros((len(rows), 3))
    points[:, : axes.shape[1]] = centered @ axes
    low, high = np.percentile(points, [_CLIPPED, 100 - _CLIPPED], axis=0)
    colors = np.clip((points - low) / np.maximum(high - low, np.finfo(np.float64).tiny), 0, 1).astype(np.float32)
    ends = np.cumsum([each.shape[0] * each.shape[1] for each in images])
    return [part.reshape(*each.shape[:2], 3) for part, each in zip(np.split(colors, ends[:-1]), images, strict=True)]
