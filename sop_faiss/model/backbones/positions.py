"""Position embeddings of a ViT for images of another size: by timm's rule, or by that of DINO and iBOT.

Both are bicubic. timm's is antialiased and maps the old grid onto the new one from edge to edge. DINO's is not
antialiased, and its scale is that of a grid 0.1 rows and columns larger; iBOT and DINOv2 without registers took it from
there. From 14 x 14 to 6 x 6, as for local views of 96 pixels, the two differ by a third of the signal.
"""

from __future__ import annotations

from collections.abc import Sequence

import timm
import torch
from jaxtyping import Float
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from sop_faiss.errors import ConfigError

_OFFSET = 0.1
"""Rows and columns that DINO's scale factor counts beyond the grid, against rounding."""


def resample_positions(
    positions: Float[Tensor, "1 n d"], new: Sequence[int], old: Sequence[int], *, prefix: int, rule: str
) -> Float[Tensor, "1 m d"]:
    """Bring position embeddings from one grid of patches to another.

    Args:
        positions: of the prefix, which stay as they are, then of the old grid in row-major order.
        new: rows and columns of the grid wanted; an equal one changes nothing.
        old: rows and columns of the grid there is.
        prefix: tokens before the patches that have a position: [CLS], or none.
        rule: `timm` or `dino`.
    """
    if tuple(new) == tuple(old):
        return positions
    if rule == "timm":
        resampled: Tensor = resample_abs_pos_embed(positions, list(new), list(old), num_prefix_tokens=prefix)
        return resampled
    grid = positions[:, prefix:].float().unflatten(1, tuple(old)).permute(0, 3, 1, 2)
    scale = [(wanted + _OFFSET) / held for wanted, held in zip(new, old, strict=True)]
    patches = functional.interpolate(grid, scale_factor=scale, mode="bicubic").flatten(2).transpose(1, 2)
    return torch.cat([positions[:, :prefix], patches.to(positions.dtype)], dim=1)


class _DinoVit(VisionTransformer):  # type: ignore[misc]
    """A timm ViT that resizes its position embeddings by DINO's rule, in every kind of forward pass."""

    def _pos_embed(self, patches: Float[Tensor, "b rows cols d"]) -> Float[Tensor, "b tokens d"]:
        prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        positions = resample_positions(
            self.pos_embed, patches.shape[1:3], self.patch_embed.grid_size, prefix=prefix, rule="dino"
        )
        before = [token.expand(len(patches), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        tokens = patches.flatten(1, 2)
        if self.no_embed_class:
            tokens = torch.cat([*before, tokens + positions], dim=1)
        else:
            tokens = torch.cat([*before, tokens], dim=1) + positions
        return self.pos_drop(tokens)


def resize_as_dino(model: nn.Module, name: str) -> None:
    """Make a timm ViT that takes images of any size resize its position embeddings by DINO's rule from now on.

    Args:
        model: changed in place; its tensors and their names stay.
        name: of the model, for the message.

    Raises:
        ConfigError: it is of another kind, or has no position embeddings to resize.
    """
    if type(model) is not VisionTransformer or model.pos_embed is None or not model.dynamic_img_size:
        raise ConfigError(
            f"model.position_resize (`position_resize`) = dino: {name} lacks the position embeddings of a plain "
            "ViT, which DINO's rule is for: leave it out"
        )
    model.__class__ = _DinoVit


def rule_of_official(arch: str) -> str:
    """Return the rule of an official checkpoint's authors: DINO's, except for DINOv2's ViTs with registers."""
    base = arch.partition(".")[0]
    if not timm.is_model(base) or "_reg" in base or "distilled" in base:
        return "timm"
    module = timm.models.model_entrypoint(base).__module__
    return "dino" if module in ("timm.models.vision_transformer", "timm.models.deit") else "timm"


def resize_in_architecture(rule: str) -> dict[str, str]:
    """Return what a rule adds to an encoder's architecture and fingerprint: nothing for timm's, once the only one."""
    return {"position_resize": "dino"} if rule == "dino" else {}
